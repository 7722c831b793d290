"""Draft weights that the package brings for the embedded model, found by name.

`drafts/<name>/` holds config.json, model.safetensors and provenance.json. An EAGLE3 head is used
where it lies. A standalone draft is small because its embedding and its output layer are
projections of the target's embedding E: the file holds `embed_projection.weight` P [H_draft,
H_target] for model.embed_tokens.weight = E P^T, and `lm_head_projection.weight` likewise. It is
unfolded once into an ordinary Hugging Face directory in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_spec.errors import ConfigError, UnsupportedModelError
from sgl_spec.models.cache import cached_directory
from sgl_spec.models.config import read_json
from sgl_spec.models.embedded import embedded_directory

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

SHIPPED = {"smollm2-eagle3": "EAGLE3", "smollm2-draft": "STANDALONE"}
"""Name of each shipped draft, and the algorithm it is for; the target is the embedded model."""

_DRAFTS = Path(__file__).parents[1] / "drafts"
_FILES = ("config.json", "model.safetensors")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_PROJECTED = {
    "embed_projection.weight": "model.embed_tokens.weight",
    "lm_head_projection.weight": "lm_head.weight",
}
_UNFOLD_VERSION = 1  # raise it when the unfolded files change; old directories are then ignored


def shipped_directory(name: str) -> Path:
    """The directory of the shipped draft `name`, one of `SHIPPED`; loads like any other.

    Raises `ConfigError` where the weights are missing or the cache cannot be written.
    """
    source = _DRAFTS / name
    for file in _FILES:
        if not (source / file).is_file():
            raise ConfigError(
                f"--speculative-draft-model-path {name}: {source / file} is missing, so this "
                "installation ships no weights for it. Train some (python -m sgl_spec.training) "
                "and give their directory."
            )
    if SHIPPED[name] != "STANDALONE":
        return source
    target = embedded_directory()
    return cached_directory(
        f"{name}-{_content_key(source)}-of-{target.name}-u{_UNFOLD_VERSION}",
        lambda partial: unfold_standalone(source, target, partial),
        what=f"draft {name}",
        room="200 MB",
    )


def folded_names(names: frozenset[str]) -> list[str]:
    """Those of a draft's tensors that only the shipped form has."""
    return sorted(names & _PROJECTED.keys())


def unfold_standalone(source: Path, target: Path, into: Path) -> None:
    """Write a standalone draft with projected embeddings as an ordinary checkpoint, in float32.

    source: the shipped form. target: the checkpoint whose embedding it projects, and whose
    tokenizer it has. into: an empty directory. Raises `UnsupportedModelError` naming what does not
    fit.
    """
    from safetensors.torch import load_file, save_file

    logger.info("First use: unfolding the draft %s (once, about a second).", source.name)
    weights = {name: weight.float() for name, weight in load_file(source / _FILES[1]).items()}
    embedding = _target_embedding(target)
    for folded, name in _PROJECTED.items():
        weights[name] = _project(weights.pop(folded, None), embedding, f"{source}: {folded}")
    save_file(weights, into / _FILES[1], metadata={"format": "pt"})
    config = read_json(source / _FILES[0]) | {"dtype": "float32"}
    config.pop("torch_dtype", None)
    (into / _FILES[0]).write_text(json.dumps(config, indent=2), encoding="utf-8")
    for file in _TOKENIZER_FILES:
        if (target / file).is_file():
            shutil.copyfile(target / file, into / file)


def _project(projection: Tensor | None, embedding: Tensor, what: str) -> Tensor:
    """E P^T, [vocabulary, H_draft]."""
    width = embedding.shape[1]
    if projection is None:
        raise UnsupportedModelError(f"{what} is missing; a folded draft has it.")
    if projection.dim() != 2 or projection.shape[1] != width:
        raise UnsupportedModelError(
            f"{what} has shape {list(projection.shape)}; allowed: [draft hidden size, {width}], "
            "the target's hidden_size."
        )
    return embedding @ projection.T


def _target_embedding(target: Path) -> Tensor:
    from sgl_spec.models.stored import StoredWeights

    with StoredWeights(target) as stored:
        return stored("model.embed_tokens.weight")


def _content_key(source: Path) -> str:
    """Changes with the weights or the config, so that a newer package never meets an old cache."""
    digest = hashlib.sha256()
    for file in _FILES:
        digest.update((source / file).read_bytes())
    return digest.hexdigest()[:16]
