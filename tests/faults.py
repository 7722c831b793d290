"""Does a test notice? Each fault of `fault_list` is planted in a copy of the tree, and the tests
that should notice are run there until the first fails.

    python tests/faults.py           all of them (`make faults`): an hour on two cores
    python tests/faults.py prune.py  those in files that end so
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fault_list import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 900
MISSED, CAUGHT = 0, 1  # pytest's exit codes: all passed, some failed


def planted(fault: Fault, root: Path) -> str:
    """The file with the fault in it."""
    text = (root / fault.file).read_text()
    found = text.count(fault.line)
    assert found == 1, f"{fault.file} holds {fault.line!r} {found} times; see tests/fault_list.py"
    return text.replace(fault.line, fault.wrong)


def files_of(fault: Fault) -> list[str]:
    """Of the tests that should notice, from the root."""
    named = [name.partition("/") for name in fault.tests.split()]
    return [f"tests/{folder}/test_{stem}.py" for folder, _, stem in named]


def copy_tree(to: Path) -> None:
    """Files that git knows or would add, as they are now."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def run(fault: Fault, root: Path) -> str:
    """What noticed, MISSED or how pytest broke off."""
    file = root / fault.file
    sound = file.read_text()
    file.write_text(planted(fault, root))
    flags = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    paths = os.pathsep.join((str(root), str(root / "kernels")))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *flags, *files_of(fault)],
            cwd=root,
            env=os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "CI": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"caught: no end within {LIMIT_S} s"
    finally:
        file.write_text(sound)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode == CAUGHT and failed:
        return f"caught by {failed[1].removeprefix('tests/')}"
    return "MISSED" if done.returncode == MISSED else f"BROKEN: {done.stdout[-2000:]}"


def main() -> None:
    """A line per fault; fails if one was missed."""
    chosen = [f for f in FAULTS if any(map(f.file.endswith, sys.argv[1:] or [""]))]
    noticed = 0
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        root = Path(scratch)
        copy_tree(root)
        for fault in chosen:
            begun = time.monotonic()
            said = run(fault, root)
            noticed += said.startswith("caught")
            seconds = time.monotonic() - begun
            print(f"{fault.file}: {fault.wrong}\n    {said} ({seconds:.0f} s)", flush=True)
    print(f"{noticed} of {len(chosen)} faults were caught")
    sys.exit(noticed < len(chosen))


if __name__ == "__main__":
    main()
