"""Directories made once in the user's cache: complete or absent, whoever else starts meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from sgl_spec.errors import ConfigError
from sgl_spec.kept import cache_root


def cached_directory(name: str, make: Callable[[Path], None], *, what: str, room: str) -> Path:
    """The directory `name` in the cache, made first if it is not there.

    name: says all that its content depends on. make: fills an empty directory. what, room: what is
    written and the space that it needs, for the `ConfigError` where the cache cannot be written.
    """
    target = cache_root() / "models" / name
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(target.name + ".lock")):
            if not target.is_dir():
                _make_into(make, target)
    except OSError as error:
        raise ConfigError(
            f"Cannot write the {what} to {target}: {error.strerror or error}. "
            f"Set XDG_CACHE_HOME to a writable directory with {room} free."
        ) from error
    return target


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the system drops it when the holder dies."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _make_into(make: Callable[[Path], None], target: Path) -> None:
    """Write beside the target, then rename: a directory of that name is always complete."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a start that died; we hold the lock
    partial.mkdir()
    try:
        make(partial)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
