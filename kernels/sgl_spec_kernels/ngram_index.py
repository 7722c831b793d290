"""The index that n-gram drafts on the device come from, over all texts of a server.

The log holds texts, each in one span, -1 behind its end. A table of a power of two of entries finds
them: for every text position p and every order k, the entry of the k tokens before p names p (its
place in the log), the latest text winning. A lookup compares what stands in the log, so an entry
that was overwritten, or is another n-gram's, is a worse draft and nothing else.

    learn      enters positions of the log
    keep       appends to the log what a round accepted

`ngram_chains` looks up. The twins are at the foot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chain, chained
from sgl_spec_kernels.sample import Walked

ORDERS = (1, 2, 3, 4, 6, 8)
"""Lengths of the n-grams that are entered."""

LONGEST = max(ORDERS)
ORDER_BITS = sum(1 << order for order in ORDERS)
STEP, LAST = 2654435761, 2246822519  # odd; times 31 bits they stay within 63
BITS = (1 << 31) - 1
_BLOCK = 128


@dataclass(frozen=True, slots=True)
class TokenIndex:
    """log: [L] int32; place 0 is nobody's. table: [E] int32, places in the log, 0: none; E is a
    power of two. starts: [R] int64 by table row, where a row's text begins in the log."""

    log: Tensor
    table: Tensor
    starts: Tensor

    def clear(self) -> None:
        """Forget all texts."""
        self.log.fill_(-1)
        self.table.zero_()

    @property
    def nbytes(self) -> int:
        """Memory of the log and the table."""
        return self.log.nbytes + self.table.nbytes


def token_index(
    tokens: int, rows: int, device: torch.device | str, grams: int | None = None
) -> TokenIndex:
    """An empty index for a log of so many tokens, and texts in `rows` table rows. grams: entries
    that the table has at least, None for all n-grams of a full log."""
    entries: int = triton.next_power_of_2(grams or len(ORDERS) * tokens)
    log = torch.full((tokens,), -1, dtype=torch.int32, device=device)
    table = torch.zeros(entries, dtype=torch.int32, device=device)
    return TokenIndex(log, table, torch.ones(rows, dtype=torch.int64, device=device))


@triton.jit
def mixed(key, token, BITS: tl.constexpr, STEP: tl.constexpr):
    """The hash of an n-gram with one more token before it."""
    return (key * STEP + token + 1) & BITS


@triton.jit
def entry_of(key, mask, LAST: tl.constexpr):
    return ((key * LAST) >> 17) & mask


@triton.jit
def _learn(
    places,
    known,
    log,
    table,
    count,
    mask,
    LONGEST: tl.constexpr,
    ORDER_BITS: tl.constexpr,
    BITS: tl.constexpr,
    STEP: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + at, mask=at < count, other=0)
    before = tl.load(known + at, mask=at < count, other=0)
    key = tl.zeros([BLOCK], tl.int64)
    for j in tl.static_range(LONGEST):
        there = before > j
        token = tl.load(log + place - 1 - j, mask=there, other=0).to(tl.int64)
        key = mixed(key, token, BITS, STEP)
        if (ORDER_BITS >> (j + 1)) & 1:
            tl.store(table + entry_of(key, mask, LAST), place.to(tl.int32), mask=there)


@triton.jit
def _keep(
    rows,
    committed_lens,
    tokens,
    counts,
    starts,
    log,
    places,
    known,
    filler,
    NODES: tl.constexpr,
    LANES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    request = tl.program_id(0)
    row = tl.load(rows + request)
    lane = tl.arange(0, LANES)
    live = (lane < tl.load(counts + request)) & (row != filler)
    position = tl.load(committed_lens + request) + 1 + lane
    place = tl.load(starts + row) + position
    token = tl.load(tokens + request * NODES + lane, mask=live, other=0)
    tl.store(log + place, token.to(tl.int32), mask=live)
    to, inside = request * NODES + lane, lane < NODES
    tl.store(places + to, place, mask=inside)
    tl.store(known + to, tl.where(live, position, 0), mask=inside)


def learn(index: TokenIndex, places: Tensor, known: Tensor) -> None:
    """Enter positions of texts. places: [M] int64, where each stands in the log. known: [M] int64,
    tokens of its text before it; 0: not entered."""
    count = places.shape[0]
    assert places.is_contiguous(), "places must be contiguous"
    assert known.is_contiguous(), "known must be contiguous"
    _learn[(triton.cdiv(count, _BLOCK),)](
        places, known, index.log, index.table, count, index.table.shape[0] - 1,
        LONGEST=LONGEST, ORDER_BITS=ORDER_BITS, BITS=BITS, STEP=STEP, LAST=LAST,
        BLOCK=_BLOCK, num_warps=4, **chained(places.device),
    )  # fmt: skip


def keep(
    index: TokenIndex,
    rows: Tensor,
    committed: Tensor,
    out: Walked,
    filler: int,
    places: Tensor,
    known: Tensor,
) -> None:
    """Append to the log what a round accepted, and say which positions `learn` is to enter.

    rows, committed: [B] int64, as the round began; `filler` is a row without a text. out: of
    `sample`, N nodes. places, known: [B * N] int64, filled.
    """
    batch, nodes = out.tokens.shape
    assert places.shape == known.shape == (batch * nodes,)
    _keep[(batch,)](
        rows, committed, out.tokens, out.counts, index.starts, index.log, places, known, filler,
        NODES=nodes, LANES=max(triton.next_power_of_2(nodes), 2), num_warps=1,
        **chained(rows.device),
    )  # fmt: skip


# --- twins ----------------------------------------------------------------------------------------


def entries_of(index: TokenIndex, place: int, known: int) -> list[int]:
    """The table's entries for the n-grams before a place, by rising order."""
    key, found, mask = 0, [], index.table.shape[0] - 1
    for j in range(min(LONGEST, known)):
        key = (key * STEP + int(index.log[place - 1 - j]) + 1) & BITS
        if j + 1 in ORDERS:
            found.append(((key * LAST) >> 17) & mask)
    return found


def learn_ref(index: TokenIndex, places: Tensor, known: Tensor) -> None:
    """The twin of `learn`; of equal n-grams the last one wins."""
    for place, before in zip(places.tolist(), known.tolist(), strict=True):
        for entry in entries_of(index, place, before):
            index.table[entry] = place


def keep_ref(
    index: TokenIndex,
    rows: Tensor,
    committed: Tensor,
    out: Walked,
    filler: int,
    places: Tensor,
    known: Tensor,
) -> None:
    """The twin of `keep`."""
    nodes = out.tokens.shape[1]
    for i, (row, count) in enumerate(zip(rows.tolist(), out.counts.tolist(), strict=True)):
        position = committed[i] + 1 + torch.arange(nodes, device=rows.device)
        span, place = slice(i * nodes, (i + 1) * nodes), index.starts[row] + position
        used = torch.arange(nodes, device=rows.device) < (0 if row == filler else count)
        index.log[place[used]] = out.tokens[i][used].int()
        places[span], known[span] = place, torch.where(used, position, 0)
