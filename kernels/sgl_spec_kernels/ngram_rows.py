"""The rows of a verify forward over n-gram chains (`ngram_chains`).

    share_rows how many nodes of each chain a forward of T rows verifies
    chain_rows the forward's rows

The twins are at the foot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chain, chained
from sgl_spec_kernels.ngram_chains import MOST_MATCHED, Chains

CUTOFFS = 64
"""Score thresholds among which `share_rows` chooses; a power of two."""
_BLOCK = 128


@dataclass(frozen=True, slots=True)
class ChainRows:
    """Rows of a verify forward over chains: tokens, positions, slots, words: [T] int64. starts:
    [B + 1] int64, each request's; nodes: [B] int64, how many. Rows that are left over fill the
    forward up: token 0, position 0, no slot (-1)."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    words: Tensor
    starts: Tensor
    nodes: Tensor


def chain_rows_buffers(batch: int, total: int, device: torch.device | str) -> ChainRows:
    """Buffers for T = `total` rows."""
    flat = [torch.zeros(total, dtype=torch.int64, device=device) for _ in range(4)]
    starts = torch.zeros(batch + 1, dtype=torch.int64, device=device)
    return ChainRows(*flat, starts, torch.ones(batch, dtype=torch.int64, device=device))


@triton.jit
def _wanted(depths, cutoff, matched, drafted, WIDTH: tl.constexpr):
    """Drafted nodes of each request whose score reaches a cutoff."""
    return tl.minimum(tl.load(depths + cutoff * WIDTH + matched), drafted)


@triton.jit
def _share_rows(
    facts,
    depths,
    nodes,
    starts,
    batch,
    rows_for_drafts,
    CUTOFFS: tl.constexpr,
    STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    lane = tl.arange(0, LANES)
    inside = lane < batch
    matched = tl.load(facts + lane * 3, mask=inside, other=0)
    drafted = tl.load(facts + lane * 3 + 1, mask=inside, other=0)
    low, high = tl.zeros([], tl.int32), tl.full([], CUTOFFS - 1, tl.int32)
    for _ in tl.static_range(STEPS):
        middle = (low + high + 1) // 2
        fits = tl.sum(_wanted(depths, middle, matched, drafted, WIDTH)) <= rows_for_drafts
        low, high = tl.where(fits, middle, low), tl.where(fits, high, middle - 1)
    taken = _wanted(depths, low, matched, drafted, WIDTH)
    following = tl.minimum(low + 1, CUTOFFS - 1)
    more = tl.maximum(_wanted(depths, following, matched, drafted, WIDTH) - taken, 0)
    left = rows_for_drafts - tl.sum(taken) - (tl.cumsum(more) - more)
    count = tl.where(inside, taken + tl.minimum(tl.maximum(left, 0), more) + 1, 0)
    tl.store(nodes + lane, count.to(tl.int64), mask=inside)
    tl.store(facts + lane * 3 + 2, count, mask=inside)
    ends = tl.cumsum(count)
    tl.store(starts + 1 + lane, ends.to(tl.int64), mask=inside)
    tl.store(starts, tl.zeros([], tl.int64))


@triton.jit
def _chain_rows(
    starts,
    chain_tokens,
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
    token = tl.load(chain_tokens + low * NODES + node, mask=live, other=0)
    position = tl.load(committed_lens + low) + node
    row = tl.load(table_rows + low)
    slot = tl.load(req_to_token + row * table_stride + position, mask=live, other=-1)
    word = (tl.full([BLOCK], 2, tl.int64) << node.to(tl.int64)) - 1
    inside = at < total
    tl.store(tokens + at, token, mask=inside)
    tl.store(positions + at, tl.where(live, position, 0), mask=inside)
    tl.store(slots + at, slot.to(tl.int64), mask=inside)
    tl.store(words + at, tl.where(live, word, 1), mask=inside)


def share_rows(out: Chains, depths: Tensor, into: ChainRows) -> None:
    """Share T rows among B chains: every root has one, and the drafts with the highest scores.

    depths: [CUTOFFS, MOST_MATCHED + 1] int32, how many nodes of a chain behind so many matched
    tokens reach each of the falling cutoffs; 0 at the first. Rows that the best cutoff leaves over
    go to nodes of the next, in the order of the requests.
    """
    batch, total = out.tokens.shape[0], into.tokens.shape[0]
    assert depths.shape == (CUTOFFS, MOST_MATCHED + 1), "depths by cutoff and match"
    assert depths.dtype == torch.int32
    assert total >= batch, "every root needs a row"
    _share_rows[(1,)](
        out.facts, depths, into.nodes, into.starts, batch, total - batch,
        CUTOFFS=CUTOFFS, STEPS=CUTOFFS.bit_length() - 1, WIDTH=MOST_MATCHED + 1,
        LANES=max(triton.next_power_of_2(batch), 2), num_warps=4, **chained(depths.device),
    )  # fmt: skip


def chain_rows(
    out: Chains, committed: Tensor, rows: Tensor, req_to_token: Tensor, into: ChainRows
) -> None:
    """Fill the rows of a forward that `share_rows` has shared. committed, rows: [B] int64.
    req_to_token: [table rows, width] int32."""
    (batch, nodes), total = out.tokens.shape, into.tokens.shape[0]
    assert req_to_token.stride(1) == 1, "a table row must be contiguous"
    _chain_rows[(triton.cdiv(total, _BLOCK),)](
        into.starts, out.tokens, committed, rows, req_to_token, into.tokens, into.positions,
        into.slots, into.words, batch, total, req_to_token.stride(0),
        NODES=nodes, STEPS=batch.bit_length(), BLOCK=_BLOCK, num_warps=4,
        **chained(rows.device),
    )  # fmt: skip


# --- twins ----------------------------------------------------------------------------------------


def share_rows_ref(out: Chains, depths: Tensor, into: ChainRows) -> None:
    """The twin of `share_rows`."""
    matched, drafted = out.facts[:, 0].long(), out.facts[:, 1]
    left = into.tokens.shape[0] - len(matched)
    wanted = torch.minimum(depths[:, matched], drafted)  # [CUTOFFS, B]
    best = int((wanted.sum(1) <= left).nonzero().max())
    count = wanted[best]
    more = wanted[min(best + 1, CUTOFFS - 1)] - count
    free = left - count.sum() - (more.cumsum(0) - more)
    count = count + torch.minimum(free.clamp(min=0), more) + 1
    into.nodes.copy_(count)
    out.facts[:, 2] = count
    into.starts[0] = 0
    into.starts[1:] = count.cumsum(0)


def chain_rows_ref(
    out: Chains, committed: Tensor, rows: Tensor, req_to_token: Tensor, into: ChainRows
) -> None:
    """The twin of `chain_rows`."""
    for buffer, value in ((into.tokens, 0), (into.positions, 0), (into.slots, -1), (into.words, 1)):
        buffer.fill_(value)
    for i, (start, count) in enumerate(
        zip(into.starts.tolist(), into.nodes.tolist(), strict=False)
    ):
        span, step = slice(start, start + count), torch.arange(count, device=rows.device)
        into.tokens[span] = out.tokens[i, :count]
        into.positions[span] = committed[i] + step
        into.slots[span] = req_to_token[rows[i], committed[i] + step].long()
        into.words[span] = (2 << step) - 1
