"""What a forward begins with, in one launch: rows of the embedding, and what is read first, normed.

Of a model:              stream[t] = table[tokens[t]],   out[t] = norm(stream[t])
Of a draft head:         out[t] = norm(table[tokens[t]]), norm(features[t])      side by side
                         stream[t] = norm(features[t])                           where it is wanted

norm(x) = x / sqrt(mean(x^2) + eps) * weight, or x itself for a head without norms.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chained, let_follow, wait_before


@triton.jit
def _embed(
    table,
    tokens,
    weight,
    features,
    feature_weight,
    stream,
    out,
    eps,
    feature_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    PARTS: tl.constexpr,
    STREAM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    let_follow(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    if NORMED:  # no kernel writes weights
        w = tl.load(weight + column, mask=inside & (part == 0), other=0.0)
        if PARTS == 2:
            other = tl.load(feature_weight + column, mask=inside & (part == 1), other=0.0)
            w = tl.where(part == 0, w, other)
    wait_before(CHAINED)
    if part == 0:
        source = table + tl.load(tokens + row).to(tl.int64) * WIDTH
    else:
        source = features + row * feature_stride
    x = tl.load(source + column, mask=inside, other=0.0)
    if STREAM and PARTS == 1:
        tl.store(stream + row * WIDTH + column, x, mask=inside)
    if NORMED:
        h = x.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(h * h, 0) / WIDTH + eps)
        h = h * scale * w.to(tl.float32)
        x = h.to(out.dtype.element_ty)
    if STREAM and PARTS == 2:
        tl.store(stream + row * WIDTH + column, x, mask=inside & (part == 1))
    tl.store(out + row * (PARTS * WIDTH) + part * WIDTH + column, x, mask=inside)


def embed_norm(table: Tensor, tokens: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(stream, out), both [T, H]. table: [V, H] contiguous. tokens: [T] int64. weight: [H]."""
    _check(table, tokens, weight)
    stream = torch.empty(tokens.shape[0], table.shape[1], dtype=table.dtype, device=table.device)
    out = torch.empty_like(stream)
    _launch(table, tokens, weight, None, None, stream, out, eps)
    return stream, out


def embed_beside(
    table: Tensor,
    tokens: Tensor,
    features: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    stream: Tensor | None = None,
) -> Tensor:
    """out [T, 2 H]. table: [V, H] contiguous. tokens: [T] int64. features: [T, H], rows may lie
    apart. norms: weights [H] of the embedding's and of the features', None for neither. stream:
    [T, H] contiguous, filled with the normed features."""
    width = table.shape[1]
    assert features.shape == (tokens.shape[0], width)
    assert features.stride(1) == 1, "a row of features must be contiguous"
    assert features.dtype == table.dtype, "features and table must have one dtype"
    assert stream is None or (stream.is_contiguous() and stream.shape == features.shape)
    weight, feature_weight = norms or (None, None)
    _check(table, tokens, weight, feature_weight)
    out = torch.empty(tokens.shape[0], 2 * width, dtype=table.dtype, device=table.device)
    _launch(table, tokens, weight, features, feature_weight, stream, out, eps)
    return out


def _check(table: Tensor, tokens: Tensor, *weights: Tensor | None) -> None:
    assert table.is_contiguous(), "the table must be contiguous"
    assert tokens.is_contiguous(), "tokens must be contiguous"
    assert all(w is None or w.is_contiguous() for w in weights), "weights must be contiguous"


def _launch(
    table: Tensor,
    tokens: Tensor,
    weight: Tensor | None,
    features: Tensor | None,
    feature_weight: Tensor | None,
    stream: Tensor | None,
    out: Tensor,
    eps: float,
) -> None:
    width, parts = table.shape[1], 1 if features is None else 2
    block = triton.next_power_of_2(width)
    _embed[(tokens.shape[0], parts)](
        table,
        tokens,
        # An argument that no program reads stands in for one that is not there.
        table if weight is None else weight,
        table if features is None else features,
        table if feature_weight is None else feature_weight,
        out if stream is None else stream,
        out,
        eps,
        0 if features is None else features.stride(0),
        WIDTH=width,
        BLOCK=block,
        NORMED=weight is not None,
        PARTS=parts,
        STREAM=stream is not None,
        num_warps=min(max(block // 512, 1), 16),
        **chained(table.device),
    )


def embed_norm_ref(
    table: Tensor, tokens: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The twin of `embed_norm`."""
    stream = table[tokens]
    return stream, _normed(stream, weight, eps)


def embed_beside_ref(
    table: Tensor,
    tokens: Tensor,
    features: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    stream: Tensor | None = None,
) -> Tensor:
    """The twin of `embed_beside`."""
    parts = [table[tokens], features]
    if norms is not None:
        parts = [_normed(x, weight, eps) for x, weight in zip(parts, norms, strict=True)]
    if stream is not None:
        stream.copy_(parts[1])
    return torch.cat(parts, -1)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
