"""The n-gram trie of all texts of a server, and its operations in NumPy: what a CPU runs, and the
twin of `ngram`.

The log holds texts, each in a span of its own, as token + 1; 0 stands before and behind each. A
node of the trie is an n-gram. It is found by a hash, and its record is WAYS places of the log where
texts went on behind it: a new one replaces one of them. The
n-grams of OWN_ORDERS are entered twice, once for all texts and once for their own text alone. A
lookup compares what stands in the log, so a record that was overwritten, or is another n-gram's, is
a worse draft and nothing else.

    enter      adds the n-grams before places of the log
    propose    finds the ends of texts, and makes a tree of what followed there
    judge      counts which nodes of a tree were right
    keep       appends tokens to texts

A tree merges what followed at the PLACES best places: those with the longest match, then of the
same text, then the latest. A node's chance is looked up by match length, depth, rank among its
siblings and whether its place is of the same text; costs are negated logarithms in whole numbers,
so that both columns order nodes alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ORDERS = (1, 2, 3, 4, 6, 8)
"""Lengths of the n-grams that are entered for all texts."""
OWN_ORDERS = ORDERS[:2]
LONGEST = max(ORDERS)
GRAMS = len(ORDERS) + len(OWN_ORDERS)
WAYS = 8
PLACES = 8
MOST_MATCHED = 16
"""Tokens before a place that are compared; longer matches are not told apart."""
RANKS = 3
"""Ranks among siblings that are told apart; the last stands for all later ones."""
FIRST = MOST_MATCHED + 1
"""The first place of a log that a text may begin at."""
STEP = -7046029254386353131  # the golden ratio, in 64 bits: odd
INDEX_BITS = 9  # of a candidate's number: PLACES * 63 are below 512
BARRED = 1 << 20  # cost of a node that breadth forbids, above that of all paths

Ints = npt.NDArray[np.int64]
_POWERS = np.array([pow(STEP, i + 1, 2**64) for i in range(LONGEST + 1)], np.uint64).view(np.int64)
_BACK = np.arange(1, MOST_MATCHED + 1)
_ALL_ORDERS = np.array([*ORDERS, *OWN_ORDERS])
_EARLIER = np.tri(PLACES, k=-1, dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class TokenIndex:
    """log: [L] int32. table: [E] int32, WAYS places a record, 0: none; E is a power of two. starts:
    [R] int64 by table row, where a row's text begins in the log. tried, won: [MOST_MATCHED + 1,
    depths, RANKS, 2] int32, how often nodes were judged and how often right. costs: of the same
    shape, int32, from 1 to 2^14. breadth: [MOST_MATCHED + 1] int32, children of a node where the
    place matches so many tokens. longest: a match that is not told from longer ones. by_count:
    whether of equal matches the commoner continuation comes before that of the same text. hashing:
    [LONGEST + 1 + GRAMS] int64, factors of the hash, then the length of each n-gram."""

    log: Tensor
    table: Tensor
    starts: Tensor
    tried: Tensor
    won: Tensor
    costs: Tensor
    breadth: Tensor
    longest: int
    by_count: bool
    hashing: Tensor

    def clear(self) -> None:
        """Forget all texts, and what came of drafts."""
        for each in (self.log, self.table, self.tried, self.won):
            each.zero_()

    @property
    def nbytes(self) -> int:
        """Memory of the log and the table."""
        return self.log.nbytes + self.table.nbytes


def token_index(
    tokens: int,
    grams: int,
    rows: int,
    nodes: int,
    device: torch.device | str,
    *,
    longest: int = MOST_MATCHED,
    by_count: bool = False,
) -> TokenIndex:
    """An empty index: a log of so many tokens, at least `grams` entries, texts in `rows` table
    rows, trees of `nodes` nodes."""
    entries = 1 << max(grams - 1, WAYS).bit_length()
    shape = (MOST_MATCHED + 1, max(nodes - 1, 1), RANKS, 2)
    return TokenIndex(
        log=torch.zeros(tokens, dtype=torch.int32, device=device),
        table=torch.zeros(entries, dtype=torch.int32, device=device),
        starts=torch.full((rows,), FIRST, dtype=torch.int64, device=device),
        tried=torch.zeros(shape, dtype=torch.int32, device=device),
        won=torch.zeros(shape, dtype=torch.int32, device=device),
        costs=torch.ones(shape, dtype=torch.int32, device=device),
        breadth=torch.full((MOST_MATCHED + 1,), PLACES, dtype=torch.int32, device=device),
        longest=longest,
        by_count=by_count,
        hashing=torch.from_numpy(np.concatenate([_POWERS, _ALL_ORDERS])).to(device),
    )


@dataclass(frozen=True, slots=True)
class NgramDrafts:
    """Trees of B requests, N nodes at most, by rising cost, so that the first nodes of a tree are a
    tree. tokens, parents, depths, words: [B, N] int64, see `TokenTree` and `ArrayTree`. facts:
    [B, N] int32, what the path to each node costs, BARRED where there is none; in place of the
    root's the nodes to be verified. buckets: [B, N] int32, where a node's chance stands in
    `TokenIndex.costs`. drafted, num_nodes: [B] int64, nodes found, and nodes to be verified."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    words: Tensor
    facts: Tensor
    buckets: Tensor
    drafted: Tensor
    num_nodes: Tensor


def ngram_drafts(batch: int, nodes: int, device: torch.device | str) -> NgramDrafts:
    """Buffers."""
    long = [torch.zeros(batch, nodes, dtype=torch.int64, device=device) for _ in range(4)]
    short = [torch.zeros(batch, nodes, dtype=torch.int32, device=device) for _ in range(2)]
    ones = [torch.ones(batch, dtype=torch.int64, device=device) for _ in range(2)]
    return NgramDrafts(*long, *short, *ones)


def _records(index: TokenIndex, ends: Ints, own: Ints) -> Ints:
    """[M, GRAMS] first entry of the record of each n-gram that ends before `ends`, in the text that
    begins at `own`; both [M]."""
    tokens = index.log.numpy().take(ends[:, None] - _BACK[:LONGEST]).astype(np.int64)
    sums = (tokens * _POWERS[:LONGEST]).cumsum(axis=1).take(_ALL_ORDERS[: len(ORDERS)] - 1, axis=1)
    mine = sums[:, : len(OWN_ORDERS)] + (own * _POWERS[LONGEST])[:, None]
    hashed = np.concatenate([sums, mine], axis=1) >> 32
    records: Ints = (hashed & (len(index.table) // WAYS - 1)) * WAYS
    return records


def way_of(places: Ints) -> Ints:
    """The way of a record that each place takes: at random, so that no text's period meets one."""
    ways: Ints = places * STEP >> 40 & (WAYS - 1)
    return ways


def enter(index: TokenIndex, places: Tensor, starts: Tensor) -> None:
    """Add the n-grams before places of texts. places, starts: [M] int64, where each stands in the
    log and where its text begins; as many: nothing is entered. Of equal n-grams the last wins."""
    at, own = places.numpy(), starts.numpy()
    entries = _records(index, at, own) + way_of(at)[:, None]
    known = (at - own)[:, None] >= _ALL_ORDERS
    index.table.numpy()[entries[known]] = np.broadcast_to(at[:, None], known.shape)[known]


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
    """Append to the log what a round emitted, and say which places `enter` is to take.

    rows, committed: [B] int64, positions of the roots as the round began; `filler` is a row without
    a text. tokens: [B, N] int64, of
    which the first counts [B] int64 count. places, starts: [B * N] int64, filled.
    """
    width = tokens.shape[1]
    row = rows.numpy()[:, None]
    own = index.starts.numpy().take(row)
    at = own + 1 + committed.numpy()[:, None] + np.arange(width)
    live = (np.arange(width) < counts.numpy()[:, None]) & (row != filler)
    index.log.numpy()[at[live]] = tokens.numpy()[live] + 1
    places.numpy()[:] = at.reshape(-1)
    starts.numpy()[:] = np.where(live, own, at).reshape(-1)


@dataclass(frozen=True, slots=True)
class _Found:
    """[B, PLACES] the best places for each text's end, best first: where, tokens that match before
    it (0: there is none), whether it is of the text itself."""

    place: Ints
    matched: Ints
    own: npt.NDArray[np.bool_]


def propose(
    index: TokenIndex,
    rows: Tensor,
    committed: Tensor,
    roots: Tensor,
    max_nodes: Tensor,
    out: NgramDrafts,
) -> None:
    """Fill `out`. rows, committed, roots, max_nodes: [B] int64; the log holds each row's text up to
    its root, which stands at position `committed`."""
    starts = index.starts.numpy().take(rows.numpy())
    ends = starts + 1 + committed.numpy()
    found = _find(index, starts, ends)
    tokens = _following(index, ends, found, out.tokens.shape[1] - 1)
    _merge(index, found, tokens, roots.numpy(), max_nodes.numpy(), out)


def _find(index: TokenIndex, starts: Ints, ends: Ints) -> _Found:
    log, batch = index.log.numpy(), len(ends)
    entries = _records(index, ends, starts)[:, :, None] + np.arange(WAYS)
    known = (ends - starts)[:, None] >= _ALL_ORDERS
    places = (index.table.numpy().take(entries) * known[:, :, None]).reshape(batch, -1)
    places = np.where(places == ends[:, None], 0, places)  # of a text that stood here before
    mine = log.take(ends[:, None] - _BACK)
    same = np.zeros((*places.shape, MOST_MATCHED + 1), np.bool_)
    same[..., :-1] = log.take(places[:, :, None] - _BACK, mode="wrap") == mine[:, None]
    same[..., :-1] &= mine[:, None] > 0
    matched = np.minimum(same.argmin(axis=2), index.longest) * (places > 0)
    own = (places >= starts[:, None]) & (places < ends[:, None])
    order = matched
    if index.by_count:
        order = (matched << 7) + _counts(log.take(places), matched)
    age = len(log)
    key = (((order << 1) + own) << 32) + (places - ends[:, None]) % age
    key[matched == 0] = 0
    key.sort(axis=1)
    key[:, 1:][key[:, 1:] == key[:, :-1]] = 0
    key.sort(axis=1)
    key = key[:, : -PLACES - 1 : -1]
    matched = key >> (40 if index.by_count else 33)
    place = ((key & 0xFFFFFFFF) + ends[:, None]) % age
    return _Found(place, matched, (key >> 32 & 1) > 0)


def _counts(tokens: npt.NDArray[np.int32], matched: Ints) -> Ints:
    """[B, C] at how many of the places what follows is the same."""
    same = (tokens[:, :, None] == tokens[:, None]) & (matched > 0)[:, None]
    counts: Ints = same.sum(axis=2)
    return counts


def _following(index: TokenIndex, ends: Ints, found: _Found, steps: int) -> npt.NDArray[np.int32]:
    """[B, PLACES, steps] what stands at the places and behind, as token + 1; 0 from the end of a
    text on. A text that comes to its own end goes round."""
    log, ahead = index.log.numpy(), np.arange(steps)
    period = np.where(found.own, ends[:, None] - found.place, steps)
    at = found.place[:, :, None] + ahead % period[:, :, None]
    tokens = log.take(np.minimum(at, len(log) - 1)) * (found.matched > 0)[:, :, None]
    alive: npt.NDArray[np.int32] = tokens * np.minimum.accumulate(tokens > 0, axis=2)
    return alive


def _merge(
    index: TokenIndex,
    found: _Found,
    tokens: npt.NDArray[np.int32],
    roots: Ints,
    max_nodes: Ints,
    out: NgramDrafts,
) -> None:
    """Make trees of chains that start together. A node belongs to the first chain that has it."""
    batch, _, steps = tokens.shape
    step = np.arange(steps)
    size = (tokens > 0).sum(axis=2)
    same = np.zeros((batch, PLACES, PLACES, steps + 1), np.bool_)
    np.equal(tokens[:, :, None], tokens[:, None], out=same[..., :-1])
    shared = np.minimum(same.argmin(axis=3), size[:, None])  # leading tokens of every two chains
    owner = (shared[..., None] > step).argmax(axis=2)  # [B, PLACES, steps]
    begin = (shared * _EARLIER).max(axis=2)  # where a chain leaves those before it
    forks = (begin[:, None] <= begin[:, :, None]) & (begin[:, :, None] < size[:, None])
    forks &= _EARLIER & (shared >= begin[:, :, None])
    older = forks.sum(axis=2)[:, :, None] * (step == begin[:, :, None])  # siblings
    barred = older >= index.breadth.numpy().take(found.matched)[:, :, None]
    buckets = (found.matched[:, :, None] * steps + step) * RANKS + np.minimum(older, RANKS - 1)
    buckets = buckets * 2 + found.own[:, :, None]
    chain = np.arange(PLACES)[:, None]
    at = np.arange(0, batch * PLACES * steps, PLACES * steps)[:, None]
    owned = at[:, :, None] + owner * steps + step  # flat index of the node at each place of a chain
    cost = index.costs.numpy().reshape(-1).take(buckets) + barred * BARRED
    costs = cost.take(owned).cumsum(axis=2)
    none = (step < begin[:, :, None]) | (step >= size[:, :, None])
    key = (np.where(none, BARRED, np.minimum(costs, BARRED)) << INDEX_BITS) + chain * steps + step
    chosen = np.sort(key.reshape(batch, -1), axis=1)[:, :steps]
    taken = (chosen < BARRED << INDEX_BITS) & (step < (max_nodes - 1)[:, None])
    node = at + (chosen & ((1 << INDEX_BITS) - 1))
    place = np.zeros(batch * PLACES * steps, np.int64)
    place[node[taken]] = np.broadcast_to(step + 1, node.shape)[taken]
    lineage = place.take(owned)
    words = 1 + (1 << lineage).cumsum(axis=2)
    parents = np.zeros_like(lineage)
    parents[:, :, 1:] = lineage[:, :, :-1]

    drafts = (
        (out.tokens, tokens.astype(np.int64) - 1),
        (out.parents, parents),
        (out.depths, np.broadcast_to(step + 1, tokens.shape)),
        (out.words, words),
        (out.buckets, buckets),
    )
    for (into, values), root in zip(drafts, (roots, -1, 0, 1, 0), strict=True):
        into.numpy()[:, 0] = root
        into.numpy()[:, 1:] = values.reshape(-1).take(node) * taken
    count = 1 + taken.sum(axis=1)
    out.facts.numpy()[:, 0] = out.drafted.numpy()[:] = out.num_nodes.numpy()[:] = count
    out.facts.numpy()[:, 1:] = np.where(taken, chosen >> INDEX_BITS, BARRED)


def judge(
    index: TokenIndex,
    trees: NgramDrafts,
    rows: Tensor,
    tokens: Tensor,
    counts: Tensor,
    filler: int = -1,
) -> None:
    """Count the nodes whose parents were right, and those that were themselves, whether or not they
    were verified: what follows a text tells. rows, tokens, counts, filler: as of `keep`."""
    drafts, depths, words = trees.tokens.numpy(), trees.depths.numpy(), trees.words.numpy()
    node = np.arange(drafts.shape[1])
    known = (depths <= counts.numpy()[:, None]) & (node < trees.drafted.numpy()[:, None])
    known &= (node > 0) & (rows.numpy()[:, None] != filler)
    level = np.minimum(np.maximum(depths - 1, 0), tokens.shape[1] - 1)
    right = known & (np.take_along_axis(tokens.numpy(), level, axis=1) == drafts)
    wrong = ~(right << node).sum(axis=1, keepdims=True) & ~1
    tried = known & (words & ~(1 << node) & wrong == 0)
    buckets = trees.buckets.numpy()
    np.add.at(index.tried.numpy().reshape(-1), buckets[tried], 1)
    np.add.at(index.won.numpy().reshape(-1), buckets[tried & right], 1)
