"""Rotary frequencies of a config, equal to transformers' for every supported kind."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sgl_spec.models.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32, radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim)
    return plain


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: 1 except for yarn."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
    return _yarn_scale(rope.factor, 1.0)


def _yarn_scale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are slowed by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / plain
    turns = rope.original_positions / wavelength  # rotations within the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    slowed = torch.where(turns < rope.low_freq_factor, plain / rope.factor, blended)
    return torch.where(turns > rope.high_freq_factor, plain, slowed)


def _yarn(plain: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Pairs that turn more than `beta_fast` times in the original context keep their speed, those
    that turn less than `beta_slow` times are slowed, with a linear ramp over the pairs between."""

    def pair_that_turns(rotations: float) -> float:
        ratio = rope.original_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    keep = 1 - ramp
    return plain / rope.factor * (1 - keep) + plain * keep
