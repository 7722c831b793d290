"""Paged attention under an ancestor mask; the formula is in `tree_attn_ref`.

One program takes a block of the query rows of one request and one KV head (rows are tokens x heads
per KV head, so a handful of tokens fills a tensor-core tile) over one split of the KV columns:

    s = scale q . k,    acc = sum_p exp(s_p - m) v_p,    l = sum_p exp(s_p - m),    m = max_p s_p

Where a block has more than one split, each leaves (acc, l, m) in the work space, and they are
merged in the splits' order: out = sum_i exp(m_i - m) acc_i / sum_i exp(m_i - m) l_i. Few requests
are split as often as fills the device, and a second kernel, with a program for every row, merges
them. Of many requests only those are split that are longer than what a program has on average, so
that none takes much longer than the others; the program of a block that is done last merges it.
Lengths, slots and mask words are read on the device and the grid comes from bounds that the host
knows, so a launch can be replayed in a CUDA graph while lengths grow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from sgl_spec_kernels.chain import chained
from sgl_spec_kernels.tree_attn_kernels import (
    fair_split_kernel,
    merge_kernel,
    tree_attn_kernel,
)

TILES = {"split": (64, 4, 3), "long": (32, 4, 3), "long, wide": (64, 4, 3), "chunk": (64, 4, 3)}
"""KV columns at a time, warps and stages: where all requests are split, where only long ones are,
with blocks of 16 rows and of more, and for chunks of prompts. Best on an H200 with heads of 128, by
`bench kernels --sweep`."""
MIN_SPLIT, MAX_SPLITS = 64, 32  # least columns of a split, where all requests are split
LONG_SPLIT, LONG_SPLITS = 128, 4  # the same where long ones are
FAIR_PROGRAMS = 317  # among which a fair share is calculated: 3 for each multiprocessor, less 20 %
_PROGRAMS = 264  # two for each multiprocessor of an H200
_FEW_BLOCKS = 64  # fewer are all split
_MOST_PART_ROWS = 1 << 17  # of the work space; more programs are balanced by their number
_MERGED_AT_ONCE = 8  # splits
_LEAST_ROWS, _MOST_ROWS = 16, 64  # of a block
MOST_TREE = 64  # rows of a request that have mask words, whose bits they are
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class AttnWork:
    """Where splits leave their parts. One launch at a time may use it.

    part: [rows * head_dim] float32. stats: [rows * 2] float32. arrived: [blocks] int32, splits that
    are done; zero between launches. fair: [1] int32, columns that a program has on average.
    """

    part: Tensor
    stats: Tensor
    arrived: Tensor
    fair: Tensor

    @classmethod
    def of(cls, rows: int, head_dim: int, device: torch.device | str) -> AttnWork:
        """Room for so many rows of parts; see `AttnGrid.work_rows`."""
        width = triton.next_power_of_2(head_dim)
        return cls(
            part=torch.empty(rows * width, dtype=torch.float32, device=device),
            stats=torch.empty(rows * 2, dtype=torch.float32, device=device),
            arrived=torch.zeros(rows // _LEAST_ROWS, dtype=torch.int32, device=device),
            fair=torch.zeros(1, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class AttnGrid:
    """block_m: rows of a block. row_blocks: of a request and a KV head. splits: at most, of
    min_split columns at least. merges: whether the last program of a block merges its splits."""

    block_m: int
    row_blocks: int
    splits: int
    min_split: int
    merges: bool

    def work_rows(self, batch: int, kv_heads: int) -> int:
        """Rows of parts that a launch leaves in the work space."""
        if self.splits == 1:
            return _LEAST_ROWS
        return self.splits * batch * kv_heads * self.row_blocks * self.block_m


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
    grid: AttnGrid
    work: AttnWork


def row_block(max_q_len: int, heads_per_kv: int) -> tuple[int, int]:
    """Rows of a block, and blocks of a request and KV head, that hold so many tokens."""
    rows = max_q_len * heads_per_kv
    block_m = min(max(triton.next_power_of_2(rows), _LEAST_ROWS), _MOST_ROWS)
    return block_m, triton.cdiv(rows, block_m)


def attn_grid(batch: int, kv_heads: int, max_q_len: int, heads_per_kv: int) -> AttnGrid:
    """The grid for `batch` requests of up to max_q_len rows."""
    block_m, row_blocks = row_block(max_q_len, heads_per_kv)
    programs = batch * kv_heads * row_blocks
    if programs < _FEW_BLOCKS:
        splits = min(max(_PROGRAMS // programs, 1), MAX_SPLITS)
        return AttnGrid(block_m, row_blocks, splits, MIN_SPLIT, merges=False)
    # The programs of a prompt's chunk are many, and as long as each other.
    splits = min(LONG_SPLITS, _MOST_PART_ROWS // (programs * block_m))
    if max_q_len > MOST_TREE or splits < 2:
        return AttnGrid(block_m, row_blocks, 1, LONG_SPLIT, merges=False)
    return AttnGrid(block_m, row_blocks, splits, LONG_SPLIT, merges=True)


def attn_work(
    batch: int,
    kv_heads: int,
    max_q_len: int,
    heads_per_kv: int,
    head_dim: int,
    device: torch.device | str,
) -> AttnWork:
    """Work space for launches of this shape; those of a smaller batch need no more."""
    grids = (attn_grid(size, kv_heads, max_q_len, heads_per_kv) for size in range(1, batch + 1))
    rows = max(grid.work_rows(size, kv_heads) for size, grid in enumerate(grids, start=1))
    return AttnWork.of(rows, head_dim, device)


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
    check_plan(req_to_token, rows, prefix_lens, q_starts, mask_words, max_q_len)
    batch = rows.shape[0]
    grid = attn_grid(batch, kv_heads, max_q_len, heads_per_kv)
    if grid.merges:
        share_fairly(prefix_lens, q_starts, tree_lens, kv_heads * grid.row_blocks, work)
    return AttnPlan(
        req_to_token,
        rows,
        prefix_lens,
        q_starts,
        mask_words,
        tree_lens,
        heads_per_kv,
        max_q_len * heads_per_kv,
        grid,
        work,
    )


def check_plan(
    req_to_token: Tensor,
    rows: Tensor,
    prefix_lens: Tensor,
    q_starts: Tensor,
    mask_words: Tensor | None,
    max_q_len: int,
) -> None:
    """Assert what kernels take for granted of a plan's arguments."""
    assert mask_words is None or max_q_len <= MOST_TREE, f"{max_q_len} rows, a word has 64 bits"
    assert req_to_token.stride(1) == 1, "a table row must be contiguous"
    assert req_to_token.dtype == torch.int32
    assert mask_words is None or mask_words.dtype == torch.int64
    for name, ints in (("rows", rows), ("prefix_lens", prefix_lens), ("q_starts", q_starts)):
        assert ints.is_contiguous(), f"{name} must be contiguous"
    assert q_starts.shape[0] == rows.shape[0] + 1


def share_fairly(
    prefix_lens: Tensor, q_starts: Tensor, tree_lens: Tensor | None, blocks: int, work: AttnWork
) -> None:
    """Leave in `work` the columns that a program has on average. blocks: of a request."""
    batch = prefix_lens.shape[0]
    fair_split_kernel[(1,)](
        prefix_lens,
        q_starts,
        tree_lens,
        work.fair,
        batch,
        blocks,
        FAIR_PROGRAMS,
        LANES=max(triton.next_power_of_2(batch), 2),
        HAS_TREE=tree_lens is not None,
        num_warps=1 if batch <= 64 else 4,
        **chained(prefix_lens.device),
    )


def tree_attn(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttnPlan, scale: float) -> Tensor:
    """Attention of one layer, [T, num_heads * head_dim].

    q: [T, num_heads, head_dim], rows may lie apart. k_cache, v_cache: [num_slots, num_kv_heads,
    head_dim], laid out alike, with the new rows already written. float32, float16 or bfloat16; sums
    are float32, and no product of float32 is rounded to tf32.
    """
    _, kv_heads, dim = k_cache.shape
    num_tokens, heads, _ = q.shape
    check_attn(q, k_cache, v_cache, plan.heads_per_kv)
    block_d = triton.next_power_of_2(dim)
    out = torch.empty(num_tokens, heads * dim, dtype=q.dtype, device=q.device)
    work, grid, batch = plan.work, plan.grid, plan.rows.shape[0]
    rows = grid.work_rows(batch, kv_heads)
    assert work.stats.numel() >= 2 * rows, "the work space is too small"
    assert work.part.numel() >= rows * block_d, "it is for other heads"
    block_n, warps, stages = _tile(plan, block_d, q.element_size())
    shared = {
        "GROUP": plan.heads_per_kv,
        "DIM": dim,
        "BLOCK_D": block_d,
        "BLOCK_M": grid.block_m,
        "BLOCK_N": block_n,
        "CAUSAL": plan.mask_words is None,
        "HAS_TREE": plan.tree_lens is not None,
        **chained(q.device),
    }
    tree_attn_kernel[(kv_heads * grid.row_blocks, grid.splits, batch)](
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
        work.arrived,
        work.fair,
        scale * _LOG2_E,
        plan.req_to_token.stride(0),
        q.stride(0),
        k_cache.stride(0),
        grid.row_blocks,
        grid.min_split,
        MERGES=grid.merges,
        num_warps=warps,
        num_stages=stages,
        **shared,
    )
    if grid.splits > 1 and not grid.merges:
        merge_kernel[(kv_heads * plan.most_rows, batch)](
            work.part,
            work.stats,
            out,
            plan.prefix_lens,
            plan.q_starts,
            plan.tree_lens,
            grid.row_blocks,
            grid.splits,
            grid.min_split,
            kv_heads,
            AT_ONCE=min(triton.next_power_of_2(grid.splits), _MERGED_AT_ONCE),
            num_warps=2,
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
    if plan.grid.splits > 1 and not plan.grid.merges:
        return TILES["split"]
    return TILES["long" if plan.grid.block_m == _LEAST_ROWS else "long, wide"]


def check_attn(q: Tensor, k: Tensor, v: Tensor, heads_per_kv: int) -> None:
    """Assert what kernels take for granted of a layer's queries, keys and values."""
    _, kv_heads, dim = k.shape
    assert q.dtype == k.dtype == v.dtype, "q, k and v must have one dtype"
    assert q.dtype in (torch.float32, torch.float16, torch.bfloat16), f"no kernel for {q.dtype}"
    assert 16 <= dim <= 256, f"head_dim {dim} is not 16 to 256"
    assert q.shape[1] == kv_heads * heads_per_kv, "the plan is for other heads"
    assert q.stride()[1:] == (dim, 1), "a row's heads must be contiguous"
    assert k.stride() == v.stride(), "k and v must be laid out alike"
    assert k.stride()[1:] == (dim, 1), "a slot's heads must be contiguous"
