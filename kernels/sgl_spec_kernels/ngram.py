"""The n-gram trie on a device: `enter`, `keep`, `judge` and `propose` of `ngram_ref`, which says
what they are and is their twin. `ngram_rows` verifies the trees.

No round waits for the host: all of it lies within the round that uses it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chain, chained
from sgl_spec_kernels.ngram_ref import (
    BARRED,
    GRAMS,
    INDEX_BITS,
    LONGEST,
    MOST_MATCHED,
    ORDERS,
    PLACES,
    RANKS,
    STEP,
    WAYS,
    NgramDrafts,
    TokenIndex,
)

_BLOCK = 32


@triton.jit
def _records(
    log,
    hashing,
    ends,
    own,
    mask,
    GRAMS: tl.constexpr,
    SHARED: tl.constexpr,
    LONGEST: tl.constexpr,
    WAYS: tl.constexpr,
):
    """[M, GRAMS] first entry of the record of each n-gram that ends before `ends` [M]."""
    lane, gram = tl.arange(0, LONGEST), tl.arange(0, GRAMS)
    token = tl.load(log + ends[:, None] - 1 - lane[None, :]).to(tl.int64)
    value = token * tl.load(hashing + lane)[None, :]
    order = tl.load(hashing + LONGEST + 1 + gram)
    part = tl.where(lane[None, None, :] < order[None, :, None], value[:, None, :], 0)
    mine = own * tl.load(hashing + LONGEST)
    sums = tl.sum(part, 2) + tl.where(gram[None, :] >= SHARED, mine[:, None], 0)
    return ((sums >> 32) & mask) * WAYS


@triton.jit
def _enter(
    places,
    starts,
    log,
    table,
    hashing,
    count,
    mask,
    GRAMS: tl.constexpr,
    SHARED: tl.constexpr,
    LONGEST: tl.constexpr,
    WAYS: tl.constexpr,
    STEP: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + at, mask=at < count, other=FIRST)
    own = tl.load(starts + at, mask=at < count, other=FIRST)
    record = _records(log, hashing, place, own, mask, GRAMS, SHARED, LONGEST, WAYS)
    order = tl.load(hashing + LONGEST + 1 + tl.arange(0, GRAMS))
    way = (place * STEP >> 40) & (WAYS - 1)
    entry = record + way[:, None]
    what = tl.broadcast_to(place[:, None], (BLOCK, GRAMS)).to(tl.int32)
    tl.store(table + entry, what, mask=(place - own)[:, None] >= order[None, :])


def enter(index: TokenIndex, places: Tensor, starts: Tensor) -> None:
    """See `ngram_ref.enter`; of equal n-grams of one call any may win."""
    count = places.shape[0]
    assert places.is_contiguous(), "places must be contiguous"
    assert starts.is_contiguous(), "starts must be contiguous"
    _enter[(triton.cdiv(count, _BLOCK),)](
        places, starts, index.log, index.table, index.hashing, count, _records_mask(index),
        GRAMS=GRAMS, SHARED=len(ORDERS), LONGEST=LONGEST, WAYS=WAYS, STEP=STEP,
        FIRST=MOST_MATCHED + 1, BLOCK=_BLOCK, num_warps=4, **chained(places.device),
    )  # fmt: skip


def _records_mask(index: TokenIndex) -> int:
    return index.table.shape[0] // WAYS - 1


@triton.jit
def _keep(
    rows,
    committed_lens,
    tokens,
    counts,
    row_starts,
    log,
    places,
    starts,
    width,
    filler,
    LANES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    request = tl.program_id(0)
    row = tl.load(rows + request)
    lane = tl.arange(0, LANES)
    live = (lane < tl.load(counts + request)) & (row != filler) & (lane < width)
    own = tl.load(row_starts + row)
    place = own + 1 + tl.load(committed_lens + request) + lane
    token = tl.load(tokens + request * width + lane, mask=live, other=0)
    tl.store(log + place, (token + 1).to(tl.int32), mask=live)
    to, inside = request * width + lane, lane < width
    tl.store(places + to, place, mask=inside)
    tl.store(starts + to, tl.where(live, own, place), mask=inside)


def keep(
    index: TokenIndex,
    rows: Tensor,
    committed: Tensor,
    tokens: Tensor,
    counts: Tensor,
    places: Tensor,
    starts: Tensor,
    filler: int = -1,
) -> None:
    """See `ngram_ref.keep`."""
    batch, width = tokens.shape
    assert tokens.is_contiguous(), "tokens must be contiguous"
    assert places.shape == starts.shape == (batch * width,)
    _keep[(batch,)](
        rows, committed, tokens, counts, index.starts, index.log, places, starts, width, filler,
        LANES=max(triton.next_power_of_2(width), 2), num_warps=1, **chained(rows.device),
    )  # fmt: skip


@triton.jit
def _judge(
    rows,
    drafts,
    depths,
    words,
    buckets,
    drafted,
    tokens,
    counts,
    tried_counts,
    won_counts,
    width,
    filler,
    NODES: tl.constexpr,
    LANES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    request = tl.program_id(0)
    lane = tl.arange(0, LANES)
    emitted = tl.load(counts + request)
    there = (lane > 0) & (lane < tl.load(drafted + request)) & (tl.load(rows + request) != filler)
    at = request * NODES + lane
    depth = tl.load(depths + at, mask=there, other=0)
    known = there & (depth <= emitted)
    token = tl.load(tokens + request * width + depth - 1, mask=known, other=-1)
    right = known & (token == tl.load(drafts + at, mask=known, other=-2))
    own = tl.full([LANES], 1, tl.int64) << lane.to(tl.int64)
    wrong = ~tl.sum(tl.where(right, own, 0)) & ~1
    tried = known & ((tl.load(words + at, mask=known, other=0) & ~own & wrong) == 0)
    bucket = tl.load(buckets + at, mask=known, other=0)
    tl.atomic_add(tried_counts + bucket, 1, mask=tried)
    tl.atomic_add(won_counts + bucket, 1, mask=tried & right)


def judge(
    index: TokenIndex,
    trees: NgramDrafts,
    rows: Tensor,
    tokens: Tensor,
    counts: Tensor,
    filler: int = -1,
) -> None:
    """See `ngram_ref.judge`."""
    batch, nodes = trees.tokens.shape
    assert tokens.is_contiguous(), "tokens must be contiguous"
    _judge[(batch,)](
        rows, trees.tokens, trees.depths, trees.words, trees.buckets, trees.drafted, tokens, counts,
        index.tried, index.won, tokens.shape[1], filler,
        NODES=nodes, LANES=max(triton.next_power_of_2(nodes), 2), num_warps=1,
        **chained(rows.device),
    )  # fmt: skip


# --- trees ----------------------------------------------------------------------------------------


@triton.jit
def _best_places(
    log,
    table,
    hashing,
    start,
    end,
    log_size,
    mask,
    longest,
    GRAMS: tl.constexpr,
    SHARED: tl.constexpr,
    LONGEST: tl.constexpr,
    WAYS: tl.constexpr,
    PLACES: tl.constexpr,
    MOST: tl.constexpr,
    BY_COUNT: tl.constexpr,
):
    """([PLACES] where, tokens that match, whether of the text itself) of the best places."""
    ends = tl.zeros([1], tl.int64) + end
    record = _records(
        log, hashing, ends, tl.zeros([1], tl.int64) + start, mask, GRAMS, SHARED, LONGEST, WAYS
    )
    entry = tl.reshape(record, (GRAMS, 1)) + tl.arange(0, WAYS)[None, :]
    order = tl.load(hashing + LONGEST + 1 + tl.arange(0, GRAMS))
    known = tl.broadcast_to((order <= end - start)[:, None], (GRAMS, WAYS))
    found = tl.load(table + entry, mask=known, other=0)
    place = tl.reshape(found, (GRAMS * WAYS,)).to(tl.int64)
    place = tl.where(place == end, 0, place)  # of a text that stood here before
    lane = tl.arange(0, MOST)
    mine = tl.load(log + end - 1 - lane)
    there = (place > 0)[:, None]
    other = tl.load(log + place[:, None] - 1 - lane[None, :], mask=there, other=0)
    same = (other == mine[None, :]) & (mine > 0)[None, :] & there
    matched = tl.minimum(tl.min(tl.where(same, MOST, lane[None, :]), 1), longest).to(tl.int64)
    own = (place >= start) & (place < end)
    worth = matched
    if BY_COUNT:
        token = tl.load(log + place)
        again = tl.where(matched > 0, token, -1)
        same = token[:, None] == again[None, :]
        worth = matched * 128 + tl.sum(same.to(tl.int32), 1)
    key = ((worth * 2 + own.to(tl.int64)) << 32) + (place - end + log_size) % log_size
    key = tl.where(matched > 0, key, 0)
    slot = tl.arange(0, PLACES)
    best = tl.zeros([PLACES], tl.int64)
    for i in tl.static_range(PLACES):
        most = tl.max(key)
        best = tl.where(slot == i, most, best)
        key = tl.where(key == most, 0, key)
    where = ((best & 0xFFFFFFFF) + end) % log_size
    return where, (best >> (40 if BY_COUNT else 33)).to(tl.int32), (best >> 32 & 1) > 0


@triton.jit
def _propose(
    rows,
    committed_lens,
    roots,
    max_nodes,
    row_starts,
    log,
    table,
    hashing,
    prices,
    breadth,
    tokens,
    parents,
    depths,
    words,
    facts,
    buckets,
    drafted,
    num_nodes,
    log_size,
    mask,
    longest,
    NODES: tl.constexpr,
    LANES: tl.constexpr,
    GRAMS: tl.constexpr,
    SHARED: tl.constexpr,
    LONGEST: tl.constexpr,
    WAYS: tl.constexpr,
    PLACES: tl.constexpr,
    MOST: tl.constexpr,
    RANKS: tl.constexpr,
    BARRED: tl.constexpr,
    INDEX_BITS: tl.constexpr,
    BY_COUNT: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    request = tl.program_id(0)
    start = tl.load(row_starts + tl.load(rows + request))
    end = start + 1 + tl.load(committed_lens + request)
    where, matched, own = _best_places(
        log, table, hashing, start, end, log_size, mask, longest,
        GRAMS, SHARED, LONGEST, WAYS, PLACES, MOST, BY_COUNT,
    )  # fmt: skip
    steps: tl.constexpr = NODES - 1
    c, s = tl.arange(0, PLACES), tl.arange(0, LANES)

    # What followed: [PLACES, LANES], 0 from the end of a text on. One's own end is gone round.
    period = tl.where(own, end - where, steps)
    ahead = where[:, None] + s[None, :] % period[:, None]
    there = (s < steps)[None, :] & (matched > 0)[:, None]
    token = tl.load(log + tl.minimum(ahead, log_size - 1), mask=there, other=0)
    size = tl.min(tl.where(token > 0, LANES, s[None, :]), 1)

    # A node belongs to the first chain that has it.
    again = tl.where((s[None, :] < size[:, None]), token, 0)
    same = again[:, None, :] == again[None, :, :]
    shared = tl.min(tl.where(same, LANES, s[None, None, :]), 2)
    shared = tl.minimum(shared, size[:, None])
    earlier = c[None, :] < c[:, None]
    begin = tl.max(tl.where(earlier, shared, 0), 1)
    forks = earlier & (begin[None, :] <= begin[:, None]) & (begin[:, None] < size[None, :])
    older = tl.sum((forks & (shared >= begin[:, None])).to(tl.int32), 1)
    mine = shared[:, :, None] > s[None, None, :]
    owner = tl.min(tl.where(mine, c[None, :, None], PLACES), 1)
    before = shared[:, :, None] >= s[None, None, :]
    owner_before = tl.min(tl.where(before, c[None, :, None], PLACES), 1)

    forked = s[None, :] == begin[:, None]
    rank = tl.where(forked, tl.minimum(older, RANKS - 1)[:, None], 0)
    bucket = ((matched[:, None] * steps + s[None, :]) * RANKS + rank) * 2 + own[:, None]
    inside = (s < steps)[None, :]
    price = tl.load(prices + bucket, mask=inside, other=0)
    barred = (older >= tl.load(breadth + matched))[:, None] & forked
    price += tl.where(barred, BARRED, 0)
    owned = owner[:, None, :] == c[None, :, None]
    cost = tl.cumsum(tl.sum(tl.where(owned, price[None, :, :], 0), 1), 1)

    node = (s[None, :] >= begin[:, None]) & (s[None, :] < size[:, None])
    number = c[:, None] * steps + s[None, :]
    none: tl.constexpr = BARRED << INDEX_BITS
    key = tl.where(node, (tl.minimum(cost, BARRED) << INDEX_BITS) + number, none)
    most = tl.minimum(tl.load(max_nodes + request), NODES) - 1
    place = tl.zeros([PLACES, LANES], tl.int32)
    above = tl.zeros([PLACES, LANES], tl.int32)
    count = tl.zeros([], tl.int32)
    for i in range(steps):
        best = tl.min(key)
        taken = (best < none) & (i < most)
        chosen = best & ((1 << INDEX_BITS) - 1)
        place = tl.where(taken & (key == best), i + 1, place)
        above = tl.where(taken & (number == chosen + 1) & (s > 0)[None, :], i + 1, above)
        key = tl.where(key == best, none, key)
        count += taken.to(tl.int32)

    lineage = tl.sum(tl.where(owned, place[None, :, :], 0), 1).to(tl.int64)
    bits = tl.full([PLACES, LANES], 1, tl.int64) << lineage
    word = tl.cumsum(bits, 1) + 1
    owned_before = owner_before[:, None, :] == c[None, :, None]
    parent = tl.sum(tl.where(owned_before, above[None, :, :], 0), 1)
    taken = place > 0
    to = request * NODES + place
    tl.store(tokens + to, (token - 1).to(tl.int64), mask=taken)
    tl.store(parents + to, parent.to(tl.int64), mask=taken)
    tl.store(depths + to, tl.broadcast_to((s + 1)[None, :], (PLACES, LANES)).to(tl.int64), taken)
    tl.store(words + to, word, mask=taken)
    tl.store(facts + to, cost, mask=taken)
    tl.store(buckets + to, bucket, mask=taken)

    lane = tl.arange(0, 2 * LANES)
    to, root = request * NODES + lane, lane == 0
    rest = ((lane > count) | root) & (lane < NODES)
    tl.store(tokens + to, tl.where(root, tl.load(roots + request), 0), mask=rest)
    tl.store(parents + to, tl.where(root, -1, 0).to(tl.int64), mask=rest)
    tl.store(depths + to, tl.zeros([2 * LANES], tl.int64), mask=rest)
    tl.store(words + to, tl.where(root, 1, 0).to(tl.int64), mask=rest)
    tl.store(facts + to, tl.where(root, count + 1, BARRED), mask=rest)
    tl.store(buckets + to, tl.zeros([2 * LANES], tl.int32), mask=rest)
    tl.store(drafted + request, (count + 1).to(tl.int64))
    tl.store(num_nodes + request, (count + 1).to(tl.int64))


def propose(
    index: TokenIndex,
    rows: Tensor,
    committed: Tensor,
    roots: Tensor,
    max_nodes: Tensor,
    out: NgramDrafts,
) -> None:
    """See `ngram_ref.propose`."""
    batch, nodes = out.tokens.shape
    assert index.costs.shape[1] == nodes - 1, "costs are those of trees of this size"
    _propose[(batch,)](
        rows, committed, roots, max_nodes, index.starts, index.log, index.table, index.hashing,
        index.costs, index.breadth, out.tokens, out.parents, out.depths, out.words, out.facts,
        out.buckets, out.drafted, out.num_nodes, index.log.shape[0], _records_mask(index),
        index.longest,
        NODES=nodes, LANES=triton.next_power_of_2(nodes - 1), GRAMS=GRAMS, SHARED=len(ORDERS),
        LONGEST=LONGEST, WAYS=WAYS, PLACES=PLACES, MOST=MOST_MATCHED, RANKS=RANKS, BARRED=BARRED,
        INDEX_BITS=INDEX_BITS, BY_COUNT=index.by_count, num_warps=4, **chained(rows.device),
    )  # fmt: skip
