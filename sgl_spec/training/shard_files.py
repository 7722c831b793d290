"""Reading the files of a data directory; `shards` tells what they hold. What does not fit that is
refused with the file's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from sgl_spec.errors import ConfigError

FORMAT = 1
Arrays = dict[str, npt.NDArray[Any]]

_ENTRIES = {"target": str, "vocab_size": int, "kinds": list, "shards": list}
_SHARD_ENTRIES = {"file": str, "sequences": int, "tokens": int, "answer_tokens": int}
_KINDS_OF_NUMBER = {  # of a shard's arrays, as numpy abbreviates them
    "tokens": "u",
    "offsets": "i",
    "prompt_lens": "i",
    "kinds": "u",
    "temperatures": "f",
    "jobs": "i",
    "prompt_hashes": "u",
}


def manifest_paths(directories: list[Path]) -> list[Path]:
    """The manifests in `directories`; `ConfigError` if there are none."""
    found = [path for folder in directories for path in sorted(folder.glob("part-[0-9][0-9].json"))]
    if not found:
        listed = ", ".join(map(str, directories))
        raise ConfigError(f"No part-NN.json in {listed}; make data with the `data` command first.")
    return found


def read_manifest(path: Path) -> dict[str, Any]:
    """A manifest with every entry that is read here or by those who call."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read the manifest {path}: {error}.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ConfigError(f"{path} is no manifest of format {FORMAT}.")
    _check_entries(path, manifest, _ENTRIES)
    for number, shard in enumerate(manifest["shards"]):
        if not isinstance(shard, dict):
            raise ConfigError(f"{path}: shard {number} is no JSON object.")
        _check_entries(path, shard, _SHARD_ENTRIES, f"shard {number}: ")
    return manifest


def read_shard(path: Path, manifest: dict[str, Any]) -> Arrays:
    """The arrays of one of the manifest's shards."""
    try:
        arrays = dict(load_file(str(path)))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"Cannot read the shard {path}: {error}.") from error
    for name, kind in _KINDS_OF_NUMBER.items():
        if name not in arrays or arrays[name].dtype.kind != kind or arrays[name].ndim != 1:
            raise ConfigError(f"The shard {path} is damaged: {name} is missing or of another type.")
    damage = _damage(arrays, manifest["vocab_size"], len(manifest["kinds"]))
    if damage is not None:
        raise ConfigError(f"The shard {path} is damaged: {damage}.")
    return arrays


def _check_entries(
    path: Path, found: dict[str, Any], wanted: dict[str, type], where: str = ""
) -> None:
    for name, kind in wanted.items():
        if not isinstance(found.get(name), kind):
            seen = found.get(name, "nothing")
            raise ConfigError(f"{path}: {where}{name} must be {kind.__name__}, found {seen!r}.")


def _damage(arrays: Arrays, vocab_size: int, num_kinds: int) -> str | None:
    """What the arrays say against each other or the manifest."""
    tokens, offsets, prompts = arrays["tokens"], arrays["offsets"], arrays["prompt_lens"]
    count = len(offsets) - 1
    each = ("prompt_lens", "kinds", "temperatures", "jobs", "prompt_hashes")
    if count < 0 or any(len(arrays[name]) != count for name in each):
        return "its arrays are of different lengths"
    lens = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != len(tokens) or (lens < 1).any():
        return f"its offsets do not divide its {len(tokens)} tokens"
    if (prompts < 1).any() or (prompts > lens).any():
        return "a prompt is empty or longer than its sequence"
    if len(tokens) and int(tokens.max()) >= vocab_size:
        return f"it holds token id {int(tokens.max())}, the vocabulary has {vocab_size}"
    if count and int(arrays["kinds"].max()) >= num_kinds:
        return f"it holds kind {int(arrays['kinds'].max())}, the manifest names {num_kinds}"
    return None
