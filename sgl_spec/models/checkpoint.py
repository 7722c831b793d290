"""From `--model-path` to a directory in Hugging Face layout. Imports no torch."""

from __future__ import annotations

import logging
from pathlib import Path

from sgl_spec.errors import ConfigError
from sgl_spec.models.embedded import EMBEDDED_NAME, embedded_directory

logger = logging.getLogger(__name__)

# "model*": some repositories carry the same weights a second time under another name.
_HUB_FILES = ["*.json", "model*.safetensors", "*.jinja", "tokenizer*", "*.txt"]


def resolve_checkpoint(model_path: str, revision: str | None = None) -> Path:
    """The directory that holds the model's config, tokenizer and weights.

    "smollm2" is the embedded model, converted on first use; a path to a directory is itself;
    anything else is a hub id, downloaded into the hub's own cache. `revision` (hub ids only) is a
    branch, tag or commit. Raises `ConfigError` naming the path.
    """
    local = Path(model_path).expanduser()
    if local.is_dir():
        directory = local
    elif model_path.lower() == EMBEDDED_NAME:
        directory = embedded_directory()
    elif local.exists():
        raise ConfigError(f"--model-path {model_path} is a file; it must be a directory.")
    else:
        directory = _from_hub(model_path, revision)
    check_directory(directory)
    return directory


def check_directory(directory: Path) -> None:
    """Raise `ConfigError` naming the first file that serving cannot do without."""
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            raise ConfigError(
                f"{directory} has no {name}; a Hugging Face directory with it is needed."
            )


def _from_hub(model_id: str, revision: str | None) -> Path:
    import httpx
    from huggingface_hub import snapshot_download

    if model_id.startswith((".", "/", "~")) or model_id.count("/") > 1:
        raise ConfigError(f"--model-path {model_id}: no such directory.")
    logger.info("Downloading %s (revision %s) from the hub.", model_id, revision or "main")
    try:
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=_HUB_FILES))
    except (OSError, ValueError, httpx.HTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ConfigError(
            f"--model-path {model_id} is no directory here, and the hub did not give it: {reason}"
        ) from error
