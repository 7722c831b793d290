"""Attention of the fused path, over keys and values that are stored already.

A forward is planned once, for all layers; a plan is a function of one layer's q, k and v.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from sgl_spec.layers.backend import Backend
from sgl_spec.layers.context import AttnBatch
from sgl_spec_kernels.ordered_attn import (
    OrderedPlan,
    ordered_attn,
    ordered_work_rows,
    plan_ordered_attn,
    tile_columns,
)
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

    def reserve(self, max_batch: int, max_q_len: int, columns: int) -> None:
        """Make the work space of forwards up to this shape. columns: of a row of the slot table."""
        ...

    def plan(self, batch: AttnBatch) -> Attend:
        """The attention of one forward."""
        ...


def attention_of(backend: Backend, heads: Heads) -> Attention:
    """The one that a backend stands for."""
    if backend.name == "triton":
        return OrderedAttention(heads) if backend.strict else TritonAttention(heads)
    from sgl_spec.layers.flashinfer_attention import FlashInferAttention

    return FlashInferAttention(heads)


class TritonAttention:
    """Our kernel: any rows, nothing read back."""

    def __init__(self, heads: Heads) -> None:
        self._heads = heads
        self._rows = 0
        self._works: list[AttnWork] = []  # the last is the largest; graphs may use the others

    def reserve(self, max_batch: int, max_q_len: int, columns: int) -> None:
        """A work space for all shapes up to this one: a smaller one may be split further."""
        lengths = {*range(1, min(max_q_len, 64) + 1), max_q_len}
        lengths |= {1 << bit for bit in range(max_q_len.bit_length())}
        batches = range(1, max_batch + 1)
        self._grow(max(self._need(b, q, columns) for b in batches for q in lengths))

    def plan(self, batch: AttnBatch) -> Attend:
        """See `Attention.plan`. Reads the device only where batch.max_q_len is None."""
        longest = self._longest(batch)
        plan = plan_tree_attn(
            batch.req_to_token,
            batch.rows,
            batch.prefix_lens,
            batch.q_starts,
            batch.mask_words,
            batch.tree_lens,
            heads_per_kv=self._heads.heads_per_kv,
            kv_heads=self._heads.kv_heads,
            max_q_len=longest,
            work=self._works[-1],
        )
        return partial(_by_triton, plan)

    def _longest(self, batch: AttnBatch) -> int:
        """The bound on its rows, with a work space that suffices."""
        longest = batch.max_q_len
        if longest is None:
            longest = int(batch.q_starts.diff().max())
        self._grow(self._need(len(batch.rows), longest, batch.req_to_token.shape[1]))
        return longest

    def _need(self, batch: int, q_len: int, columns: int) -> int:
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


class OrderedAttention(TritonAttention):
    """Our kernel whose sums have one order."""

    def plan(self, batch: AttnBatch) -> Attend:
        """See `Attention.plan`."""
        assert batch.tree_lens is None, "a target's trees are verified whole"
        longest, heads = self._longest(batch), self._heads
        plan = plan_ordered_attn(
            batch.req_to_token,
            batch.rows,
            batch.prefix_lens,
            batch.q_starts,
            batch.mask_words,
            heads_per_kv=heads.heads_per_kv,
            kv_heads=heads.kv_heads,
            head_dim=heads.head_dim,
            dtype=heads.dtype,
            max_q_len=longest,
            work=self._works[-1],
        )
        return partial(_in_order, plan)

    def _need(self, batch: int, q_len: int, columns: int) -> int:
        heads = self._heads
        tiles = -(-columns // tile_columns(heads.head_dim, heads.dtype.itemsize))
        shape = (batch, heads.kv_heads, q_len, heads.heads_per_kv)
        rows: int = ordered_work_rows(*shape, tiles)
        return rows


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _by_triton(plan: AttnPlan, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    out: Tensor = tree_attn(q, k_cache, v_cache, plan, q.shape[-1] ** -0.5)
    return out


def _in_order(plan: OrderedPlan, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    out: Tensor = ordered_attn(q, k_cache, v_cache, plan, q.shape[-1] ** -0.5)
    return out
