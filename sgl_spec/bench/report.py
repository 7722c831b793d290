"""Where a number came from, and where it is written: every result row carries its conditions."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from sgl_spec.kept import cpu_name

_PACKAGES = ("numpy", "torch", "transformers", "tokenizers", "triton")
_REPOSITORY = Path(__file__).resolve().parents[2]
_COMMIT, _DIRTY = "SGL_SPEC_COMMIT", "+dirty"


def say(text: str) -> None:
    """Progress: a line on stderr, there at once, so that the table on stdout stays alone."""
    print(text, file=sys.stderr, flush=True)


def provenance(argv: Sequence[str], seed: int | None = None) -> dict[str, Any]:
    """Conditions of a run: time, commit, command, seed, hardware, versions.

    argv: the command as a user would type it. `dirty` tells whether tracked files differed from the
    commit; both are None outside a git checkout, unless SGL_SPEC_COMMIT says them (a hash, then
    "+dirty" if they did), as for a copy of the files on another machine.
    """
    commit, dirty = _commit()
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": dirty,
        "argv": list(argv),
        "seed": seed,
        "hardware": hardware(),
        "versions": versions(),
    }


def hardware() -> dict[str, Any]:
    """What the run had under it: processor, cores, memory, threads, GPUs and the load of others."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": gpus,
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def versions() -> dict[str, str | None]:
    """Python, system, and the packages that decide speed; None where one is not installed."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cuda": torch.version.cuda,
    }
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def write_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append `row` to a file of one JSON object per line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Text table: first column to the left, the others to the right; floats with three digits."""
    cells = [[_cell(value) for value in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append("  ".join([row[0].ljust(widths[0]), *rest]))
    return "\n".join(lines)


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _commit() -> tuple[str | None, bool | None]:
    said = os.environ.get(_COMMIT)
    if said:
        return said.removesuffix(_DIRTY), said.endswith(_DIRTY)
    return _git("rev-parse", "HEAD"), _is_dirty()


def _is_dirty() -> bool | None:
    status = _git("status", "--porcelain", "--untracked-files=no")
    return None if status is None else bool(status)


def _git(*command: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(_REPOSITORY), *command], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
