"""The parts of a decoder layer as functions of their weights, batched and differentiable.

Serving runs ragged rows over slots; training runs whole padded sequences. Both must compute the
same numbers, so the formulas here are those of `layers/` and `models/decoder.py`, in [B, S, ...].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_spec.models.config import ModelConfig
from sgl_spec.models.rope import attention_factor, inverse_frequencies


@dataclass(frozen=True, slots=True)
class Rotary:
    """cos and sin at positions 0 .. P-1: [P, 1, head_dim], the first half of sin negated."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def build(
        cls, config: ModelConfig, positions: int, dtype: torch.dtype, device: torch.device
    ) -> Rotary:
        """For the rotary settings of `config`."""
        frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)
        angles = torch.arange(positions, device=device)[:, None].float() * frequencies
        factor = attention_factor(config.rope)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        return cls(
            cos=torch.cat((cos, cos), dim=-1).to(dtype)[:, None],
            sin=torch.cat((-sin, sin), dim=-1).to(dtype)[:, None],
        )

    def rows(self, start: int, length: int) -> Rotary:
        """Positions start .. start + length - 1."""
        window = slice(start, start + length)
        return Rotary(self.cos[window], self.sin[window])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + d / 2) of every head. x: [B, S, heads, d]; cos, sin: [S, 1, d]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((high, low), dim=-1) * sin


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, S, heads * d] -> [B, S, heads, d]."""
    return x.unflatten(-1, (-1, head_dim))


def repeat_kv(x: Tensor, groups: int) -> Tensor:
    """[B, S, kv_heads, d] -> [B, S, kv_heads * groups, d]: each KV head beside its queries."""
    if groups == 1:
        return x
    return x.unsqueeze(3).expand(-1, -1, -1, groups, -1).flatten(2, 3)


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """down(silu(gate x) * up x), each a weight [out, in] without bias."""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention of each row over itself and the rows before it. All [B, S, heads, d]."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
