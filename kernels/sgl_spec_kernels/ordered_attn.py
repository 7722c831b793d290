"""Paged attention under an ancestor mask whose sums have one order; the formula is in
`tree_attn_ref`.

The columns that a row sees are taken by their logical positions, in tiles of a fixed length from
position 0 on. A tile's part, for row q and the positions p of the tile that it sees, is

    m = max_p s_p,   a = sum_p 2^(s_p - m) v_p,   l = sum_p 2^(s_p - m),   s = scale log2(e) q . k

and the parts are folded one behind the other, M = max(M, m), A = A 2^(M_old - M) + a 2^(m - M), L
likewise; the result is A / L. So a row's bits depend on its own text alone:

- which program computes a tile, and how many there are, changes no operation: the first program of
  a block folds its tiles as it goes, the others leave their tiles' parts in the work space, and
  these are folded behind its own in their order;
- a tile that a row does not see has m = -inf and a = l = 0, which changes nothing, not even a bit;
- a position is always in the same lane of a product. A tree's node at depth d lies in column
  prefix + node, where plain decoding has it at position prefix + d. So only the tiles that lie
  wholly within the prefix are shared by all nodes. Behind them each path from the root has tiles of
  its own, whose slots are gathered by position (`tails_kernel`), and a row sees those of one path;
- l is a product with ones, since a reduction's order depends on how many threads share the rows;
- products and sums are not contracted to one rounding in one variant of the kernel and to two in
  another: `enable_fp_fusion` is off.

The length of a tile follows from the head's size and the dtype. How rows are put in blocks does not
change a bit, since a product's rows do not meet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from sgl_spec_kernels.chain import chained
from sgl_spec_kernels.ordered_attn_kernels import fold_kernel, ordered_attn_kernel, tails_kernel
from sgl_spec_kernels.tree_attn import (
    MOST_TREE,
    AttnGrid,
    AttnWork,
    check_attn,
    check_plan,
    row_block,
    share_fairly,
)

LONG_SPLIT, LONG_PROGRAMS = 128, 4  # least columns of a program where only long requests are split
MOST_PROGRAMS = 32  # of a block where all are
MOST_PART_ROWS = 1 << 18  # of the work space
TALL_ROWS = 64  # from here on rows are the tall operand of the tensor cores
HOW = {"alone": (4, 3), "many": (4, 2), "wide": (4, 3), "chunk": (4, 3)}
"""Warps and stages: where every block is split, where not, with blocks of 64 rows, and for chunks
of prompts. They change no bit."""
FOLDED_AT_ONCE = 8  # parts whose loads are on their way together
_PROGRAMS = 264  # two for each multiprocessor of an H200
_FEW_BLOCKS = 64  # fewer are all split


@dataclass(frozen=True, slots=True)
class Tails:
    """What the rows of trees see beyond the whole tiles of their prefix, block by block.

    slots: [blocks, tokens * tiles * tile] int32, the tiles of each path, -1 where a path has ended.
    shapes: [blocks, 2] int32, paths and tiles of each. paths, lasts: [blocks, tokens] int32, of
    each row its path, and the last position that it sees.
    """

    slots: Tensor
    shapes: Tensor
    paths: Tensor
    lasts: Tensor
    tokens: int
    tiles: int


@dataclass(frozen=True, slots=True)
class OrderedPlan:
    """What all layers of one forward share. tails: None where rows are a chain. grid: `splits` are
    the programs of a block, `slots` the parts that a block has room for."""

    req_to_token: Tensor
    rows: Tensor
    prefix_lens: Tensor
    q_starts: Tensor
    tails: Tails | None
    heads_per_kv: int
    most_rows: int
    tile: int
    grid: AttnGrid
    slots: int
    work: AttnWork


def tile_columns(head_dim: int, itemsize: int) -> int:
    """Positions of a tile: what any number of rows can be computed with."""
    if itemsize == 4:  # products are unrolled into single instructions, which fill the registers
        return 16 if head_dim > 64 else 32
    return 64 if head_dim <= 128 else 32


def ordered_grid(batch: int, kv_heads: int, max_q_len: int, heads_per_kv: int) -> AttnGrid:
    """How blocks are spread over programs, which changes no bit."""
    block_m, row_blocks = row_block(max_q_len, heads_per_kv)
    blocks = batch * kv_heads * row_blocks
    if blocks < _FEW_BLOCKS:
        programs = min(max(_PROGRAMS // blocks, 1), MOST_PROGRAMS)
        return AttnGrid(block_m, row_blocks, programs, 1, merges=False)
    # The programs of a prompt's chunk are many, and as long as each other.
    if max_q_len > MOST_TREE or part_slots(batch, kv_heads, block_m, row_blocks) < 2:
        return AttnGrid(block_m, row_blocks, 1, LONG_SPLIT, merges=False)
    return AttnGrid(block_m, row_blocks, LONG_PROGRAMS, LONG_SPLIT, merges=True)


def part_slots(batch: int, kv_heads: int, block_m: int, row_blocks: int) -> int:
    """Parts that each block has room for."""
    return MOST_PART_ROWS // (batch * kv_heads * row_blocks * block_m)


def ordered_work_rows(
    batch: int, kv_heads: int, max_q_len: int, heads_per_kv: int, tiles: int
) -> int:
    """Rows of parts in the work space of a launch. tiles: most that a row sees."""
    grid = ordered_grid(batch, kv_heads, max_q_len, heads_per_kv)
    rows = batch * kv_heads * grid.row_blocks * grid.block_m
    if grid.splits == 1:
        return grid.block_m
    return rows * _slots_of(batch, kv_heads, max_q_len, heads_per_kv, tiles, grid)


def _slots_of(
    batch: int, kv_heads: int, q_len: int, heads_per_kv: int, tiles: int, grid: AttnGrid
) -> int:
    tails = 2 * min(q_len, MOST_TREE, _tokens(grid.block_m, heads_per_kv))
    room = part_slots(batch, kv_heads, grid.block_m, grid.row_blocks)
    return max(1, min(tiles + tails, room))


def _tokens(block_m: int, heads_per_kv: int) -> int:
    """Most tokens of which a block has rows."""
    return -(-block_m // heads_per_kv) + (block_m % heads_per_kv != 0)


def plan_ordered_attn(
    req_to_token: Tensor,
    rows: Tensor,
    prefix_lens: Tensor,
    q_starts: Tensor,
    mask_words: Tensor | None,
    *,
    heads_per_kv: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    max_q_len: int,
    work: AttnWork,
) -> OrderedPlan:
    """As `tree_attn.plan_tree_attn`, of trees that are written whole. work: of at least
    `ordered_work_rows` rows."""
    check_plan(req_to_token, rows, prefix_lens, q_starts, mask_words, max_q_len)
    batch, tile = rows.shape[0], tile_columns(head_dim, dtype.itemsize)
    grid = ordered_grid(batch, kv_heads, max_q_len, heads_per_kv)
    tiles = triton.cdiv(req_to_token.shape[1], tile)
    if grid.merges:
        share_fairly(prefix_lens, q_starts, None, kv_heads * grid.row_blocks, work)
    where = (req_to_token, rows, prefix_lens, q_starts)
    tails = None
    if mask_words is not None and max_q_len > 1:  # a root alone is a chain
        tails = _tails(*where, mask_words, heads_per_kv, grid, tile)
    slots = _slots_of(batch, kv_heads, max_q_len, heads_per_kv, tiles, grid)
    most = max_q_len * heads_per_kv
    return OrderedPlan(*where, tails, heads_per_kv, most, tile, grid, slots, work)


def _tails(
    req_to_token: Tensor,
    rows: Tensor,
    prefix_lens: Tensor,
    q_starts: Tensor,
    mask_words: Tensor,
    heads_per_kv: int,
    grid: AttnGrid,
    tile: int,
) -> Tails:
    tokens = triton.next_power_of_2(_tokens(grid.block_m, heads_per_kv))
    tiles = triton.next_power_of_2(triton.cdiv(tile - 1 + MOST_TREE, tile))
    blocks, device = rows.shape[0] * grid.row_blocks, rows.device

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    found = Tails(
        ints(blocks, tokens * tiles * tile), ints(blocks, 2), ints(blocks, tokens),
        ints(blocks, tokens), tokens, tiles,
    )  # fmt: skip
    tails_kernel[(blocks,)](
        req_to_token,
        rows,
        prefix_lens,
        q_starts,
        mask_words,
        found.slots,
        found.shapes,
        found.paths,
        found.lasts,
        req_to_token.stride(0),
        grid.row_blocks,
        GROUP=heads_per_kv,
        BLOCK_M=grid.block_m,
        BLOCK_N=tile,
        TOKENS=tokens,
        TAIL=tiles,
        num_warps=4,
        **chained(device),
    )
    return found


def ordered_attn(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: OrderedPlan, scale: float
) -> Tensor:
    """Attention of one layer, [T, num_heads * head_dim]; arguments as of `tree_attn.tree_attn`."""
    _, kv_heads, dim = k_cache.shape
    num_tokens, heads, _ = q.shape
    check_attn(q, k_cache, v_cache, plan.heads_per_kv)
    assert tile_columns(dim, q.element_size()) == plan.tile, "the plan is for another dtype"
    block_d = triton.next_power_of_2(dim)
    out = torch.empty(num_tokens, heads * dim, dtype=q.dtype, device=q.device)
    work, grid, batch, tails = plan.work, plan.grid, plan.rows.shape[0], plan.tails
    if grid.splits > 1:
        rows = plan.slots * batch * kv_heads * grid.row_blocks * grid.block_m
        assert work.stats.numel() >= 2 * rows, "the work space is too small"
        assert work.part.numel() >= rows * block_d, "it is for other heads"
    shared = {
        "GROUP": plan.heads_per_kv,
        "DIM": dim,
        "BLOCK_D": block_d,
        "BLOCK_M": grid.block_m,
        "BLOCK_N": plan.tile,
        "CAUSAL": tails is None,
        "enable_fp_fusion": False,
        **chained(q.device),
    }
    shapes = None if tails is None else tails.shapes
    warps, stages = _how(plan, block_d, q.element_size())
    ordered_attn_kernel[(kv_heads * grid.row_blocks, grid.splits, batch)](
        q,
        k_cache,
        v_cache,
        out,
        plan.req_to_token,
        plan.rows,
        plan.prefix_lens,
        plan.q_starts,
        plan.req_to_token if tails is None else tails.slots,
        shapes,
        None if tails is None else tails.paths,
        None if tails is None else tails.lasts,
        work.part,
        work.stats,
        work.arrived,
        work.fair,
        scale * 1.4426950408889634,
        plan.req_to_token.stride(0),
        q.stride(0),
        k_cache.stride(0),
        grid.row_blocks,
        plan.slots,
        grid.min_split,
        TOKENS=1 if tails is None else tails.tokens,
        TAIL=1 if tails is None else tails.tiles,
        WHOLE_FIRST=tails is None and plan.most_rows > MOST_TREE * plan.heads_per_kv,
        TALL=grid.block_m >= TALL_ROWS,
        MERGES=grid.merges,
        num_warps=warps,
        num_stages=stages,
        **shared,
    )
    if grid.splits > 1 and not grid.merges:
        fold_kernel[(kv_heads * plan.most_rows, batch)](
            work.part,
            work.stats,
            out,
            plan.prefix_lens,
            plan.q_starts,
            shapes,
            grid.row_blocks,
            grid.splits,
            plan.slots,
            grid.min_split,
            kv_heads,
            AT_ONCE=FOLDED_AT_ONCE,
            num_warps=1,
            **shared,
        )
    return out


def _how(plan: OrderedPlan, block_d: int, item: int) -> tuple[int, int]:
    """(warps, stages)."""
    if item == 4 or block_d > 128:
        return 8, 2
    if plan.most_rows > MOST_TREE * plan.heads_per_kv:
        return HOW["chunk"]
    if plan.grid.block_m > 32:
        return HOW["wide"]
    return HOW["many" if plan.grid.merges or plan.grid.splits == 1 else "alone"]
