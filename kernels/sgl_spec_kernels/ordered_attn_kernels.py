"""The kernels of `ordered_attn`, which says what they do and why their sums have one order."""

from __future__ import annotations

import triton
import triton.language as tl

from sgl_spec_kernels.chain import chain


@triton.jit
def tails_kernel(
    req_to_token,
    table_rows,
    prefix_lens,
    q_starts,
    mask_words,
    tails,
    shapes,
    paths,
    lasts,
    table_stride,
    row_blocks,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOKENS: tl.constexpr,
    TAIL: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """What a block of a tree's rows sees beyond the last whole tile of its prefix; one program for
    each block. A path is a row's columns in the order of their positions, whatever node they are;
    one that begins another row's path is a part of that."""
    chain(CHAINED)
    one = tl.program_id(0)
    request, block = one // row_blocks, one % row_blocks
    start = tl.load(q_starts + request).to(tl.int32)
    q_len = tl.load(q_starts + request + 1).to(tl.int32) - start
    prefix = tl.load(prefix_lens + request).to(tl.int32)
    table = req_to_token + tl.load(table_rows + request).to(tl.int64) * table_stride
    first = block * BLOCK_M // GROUP
    end = tl.minimum(((block + 1) * BLOCK_M - 1) // GROUP + 1, q_len)
    lane, bit = tl.arange(0, TOKENS), tl.arange(0, 64)
    word = tl.load(mask_words + start + first + lane, mask=first + lane < end, other=0)
    bits = ((word[:, None] >> bit[None, :].to(tl.int64)) & 1).to(tl.int32)  # [TOKENS, 64]
    length = tl.sum(bits, 1)

    begins = (word[:, None] & ~word[None, :]) == 0  # [row, other]
    covered = begins & ((word[:, None] != word[None, :]) | (lane[None, :] < lane[:, None]))
    whole = (word != 0) & (tl.max(covered.to(tl.int32), 1) == 0)
    rank = tl.cumsum(whole.to(tl.int32), 0) - 1
    path = tl.min(tl.where(begins & whole[None, :], rank[None, :], TOKENS), 1)
    tl.store(paths + one * TOKENS + lane, path)
    tl.store(lasts + one * TOKENS + lane, prefix + length - 1)
    beyond = prefix % BLOCK_N
    tiles = tl.cdiv(beyond + tl.max(length, 0), BLOCK_N)
    tl.store(shapes + 2 * one, tl.sum(whole.to(tl.int32), 0))
    tl.store(shapes + 2 * one + 1, tiles)

    column = tl.arange(0, TAIL * BLOCK_N)
    # The paths of a block lie side by side, `tiles` tiles each.
    to = tails + one * TOKENS * TAIL * BLOCK_N + (rank * tiles * BLOCK_N)[:, None]
    shared = tl.load(table + prefix - beyond + column, mask=column < beyond, other=-1)
    fill = (column < beyond)[None, :] | (column[None, :] >= beyond + length[:, None])
    fill &= whole[:, None] & (column < tiles * BLOCK_N)[None, :]
    tl.store(to + column[None, :], tl.broadcast_to(shared[None, :], [TOKENS, TAIL * BLOCK_N]), fill)
    slot = tl.load(table + prefix + bit, mask=tl.max(bits, 0) > 0, other=-1)
    step = tl.cumsum(bits, 1) - bits  # of the node on the path
    own = (bits > 0) & whole[:, None]
    tl.store(to + beyond + step, tl.broadcast_to(slot[None, :], [TOKENS, 64]), own)


@triton.jit
def _shares(tiles, programs, slots, least, BLOCK_N: tl.constexpr):
    """(tiles of a program, programs that there are). The first folds its tiles as it goes, the
    others leave a part for each of theirs: so many must have room."""
    wanted = tl.maximum(tl.minimum(tl.cdiv(tiles * BLOCK_N, least), programs), 1)
    share = tl.maximum(tl.maximum(tl.cdiv(tiles, wanted), tiles + 1 - slots), 1)
    return share, tl.cdiv(tiles, share)


@triton.jit
def _tiles_of(
    shapes, one, prefix, q_len, block, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """(tiles that a block of rows may see, whole ones below the tree, tiles of a path)."""
    if CAUSAL:
        last = tl.minimum(q_len, ((block + 1) * BLOCK_M - 1) // GROUP + 1)
        below, of_path = tl.cdiv(prefix + last, BLOCK_N), 1
        tiles = below
    else:
        below = prefix // BLOCK_N
        of_path = tl.maximum(tl.load(shapes + 2 * one + 1), 1)
        tiles = below + tl.load(shapes + 2 * one) * of_path
    return tiles, below, of_path


@triton.jit
def _by_row(x, TALL: tl.constexpr):
    """A value of each row, beside sums or scores."""
    return x[:, None] if TALL else x[None, :]


@triton.jit
def _by_column(x, TALL: tl.constexpr):
    return x[None, :] if TALL else x[:, None]


@triton.jit
def _turned(x, TALL: tl.constexpr):
    """Rows first, or back."""
    return x if TALL else tl.trans(x)


@triton.jit
def _fold(acc, total, best, part, weight, top, TALL: tl.constexpr):
    """A tile's part behind those before it; acc, part: [rows, BLOCK_D] if TALL, else on end. Where
    a row sees nothing of the tile, exactly nothing changes: the factors are 1 and 0."""
    higher = tl.maximum(best, top)
    # A row that has seen nothing yet stays at -inf; its differences must not become NaN.
    level = tl.where(higher == float("-inf"), 0.0, higher)
    old, new = tl.exp2(best - level), tl.exp2(top - level)
    acc = acc * _by_row(old, TALL) + part * _by_row(new, TALL)
    return acc, total * old + weight * new, higher


@triton.jit
def _slots(table, tails, tile, below, stop, last, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """The slots of a tile, -1 where there is no column."""
    step = tl.arange(0, BLOCK_N)
    column = tile * BLOCK_N + step
    if CAUSAL:
        slot = tl.load(table + column, mask=(tile < stop) & (column < last), other=-1)
    else:
        slot = tl.load(table + column, mask=(tile < stop) & (tile < below), other=-1)
        there = (tile < stop) & (tile >= below)
        slot = tl.maximum(slot, tl.load(tails + column - below * BLOCK_N, mask=there, other=-1))
    return slot


@triton.jit
def _attend(
    acc, total, best, queries, path, own, k, v, table, tails, part, part_stats,
    mine, between, live, lo, hi, share, below, of_path, last, split, kv_stride, scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, TALL: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Tiles lo .. hi: folded into (acc, total, best) by the first program of a block, left in the
    work space by others. path, own: of each row, its path and the last position that it sees. Sums
    and scores of few rows stand on end, since the tensor cores want a tall operand; TALL: the rows
    are many."""
    dims, step = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    ones = tl.full([16, BLOCK_N], 1.0, dtype=queries.dtype)
    # Slots are read a tile ahead: what depends on a load of its own iteration is not pipelined.
    slot = _slots(table, tails, lo, below, hi, last, BLOCK_N, CAUSAL)
    for tile in range(lo, hi):
        at = slot.to(tl.int64)[:, None] * kv_stride + dims[None, :]
        used = (slot >= 0)[:, None] & (dims < DIM)[None, :]
        slot = _slots(table, tails, tile + 1, below, hi, last, BLOCK_N, CAUSAL)
        keys = tl.load(k + at, mask=used, other=0.0)  # [BLOCK_N, BLOCK_D]
        if TALL:
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        else:
            scores = tl.dot(keys, tl.trans(queries), input_precision="ieee") * scale
        if MASKED:
            if CAUSAL:
                seen = _by_column(tile * BLOCK_N + step, TALL) <= _by_row(own, TALL)
            else:
                beyond = tile - below
                position = (below + beyond % of_path) * BLOCK_N + step
                seen = _by_column(position, TALL) <= _by_row(own, TALL)
                seen &= _by_row(path == beyond // of_path, TALL)
                seen |= beyond < 0
            scores = tl.where(seen, scores, float("-inf"))
        top = tl.max(scores, 1 if TALL else 0)
        level = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp2(scores - _by_row(level, TALL))
        values = tl.load(v + at, mask=used, other=0.0)
        weights = weights.to(values.dtype)
        # l is summed by the product's own order: a reduction's depends on the layout of threads.
        if TALL:
            added = tl.dot(weights, values, input_precision="ieee")
            weight = tl.max(tl.dot(weights, tl.trans(ones), input_precision="ieee"), 1)
        else:
            added = tl.dot(tl.trans(values), weights, input_precision="ieee")
            weight = tl.max(tl.dot(ones, weights, input_precision="ieee"), 0)
        if split > 0:
            to = mine + (tile - share + 1) * between
            tl.store(part_stats + to * 2, top, mask=live)
            tl.store(part_stats + to * 2 + 1, weight, mask=live)
            at_part = part + to[:, None] * BLOCK_D + dims[None, :]
            tl.store(at_part, _turned(added, TALL), mask=live[:, None])
        acc, total, best = _fold(acc, total, best, added, weight, top, TALL)
    return acc, total, best


@triton.jit
def _merged(
    part, part_stats, first, between, parts, live, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):
    """(acc, total) of a block's parts, folded in their order whichever of them was done last."""
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    best = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    for index in range(parts):
        mine = first + index * between
        top = tl.load(part_stats + mine * 2, mask=live, other=0.0, cache_modifier=".cg")
        weight = tl.load(part_stats + mine * 2 + 1, mask=live, other=0.0, cache_modifier=".cg")
        at = mine[:, None] * BLOCK_D + dims[None, :]
        added = tl.load(part + at, mask=live[:, None], other=0.0, cache_modifier=".cg")
        acc, total, best = _fold(acc, total, best, added, weight, top, True)
    return acc, total


@triton.jit(do_not_specialize=["row_blocks", "slots"])  # chunks of prompts have any length
def ordered_attn_kernel(
    q, k, v, out,
    req_to_token, table_rows, prefix_lens, q_starts,
    tails, shapes, paths, lasts,
    part, part_stats, arrived, fair,
    scale, table_stride, q_stride, kv_stride, row_blocks, slots, min_split,
    GROUP: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TOKENS: tl.constexpr, TAIL: tl.constexpr,
    CAUSAL: tl.constexpr, TALL: tl.constexpr, WHOLE_FIRST: tl.constexpr,
    MERGES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    chain(CHAINED)
    kv_heads = tl.num_programs(0) // row_blocks
    kv_head = tl.program_id(0) % kv_heads
    block = tl.program_id(0) // kv_heads
    if CAUSAL:
        block = row_blocks - 1 - block  # the longest first
    split, request = tl.program_id(1), tl.program_id(2)
    start = tl.load(q_starts + request).to(tl.int32)
    q_len = tl.load(q_starts + request + 1).to(tl.int32) - start
    prefix = tl.load(prefix_lens + request).to(tl.int32)
    table = req_to_token + tl.load(table_rows + request).to(tl.int64) * table_stride
    least = min_split
    if MERGES:
        least = tl.maximum(tl.load(fair), min_split)
    if block * BLOCK_M >= q_len * GROUP:
        return
    one = request * row_blocks + block
    tiles, below, of_path = _tiles_of(
        shapes, one, prefix, q_len, block, BLOCK_M, BLOCK_N, GROUP, CAUSAL
    )
    share, programs = _shares(tiles, tl.num_programs(1), slots, least, BLOCK_N)
    if split >= tl.maximum(programs, 1):
        return

    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    folded = block * BLOCK_M + rows  # token * GROUP + head of the group
    live = folded < q_len * GROUP
    token = folded // GROUP
    head = kv_head * GROUP + folded % GROUP
    if CAUSAL:
        path, own = token, prefix + token
    else:
        lane = one * TOKENS + token - block * BLOCK_M // GROUP
        path = tl.load(paths + lane, mask=live, other=TOKENS)
        own = tl.load(lasts + lane, mask=live, other=0)
    row = (start + token).to(tl.int64)
    used = live[:, None] & (dims < DIM)[None, :]
    at = row[:, None] * q_stride + head[:, None] * DIM + dims[None, :]
    queries = tl.load(q + at, mask=used, other=0.0)

    k += kv_head * DIM
    v += kv_head * DIM
    tails += one * TOKENS * TAIL * BLOCK_N
    group = one * kv_heads + kv_head
    between = tl.num_programs(2) * row_blocks * kv_heads * BLOCK_M
    mine = group * BLOCK_M + rows
    lo, hi = split * share, tl.minimum((split + 1) * share, tiles)
    last = prefix + q_len
    acc = _turned(tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32), TALL)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    best = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    if WHOLE_FIRST:  # products decide here: no mask where none is needed
        middle = tl.maximum(tl.minimum((prefix + block * BLOCK_M // GROUP) // BLOCK_N, hi), lo)
        acc, total, best = _attend(
            acc, total, best, queries, path, own, k, v, table, tails, part, part_stats,
            mine, between, live, lo, middle, share, below, of_path, last, split, kv_stride, scale,
            False, CAUSAL, TALL, DIM, BLOCK_D, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        lo = middle
    acc, total, best = _attend(
        acc, total, best, queries, path, own, k, v, table, tails, part, part_stats,
        mine, between, live, lo, hi, share, below, of_path, last, split, kv_stride, scale,
        True, CAUSAL, TALL, DIM, BLOCK_D, BLOCK_M, BLOCK_N,
    )  # fmt: skip

    done = programs <= 1
    if programs > 1:
        if split == 0:
            tl.store(part_stats + mine * 2, best, mask=live)
            tl.store(part_stats + mine * 2 + 1, total, mask=live)
            to = part + mine[:, None] * BLOCK_D + dims[None, :]
            tl.store(to, _turned(acc, TALL), mask=live[:, None])
        if MERGES:  # whoever comes last
            tl.debug_barrier()
            done = tl.atomic_add(arrived + group, 1, sem="acq_rel") == programs - 1
            if done:
                tl.store(arrived + group, 0)
                merged, total = _merged(
                    part, part_stats, mine, between, tiles - share + 1, live, BLOCK_M, BLOCK_D
                )
                acc = _turned(merged, TALL)
    if not done:
        return
    # A row whose word is empty and that has no prefix sees nothing: 0, not NaN.
    acc = _turned(acc / _by_row(tl.where(total > 0, total, 1.0), TALL), TALL)
    at = row[:, None] * (kv_heads * GROUP * DIM) + head[:, None] * DIM + dims[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=used)


@triton.jit(do_not_specialize=["row_blocks", "programs", "slots"])
def fold_kernel(
    part, part_stats, out,
    prefix_lens, q_starts, shapes,
    row_blocks, programs, slots, min_split, kv_heads,
    GROUP: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    AT_ONCE: tl.constexpr, CAUSAL: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program takes one row, a token and a head, and folds its parts in their order."""
    chain(CHAINED)
    kv_head = tl.program_id(0) % kv_heads
    folded = tl.program_id(0) // kv_heads
    request = tl.program_id(1)
    start = tl.load(q_starts + request).to(tl.int32)
    q_len = tl.load(q_starts + request + 1).to(tl.int32) - start
    prefix, block = tl.load(prefix_lens + request).to(tl.int32), folded // BLOCK_M
    one = request * row_blocks + block
    if folded >= q_len * GROUP:
        return
    tiles, _, _ = _tiles_of(shapes, one, prefix, q_len, block, BLOCK_M, BLOCK_N, GROUP, CAUSAL)
    share, used = _shares(tiles, programs, slots, min_split, BLOCK_N)
    if used < 2:
        return
    dims, row = tl.arange(0, BLOCK_D), tl.arange(0, 1)
    acc = tl.zeros([1, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    best = tl.full([1], float("-inf"), dtype=tl.float32)
    between = tl.num_programs(1) * row_blocks * kv_heads * BLOCK_M
    mine = (one * kv_heads + kv_head) * BLOCK_M + folded % BLOCK_M + row
    parts = tiles - share + 1
    for first in range(0, parts, AT_ONCE):
        for index in tl.static_range(AT_ONCE):  # unrolled, so that all are on their way at once
            there = first + index < parts
            from_row = mine + (first + index) * between
            top = tl.load(part_stats + from_row * 2, mask=there, other=float("-inf"))
            weight = tl.load(part_stats + from_row * 2 + 1, mask=there, other=0.0)
            at = from_row[:, None] * BLOCK_D + dims[None, :]
            added = tl.load(part + at, mask=there, other=0.0)
            acc, total, best = _fold(acc, total, best, added, weight, top, True)
    # A row whose word is empty and that has no prefix sees nothing: 0, not NaN.
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    to = (start + folded // GROUP).to(tl.int64) * kv_heads * GROUP + kv_head * GROUP
    at = (to + folded % GROUP) * DIM + dims
    tl.store(out + at[None, :], acc.to(out.dtype.element_ty), mask=(dims < DIM)[None, :])
