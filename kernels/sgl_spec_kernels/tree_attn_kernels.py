"""The two kernels of `tree_attn`, which says what they do."""

from __future__ import annotations

import triton
import triton.language as tl

from sgl_spec_kernels.chain import chain


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _attend(
    acc,
    total,
    best,
    queries,
    own,
    union,
    k,
    v,
    table,
    prefix,
    lo,
    hi,
    kv_stride,
    scale,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Columns lo .. hi into (acc, total, best). own: each row's mask word, or its last column.
    union: the words together; a new column that no row sees may never have been written."""
    dims, step = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    # Slots are read a block ahead: what depends on a load of its own iteration is not pipelined.
    slot = tl.load(table + lo + step, mask=lo + step < hi, other=0)
    for start in range(lo, hi, BLOCK_N):
        column = start + step
        inside = column < hi
        new = column - prefix
        bit = tl.minimum(tl.maximum(new, 0), 63).to(tl.int64)
        if MASKED and not CAUSAL:
            inside &= (new < 0) | (((union >> bit) & 1) != 0)
        at = slot.to(tl.int64)[:, None] * kv_stride + dims[None, :]
        slot = tl.load(table + column + BLOCK_N, mask=column + BLOCK_N < hi, other=0)
        used = inside[:, None] & (dims < DIM)[None, :]
        keys = tl.load(k + at, mask=used, other=0.0)  # [BLOCK_N, BLOCK_D]
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if MASKED:
            if CAUSAL:
                seen = new[None, :] <= own[:, None]
            else:
                seen = (new < 0)[None, :] | (((own[:, None] >> bit[None, :]) & 1) != 0)
            scores = tl.where(seen & inside[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        # A row that has seen nothing yet stays at -inf; its differences must not become NaN.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - level[:, None])
        shrink = tl.exp2(best - level)
        values = tl.load(v + at, mask=used, other=0.0)
        acc = acc * shrink[:, None]
        acc += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        best = higher
    return acc, total, best


@triton.jit
def fair_split_kernel(
    prefix_lens,
    q_starts,
    tree_lens,
    fair,
    batch,
    blocks,
    programs,
    LANES: tl.constexpr,
    HAS_TREE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """fair: the columns of a program if `programs` shared those of all `blocks` blocks of each
    request."""
    chain(CHAINED)
    lane = tl.arange(0, LANES)
    columns = tl.load(prefix_lens + lane, mask=lane < batch, other=0)
    if HAS_TREE:
        columns += tl.load(tree_lens + lane, mask=lane < batch, other=0)
    total = tl.sum(columns) + tl.load(q_starts + batch) - tl.load(q_starts)
    tl.store(fair, (total * blocks // programs).to(tl.int32))


@triton.jit
def _splits(
    q_len,
    prefix,
    tree,
    block,
    num_splits,
    least,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """(columns that a block of rows may see, columns of a split, splits that there are), all splits
    about as long. least: columns for which another one is begun."""
    length = prefix + tree + q_len
    if CAUSAL:
        length = tl.minimum(length, prefix + ((block + 1) * BLOCK_M - 1) // GROUP + 1)
    wanted = tl.maximum(tl.minimum(tl.cdiv(length, least), num_splits), 1)
    share = tl.maximum(tl.cdiv(tl.cdiv(length, wanted), BLOCK_N), 1) * BLOCK_N
    return length, share, tl.cdiv(length, share)


@triton.jit
def _merged(
    part, part_stats, first, between, splits, live, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):
    """(acc, total) of a block's splits, in their order whichever of them was done last. first:
    [BLOCK_M] the rows of split 0; between: rows from one split to the next; live: rows there are.
    """
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    best = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    for split in range(splits):
        mine = first + split * between
        m = tl.load(part_stats + mine * 2, mask=live, other=0.0, cache_modifier=".cg")
        l = tl.load(  # noqa: E741
            part_stats + mine * 2 + 1, mask=live, other=0.0, cache_modifier=".cg"
        )
        higher = tl.maximum(best, m)
        level = tl.where(higher == float("-inf"), 0.0, higher)
        old, new = tl.exp2(best - level), tl.exp2(m - level)
        at = mine[:, None] * BLOCK_D + dims[None, :]
        parts = tl.load(part + at, mask=live[:, None], other=0.0, cache_modifier=".cg")
        acc = acc * old[:, None] + parts * new[:, None]
        total = total * old + l * new
        best = higher
    return acc, total


@triton.jit
def _span(q_starts, prefix_lens, request):
    """(first row of a request, the row behind its last, columns before those)."""
    start = tl.load(q_starts + request).to(tl.int32)
    stop = tl.load(q_starts + request + 1).to(tl.int32)
    return start, stop, tl.load(prefix_lens + request).to(tl.int32)


@triton.jit
def _attended(
    queries,
    own,
    union,
    k,
    v,
    table,
    prefix,
    block,
    lo,
    hi,
    kv_stride,
    scale,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(acc, total, best) of a block's rows over columns lo .. hi."""
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    best = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    if CAUSAL:  # products decide here: no mask where none is needed
        whole = tl.maximum(tl.minimum(hi, prefix + block * BLOCK_M // GROUP) - lo, 0)
        middle = lo + whole // BLOCK_N * BLOCK_N
        acc, total, best = _attend(
            acc, total, best, queries, own, union, k, v, table, prefix, lo, middle,
            kv_stride, scale, False, CAUSAL, DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
        lo = middle
    return _attend(
        acc, total, best, queries, own, union, k, v, table, prefix, lo, hi,
        kv_stride, scale, True, CAUSAL, DIM, BLOCK_D, BLOCK_N,
    )  # fmt: skip


@triton.jit
def _handed_in(
    acc,
    total,
    best,
    part,
    part_stats,
    arrived,
    first,
    between,
    split,
    splits,
    done,
    live,
    MERGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write a split's part; (whether this program has the whole block, acc, total), which the last
    of a block's programs gets where they merge. arrived: the block's."""
    dims = tl.arange(0, BLOCK_D)
    mine = split * between + first
    tl.store(part_stats + mine * 2, best, mask=live)
    tl.store(part_stats + mine * 2 + 1, total, mask=live)
    tl.store(part + mine[:, None] * BLOCK_D + dims[None, :], acc, mask=live[:, None])
    if MERGES:  # whoever comes last
        tl.debug_barrier()
        done = tl.atomic_add(arrived, 1, sem="acq_rel") == splits - 1
        if done:
            tl.store(arrived, 0)
            acc, total = _merged(part, part_stats, first, between, splits, live, BLOCK_M, BLOCK_D)
    return done, acc, total


@triton.jit(do_not_specialize=["row_blocks"])  # chunks of prompts have any length
def tree_attn_kernel(
    q, k, v, out,
    req_to_token, table_rows, prefix_lens, q_starts, mask_words, tree_lens,
    part, part_stats, arrived, fair,
    scale, table_stride, q_stride, kv_stride, row_blocks, min_split,
    GROUP: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_TREE: tl.constexpr, MERGES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    chain(CHAINED)
    kv_heads = tl.num_programs(0) // row_blocks
    kv_head = tl.program_id(0) % kv_heads
    block = tl.program_id(0) // kv_heads
    if CAUSAL:
        block = row_blocks - 1 - block  # the longest first
    split, request = tl.program_id(1), tl.program_id(2)
    # All on their way before the first is waited for.
    start, stop, prefix = _span(q_starts, prefix_lens, request)
    table_row = tl.load(table_rows + request).to(tl.int64)
    tree = 0
    if HAS_TREE:
        tree = tl.load(tree_lens + request).to(tl.int32)
    least = min_split
    if MERGES:
        least = tl.maximum(tl.load(fair), min_split)
    q_len = stop - start
    if block * BLOCK_M >= q_len * GROUP:
        return
    length, share, used_splits = _splits(
        q_len, prefix, tree, block, tl.num_programs(1), least, GROUP, BLOCK_M, BLOCK_N, CAUSAL
    )
    if split >= used_splits:
        return

    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    folded = block * BLOCK_M + rows  # token * GROUP + head of the group
    live = folded < q_len * GROUP
    token = folded // GROUP
    head = kv_head * GROUP + folded % GROUP
    if CAUSAL:
        own, union = token, length
    else:
        own = tl.load(mask_words + start + token, mask=live, other=0)
        union = tl.reduce(own, 0, _either)
    row = (start + token).to(tl.int64)
    used = live[:, None] & (dims < DIM)[None, :]
    at = row[:, None] * q_stride + head[:, None] * DIM + dims[None, :]
    queries = tl.load(q + at, mask=used, other=0.0)

    table = req_to_token + table_row * table_stride
    k += kv_head * DIM
    v += kv_head * DIM
    lo = split * share
    hi = tl.minimum(lo + share, length)
    acc, total, best = _attended(
        queries, own, union, k, v, table, prefix, block, lo, hi, kv_stride, scale,
        CAUSAL, GROUP, DIM, BLOCK_D, BLOCK_M, BLOCK_N,
    )  # fmt: skip

    done = used_splits == 1
    if used_splits > 1:
        group = (request * row_blocks + block) * kv_heads + kv_head
        between = tl.num_programs(2) * row_blocks * kv_heads * BLOCK_M
        first = group * BLOCK_M + rows
        done, acc, total = _handed_in(
            acc, total, best, part, part_stats, arrived + group, first, between, split,
            used_splits, done, live, MERGES, BLOCK_M, BLOCK_D,
        )  # fmt: skip
    if not done:
        return
    # A row whose word is empty and that has no prefix sees nothing: 0, not NaN.
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    at = row[:, None] * (kv_heads * GROUP * DIM) + head[:, None] * DIM + dims[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=used)


@triton.jit(do_not_specialize=["row_blocks", "num_splits"])
def merge_kernel(
    part,
    part_stats,
    out,
    prefix_lens,
    q_starts,
    tree_lens,
    row_blocks,
    num_splits,
    min_split,
    kv_heads,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_TREE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program takes one row: a token and a head."""
    chain(CHAINED)
    kv_head = tl.program_id(0) % kv_heads
    folded = tl.program_id(0) // kv_heads
    request = tl.program_id(1)
    start, stop, prefix = _span(q_starts, prefix_lens, request)
    tree = 0
    if HAS_TREE:
        tree = tl.load(tree_lens + request).to(tl.int32)
    q_len, block = stop - start, folded // BLOCK_M
    _, _, used_splits = _splits(
        q_len, prefix, tree, block, num_splits, min_split, GROUP, BLOCK_M, BLOCK_N, CAUSAL
    )
    if (folded >= q_len * GROUP) | (used_splits < 2):
        return
    dims = tl.arange(0, BLOCK_D)
    group = (request * row_blocks + block) * kv_heads + kv_head
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    total = tl.zeros([], dtype=tl.float32)
    best = tl.full([], float("-inf"), dtype=tl.float32)
    # A few at a time: most texts are short, and what is masked out costs time as well.
    for first in range(0, used_splits, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        there = split < used_splits
        mine = (split * tl.num_programs(1) * row_blocks * kv_heads + group) * BLOCK_M
        mine += folded % BLOCK_M
        m = tl.load(part_stats + mine * 2, mask=there, other=float("-inf"))
        l = tl.load(part_stats + mine * 2 + 1, mask=there, other=0.0)  # noqa: E741
        at = mine[:, None] * BLOCK_D + dims[None, :]
        parts = tl.load(part + at, mask=there[:, None], other=0.0)
        higher = tl.maximum(best, tl.max(m, 0))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        old, weight = tl.exp2(best - level), tl.exp2(m - level)
        acc = acc * old + tl.sum(parts * weight[:, None], 0)
        total = total * old + tl.sum(l * weight, 0)
        best = higher
    # A row whose word is empty and that has no prefix sees nothing: 0, not NaN.
    acc = acc / tl.where(total > 0, total, 1.0)
    row = (start + folded // GROUP).to(tl.int64) * kv_heads * GROUP + kv_head * GROUP
    to = out + (row + folded % GROUP) * DIM + dims
    tl.store(to, acc.to(out.dtype.element_ty), mask=dims < DIM)
