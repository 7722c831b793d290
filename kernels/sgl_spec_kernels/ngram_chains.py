"""N-gram drafts on the device, looked up and extended within the round that uses them.

    propose    the longest match of each text's end in the index (`ngram_index`), and what followed
               it: a chain

`ngram_rows` verifies them. The twin is at the foot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chain, chained
from sgl_spec_kernels.ngram_index import (
    BITS,
    LAST,
    LONGEST,
    ORDER_BITS,
    STEP,
    TokenIndex,
    entries_of,
    entry_of,
    mixed,
)

MOST_MATCHED = 16
"""Tokens before a match that are compared; also the largest match length that is told apart."""


@dataclass(frozen=True, slots=True)
class Chains:
    """Drafts of B requests, N - 1 tokens at most. tokens: [B, N] int64, the root first. facts:
    [B, 3] int32: tokens that match before the draft (0: none was found), drafted tokens, and nodes
    verified, the root included."""

    tokens: Tensor
    facts: Tensor


def chains(batch: int, nodes: int, device: torch.device | str) -> Chains:
    """Buffers."""
    tokens = torch.zeros(batch, nodes, dtype=torch.int64, device=device)
    return Chains(tokens, torch.zeros(batch, 3, dtype=torch.int32, device=device))


@triton.jit
def _matched(log, end, length, place, MOST: tl.constexpr):
    """How many tokens before `place` are those before `end`, of a text of `length` tokens; none
    where the two are one: an entry that is left of a text that stood here before."""
    lane = tl.arange(0, MOST)
    there = (lane < length) & (place - 1 - lane > 0) & (place != end)
    mine = tl.load(log + end - 1 - lane, mask=there, other=-1)
    other = tl.load(log + place - 1 - lane, mask=there, other=-2)
    return tl.min(tl.where(mine == other, MOST, lane))


@triton.jit
def _propose(
    rows,
    committed_lens,
    roots,
    max_nodes,
    starts,
    log,
    table,
    tokens,
    facts,
    mask,
    log_size,
    NODES: tl.constexpr,
    LANES: tl.constexpr,
    LONGEST: tl.constexpr,
    ORDER_BITS: tl.constexpr,
    MOST: tl.constexpr,
    BITS: tl.constexpr,
    STEP: tl.constexpr,
    LAST: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    request = tl.program_id(0)
    start = tl.load(starts + tl.load(rows + request))
    length = tl.load(committed_lens + request) + 1
    end = start + length
    key = tl.zeros([], tl.int64)
    best, source = tl.zeros([], tl.int32), tl.zeros([], tl.int64)
    for j in tl.static_range(LONGEST):
        token = tl.load(log + end - 1 - j, mask=j < length, other=0).to(tl.int64)
        key = mixed(key, token, BITS, STEP)
        if (ORDER_BITS >> (j + 1)) & 1:
            place = tl.load(table + entry_of(key, mask, LAST)).to(tl.int64)
            found = _matched(log, end, length, place, MOST)
            longer = (found > best) & (j < length)
            best, source = tl.where(longer, found, best), tl.where(longer, place, source)
    lane = tl.arange(0, LANES)
    # What followed in the text itself may reach its end: then it goes round.
    period = end - source
    own = (source >= start) & (period > 0)
    ahead = tl.where(own, lane % tl.where(own, period, 1), lane)
    most = tl.minimum(tl.load(max_nodes + request), NODES) - 1
    there = (best > 0) & (lane < most) & (source + ahead < log_size)
    token = tl.load(log + source + ahead, mask=there, other=-1)
    drafted = tl.min(tl.where(token >= 0, LANES, lane))
    to = tokens + request * NODES
    tl.store(to, tl.load(roots + request))
    drafts = tl.where(lane < drafted, token, 0).to(tl.int64)
    tl.store(to + 1 + lane, drafts, mask=lane < NODES - 1)
    tl.store(facts + request * 3, best)
    tl.store(facts + request * 3 + 1, drafted.to(tl.int32))


def propose(
    index: TokenIndex,
    rows: Tensor,
    committed: Tensor,
    roots: Tensor,
    max_nodes: Tensor,
    out: Chains,
) -> None:
    """Fill `out` but for the verified nodes. rows, committed, roots, max_nodes: [B] int64; the log
    holds each row's text up to its root, which stands at position `committed`."""
    batch, nodes = out.tokens.shape
    _propose[(batch,)](
        rows, committed, roots, max_nodes, index.starts, index.log, index.table, out.tokens,
        out.facts, index.table.shape[0] - 1, index.log.shape[0],
        NODES=nodes, LANES=max(triton.next_power_of_2(nodes), 2), LONGEST=LONGEST,
        ORDER_BITS=ORDER_BITS, MOST=MOST_MATCHED, BITS=BITS, STEP=STEP, LAST=LAST, num_warps=1,
        **chained(rows.device),
    )  # fmt: skip


# --- twins ----------------------------------------------------------------------------------------


def _matched_ref(log: list[int], end: int, length: int, place: int) -> int:
    if place == end:
        return 0
    for j in range(MOST_MATCHED):
        if j >= length or place - 1 - j <= 0 or log[end - 1 - j] != log[place - 1 - j]:
            return j
    return MOST_MATCHED


def propose_ref(
    index: TokenIndex,
    rows: Tensor,
    committed: Tensor,
    roots: Tensor,
    max_nodes: Tensor,
    out: Chains,
) -> None:
    """The twin of `propose`."""
    log, nodes = index.log.tolist(), out.tokens.shape[1]
    for i, row in enumerate(rows.tolist()):
        start, length = int(index.starts[row]), int(committed[i]) + 1
        end, best, source = start + length, 0, 0
        for entry in entries_of(index, end, length):
            place = int(index.table[entry])
            found = _matched_ref(log, end, length, place)
            if found > best:
                best, source = found, place
        drafts: list[int] = []
        most = min(int(max_nodes[i]), nodes) - 1
        while best and len(drafts) < most:
            ahead = len(drafts) % (end - source) if start <= source < end else len(drafts)
            if source + ahead >= len(log) or log[source + ahead] < 0:
                break
            drafts.append(log[source + ahead])
        out.tokens[i] = 0
        out.tokens[i, : 1 + len(drafts)] = torch.tensor([int(roots[i]), *drafts])
        out.facts[i, 0], out.facts[i, 1] = best, len(drafts)
