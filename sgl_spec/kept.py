"""What was measured of this machine, kept in the user's cache between starts."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


def cache_root() -> Path:
    """Where this package keeps what it can make again."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sgl-spec"


@cache
def cpu_name() -> str:
    """What the CPU calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def measured_once(
    kind: str,
    facts: object,
    measure: Callable[[], T],
    *,
    read: Callable[[Any], T],
    write: Callable[[T], Any],
    worth_keeping: Callable[[T], bool] = lambda _: True,
) -> T:
    """What an earlier start measured under the same facts, else what is measured now.

    facts: their `repr` says all that the result depends on. read, write: from and to JSON.
    worth_keeping: whether later starts may go by it. Of several starts that measure at once the
    first to end is believed by all.
    """
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
    path = cache_root() / kind / f"{digest}.json"
    unreadable = False
    try:
        return read(json.loads(path.read_text()))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("Cannot read what was measured in %s, measuring again: %s", path, error)
        unreadable = True
    found = measure()
    if not worth_keeping(found):
        return found
    try:
        if unreadable:
            path.unlink(missing_ok=True)
        _keep(path, json.dumps(write(found)))
        return read(json.loads(path.read_text()))
    except OSError as error:
        logger.warning("Cannot keep what was measured, the next start measures again: %s", error)
        return found


def _keep(path: Path, text: str) -> None:
    """Beside the target first, so that a file of that name is always whole; one that is there by
    now stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.{time.time_ns()}")
    partial.write_text(text)
    try:
        os.link(partial, path)
    except FileExistsError:
        pass
    finally:
        partial.unlink()
