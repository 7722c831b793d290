"""Paged attention under an ancestor mask; the formula is in `tree_attn_ref`.

One program takes a block of the query rows of one request and one KV head (rows are tokens x heads
per KV head, so a handful of tokens fills a tensor-core tile) over one split of the KV columns:

    s = scale q . k,    acc = sum_p exp(s_p - m) v_p,    l = sum_p exp(s_p - m),    m = max_p s_p

Where a block has more than one split, each leaves (acc, l, m) in the work space, and a second
kernel, with a program for every row, merges them in the splits' order:
out = sum_i exp(m_i - m) acc_i / sum_i exp(m_i - m) l_i.
Lengths, slots and mask words are read on the device and the grid comes from bounds that the host
knows, so a launch can be replayed in a CUDA graph while lengths grow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from sgl_spec_kernels.chain import chained
from sgl_spec_kernels.tree_attn_kernels import merge_kernel, tree_attn_kernel

TILES = {"split": (64, 4, 3), "whole": (32, 4, 3), "chunk": (64, 4, 3)}
"""KV columns at a time, warps and stages of trees whose columns are split, of those whose columns
are not, and of chunks of prompts. Best on an H200 with heads of 128, by `bench kernels --sweep`."""
MIN_SPLIT = 64  # least columns of a split
MAX_SPLITS = 32
_PROGRAMS = 264  # two for each multiprocessor of an H200
_LEAST_ROWS, _MOST_ROWS = 16, 64  # of a block
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class AttnWork:
    """Where splits leave their parts. One launch at a time may use it.

    part: [rows * head_dim] float32. stats: [rows * 2] float32.
    """

    part: Tensor
    stats: Tensor


@dataclass(frozen=True, slots=True)
class AttnPlan:
    """What all layers of one forward share: the arguments of `plan_tree_attn`, and the grid.
    most_rows: of a request and a KV head, tokens x heads."""

    req_to_token: Tensor
    rows: Tensor
    prefix_lens: Tensor
    q_starts: Tensor
    mask_words: Tensor | None
    tree_lens: Tensor | None
    heads_per_kv: int
    most_rows: int
    block_m: int
    row_blocks: int
    splits: int
    work: AttnWork


def attn_grid(batch: int, kv_heads: int, max_q_len: int, heads_per_kv: int) -> tuple[int, int, int]:
    """(rows of a block, blocks, splits) for `batch` requests of up to max_q_len rows."""
    rows = max_q_len * heads_per_kv
    block_m = min(max(triton.next_power_of_2(rows), _LEAST_ROWS), _MOST_ROWS)
    row_blocks = triton.cdiv(rows, block_m)
    splits = _PROGRAMS // (batch * kv_heads * row_blocks)
    return block_m, row_blocks, min(max(splits, 1), MAX_SPLITS)


def attn_work(
    batch: int,
    kv_heads: int,
    max_q_len: int,
    heads_per_kv: int,
    head_dim: int,
    device: torch.device | str,
) -> AttnWork:
    """Work space for launches of this shape; those of a smaller batch need no more."""
    rows = 1
    for size in range(1, batch + 1):
        block_m, row_blocks, splits = attn_grid(size, kv_heads, max_q_len, heads_per_kv)
        if splits > 1:
            rows = max(rows, splits * size * kv_heads * row_blocks * block_m)
    return AttnWork(
        part=torch.empty(rows * triton.next_power_of_2(head_dim), device=device),
        stats=torch.empty(rows * 2, device=device),
    )


def plan_tree_attn(
    req_to_token: Tensor,
    rows: Tensor,
    prefix_lens: Tensor,
    q_starts: Tensor,
    mask_words: Tensor | None,
    tree_lens: Tensor | None = None,
    *,
    heads_per_kv: int,
    kv_heads: int,
    max_q_len: int,
    work: AttnWork,
) -> AttnPlan:
    """As `tree_attn_ref.plan_tree_attn`, without reading the device.

    max_q_len: bound on the rows of a request. work: of `attn_work`, for at least this shape.
    """
    assert tree_lens is None or mask_words is not None, "a causal chunk has no tree before it"
    assert mask_words is None or max_q_len <= 64, f"{max_q_len} rows, a mask word has 64 bits"
    assert req_to_token.stride(1) == 1, "a table row must be contiguous"
    assert req_to_token.dtype == torch.int32
    assert mask_words is None or mask_words.dtype == torch.int64
    for name, ints in (("rows", rows), ("prefix_lens", prefix_lens), ("q_starts", q_starts)):
        assert ints.is_contiguous(), f"{name} must be contiguous"
    batch = rows.shape[0]
    assert q_starts.shape[0] == batch + 1
    block_m, row_blocks, splits = attn_grid(batch, kv_heads, max_q_len, heads_per_kv)
    return AttnPlan(
        req_to_token,
        rows,
        prefix_lens,
        q_starts,
        mask_words,
        tree_lens,
        heads_per_kv,
        max_q_len * heads_per_kv,
        block_m,
        row_blocks,
        splits,
        work,
    )


def tree_attn(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttnPlan, scale: float) -> Tensor:
    """Attention of one layer, [T, num_heads * head_dim].

    q: [T, num_heads, head_dim], rows may lie apart. k_cache, v_cache: [num_slots, num_kv_heads,
    head_dim], laid out alike, with the new rows already written. float32, float16 or bfloat16; sums
    are float32, and no product of float32 is rounded to tf32.
    """
    _, kv_heads, dim = k_cache.shape
    num_tokens, heads, _ = q.shape
    _check(q, k_cache, v_cache, plan)
    block_d = triton.next_power_of_2(dim)
    out = torch.empty(num_tokens, heads * dim, dtype=q.dtype, device=q.device)
    work, batch = plan.work, plan.rows.shape[0]
    block_n, warps, stages = _tile(plan, block_d, q.element_size())
    shared = {
        "GROUP": plan.heads_per_kv,
        "DIM": dim,
        "BLOCK_D": block_d,
        "BLOCK_M": plan.block_m,
        "BLOCK_N": block_n,
        "CAUSAL": plan.mask_words is None,
        "HAS_TREE": plan.tree_lens is not None,
        **chained(q.device),
    }
    tree_attn_kernel[(kv_heads * plan.row_blocks, plan.splits, batch)](
        q,
        k_cache,
        v_cache,
        out,
        plan.req_to_token,
        plan.rows,
        plan.prefix_lens,
        plan.q_starts,
        plan.mask_words,
        plan.tree_lens,
        work.part,
        work.stats,
        scale * _LOG2_E,
        plan.req_to_token.stride(0),
        q.stride(0),
        k_cache.stride(0),
        plan.row_blocks,
        MIN_SPLIT,
        num_warps=warps,
        num_stages=stages,
        **shared,
    )
    if plan.splits > 1:
        merge_kernel[(kv_heads * plan.most_rows, batch)](
            work.part,
            work.stats,
            out,
            plan.prefix_lens,
            plan.q_starts,
            plan.tree_lens,
            plan.row_blocks,
            plan.splits,
            MIN_SPLIT,
            kv_heads,
            MOST_SPLITS=triton.next_power_of_2(plan.splits),
            num_warps=2 if plan.splits <= 8 else 4,
            **shared,
        )
    return out


def _tile(plan: AttnPlan, block_d: int, item: int) -> tuple[int, int, int]:
    """(KV columns at a time, warps, stages)."""
    if item == 4:  # products are unrolled into single instructions, which fill the registers
        return 16 if block_d > 64 else 32, 8, 2
    if block_d > 128:
        return 32, 8, 2
    if plan.most_rows > 64 * plan.heads_per_kv:
        return TILES["chunk"]
    return TILES["split" if plan.splits > 1 else "whole"]


def _check(q: Tensor, k: Tensor, v: Tensor, plan: AttnPlan) -> None:
    _, kv_heads, dim = k.shape
    assert q.dtype == k.dtype == v.dtype, "q, k and v must have one dtype"
    assert q.dtype in (torch.float32, torch.float16, torch.bfloat16), f"no kernel for {q.dtype}"
    assert 16 <= dim <= 256, f"head_dim {dim} is not 16 to 256"
    assert q.shape[1] == kv_heads * plan.heads_per_kv, "the plan is for other heads"
    assert q.stride()[1:] == (dim, 1), "a row's heads must be contiguous"
    assert k.stride() == v.stride(), "k and v must be laid out alike"
    assert k.stride()[1:] == (dim, 1), "a slot's heads must be contiguous"
    blocks = plan.rows.shape[0] * kv_heads * plan.row_blocks
    rows = plan.splits * blocks * plan.block_m
    assert plan.splits == 1 or plan.work.stats.numel() >= 2 * rows, "the work space is too small"
    assert plan.splits == 1 or plan.work.part.numel() >= rows * triton.next_power_of_2(dim)
