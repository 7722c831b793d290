"""EAGLE and EAGLE3 heads for a widened target: the same drafts at the cost of a bigger head; and an
EAGLE3 head that was never trained, for the cost alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sgl_spec.bench.widen_parts import Noise, Size, check_size, joined, stream
from sgl_spec.bench.widen_plan import Plan, Planned, Widener, widened_keys, write_checkpoint
from sgl_spec.errors import ConfigError
from sgl_spec.models.config import Keys, ModelConfig
from sgl_spec.models.draft_config import EAGLE, EAGLE3, SPECULATORS, HeadConfig, read_head_config
from sgl_spec.models.draft_names import (
    eagle3_names,
    eagle3_shapes,
    eagle3_unread,
    eagle_names,
    eagle_shapes,
    eagle_unread,
)
from sgl_spec.models.stored import StoredWeights

_LAYERS = "eagle_aux_hidden_state_layer_ids"
_TAKEN = (
    *("vocab_size", "bos_token_id", "eos_token_id", "hidden_act", "max_position_embeddings"),
    *("rope_theta", "rope_parameters", "rope_scaling"),
)


def widen_head(
    kind: str,
    keys: Keys,
    stored: StoredWeights,
    target: ModelConfig,
    out: Path,
    size: Size,
    noise: Noise,
) -> None:
    """Write the head of `stored` for `target` widened to `size`. kind: EAGLE or EAGLE3."""
    config = read_head_config(keys, kind)
    check_size(config.layers, size, layers=config.layers.num_layers)
    if (config.target_hidden, config.layers.vocab_size) != (target.hidden_size, target.vocab_size):
        raise ConfigError(
            f"{keys.path}: the head is for a target of hidden_size {config.target_hidden} and "
            f"vocab_size {config.layers.vocab_size}, --model-path has {target.hidden_size} and "
            f"{target.vocab_size}."
        )
    widener = Widener(stored, config.layers, size, noise)
    plan = _eagle(widener, config) if kind == EAGLE else _eagle3(widener, config, keys, target)
    write_checkpoint(out, plan, _content(keys, config, target, size), noise.dtype)


def _eagle(widener: Widener, config: HeadConfig) -> Plan:
    stored, hidden = widener.stored, widener.axes.hidden
    names = eagle_names(config, stored.names)
    stored.check(eagle_shapes(config, names), also=eagle_unread(stored.names))
    plan = widener.linear(names.fc, hidden, joined([hidden, hidden]))
    for prefix in names.layers:
        plan |= widener.layer(prefix)
    return plan


def _eagle3(widener: Widener, config: HeadConfig, keys: Keys, target: ModelConfig) -> Plan:
    stored, hidden = widener.stored, widener.axes.hidden
    tied = config.draft_vocab_size in (None, target.vocab_size)
    tied = tied and keys.flag("tie_word_embeddings", False)
    names = eagle3_names(config, stored.names, target.hidden_size, tied=tied)
    stored.check(eagle3_shapes(config, names), also=eagle3_unread(config))
    captured = stream(target.hidden_size, widener.size.hidden)
    features = joined([captured] * config.num_features)
    plan = widener.linear(names.fc, hidden, features)
    for index, prefix in enumerate(names.layers):
        plan |= widener.layer(prefix, joined([hidden, hidden]) if index == 0 else None)
    plan |= widener.norm(names.norm, hidden)
    norms = [(name, captured) for name in names.feature_norms]
    norms += [] if names.input_norm is None else [(names.input_norm, features)]
    if norms and captured.growth != hidden.growth:
        raise ConfigError(
            f"{keys.path}: a head with norms before fc must be as wide as its target "
            f"({target.hidden_size}) to be widened, got hidden_size {config.layers.hidden_size}: "
            "both kinds of norms share one rms_norm_eps."
        )
    for name, axis in norms:
        plan |= widener.norm(name, axis)
    if names.lm_head is not None:
        plan |= widener.output(names.lm_head, names.lm_head, hidden)
    if names.embedding is not None:
        plan |= widener.embedding(names.embedding, hidden)
    return plan | {name: _copy(stored, name) for name in ("d2t", "t2d") if name in stored.names}


def random_head(
    content: dict[str, Any], target: ModelConfig, columns: int, out: Path, size: Size, noise: Noise
) -> None:
    """Write an EAGLE3 head of one layer with random weights for a target of `size`.

    content: the config of the narrow `target`, whose rope and vocabulary the head takes. columns:
    its draft vocabulary, the first tokens of the target's.
    """
    if not 1 <= columns <= target.vocab_size:
        raise ConfigError(
            f"--random-head must be from 1 to the vocabulary of {target.vocab_size}, got "
            f"{columns}.",
            param="random_head",
        )
    kept = {key: content[key] for key in _TAKEN if key in content} | {"model_type": "llama"}
    count = size.layers
    head = widened_keys(kept, target, size) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": columns,
        "target_hidden_size": size.hidden,
        "tie_word_embeddings": False,
        "eagle_config": {_LAYERS: [2, count // 2, count - 3], "use_aux_hidden_state": True},
    }
    config = read_head_config(Keys(head, out / "config.json"), EAGLE3)
    names = eagle3_names(config, frozenset(), size.hidden, tied=False)
    plan = {n: _random(n, shape, noise) for n, shape in eagle3_shapes(config, names).items()}
    plan["d2t"] = Planned((columns,), lambda: torch.zeros(columns, dtype=torch.int64))
    vocabulary = torch.arange(target.vocab_size)
    plan["t2d"] = Planned((target.vocab_size,), lambda: vocabulary < columns)
    write_checkpoint(out, plan, head, noise.dtype)


def _random(name: str, shape: tuple[int, ...], noise: Noise) -> Planned:
    """Rows of unit length for a matrix, ones for a norm."""
    spread = 1 / math.sqrt(shape[-1])
    like = torch.ones(2) if len(shape) == 1 else torch.tensor([[-spread, spread]])
    return Planned(shape, lambda: noise(name, shape, like))


def _copy(stored: StoredWeights, name: str) -> Planned:
    def make() -> Tensor:
        return stored.raw(name).clone()

    return Planned(stored.shape(name), make)


def _content(keys: Keys, config: HeadConfig, target: ModelConfig, size: Size) -> dict[str, Any]:
    content = dict(keys.content)
    if config.layout == SPECULATORS:
        nested = content["transformer_layer_config"]
        content["transformer_layer_config"] = widened_keys(nested, config.layers, size)
    else:
        content = widened_keys(content, config.layers, size)
    if content.get("target_hidden_size") is not None:
        content["target_hidden_size"] = size.hidden
    if config.layout != EAGLE and config.capture is None:
        # What is guessed from the number of target layers must not change with that number.
        count = target.num_layers
        content[_LAYERS] = [2, count // 2, count - 3]
    return content
