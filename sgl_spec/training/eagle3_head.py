"""The EAGLE3 head in training: steps over whole sequences, rows indexed by their root.

Step j at root p reads token p + 1 + j and, as its feature, the fused target features at p (j = 0)
or the head's own hidden row of step j - 1 (j >= 1); its rotary position is p + j; it sees the
step-0 rows 0 .. p and its own chain's rows of steps 1 .. j. It predicts token p + 2 + j. This is
what serving computes for a draft tree whose committed text ends at p + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_spec.models.config import ModelConfig
from sgl_spec.training.blocks import (
    Rotary,
    gated_mlp,
    repeat_kv,
    rms_norm,
    rotate,
    split_heads,
)
from sgl_spec.training.chain_attention import chain_attention
from sgl_spec.training.target import Target

Weights = dict[str, Tensor]
"""By their names in the published layout: midlayer.*, fc.weight, norm.weight, lm_head.weight."""

CAPTURED = 3


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a head. hidden is the target's; vocab: the draft vocabulary. normed: EAGLE-3.1's
    shape, in which each captured row has a norm before `fc`, and what a step feeds back is normed
    too: features then stay of one size however deep a chain is."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    normed: bool = False

    @classmethod
    def beside(
        cls, config: ModelConfig, vocab: int, intermediate: int | None, *, normed: bool = False
    ) -> HeadShape:
        """A head with the target's attention shape."""
        return cls(
            hidden=config.hidden_size,
            intermediate=intermediate or config.intermediate_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab=vocab,
            eps=config.rms_norm_eps,
            normed=normed,
        )

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every trained weight."""
        hidden, inner = self.hidden, self.intermediate
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        norms = {f"fc_norm.{i}.weight": (hidden,) for i in range(CAPTURED if self.normed else 0)}
        return norms | {
            "fc.weight": (hidden, CAPTURED * hidden),
            "midlayer.input_layernorm.weight": (hidden,),
            "midlayer.hidden_norm.weight": (hidden,),
            "midlayer.self_attn.q_proj.weight": (q, 2 * hidden),
            "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
            "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
            "midlayer.self_attn.o_proj.weight": (hidden, q),
            "midlayer.post_attention_layernorm.weight": (hidden,),
            "midlayer.mlp.gate_proj.weight": (inner, hidden),
            "midlayer.mlp.up_proj.weight": (inner, hidden),
            "midlayer.mlp.down_proj.weight": (hidden, inner),
            "norm.weight": (hidden,),
            "lm_head.weight": (self.vocab, hidden),
        }


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs are captured unless a config says otherwise."""
    return (2, num_layers // 2, num_layers - 3)


def initial_weights(shape: HeadShape, target: Target, ids: Tensor, seed: int) -> Weights:
    """float32 weights to start from: output rows are the target's, scaled to a mean length of 1 so
    that the first logits are small; `fc` is the identity on the last captured layer; the rest is
    random (normal, std 0.02), o and down zero.

    ids: [vocab] target ids of the draft vocabulary.
    """
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for name, size in shape.weights().items():
        if len(size) == 1:
            weights[name] = torch.ones(size)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = torch.zeros(size)
        else:
            weights[name] = torch.randn(size, generator=generator) * 0.02
    rows = target.head.detach().cpu()[ids].float()
    weights["lm_head.weight"] = rows / rows.norm(dim=-1).mean().clamp(min=1e-6)
    weights["fc.weight"].zero_()[:, -shape.hidden :].fill_diagonal_(1.0)
    return {name: weight.to(target.device) for name, weight in weights.items()}


class _Front(NamedTuple):
    """Weights before attention. qkv: the three projections stacked, [q + 2 kv, 2 H]."""

    input_norm: Tensor
    hidden_norm: Tensor
    qkv: Tensor


class _Back(NamedTuple):
    """Weights after attention, the final norm included."""

    output: Tensor
    post_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    norm: Tensor


class _Sizes(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    eps: float


def _front(
    feature: Tensor, embed: Tensor, w: _Front, cos: Tensor, sin: Tensor, sizes: _Sizes
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [B, heads, S, d], rotated, KV heads repeated."""
    rows = torch.cat(
        (rms_norm(embed, w.input_norm, sizes.eps), rms_norm(feature, w.hidden_norm, sizes.eps)), -1
    )
    qkv = split_heads(F.linear(rows, w.qkv), sizes.head_dim)
    q, k, v = torch.split(qkv, [sizes.heads, sizes.kv_heads, sizes.kv_heads], dim=2)
    groups = sizes.heads // sizes.kv_heads
    k = repeat_kv(rotate(k, cos, sin), groups)
    q, v = rotate(q, cos, sin), repeat_kv(v, groups)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _back(feature: Tensor, attended: Tensor, w: _Back, eps: float) -> tuple[Tensor, Tensor]:
    """The hidden row (the next step's feature) and the row that the output layer reads."""
    hidden = feature + F.linear(attended.transpose(1, 2).flatten(2), w.output)
    normed = rms_norm(hidden, w.post_norm, eps)
    hidden = hidden + gated_mlp(normed, w.gate, w.up, w.down)
    return hidden, rms_norm(hidden, w.norm, eps)


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """A batch as the head reads it.

    tokens: [B, S]; captured: [B, S, 3 H_t] in the head's dtype; embedding: the target's [vocab, H];
    rotary: at least S + steps - 1 positions.
    """

    tokens: Tensor
    captured: Tensor
    embedding: Tensor
    rotary: Rotary


class Head:
    """The head's forward, as a function of its weights."""

    def __init__(self, shape: HeadShape, *, compiled: bool = False) -> None:
        self.shape = shape
        self._sizes = _Sizes(shape.heads, shape.kv_heads, shape.head_dim, shape.eps)
        self._front: Callable[..., tuple[Tensor, Tensor, Tensor]] = _front
        self._back: Callable[..., tuple[Tensor, Tensor]] = _back
        if compiled:
            self._front, self._back = torch.compile(_front), torch.compile(_back)

    def steps(self, weights: Weights, inputs: HeadInputs, count: int) -> list[Tensor]:
        """For steps 0 .. count - 1: [B, S, H] rows that the output layer reads, by root.

        weights: in the dtype of the computation. Rows whose tokens lie beyond S read token 0.
        """
        front, back = _grouped(weights)
        length = inputs.tokens.shape[1]
        padded = F.pad(inputs.tokens, (0, count))
        feature = F.linear(self._features(inputs.captured, weights), weights["fc.weight"])
        rows, keys, values = [], [], []
        for step in range(count):
            embed = F.embedding(padded[:, step + 1 : step + 1 + length], inputs.embedding)
            rotary = inputs.rotary.rows(step, length)
            q, k, v = self._front(feature, embed, front, rotary.cos, rotary.sin, self._sizes)
            keys.append(k)
            values.append(v)
            attended = chain_attention(q, keys[0], values[0], keys[1:], values[1:])
            feature, normed = self._back(feature, attended, back, self.shape.eps)
            feature = normed if self.shape.normed else feature
            rows.append(normed)
        return rows

    def _features(self, captured: Tensor, weights: Weights) -> Tensor:
        """[B, S, 3 H_t]: what `fc` reads."""
        if not self.shape.normed:
            return captured
        parts = captured.chunk(CAPTURED, dim=-1)
        norms = (weights[f"fc_norm.{index}.weight"] for index in range(CAPTURED))
        normed = [rms_norm(*one, self.shape.eps) for one in zip(parts, norms, strict=True)]
        return torch.cat(normed, dim=-1)


def _grouped(weights: Weights) -> tuple[_Front, _Back]:
    def layer(name: str) -> Tensor:
        return weights[f"midlayer.{name}.weight"]

    front = _Front(
        input_norm=layer("input_layernorm"),
        hidden_norm=layer("hidden_norm"),
        qkv=torch.cat([layer(f"self_attn.{name}_proj") for name in "qkv"]),
    )
    back = _Back(
        output=layer("self_attn.o_proj"),
        post_norm=layer("post_attention_layernorm"),
        gate=layer("mlp.gate_proj"),
        up=layer("mlp.up_proj"),
        down=layer("mlp.down_proj"),
        norm=weights["norm.weight"],
    )
    return front, back
