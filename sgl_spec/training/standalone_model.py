"""The small Llama in training: a decoder between two projections of the target's embedding.

Its embedding is E P^T and its output layer E Q^T, where E is the target's embedding [vocab, H_t]
and P, Q [H, H_t] are trained. Only P and Q are stored, so a draft over a large vocabulary is small
on disk; serving multiplies them out once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_spec.training.blocks import LayerSizes, LayerWeights, Rotary, forward_layer, rms_norm

Weights = dict[str, Tensor]
"""By their Hugging Face names, the two vocabulary matrices as `*_projection.weight`."""

EMBED = "embed_projection.weight"
HEAD = "lm_head_projection.weight"
_EMBED_RMS = 0.3  # of an embedding row at the start


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Sizes of a small Llama beside a target of width `target_hidden`."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    target_hidden: int

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every stored weight."""
        shapes: dict[str, tuple[int, ...]] = {EMBED: (self.hidden, self.target_hidden)}
        for index in range(self.layers):
            for name, size in self._layer().items():
                shapes[f"model.layers.{index}.{name}.weight"] = size
        shapes["model.norm.weight"] = (self.hidden,)
        shapes[HEAD] = (self.hidden, self.target_hidden)
        return shapes

    def _layer(self) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden, self.intermediate
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }


def initial_weights(shape: DraftShape, embedding: Tensor, seed: int) -> Weights:
    """float32 weights to start from: both projections keep the embedding's main directions, the
    output's behind a random rotation, so that a token does not predict itself; the rest is random
    (normal, std 0.02), o and down zero. embedding: [vocab, H_t]."""
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for name, size in shape.weights().items():
        if len(size) == 1:
            weights[name] = torch.ones(size)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = torch.zeros(size)
        else:
            weights[name] = torch.randn(size, generator=generator) * 0.02
    directions = _main_directions(embedding, shape.hidden)
    rows = embedding.float() @ directions.t()
    weights[EMBED] = directions * (_EMBED_RMS / rows.square().mean().sqrt())
    rotation, _ = torch.linalg.qr(torch.randn((shape.hidden,) * 2, generator=generator))
    length = rows.square().sum(dim=-1).mean().sqrt()
    weights[HEAD] = rotation.to(embedding.device) @ directions / length
    return {name: weight.to(embedding.device) for name, weight in weights.items()}


def _main_directions(embedding: Tensor, count: int) -> Tensor:
    """[count, H_t] orthonormal rows: the directions with most of the embedding's energy. Beyond
    H_t there are none: random ones follow."""
    rows = embedding.float()
    energy, vectors = torch.linalg.eigh(rows.t() @ rows)
    found: Tensor = vectors[:, energy.argsort(descending=True)].t()[:count]
    missing = count - len(found)
    if missing <= 0:
        return found.contiguous()
    generator = torch.Generator().manual_seed(0)
    more = torch.randn((missing, found.shape[1]), generator=generator).to(found.device)
    return torch.cat((found, F.normalize(more, dim=-1)))


class Student:
    """The draft's forward, as a function of its weights."""

    def __init__(self, shape: DraftShape, *, compiled: bool = False) -> None:
        self.shape = shape
        self._sizes = LayerSizes(shape.heads, shape.kv_heads, shape.head_dim, shape.eps)
        self._layer: Callable[..., Tensor] = forward_layer
        if compiled:
            self._layer = torch.compile(forward_layer)

    def forward(self, weights: Weights, tokens: Tensor, embedding: Tensor, rows: Rotary) -> Tensor:
        """[B, S, H], the final-normed hidden. weights: in the dtype of the computation; tokens:
        [B, S]; embedding: the target's; rows: positions 0 .. S - 1."""
        hidden = F.linear(F.embedding(tokens, embedding), weights[EMBED])
        for index in range(self.shape.layers):
            layer = _grouped(weights, f"model.layers.{index}")
            hidden = self._layer(hidden, layer, rows.cos, rows.sin, self._sizes)
        return rms_norm(hidden, weights["model.norm.weight"], self.shape.eps)


def output_layer(weights: Weights, embedding: Tensor) -> Tensor:
    """[vocab, H]: the output layer that the projection stands for."""
    return F.linear(embedding, weights[HEAD])


def _grouped(weights: Weights, prefix: str) -> LayerWeights:
    def take(name: str) -> Tensor:
        return weights[f"{prefix}.{name}.weight"]

    return LayerWeights(
        input_norm=take("input_layernorm"),
        qkv=torch.cat([take(f"self_attn.{name}_proj") for name in "qkv"]),
        qkv_bias=None,
        qk_norm=None,
        output=take("self_attn.o_proj"),
        output_bias=None,
        post_norm=take("post_attention_layernorm"),
        gate=take("mlp.gate_proj"),
        up=take("mlp.up_proj"),
        down=take("mlp.down_proj"),
    )
