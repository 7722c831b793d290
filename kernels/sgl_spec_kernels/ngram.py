"""N-gram drafts on the device: an index over all texts of a server, looked up and extended within
the round that uses it.

The log holds texts, each in one span, -1 behind its end. A table of a power of two of entries finds
them: for every text position p and every order k, the entry of the k tokens before p names p (its
place in the log), the latest text winning. A lookup compares what stands in the log, so an entry
that was overwritten, or is another n-gram's, is a worse draft and nothing else.

    learn      enters positions of the log
    keep       appends to the log what a round accepted
    propose    the longest match of each text's end, and what followed it: a chain
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
from sgl_spec_kernels.sample import Walked

ORDERS = (1, 2, 3, 4, 6, 8)
"""Lengths of the n-grams that are entered."""
MOST_MATCHED = 16
"""Tokens before a match that are compared; also the largest match length that is told apart."""
CUTOFFS = 64
"""Score thresholds among which `share_rows` chooses; a power of two."""

_LONGEST = max(ORDERS)
_ORDER_BITS = sum(1 << order for order in ORDERS)
_STEP, _LAST = 2654435761, 2246822519  # odd; times 31 bits they stay within 63
_BITS = (1 << 31) - 1
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
def _mixed(key, token, BITS: tl.constexpr, STEP: tl.constexpr):
    """The hash of an n-gram with one more token before it."""
    return (key * STEP + token + 1) & BITS


@triton.jit
def _entry(key, mask, LAST: tl.constexpr):
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
        key = _mixed(key, token, BITS, STEP)
        if (ORDER_BITS >> (j + 1)) & 1:
            tl.store(table + _entry(key, mask, LAST), place.to(tl.int32), mask=there)


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
        key = _mixed(key, token, BITS, STEP)
        if (ORDER_BITS >> (j + 1)) & 1:
            place = tl.load(table + _entry(key, mask, LAST)).to(tl.int64)
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


def learn(index: TokenIndex, places: Tensor, known: Tensor) -> None:
    """Enter positions of texts. places: [M] int64, where each stands in the log. known: [M] int64,
    tokens of its text before it; 0: not entered."""
    count = places.shape[0]
    assert places.is_contiguous(), "places must be contiguous"
    assert known.is_contiguous(), "known must be contiguous"
    _learn[(triton.cdiv(count, _BLOCK),)](
        places, known, index.log, index.table, count, index.table.shape[0] - 1,
        LONGEST=_LONGEST, ORDER_BITS=_ORDER_BITS, BITS=_BITS, STEP=_STEP, LAST=_LAST,
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
        NODES=nodes, LANES=max(triton.next_power_of_2(nodes), 2), LONGEST=_LONGEST,
        ORDER_BITS=_ORDER_BITS, MOST=MOST_MATCHED, BITS=_BITS, STEP=_STEP, LAST=_LAST, num_warps=1,
        **chained(rows.device),
    )  # fmt: skip


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


def _entries(index: TokenIndex, place: int, known: int) -> list[int]:
    """The table's entries for the n-grams before a place, by rising order."""
    key, found, mask = 0, [], index.table.shape[0] - 1
    for j in range(min(_LONGEST, known)):
        key = (key * _STEP + int(index.log[place - 1 - j]) + 1) & _BITS
        if j + 1 in ORDERS:
            found.append(((key * _LAST) >> 17) & mask)
    return found


def learn_ref(index: TokenIndex, places: Tensor, known: Tensor) -> None:
    """The twin of `learn`; of equal n-grams the last one wins."""
    for place, before in zip(places.tolist(), known.tolist(), strict=True):
        for entry in _entries(index, place, before):
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
        for entry in _entries(index, end, length):
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
