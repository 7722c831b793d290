"""A bounded n-gram trie over many token streams, in flat NumPy arrays.

A node is an n-gram of 1 .. depth tokens that occurred in some stream; its parent is the n-gram
without its last token. Nodes are found by the 64-bit rolling hash of their n-gram instead of by
(parent, token), so every n-gram of a round is looked up and entered in one pass whatever its
length. Two n-grams share a
node only if their hashes are equal: about n^2 / 2^65 for n nodes (3e-6 at 10 million), and then a
draft may be wrong, nothing else.

A node remembers where in the token log its n-gram last ended, so what followed an n-gram can be
read off as far as its stream went, beyond the depth of the trie.

Memory per node: 32 bytes of record, 22 of index, at most 4 of child lists and 2 of log: 60.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sgl_spec.errors import ConfigError
from sgl_spec.speculative.ngram_hash import Hashes, RollingHash, index_keys
from sgl_spec.speculative.ngram_index import HashIndex
from sgl_spec.speculative.ngram_log import CLOCK_LIMIT, TokenLog, last_of
from sgl_spec.speculative.ngram_nodes import COUNT, LAST, LISTED, PLACES, TOKEN, NodeStore

__all__ = ["LISTED", "MAX_DEPTH", "MIN_CAPACITY", "PLACES", "NgramTrie", "Piece"]

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]

MAX_DEPTH = 64
MIN_CAPACITY = 1024
MAX_CAPACITY = 2**30 - 1


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of one or more streams, for `NgramTrie.insert`.

    windows: [T, depth] int32, the new tokens in order, each with the tokens before it, newest
    first.
    known: [T] how many entries of each window are real tokens of the stream (1 .. depth).
    starts: [S] indices of the rows that begin a stream's part, ascending from 0.
    tails: [S] log position of the stream's token before its part, 0 if it has none.
    before: [S, depth - 1] nodes of the 1, 2, ... tokens before each part, 0 where there is none, as
    looked up since the last insertion; a row that starts with -1, or None for all, is looked up.
    """

    windows: Ints32
    known: Ints
    starts: Ints
    tails: Ints
    before: Ints | None = None


class NgramTrie:
    """The trie. Not thread-safe; no stream of tokens makes it raise."""

    def __init__(
        self, depth: int, capacity: int, *, rank_by_count: bool = False, seed: int | None = None
    ) -> None:
        """depth: tokens of the longest n-gram. capacity: most nodes. rank_by_count: which children
        a
        node lists when it has more than LISTED: the most frequent, or (default) the most recent.
        seed: fixes the hash function, which is otherwise secret."""
        if not 2 <= depth <= MAX_DEPTH:
            raise ConfigError(f"the n-gram trie depth must be 2 to {MAX_DEPTH}, got {depth}")
        if not MIN_CAPACITY <= capacity <= MAX_CAPACITY:
            raise ConfigError(
                f"the n-gram trie capacity must be {MIN_CAPACITY} to {MAX_CAPACITY} nodes, "
                f"got {capacity}"
            )
        self.depth = depth
        self.capacity = capacity
        self.hash = RollingHash(seed)
        self._rank = COUNT if rank_by_count else LAST
        self.clear()

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        self.nodes = NodeStore(self.capacity, self._rank, self._evicted)
        self._index = HashIndex(self.capacity, self.nodes.placed)
        self.log = TokenLog(1 << max(12, (self.capacity // 8).bit_length() - 1))

    def _evicted(self, slots: Ints) -> None:
        self._index.remove(slots)

    @property
    def num_nodes(self) -> int:
        """Nodes in the trie, the empty n-gram not counted."""
        return self._index.used

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays in use."""
        return self._index.num_bytes + self.nodes.num_bytes + self.log.num_bytes

    def find(self, raw: Hashes) -> Ints:
        """Node of each raw hash, 0 where its n-gram is not in the trie."""
        return self._index.get(index_keys(raw.reshape(-1))).reshape(raw.shape)

    def counts(self, ids: Ints) -> Ints32:
        """Occurrences of each node's n-gram."""
        return self.nodes.column(ids, COUNT)

    def tokens(self, ids: Ints) -> Ints32:
        """Last token of each node's n-gram."""
        return self.nodes.column(ids, TOKEN)

    def last(self, ids: Ints) -> Ints32:
        """Log position where each node's n-gram last ended; later is larger."""
        return self.nodes.column(ids, LAST)

    def insert(self, piece: Piece) -> Ints:
        """Count every n-gram of 1 .. depth tokens that ends at a new token, once.

        Returns [S] log positions of the last token of each stream's part. Takes time in proportion
        to T * depth: give long texts in slices.
        """
        step = min(max(1, self.capacity // (4 * self.depth)), self.log.size // 2)
        if piece.windows.shape[0] <= step:
            return self._insert(piece)
        tails = piece.tails.copy()
        for begin in range(0, piece.windows.shape[0], step):
            part, streams = _cut(replace(piece, tails=tails, before=None), begin, begin + step)
            tails[streams] = self._insert(part)
        return tails

    def _insert(self, piece: Piece) -> Ints:
        total = piece.windows.shape[0]
        evicted = self.nodes.evicted
        free = self.nodes.reserve(total * self.depth)
        self._index.grow(total * self.depth)
        if self.log.clock + total >= CLOCK_LIMIT:
            self.nodes.set_back(self.log.set_back())
        at = self.log.append(piece.windows[:, 0], piece.starts, piece.tails)
        hashed = self.hash.tokens(piece.windows)
        raw = self.hash.suffixes(hashed)
        before = self._before(
            piece.before if self.nodes.evicted == evicted else None,
            raw[piece.starts],
            hashed[piece.starts, 0],
        )
        known = _with_parents(piece, before)
        entries = np.flatnonzero(np.arange(self.depth) < known[:, None])  # (token, length) pairs
        row = entries // self.depth
        length = entries - row * self.depth + 1
        keys = index_keys(raw.reshape(-1).take(entries))
        ids = self._index.get(keys)
        missing = np.flatnonzero(ids == 0)
        ids[missing], new = self._index.add(keys.take(missing), free)
        fresh = missing.take(new)  # one entry per new node
        self.nodes.take(fresh.size)
        parents = _parents(piece, entries, ids, before)
        if not ids.all():
            ids[missing] = self._index.get(keys.take(missing))
            parents = self._without_orphans(piece, entries, ids, before)
            fresh = fresh[ids.take(fresh) > 0]
        tokens = piece.windows[:, 0].take(row.take(fresh))
        born = self.nodes.create(ids.take(fresh), parents.take(fresh), tokens, length.take(fresh))
        unlisted = self.nodes.touch(ids, at.take(row))
        unlisted[missing] = False
        self.nodes.list_children(np.concatenate([born, np.unique(ids[unlisted])]))
        return at[last_of(piece.starts, total)]

    def _before(self, given: Ints | None, raw: Hashes, newest: Hashes) -> Ints:
        """`Piece.before` with what it leaves open. raw: [S, depth] hashes of the n-grams that end
        at each part's first token. newest: [S] that token's own."""
        if given is None:
            return self.find(self.hash.prefixes(raw, newest))
        open_rows = np.flatnonzero(given[:, 0] < 0)
        if open_rows.size:
            given[open_rows] = self.find(self.hash.prefixes(raw[open_rows], newest[open_rows]))
        return given

    def _without_orphans(self, piece: Piece, entries: Ints, ids: Ints, before: Ints) -> Ints:
        """Take back new nodes (ids set to 0 in place) whose parent found no room in the index.

        Happens about never: both buckets of an n-gram full and none of their 16 entries able to
        move.
        """
        longer = entries % self.depth > 0
        while True:
            parents = _parents(piece, entries, ids, before)
            orphans = longer & (ids > 0) & (parents == 0)
            if not orphans.any():
                return parents
            gone = np.unique(ids[orphans])
            self._index.remove(self.nodes.slots(gone))
            self.nodes.give_back(gone)
            ids[orphans] = 0


def _parents(piece: Piece, entries: Ints, ids: Ints, before: Ints) -> Ints:
    """[m] parent of the node of each (token, length) entry, 0 for length 1."""
    grid = np.zeros(piece.windows.shape, np.int64)
    grid.reshape(-1)[entries] = ids
    parents = np.zeros_like(grid)
    parents[1:, 1:] = grid[:-1, :-1]
    parents[piece.starts, 1:] = before
    return parents.reshape(-1).take(entries)


def _cut(piece: Piece, begin: int, end: int) -> tuple[Piece, Ints]:
    """Rows begin .. end - 1 of a piece, and which of its streams they belong to."""
    end = min(end, piece.windows.shape[0])
    first = int(np.searchsorted(piece.starts, begin, side="right")) - 1
    streams = np.arange(first, int(np.searchsorted(piece.starts, end)))
    part = Piece(
        windows=piece.windows[begin:end],
        known=piece.known[begin:end],
        starts=np.maximum(piece.starts[streams] - begin, 0),
        tails=piece.tails[streams],
    )
    return part, streams


def _with_parents(piece: Piece, before: Ints) -> Ints:
    """[T] lengths up to which every n-gram's parent is, or will be, in the trie.

    before: [S, depth - 1] nodes of 1 .. depth - 1 tokens that end just before each stream's part.
    Where one is missing (evicted since) the longer n-grams that run through it are left out.
    """
    if before.all():
        return piece.known
    present = 1 + np.cumprod(before != 0, axis=1).sum(axis=1)
    lengths = np.diff(piece.starts, append=piece.windows.shape[0])
    offset = np.arange(piece.known.size) - np.repeat(piece.starts, lengths)
    known: Ints = np.minimum(piece.known, np.repeat(present, lengths) + offset)
    return known
