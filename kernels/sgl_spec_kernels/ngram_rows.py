"""The rows of a verify forward over n-gram trees (`ngram`).

    share_rows    how many nodes of each tree a forward of T rows verifies
    tree_rows     that forward's rows

The twins are at the foot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chain, chained
from sgl_spec_kernels.ngram_ref import BARRED, NgramDrafts

_ROWS = 128
_COST_BITS = BARRED.bit_length()


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Rows of a verify forward over n-gram trees: tokens, positions, slots, words: [T] int64.
    starts: [B + 1] int64, each request's. Rows that are left over fill the forward up: token 0,
    position 0, no slot (-1)."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    words: Tensor
    starts: Tensor


def tree_rows_buffers(batch: int, total: int, device: torch.device | str) -> TreeRows:
    """Buffers for T = `total` rows."""
    flat = [torch.zeros(total, dtype=torch.int64, device=device) for _ in range(4)]
    return TreeRows(*flat, torch.zeros(batch + 1, dtype=torch.int64, device=device))


@triton.jit
def _within(facts, cutoff, inside, NODES: tl.constexpr, LANES: tl.constexpr, SIZE: tl.constexpr):
    """Drafted nodes of each request whose paths cost at most `cutoff`."""
    request, node = tl.arange(0, LANES), tl.arange(0, SIZE)
    there = inside[:, None] & ((node > 0) & (node < NODES))[None, :]
    cost = tl.load(facts + request[:, None] * NODES + node[None, :], mask=there, other=1 << 30)
    return tl.sum((cost <= cutoff).to(tl.int32), 1)


@triton.jit
def _share_rows(
    facts,
    num_nodes,
    starts,
    batch,
    rows_for_drafts,
    NODES: tl.constexpr,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
    SIZE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    lane = tl.arange(0, LANES)
    inside = lane < batch
    low = tl.zeros([], tl.int32)
    high = tl.full([], (1 << BITS - 1) - 1, tl.int32)  # what is barred costs more
    for _ in range(BITS):
        middle = (low + high + 1) // 2
        count = _within(facts, middle, inside, NODES, LANES, SIZE)
        fits = tl.sum(count) <= rows_for_drafts
        low, high = tl.where(fits, middle, low), tl.where(fits, high, middle - 1)
    taken = _within(facts, low, inside, NODES, LANES, SIZE)
    following = tl.minimum(low + 1, (1 << BITS - 1) - 1)
    more = _within(facts, following, inside, NODES, LANES, SIZE) - taken
    left = rows_for_drafts - tl.sum(taken) - (tl.cumsum(more) - more)
    count = tl.where(inside, taken + tl.minimum(tl.maximum(left, 0), more) + 1, 0)
    tl.store(num_nodes + lane, count.to(tl.int64), mask=inside)
    tl.store(facts + lane * NODES, count, mask=inside)
    ends = tl.cumsum(count)
    tl.store(starts + 1 + lane, ends.to(tl.int64), mask=inside)
    tl.store(starts, tl.zeros([], tl.int64))


def share_rows(trees: NgramDrafts, into: TreeRows) -> None:
    """Share T rows among B trees: every root has one, and the nodes with the cheapest paths. Of
    nodes that cost the same as the first that has none left, those of the first requests."""
    (batch, nodes), total = trees.tokens.shape, into.tokens.shape[0]
    assert total >= batch, "every root needs a row"
    _share_rows[(1,)](
        trees.facts, trees.num_nodes, into.starts, batch, total - batch,
        NODES=nodes, BITS=_COST_BITS, LANES=max(triton.next_power_of_2(batch), 2),
        SIZE=triton.next_power_of_2(nodes), num_warps=8, **chained(trees.facts.device),
    )  # fmt: skip


@triton.jit
def _tree_rows(
    starts,
    tree_tokens,
    tree_depths,
    tree_words,
    committed_lens,
    table_rows,
    req_to_token,
    tokens,
    positions,
    slots,
    words,
    batch,
    total,
    table_stride,
    NODES: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low, high = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + batch - 1
    for _ in tl.static_range(STEPS):  # the last request that starts at or before the row
        middle = (low + high + 1) // 2
        fits = tl.load(starts + middle) <= at
        low, high = tl.where(fits, middle, low), tl.where(fits, high, tl.maximum(middle - 1, low))
    live = at < tl.load(starts + batch)
    node = at - tl.load(starts + low)
    source = low * NODES + node
    token = tl.load(tree_tokens + source, mask=live, other=0)
    depth = tl.load(tree_depths + source, mask=live, other=0)
    word = tl.load(tree_words + source, mask=live, other=1)
    committed = tl.load(committed_lens + low)
    row = tl.load(table_rows + low)
    slot = tl.load(req_to_token + row * table_stride + committed + node, mask=live, other=-1)
    inside = at < total
    tl.store(tokens + at, token, mask=inside)
    tl.store(positions + at, tl.where(live, committed + depth, 0), mask=inside)
    tl.store(slots + at, slot.to(tl.int64), mask=inside)
    tl.store(words + at, word, mask=inside)


def tree_rows(
    trees: NgramDrafts, committed: Tensor, rows: Tensor, req_to_token: Tensor, into: TreeRows
) -> None:
    """Fill the rows of a forward that `share_rows` has shared. committed, rows: [B] int64.
    req_to_token: [table rows, width] int32."""
    (batch, nodes), total = trees.tokens.shape, into.tokens.shape[0]
    assert req_to_token.stride(1) == 1, "a table row must be contiguous"
    _tree_rows[(triton.cdiv(total, _ROWS),)](
        into.starts, trees.tokens, trees.depths, trees.words, committed, rows, req_to_token,
        into.tokens, into.positions, into.slots, into.words, batch, total, req_to_token.stride(0),
        NODES=nodes, STEPS=batch.bit_length(), BLOCK=_ROWS, num_warps=4, **chained(rows.device),
    )  # fmt: skip


# --- twins ----------------------------------------------------------------------------------------


def share_rows_ref(trees: NgramDrafts, into: TreeRows) -> None:
    """The twin of `share_rows`."""
    batch = len(trees.tokens)
    costs = trees.facts[:, 1:]
    order = costs.flatten().argsort(stable=True)
    order = order[costs.flatten()[order] < BARRED][: into.tokens.shape[0] - batch]
    count = 1 + torch.bincount(order // costs.shape[1], minlength=batch)
    trees.num_nodes.copy_(count)
    trees.facts[:, 0] = count
    into.starts[0] = 0
    into.starts[1:] = count.cumsum(0)


def tree_rows_ref(
    trees: NgramDrafts, committed: Tensor, rows: Tensor, req_to_token: Tensor, into: TreeRows
) -> None:
    """The twin of `tree_rows`."""
    for buffer, value in ((into.tokens, 0), (into.positions, 0), (into.slots, -1), (into.words, 1)):
        buffer.fill_(value)
    request = torch.arange(len(rows)).repeat_interleave(trees.num_nodes)
    used = len(request)
    node = torch.arange(used) - into.starts[request]
    into.tokens[:used] = trees.tokens[request, node]
    into.positions[:used] = committed[request] + trees.depths[request, node]
    into.slots[:used] = req_to_token[rows[request], committed[request] + node].long()
    into.words[:used] = trees.words[request, node]
