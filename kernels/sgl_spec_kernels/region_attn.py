"""Attention of one new row per sequence over KV regions; the formula is in `region_attn_ref`.

One program per sequence and KV head: its `group` queries, padded to 16 rows for the tensor cores,
run over the blocks of the positions that the sequence has, with a running maximum and sum. Each key
and value is read once, and nothing beyond `lens` is read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 64  # positions at a time
_ROWS = 16  # least rows of a tensor-core product


@triton.jit
def _region_attention(
    q,
    k,
    v,
    lens,
    out,
    scale,
    batch_stride,
    head_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    sequence = program // KV_HEADS
    head = program % KV_HEADS
    length = tl.load(lens + sequence).to(tl.int32)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    at = program * GROUP * DIM + rows[:, None] * DIM + dims[None, :]
    used = rows[:, None] < GROUP
    queries = tl.load(q + at, mask=used, other=0.0)
    region = sequence.to(tl.int64) * batch_stride + head * head_stride
    best = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    mixed = tl.zeros([ROWS, DIM], dtype=tl.float32)
    for start in range(0, length, BLOCK):
        positions = start + tl.arange(0, BLOCK)
        inside = positions < length
        keys = tl.load(
            k + region + positions[None, :] * DIM + dims[:, None],
            mask=inside[None, :],
            other=0.0,
        )  # [DIM, BLOCK]
        scores = tl.dot(queries, keys, input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(best - higher)
        values = tl.load(
            v + region + positions[:, None] * DIM + dims[None, :],
            mask=inside[:, None],
            other=0.0,
        )  # [BLOCK, DIM]
        mixed = mixed * shrink[:, None]
        mixed += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        best = higher
    mixed = mixed / total[:, None]
    tl.store(out + at, mixed.to(out.dtype.element_ty), mask=used)


def region_attention(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, width: int) -> Tensor:
    """As in `region_attn_ref`; `width` is not needed, for every row stops at its own length."""
    batch, kv_heads, _, dim = k.shape
    group = q.shape[1] // kv_heads
    assert k.stride() == v.stride(), "k and v must be laid out alike"
    assert k.stride(3) == 1, "a position's values must be contiguous"
    assert k.stride(2) == dim, "a head's positions must be contiguous"
    assert dim in (16, 32, 64, 128, 256), f"head_dim {dim} is no power of two from 16 to 256"
    assert q.dtype == k.dtype == v.dtype, "q, k and v must have one dtype"
    assert group <= _ROWS, f"{group} query heads per KV head, at most {_ROWS} here"
    assert width <= k.shape[2], "the width lies beyond the regions"
    q = q.contiguous()
    out = torch.empty_like(q)
    _region_attention[(batch * kv_heads,)](
        q,
        k,
        v,
        lens,
        out,
        dim**-0.5,
        k.stride(0),
        k.stride(1),
        KV_HEADS=kv_heads,
        GROUP=group,
        DIM=dim,
        ROWS=_ROWS,
        BLOCK=_BLOCK,
        num_warps=4,
        num_stages=3,
    )
    return out.view(batch, -1)
