"""The parts of a decoder layer as functions of their weights, batched and differentiable.

Serving runs ragged rows over slots; training runs whole padded sequences. Both must compute the
same numbers, so the formulas here are those of `layers/` and `models/decoder.py`, in [B, S, ...].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
    return x.view(*x.shape[:-1], -1, head_dim)


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


class LayerWeights(NamedTuple):
    """One layer's weights; q, k and v are stacked. A compiler sees through a named tuple, where a
    dataclass would be compiled once per object."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: tuple[Tensor, Tensor] | None
    output: Tensor
    output_bias: Tensor | None
    post_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class LayerSizes(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    eps: float


def forward_layer(
    x: Tensor, layer: LayerWeights, cos: Tensor, sin: Tensor, shape: LayerSizes
) -> Tensor:
    """One decoder layer. x: [B, S, H], the residual stream; cos, sin: [S, 1, head_dim]."""
    normed = rms_norm(x, layer.input_norm, shape.eps)
    qkv = split_heads(F.linear(normed, layer.qkv, layer.qkv_bias), shape.head_dim)
    q, k, v = torch.split(qkv, [shape.heads, shape.kv_heads, shape.kv_heads], dim=2)
    if layer.qk_norm is not None:
        q = rms_norm(q, layer.qk_norm[0], shape.eps)
        k = rms_norm(k, layer.qk_norm[1], shape.eps)
    groups = shape.heads // shape.kv_heads
    k, v = repeat_kv(rotate(k, cos, sin), groups), repeat_kv(v, groups)
    attended = causal_attention(rotate(q, cos, sin), k, v).flatten(2)
    x = x + F.linear(attended, layer.output, layer.output_bias)
    normed = rms_norm(x, layer.post_norm, shape.eps)
    return x + gated_mlp(normed, layer.gate, layer.up, layer.down)
