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
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chain, chained

BLOCK_N = 64  # KV columns at a time
MIN_SPLIT = 128  # least columns of a split: merging smaller ones costs more than they save
MAX_SPLITS = 32
_PROGRAMS = 264  # two for each multiprocessor of an H200
_LEAST_ROWS, _MOST_ROWS = 16, 64  # of a block
_CHUNK_ROWS = 128  # of a block of more tokens than a mask word has bits: a chunk of a prompt
_LOG2_E = 1.4426950408889634


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
    dims = tl.arange(0, BLOCK_D)
    for start in range(lo, hi, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        inside = column < hi
        new = column - prefix
        bit = tl.minimum(tl.maximum(new, 0), 63).to(tl.int64)
        if MASKED and not CAUSAL:
            inside &= (new < 0) | (((union >> bit) & 1) != 0)
        slot = tl.load(table + column, mask=inside, other=0).to(tl.int64)
        at = slot[:, None] * kv_stride + dims[None, :]
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
def _splits(
    q_len,
    prefix,
    tree,
    block,
    num_splits,
    min_split,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """(columns that a block of rows may see, columns of a split, splits that there are)."""
    length = prefix + tree + q_len
    if CAUSAL:
        length = tl.minimum(length, prefix + ((block + 1) * BLOCK_M - 1) // GROUP + 1)
    share = tl.cdiv(tl.cdiv(length, num_splits), BLOCK_N) * BLOCK_N
    share = tl.maximum(share, min_split)
    return length, share, tl.cdiv(length, share)


@triton.jit(do_not_specialize=["row_blocks"])  # chunks of prompts have any length
def _tree_attn(
    q,
    k,
    v,
    out,
    req_to_token,
    table_rows,
    prefix_lens,
    q_starts,
    mask_words,
    tree_lens,
    part,
    part_stats,
    scale,
    table_stride,
    q_stride,
    kv_stride,
    row_blocks,
    min_split,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_TREE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    kv_heads = tl.num_programs(0) // row_blocks
    kv_head = tl.program_id(0) % kv_heads
    block = tl.program_id(0) // kv_heads
    if CAUSAL:
        block = row_blocks - 1 - block  # the longest first
    split = tl.program_id(1)
    request = tl.program_id(2)
    # All on their way before the first is waited for.
    start = tl.load(q_starts + request).to(tl.int32)
    stop = tl.load(q_starts + request + 1).to(tl.int32)
    prefix = tl.load(prefix_lens + request).to(tl.int32)
    table_row = tl.load(table_rows + request).to(tl.int64)
    tree = 0
    if HAS_TREE:
        tree = tl.load(tree_lens + request).to(tl.int32)
    q_len = stop - start
    if block * BLOCK_M >= q_len * GROUP:
        return
    length, share, used_splits = _splits(
        q_len, prefix, tree, block, tl.num_programs(1), min_split, GROUP, BLOCK_M, BLOCK_N, CAUSAL
    )
    if split >= used_splits:
        return

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
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
    acc, total, best = _attend(
        acc, total, best, queries, own, union, k, v, table, prefix, lo, hi,
        kv_stride, scale, True, CAUSAL, DIM, BLOCK_D, BLOCK_N,
    )  # fmt: skip

    if used_splits > 1:
        group = (request * row_blocks + block) * kv_heads + kv_head
        mine = (split * tl.num_programs(2) * row_blocks * kv_heads + group) * BLOCK_M + rows
        tl.store(part_stats + mine * 2, best, mask=live)
        tl.store(part_stats + mine * 2 + 1, total, mask=live)
        tl.store(part + mine[:, None] * BLOCK_D + dims[None, :], acc, mask=live[:, None])
        return
    # A row whose word is empty and that has no prefix sees nothing: 0, not NaN.
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    at = row[:, None] * (kv_heads * GROUP * DIM) + head[:, None] * DIM + dims[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=used)


@triton.jit(do_not_specialize=["row_blocks", "num_splits"])
def _merge(
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
    MOST_SPLITS: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_TREE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program takes one row: a token and a head."""
    chain(CHAINED)
    kv_head = tl.program_id(0) % kv_heads
    folded = tl.program_id(0) // kv_heads
    request = tl.program_id(1)
    start = tl.load(q_starts + request).to(tl.int32)
    stop = tl.load(q_starts + request + 1).to(tl.int32)
    prefix = tl.load(prefix_lens + request).to(tl.int32)
    tree = 0
    if HAS_TREE:
        tree = tl.load(tree_lens + request).to(tl.int32)
    q_len, block = stop - start, folded // BLOCK_M
    _, _, used_splits = _splits(
        q_len, prefix, tree, block, num_splits, min_split, GROUP, BLOCK_M, BLOCK_N, CAUSAL
    )
    if (folded >= q_len * GROUP) | (used_splits < 2):
        return
    split, dims = tl.arange(0, MOST_SPLITS), tl.arange(0, BLOCK_D)
    there = split < used_splits
    group = (request * row_blocks + block) * kv_heads + kv_head
    mine = (split * tl.num_programs(1) * row_blocks * kv_heads + group) * BLOCK_M
    mine += folded % BLOCK_M
    m = tl.load(part_stats + mine * 2, mask=there, other=float("-inf"))
    l = tl.load(part_stats + mine * 2 + 1, mask=there, other=0.0)  # noqa: E741
    at = mine[:, None] * BLOCK_D + dims[None, :]
    parts = tl.load(part + at, mask=there[:, None], other=0.0)
    best = tl.max(m, 0)
    # A row whose word is empty and that has no prefix sees nothing: 0, not NaN.
    weight = tl.exp2(m - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(l * weight, 0)
    acc = tl.sum(parts * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    row = (start + folded // GROUP).to(tl.int64) * kv_heads * GROUP + kv_head * GROUP
    to = out + (row + folded % GROUP) * DIM + dims
    tl.store(to, acc.to(out.dtype.element_ty), mask=dims < DIM)


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
    most = _MOST_ROWS if max_q_len <= 64 else _CHUNK_ROWS
    block_m = min(max(triton.next_power_of_2(rows), _LEAST_ROWS), most)
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
    shared = {
        "GROUP": plan.heads_per_kv,
        "DIM": dim,
        "BLOCK_D": block_d,
        "BLOCK_M": plan.block_m,
        # float32 products are unrolled into single instructions, which fill the registers.
        "BLOCK_N": BLOCK_N if block_d * q.element_size() <= 256 else BLOCK_N // 2,
        "CAUSAL": plan.mask_words is None,
        "HAS_TREE": plan.tree_lens is not None,
        **chained(q.device),
    }
    _tree_attn[(kv_heads * plan.row_blocks, plan.splits, batch)](
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
        num_warps=4 if q.element_size() == 2 and plan.block_m <= 64 else 8,
        num_stages=3 if q.element_size() == 2 else 2,
        **shared,
    )
    if plan.splits > 1:
        _merge[(kv_heads * plan.most_rows, batch)](
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
