"""EAGLE3 heads with each of the options that published ones have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from heads import Weights, eagle3_weights, noise

Change = Callable[[dict[str, Any], Weights], None]


def with_input_norm(config: dict[str, Any], weights: Weights) -> None:
    config["eagle_config"] |= {"norm_before_fc": True}
    weights["input_norm.weight"] = 1 + 0.5 * noise(torch.Generator().manual_seed(8), 192)


def with_feature_norms(config: dict[str, Any], weights: Weights) -> None:
    for index in range(3):  # the config does not say it: the names do
        norm = 1 + 0.5 * noise(torch.Generator().manual_seed(index), 64)
        weights[f"fc_norm.{index}.weight"] = norm


def with_own_embedding(config: dict[str, Any], weights: Weights) -> None:
    generator = torch.Generator().manual_seed(9)
    weights["embed_tokens.weight"] = noise(generator, config["vocab_size"], config["hidden_size"])


def with_other_width(config: dict[str, Any], weights: Weights) -> None:
    config |= {"hidden_size": 48, "target_hidden_size": 64, "intermediate_size": 80, "head_dim": 20}
    weights.clear()
    weights |= eagle3_weights(config)
    with_own_embedding(config, weights)


def with_two_features(config: dict[str, Any], weights: Weights) -> None:
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [2, 0]}
    config["num_aux_hidden_states"] = 2
    weights |= eagle3_weights(config, features=2)


def rebuilt(**changes: Any) -> Change:
    """The head of another config."""

    def change(config: dict[str, Any], weights: Weights) -> None:
        config |= changes
        weights.clear()
        weights |= eagle3_weights(config)

    return change


CHANGES: dict[str, Change] = {
    "plain": lambda config, weights: None,
    "biases": rebuilt(bias=True, attention_bias=True, mlp_bias=True),
    "two layers": rebuilt(num_hidden_layers=2),
    "other geometry": rebuilt(num_attention_heads=6, num_key_value_heads=3, head_dim=10),
    "target's head": rebuilt(draft_vocab_size=None),
    "whole vocabulary": rebuilt(draft_vocab_size=512),
    "norm before residual": lambda config, weights: config.update(norm_before_residual=True),
    "norm output": lambda config, weights: config["eagle_config"].update(norm_output=True),
    "norm before fc": with_input_norm,
    "feature norms": with_feature_norms,
    "own embedding": with_own_embedding,
    "other width": with_other_width,
    "two features": with_two_features,
}
