"""Draft trees from candidates, on the device: what `sgl_spec.speculative.grow` defines, which is
the twin of both kernels.

`grow_tree` takes the children of one expansion: score = score of the parent + log-probability. The
best K of them, by falling score and then in their own order, are the frontier, whose mask words,
positions and slots the next draft forward reads. `build_tree` takes all candidates of all
expansions: the best N - 1 become nodes in the candidates' order, so that parents come first, and
the rows of the verify forward follow: words, positions, slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chain, chained
from sgl_spec_kernels.noise import falling_key

_TILE = 32  # candidates compared with all others at a time
MOST_NODES = 64


@triton.jit(do_not_specialize=["depth", "base"])
def _grow_tree(
    log_probs,
    drafted,
    cand_scores,
    cand_tokens,
    cand_parents,
    scores,
    flat,
    words,
    tokens,
    parents,
    positions,
    slots,
    prefix_lens,
    table_rows,
    req_to_token,
    table_stride,
    num_candidates,
    base,
    depth,
    FRONTIER: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    LAST: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    request = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    inside = index < FRONTIER * TOPK
    above = index // TOPK
    score = tl.load(log_probs + request * FRONTIER * TOPK + index, mask=inside, other=float("-inf"))
    token = tl.load(drafted + request * FRONTIER * TOPK + index, mask=inside, other=0)
    parent = tl.full([BLOCK], -1, dtype=tl.int64)
    word = tl.zeros([BLOCK], dtype=tl.int64)
    if depth > 1:
        mine = request * TOPK + above
        score += tl.load(scores + mine, mask=inside, other=0.0)
        parent = tl.load(flat + mine, mask=inside, other=-1)
        word = tl.load(words + mine, mask=inside, other=0)
    at = request * num_candidates + base + index
    tl.store(cand_scores + at, score, mask=inside)
    tl.store(cand_tokens + at, token, mask=inside)
    tl.store(cand_parents + at, parent, mask=inside)
    if LAST:
        return

    key = tl.where(inside, falling_key(score, index), 0x7FFFFFFFFFFFFFFF)
    rank = tl.sum((key[None, :] < key[:, None]).to(tl.int32), 1)
    taken = inside & (rank < TOPK)
    column = (depth - 1) * TOPK + rank
    tl.debug_barrier()  # the state is read before it is replaced
    to = request * TOPK + rank
    tl.store(scores + to, score, mask=taken)
    tl.store(flat + to, (base + index).to(tl.int64), mask=taken)
    tl.store(words + to, word | (tl.full([BLOCK], 1, tl.int64) << column.to(tl.int64)), mask=taken)
    tl.store(tokens + to, token, mask=taken)
    tl.store(parents + to, above.to(tl.int64), mask=taken)
    prefix = tl.load(prefix_lens + request)
    table = req_to_token + tl.load(table_rows + request).to(tl.int64) * table_stride
    slot = tl.load(table + prefix + column, mask=taken, other=0).to(tl.int64)
    tl.store(slots + to, slot, mask=taken)
    tl.store(positions + to, prefix + depth - 1 + tl.zeros([BLOCK], dtype=tl.int64), mask=taken)


@triton.jit
def _ranks(key, scores, CANDIDATES: tl.constexpr, BLOCK_C: tl.constexpr, TILE: tl.constexpr):
    """How many candidates come before each."""
    rank = tl.zeros([BLOCK_C], dtype=tl.int32)
    for start in range(0, CANDIDATES, TILE):
        other = start + tl.arange(0, TILE)
        theirs = tl.load(scores + other, mask=other < CANDIDATES, other=float("-inf"))
        before = falling_key(theirs, other)[None, :] < key[:, None]
        rank += tl.sum(before.to(tl.int32), 1)
    return rank


@triton.jit
def _lineages(i, link, count, BLOCK_N: tl.constexpr, ROUNDS: tl.constexpr):
    """(depths, mask words) of nodes whose parents are links, by doubling; a node that is none sees
    itself alone."""
    used = i < count
    depth = (used & (i > 0)).to(tl.int32)
    word = tl.full([BLOCK_N], 1, tl.int64) << i.to(tl.int64)
    word = tl.where(used, word | 1, word)  # all nodes see the root
    for _ in range(ROUNDS):
        depth += tl.gather(depth, link, 0)
        word |= tl.where(used, tl.gather(word, link, 0), 0)
        link = tl.gather(link, link, 0)
    return depth, word


@triton.jit
def _build_tree(
    cand_scores,
    cand_tokens,
    cand_parents,
    roots,
    max_nodes,
    tokens,
    parents,
    scores,
    num_nodes,
    depths,
    words,
    positions,
    slots,
    committed_lens,
    table_rows,
    req_to_token,
    table_stride,
    num_candidates,
    CANDIDATES: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROUNDS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_BOUND: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    request = tl.program_id(0)
    index = tl.arange(0, BLOCK_C)
    inside = index < CANDIDATES
    at = request * num_candidates + index
    score = tl.load(cand_scores + at, mask=inside, other=float("-inf"))
    here = cand_scores + request * num_candidates
    rank = _ranks(falling_key(score, index), here, CANDIDATES, BLOCK_C, TILE)
    most = NODES - 1
    if HAS_BOUND:
        most = tl.minimum(tl.load(max_nodes + request).to(tl.int32) - 1, most)
    chosen = inside & (rank < most) & (score > float("-inf"))
    node = tl.cumsum(chosen.to(tl.int32), 0)
    count = 1 + tl.sum(chosen.to(tl.int32), 0)
    token = tl.load(cand_tokens + at, mask=inside, other=0)
    above = tl.load(cand_parents + at, mask=inside, other=-1).to(tl.int32)
    link = tl.where(above < 0, 0, tl.gather(node, tl.maximum(above, 0), 0))
    to = request * NODES + node
    tl.store(tokens + to, token, mask=chosen)
    tl.store(parents + to, link.to(tl.int64), mask=chosen)
    tl.store(scores + to, tl.exp(score), mask=chosen)
    # The root, and entries that are no nodes: harmless rows for the verify forward.
    i = tl.arange(0, BLOCK_N)
    mine = request * NODES + i
    other = (i < NODES) & ((i == 0) | (i >= count))
    root = tl.load(roots + request)
    tl.store(tokens + mine, tl.where(i == 0, root, 0), mask=other)
    tl.store(parents + mine, tl.full([BLOCK_N], -1, tl.int64), mask=other)
    tl.store(scores + mine, tl.where(i == 0, 1.0, 0.0), mask=other)
    tl.store(num_nodes + request, count.to(tl.int64))

    tl.debug_barrier()  # the parents, by node, are there
    link = tl.load(parents + mine, mask=(i < count) & (i > 0), other=0).to(tl.int32)
    depth, word = _lineages(i, link, count, BLOCK_N, ROUNDS)
    within = i < NODES
    committed = tl.load(committed_lens + request)
    table = req_to_token + tl.load(table_rows + request).to(tl.int64) * table_stride
    slot = tl.load(table + committed + i, mask=within, other=0)
    tl.store(depths + mine, depth.to(tl.int64), mask=within)
    tl.store(words + mine, word, mask=within)
    tl.store(positions + mine, committed + depth, mask=within)
    tl.store(slots + mine, slot.to(tl.int64), mask=within)


@dataclass(frozen=True, slots=True)
class GrowState:
    """Trees of B requests while they grow; buffers of fixed addresses.

    cand_scores [B, C] float32, cand_tokens, cand_parents [B, C] int64 (parents as candidates, -1
    for the root): all children so far. scores [B, K] float32, flat, words [B, K] int64: the
    frontier's path scores, numbers as candidates, and mask words. tokens, parents, positions, slots
    [B, K] int64: the rows of the next draft forward; a parent is a row of the one before.
    """

    topk: int
    cand_scores: Tensor
    cand_tokens: Tensor
    cand_parents: Tensor
    scores: Tensor
    flat: Tensor
    words: Tensor
    tokens: Tensor
    parents: Tensor
    positions: Tensor
    slots: Tensor


def num_candidates(steps: int, topk: int) -> int:
    """Children of all expansions of a tree."""
    return topk + (steps - 1) * topk * topk


def grow_state(batch: int, steps: int, topk: int, device: torch.device | str) -> GrowState:
    """Buffers for `batch` trees of `steps` levels below the root."""
    count = num_candidates(steps, topk)
    assert (steps - 1) * topk <= MOST_NODES, f"{steps} steps of {topk} pass a mask word's 64 bits"

    def ints(width: int) -> Tensor:
        return torch.zeros(batch, width, dtype=torch.int64, device=device)

    return GrowState(
        topk,
        torch.zeros(batch, count, device=device),
        ints(count),
        ints(count),
        torch.zeros(batch, topk, device=device),
        *(ints(topk) for _ in range(6)),
    )


def grow_tree(
    state: GrowState,
    log_probs: Tensor,
    drafted: Tensor,
    depth: int,
    *,
    prefix_lens: Tensor,
    rows: Tensor,
    req_to_token: Tensor,
    last: bool,
) -> None:
    """Take the children at `depth` (1: the roots', [B, K]; later [B * K, K]) from `draft_topk`.

    prefix_lens: [B] int64, positions that hold the draft's KV; column c of a draft tree lies at
    prefix_lens + c. rows: [B] int64, table rows. last: there is no further draft forward.
    """
    frontier, topk = 1 if depth == 1 else state.topk, state.topk
    batch = prefix_lens.shape[0]
    assert log_probs.shape == drafted.shape == (batch * frontier, topk)
    assert log_probs.is_contiguous(), "log_probs must be contiguous"
    assert drafted.is_contiguous(), "drafted must be contiguous"
    base = 0 if depth == 1 else num_candidates(depth - 1, topk)
    assert base + frontier * topk <= state.cand_scores.shape[1], "more steps than there is room for"
    _grow_tree[(batch,)](
        log_probs,
        drafted,
        state.cand_scores,
        state.cand_tokens,
        state.cand_parents,
        state.scores,
        state.flat,
        state.words,
        state.tokens,
        state.parents,
        state.positions,
        state.slots,
        prefix_lens,
        rows,
        req_to_token,
        req_to_token.stride(0),
        state.cand_scores.shape[1],
        base,
        depth,
        FRONTIER=frontier,
        TOPK=topk,
        BLOCK=triton.next_power_of_2(frontier * topk),
        LAST=last,
        num_warps=4 if frontier * topk <= 64 else 8,
        **chained(log_probs.device),
    )


@dataclass(frozen=True, slots=True)
class DeviceTree:
    """Trees of N nodes and the rows of their verify forward; buffers of fixed addresses.

    tokens, parents, depths, words, positions, slots: [B, N] int64. scores: [B, N] float32.
    num_nodes: [B] int64. Entries from num_nodes on are rows of their own that nobody sees.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    num_nodes: Tensor
    depths: Tensor
    words: Tensor
    positions: Tensor
    slots: Tensor


def device_tree(batch: int, nodes: int, device: torch.device | str) -> DeviceTree:
    """Buffers for `batch` trees of up to `nodes` nodes."""
    assert 1 <= nodes <= MOST_NODES, f"{nodes} nodes, a tree has 1 to {MOST_NODES}"
    tokens, parents, depths, words, positions, slots = (
        torch.zeros(batch, nodes, dtype=torch.int64, device=device) for _ in range(6)
    )
    scores = torch.zeros(batch, nodes, device=device)
    return DeviceTree(
        tokens, parents, scores, torch.ones_like(tokens[:, 0]), depths, words, positions, slots
    )


def build_tree(
    tree: DeviceTree,
    state: GrowState,
    roots: Tensor,
    depth: int,
    *,
    committed_lens: Tensor,
    rows: Tensor,
    req_to_token: Tensor,
    max_nodes: Tensor | None = None,
) -> None:
    """Fill `tree` from the candidates of `depth` expansions.

    roots, committed_lens, rows: [B] int64. max_nodes: [B] int64, at least 1, further bounds.
    """
    nodes, batch = tree.tokens.shape[1], roots.shape[0]
    count = num_candidates(depth, state.topk)
    block_n = max(triton.next_power_of_2(nodes), 16)
    _build_tree[(batch,)](
        state.cand_scores,
        state.cand_tokens,
        state.cand_parents,
        roots,
        max_nodes,
        tree.tokens,
        tree.parents,
        tree.scores,
        tree.num_nodes,
        tree.depths,
        tree.words,
        tree.positions,
        tree.slots,
        committed_lens,
        rows,
        req_to_token,
        req_to_token.stride(0),
        state.cand_scores.shape[1],
        CANDIDATES=count,
        NODES=nodes,
        BLOCK_C=max(triton.next_power_of_2(count), 16),
        BLOCK_N=block_n,
        ROUNDS=(nodes - 1).bit_length(),
        TILE=_TILE,
        HAS_BOUND=max_nodes is not None,
        num_warps=4 if count <= 128 else 8,
        **chained(roots.device),
    )
