"""From a path on the command line to files of a checkpoint. Imports no torch.

A path is the name of something embedded, a directory, or a hub id, which is downloaded into the
hub's own cache.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sgl_spec.errors import ConfigError
from sgl_spec.models.embedded import EMBEDDED_NAME, embedded_directory
from sgl_spec.models.shipped import SHIPPED, shipped_directory

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ["*.json", "*.jinja", "tokenizer*", "*.txt"]
# "model*": some repositories carry the same weights a second time under another name.
_HUB_FILES = [*_TOKENIZER_FILES, "model*.safetensors"]
_BIN_FILES = ["pytorch_model*.bin"]  # how many heads are published; asked for when all else lacks
_UNFOLDED = re.compile(r"(.+)-[0-9a-f]{16}-of-.+-u\d+")
_DRAFT_FLAG = "--speculative-draft-model-path"


def resolve_checkpoint(
    model_path: str, revision: str | None = None, *, tokenizer: bool = True
) -> Path:
    """The directory that holds the model's config, weights and, unless `tokenizer` is False, its
    tokenizer.

    "smollm2" is the embedded model, converted on first use. `revision` (hub ids only) is a branch,
    tag or commit. Raises `ConfigError` naming the path.
    """
    named = {EMBEDDED_NAME: embedded_directory}
    directory = _resolve("--model-path", model_path, revision, named)
    _need(directory, "config.json", "a Hugging Face directory with it is needed")
    if tokenizer:
        _need(directory, "tokenizer.json", "name a directory that has with --tokenizer-path")
    return directory


def resolve_tokenizer(tokenizer_path: str) -> Path:
    """The directory that holds a tokenizer; nothing else need be in it. Paths and errors as in
    `resolve_checkpoint`."""
    named = {EMBEDDED_NAME: embedded_directory}
    directory = _resolve("--tokenizer-path", tokenizer_path, None, named, _TOKENIZER_FILES)
    _need(directory, "tokenizer.json", "--tokenizer-path needs a directory with it")
    return directory


def resolve_draft(draft_path: str, revision: str | None = None) -> Path:
    """The directory that holds a draft's config and weights (`models.draft_loader` reads it).

    The names of `models.shipped` are weights that the package brings; "smollm2" is the embedded
    model itself. Raises `ConfigError` naming the path.
    """
    named: dict[str, Callable[[], Path]] = {EMBEDDED_NAME: embedded_directory}
    named.update({name: partial(shipped_directory, name) for name in SHIPPED})
    directory = _resolve(_DRAFT_FLAG, draft_path, revision, named)
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{_DRAFT_FLAG} {draft_path}: {directory} has no config.json.")
    if not any(directory.glob("*.safetensors*")) and not any(directory.glob("*.bin*")):
        _add_bin_files(draft_path, revision)
    return directory


def resolve_token_map(path: str) -> Path:
    """The file of hot token ids: a local one, or `owner/repository/file.pt` on the hub."""
    local = Path(path).expanduser()
    if local.is_file():
        return local
    parts = path.split("/")
    if len(parts) != 3 or path.startswith((".", "/", "~")):
        raise ConfigError(
            f"--speculative-token-map {path}: no such file, and no owner/repository/file.pt."
        )
    from huggingface_hub import hf_hub_download

    return _from_hub(
        "--speculative-token-map",
        path,
        lambda: hf_hub_download("/".join(parts[:2]), parts[2]),
    )


def short_name(directory: Path) -> str:
    """What to call a checkpoint in the log: a hub's cache and that of built-in drafts keep theirs
    in directories with a hash in their names."""
    if directory.parent.name == "snapshots":
        return directory.parents[1].name.removeprefix("models--").replace("--", "/")
    return _UNFOLDED.sub(r"\1", directory.name)


def _need(directory: Path, name: str, remedy: str) -> None:
    if not (directory / name).is_file():
        raise ConfigError(f"{directory} has no {name}; {remedy}.")


def _resolve(
    flag: str,
    path: str,
    revision: str | None,
    named: dict[str, Callable[[], Path]],
    files: list[str] = _HUB_FILES,
) -> Path:
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if path.lower() in named:
        return named[path.lower()]()
    if local.exists():
        raise ConfigError(f"{flag} {path} is a file; it must be a directory.")
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ConfigError(f"{flag} {path}: no such directory.")
    near = difflib.get_close_matches(path.lower(), named, n=1, cutoff=0.7)
    if near and "/" not in path:
        raise ConfigError(
            f"{flag} {path}: no such directory; did you mean {near[0]}? Built in are "
            f"{', '.join(named)}; a hub id is owner/repository."
        )
    logger.info("Downloading %s (revision %s) from the hub.", path, revision or "main")
    return _snapshot(flag, path, revision, files)


def _add_bin_files(draft_path: str, revision: str | None) -> None:
    """Heads that are published without safetensors, from the hub."""
    if not Path(draft_path).expanduser().is_dir() and draft_path.lower() not in SHIPPED:
        _snapshot(_DRAFT_FLAG, draft_path, revision, _BIN_FILES)


def _snapshot(flag: str, hub_id: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    return _from_hub(
        flag,
        hub_id,
        lambda: snapshot_download(hub_id, revision=revision, allow_patterns=patterns),
    )


def _from_hub(flag: str, path: str, download: Callable[[], str]) -> Path:
    import httpx

    try:
        return Path(download())
    except (OSError, ValueError, httpx.HTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ConfigError(
            f"{flag} {path} is not here, and the hub did not give it: "
            f"{reason.removeprefix('Got: ')}"
        ) from error
