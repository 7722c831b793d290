"""From a directory to a `DraftModel`: what is missing or does not fit the target is named."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sgl_spec.errors import ConfigError, UnsupportedModelError
from sgl_spec.models.checkpoint import short_name
from sgl_spec.models.config import Keys, read_json
from sgl_spec.models.decoder import Decoder
from sgl_spec.models.draft import DraftModel
from sgl_spec.models.draft_config import EAGLE, EAGLE3, HeadConfig, read_head_config, refuse_layers
from sgl_spec.models.draft_names import (
    STANDALONE,
    eagle3_names,
    eagle3_shapes,
    eagle3_unread,
    eagle_names,
    eagle_shapes,
    eagle_unread,
    kind_of,
)
from sgl_spec.models.draft_vocab import check_tokenizers, read_offsets, read_token_map
from sgl_spec.models.eagle import EagleHead
from sgl_spec.models.eagle3 import Eagle3Head
from sgl_spec.models.loader import LOAD_FORMATS, load_model
from sgl_spec.models.shipped import SHIPPED, folded_names
from sgl_spec.models.standalone import StandaloneDraft
from sgl_spec.models.stored import DummyWeights, Shape, StoredWeights, WeightSource

logger = logging.getLogger(__name__)

DRAFT_ALGORITHMS = (EAGLE, EAGLE3, STANDALONE)
_WHAT = {
    EAGLE: "a head in EAGLE's layout",
    EAGLE3: "a head in EAGLE3's layout",
    STANDALONE: "a whole model",
}


def load_draft(
    algorithm: str,
    directory: Path,
    target: Decoder,
    *,
    tokenizer_dir: Path,
    token_map: Path | None = None,
    load_format: str = "auto",
) -> DraftModel:
    """Build the draft in `directory` for `target`, in the target's dtype and on its device.

    algorithm: one of `DRAFT_ALGORITHMS`. tokenizer_dir: holds the target's `tokenizer.json`, which
    that of a STANDALONE draft must equal. token_map: a file of hot token ids (EAGLE alone).
    load_format: as in `load_model`; a dummy head drafts all tokens up to its draft vocabulary.

    Raises `UnsupportedModelError` or `ConfigError` naming the file, key or tensor that is at fault.
    """
    assert algorithm in DRAFT_ALGORITHMS
    if load_format not in LOAD_FORMATS:
        allowed = ", ".join(LOAD_FORMATS)
        raise ConfigError(f"--speculative-draft-load-format must be {allowed}, got {load_format}.")
    if token_map is not None and algorithm != EAGLE:
        raise ConfigError(
            f"--speculative-token-map works with EAGLE, not with {algorithm}: an EAGLE3 head "
            "brings its own draft vocabulary, a STANDALONE draft its own output layer."
        )
    keys = Keys(read_json(directory / "config.json"), directory / "config.json")
    if load_format == "dummy":
        _check_kind(algorithm, keys, None)
        draft = _build(algorithm, _Source(directory, keys, None), target, tokenizer_dir, token_map)
    else:
        with StoredWeights(directory, pickled=True) as stored:
            _check_kind(algorithm, keys, stored.names)
            stored.dtype, stored.device = target.dtype, str(target.device)
            source = _Source(directory, keys, stored)
            draft = _build(algorithm, source, target, tokenizer_dir, token_map)
    logger.info(
        "Loaded the draft %s: %.1f MB of its own, %d KV bytes a token, %d tokens it may draft.",
        draft.name,
        draft.weight_bytes / 1e6,
        draft.kv_bytes_per_token,
        draft.logit_width,
    )
    return draft


def _check_kind(algorithm: str, keys: Keys, names: frozenset[str] | None) -> None:
    kind = kind_of(keys.content, names)
    if kind is not None and kind != algorithm:
        raise UnsupportedModelError(
            f"--speculative-algorithm {algorithm} needs {_WHAT[algorithm]}, but "
            f"{keys.path.parent} holds {_WHAT[kind]} (for --speculative-algorithm {kind}).",
            param="speculative_algorithm",
        )


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a draft comes from. stored: its open weights, None to make some up."""

    directory: Path
    keys: Keys
    stored: StoredWeights | None

    def weights(self, shapes: dict[str, Shape], unread: list[str], target: Decoder) -> WeightSource:
        """The weights, after their names, shapes and dtypes have been checked."""
        if self.stored is None:
            return DummyWeights(shapes, target.dtype, str(target.device))
        self.stored.check(shapes, also=unread)
        return self.stored

    @property
    def names(self) -> frozenset[str]:
        """Of the stored tensors."""
        return frozenset() if self.stored is None else self.stored.names


def _build(
    algorithm: str, source: _Source, target: Decoder, tokenizer_dir: Path, token_map: Path | None
) -> DraftModel:
    if algorithm == STANDALONE:
        return _standalone(source, target, tokenizer_dir)
    if algorithm == EAGLE:
        return _eagle(source, target, token_map)
    return _eagle3(source, target)


def _standalone(source: _Source, target: Decoder, tokenizer_dir: Path) -> DraftModel:
    _refuse_folded(source)
    num_tokens = check_tokenizers(tokenizer_dir, source.directory)
    model = load_model(
        source.directory,
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(target.device),
        load_format="dummy" if source.stored is None else "auto",
        role="draft",
        attention_backend=target.backend.name,
    )
    for what, rows in ("draft", model.config.vocab_size), ("target", target.config.vocab_size):
        if rows < num_tokens:
            raise UnsupportedModelError(
                f"{source.directory}: the {what} has vocab_size {rows}, its tokenizer "
                f"{num_tokens} tokens; only rows beyond the tokenizer's may be missing.",
                param="vocab_size",
            )
    name = f"{STANDALONE} {short_name(source.directory)}"
    return StandaloneDraft(name, model, num_tokens, target.config.vocab_size)


def _refuse_folded(source: _Source) -> None:
    folded = folded_names(source.names)
    if folded:
        names = [name for name, kind in SHIPPED.items() if kind == STANDALONE]
        raise UnsupportedModelError(
            f"{source.directory} holds a draft in folded form ({', '.join(folded)} in place of "
            "whole embeddings), which is not served as it lies; give "
            f"--speculative-draft-model-path {' or '.join(names)}, by name, for the built-in "
            "draft, or the folder `model` that the training writes beside the folded files."
        )


def _eagle(source: _Source, target: Decoder, token_map: Path | None) -> DraftModel:
    config = read_head_config(source.keys, EAGLE)
    _check_fit(config, source.keys, target)
    names = eagle_names(config, source.names)
    weights = source.weights(eagle_shapes(config, names), eagle_unread(source.names), target)
    hot = None if token_map is None else read_token_map(token_map, target.config.vocab_size)
    return EagleHead(
        f"EAGLE head {short_name(source.directory)}", config, weights, names, target, hot
    )


def _eagle3(source: _Source, target: Decoder) -> DraftModel:
    config, keys = read_head_config(source.keys, EAGLE3), source.keys
    _check_fit(config, keys, target)
    vocab_size = target.config.vocab_size
    full = config.draft_vocab_size in (None, vocab_size)
    tied = full and keys.flag("tie_word_embeddings", False)
    names = eagle3_names(config, source.names, target.config.hidden_size, tied=tied)
    weights = source.weights(eagle3_shapes(config, names), eagle3_unread(config), target)
    columns = config.draft_vocab_size or vocab_size
    return Eagle3Head(
        f"{EAGLE3} head {short_name(source.directory)}",
        config,
        weights,
        names,
        target,
        capture=_captured(config, keys, target),
        token_ids=_token_ids(source.stored, columns, vocab_size),
        tied=tied and names.lm_head is None,
    )


def _token_ids(stored: StoredWeights | None, columns: int, vocab_size: int) -> Tensor | None:
    if stored is None:
        return None if columns == vocab_size else torch.arange(columns)
    return read_offsets(stored, columns, vocab_size)


def _check_fit(config: HeadConfig, keys: Keys, target: Decoder) -> None:
    """Raise unless the head is one for a target of this shape."""
    hidden, vocab = target.config.hidden_size, target.config.vocab_size
    if config.target_hidden != hidden:
        key = "target_hidden_size" if "target_hidden_size" in keys.content else "hidden_size"
        raise keys.refuse(key, config.target_hidden, f"{hidden}, the target's hidden_size")
    if config.layers.vocab_size != vocab:
        allowed = f"{vocab}, the target's vocab_size"
        raise keys.refuse("vocab_size", config.layers.vocab_size, allowed)
    columns = config.draft_vocab_size
    if columns is not None and columns > vocab:
        raise keys.refuse("draft_vocab_size", columns, f"1 to {vocab}, the target's vocab_size")
    if config.draft_vocab_size is None and config.layers.hidden_size != hidden:
        own, allowed = config.layers.hidden_size, f"{hidden}, to go with the target's output layer"
        raise keys.refuse("hidden_size", own, allowed)


def _captured(config: HeadConfig, keys: Keys, target: Decoder) -> tuple[int, ...]:
    """The target layers whose inputs an EAGLE3 head reads; guessed, loudly, where the config does
    not say."""
    count = target.config.num_layers
    capture = config.capture or (2, count // 2, count - 3)
    if not all(0 <= layer < count for layer in capture):
        raise refuse_layers(keys, count)
    if config.capture is None:
        logger.warning(
            "%s does not say which target layers the head reads "
            "(eagle_aux_hidden_state_layer_ids): GUESSING the inputs of layers %s. If it was "
            "trained on others, hardly any draft will be accepted.",
            keys.path,
            ", ".join(map(str, capture)),
        )
    return capture
