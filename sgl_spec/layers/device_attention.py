"""Attention of the fused path, over keys and values that are stored already.

A forward is planned once, for all layers; a plan is a function of one layer's q, k and v.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from sgl_spec.layers.backend import Backend, prefill_attention
from sgl_spec.layers.context import AttnBatch
from sgl_spec_kernels.tree_attn import AttnPlan, AttnWork, attn_grid, plan_tree_attn, tree_attn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [T, num_heads, head_dim] with rows that may lie apart, k_cache, v_cache [num_slots,
num_kv_heads, head_dim]) to [T, num_heads * head_dim]."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Of one model. dtype: of q, k and v."""

    kv_heads: int
    heads_per_kv: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class Attention(Protocol):
    """One way to do it."""

    def reserve(self, max_batch: int, max_q_len: int) -> None:
        """Make the work space of forwards up to this shape."""
        ...

    def plan(self, batch: AttnBatch, max_q_len: int) -> Attend:
        """The attention of one forward, whose requests have up to max_q_len rows."""
        ...


class DeviceAttention:
    """The attention that a backend stands for: one for trees, one for causal chunks."""

    def __init__(self, backend: Backend, heads: Heads) -> None:
        own = _made(backend.name, heads)
        kind = prefill_attention(backend)
        self._trees = own
        self._chunks = own if kind == backend.name else _made(kind, heads)

    def reserve(self, max_batch: int, max_q_len: int) -> None:
        """See `Attention.reserve`."""
        self._trees.reserve(max_batch, max_q_len)

    def plan(self, batch: AttnBatch) -> Attend:
        """The attention of one forward. Reads the device only where batch.max_q_len is None or the
        way of it must know the lengths."""
        longest = batch.max_q_len
        if longest is None:
            longest = int(batch.q_starts.diff().max())
        return (self._chunks if batch.mask_words is None else self._trees).plan(batch, longest)


def _made(kind: str, heads: Heads) -> Attention:
    if kind == "triton":
        return TritonAttention(heads)
    if kind == "sdpa":
        return SdpaAttention(heads)
    from sgl_spec.layers.flashinfer_attention import FlashInferAttention

    return FlashInferAttention(heads)


class TritonAttention:
    """Our kernel: any rows, nothing read back."""

    def __init__(self, heads: Heads) -> None:
        self._heads = heads
        self._rows = 0
        self._works: list[AttnWork] = []  # the last is the largest; graphs may use the others

    def reserve(self, max_batch: int, max_q_len: int) -> None:
        """A work space for all shapes up to this one: a smaller one may be split further."""
        lengths = {*range(1, min(max_q_len, 64) + 1), max_q_len}
        lengths |= {1 << bit for bit in range(max_q_len.bit_length())}
        self._grow(max(self._need(b, q) for b in range(1, max_batch + 1) for q in lengths))

    def plan(self, batch: AttnBatch, max_q_len: int) -> Attend:
        """See `Attention.plan`."""
        self._grow(self._need(len(batch.rows), max_q_len))
        plan = plan_tree_attn(
            batch.req_to_token,
            batch.rows,
            batch.prefix_lens,
            batch.q_starts,
            batch.mask_words,
            batch.tree_lens,
            heads_per_kv=self._heads.heads_per_kv,
            kv_heads=self._heads.kv_heads,
            max_q_len=max_q_len,
            work=self._works[-1],
        )
        return partial(_by_triton, plan)

    def _need(self, batch: int, q_len: int) -> int:
        """Rows of parts in a work space for this shape."""
        heads = self._heads
        grid = attn_grid(batch, heads.kv_heads, q_len, heads.heads_per_kv)
        rows: int = grid.work_rows(batch, heads.kv_heads)
        return rows

    def _grow(self, rows: int) -> None:
        if rows <= self._rows:
            return
        device = self._heads.device
        assert not is_capturing(device), "reserve() must come before the capture of such a forward"
        # In large steps, since what a graph may use is never given back.
        self._rows = max(rows, 2 * self._rows)
        self._works.append(AttnWork.of(self._rows, self._heads.head_dim, device))


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _by_triton(plan: AttnPlan, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    out: Tensor = tree_attn(q, k_cache, v_cache, plan, q.shape[-1] ** -0.5)
    return out


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows start .. stop of q against the keys in `slots` [columns], whose last are their own."""

    start: int
    stop: int
    slots: Tensor


class SdpaAttention:
    """torch's own attention for causal chunks, a request at a time."""

    def __init__(self, heads: Heads) -> None:
        self._heads = heads

    def reserve(self, max_batch: int, max_q_len: int) -> None:
        """It needs nothing beforehand."""

    def plan(self, batch: AttnBatch, max_q_len: int) -> Attend:
        """See `Attention.plan`. Waits for the device."""
        assert batch.mask_words is None, "this attention is causal"
        spans = pairwise(batch.q_starts.tolist())
        chunks = [
            _Chunk(start, stop, batch.req_to_token[row, : prefix + stop - start])
            for row, prefix, (start, stop) in zip(
                batch.rows.tolist(), batch.prefix_lens.tolist(), spans, strict=True
            )
        ]
        return partial(_by_sdpa, chunks)


def _by_sdpa(chunks: list[_Chunk], q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for chunk in chunks:
        rows = q[chunk.start : chunk.stop].transpose(0, 1)[None]  # [1, heads, rows, d]
        k, v = (cache.index_select(0, chunk.slots).transpose(0, 1) for cache in (k_cache, v_cache))
        mask = causal_lower_right(rows.shape[2], k.shape[1])
        attended = F.scaled_dot_product_attention(
            rows, k[None], v[None], attn_mask=mask, enable_gqa=True
        )
        out[chunk.start : chunk.stop] = attended[0].transpose(0, 1)
    return out.view(len(q), -1)
