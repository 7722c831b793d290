"""The n-gram trie against a dictionary, and its invariants when it must forget."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_spec.errors import ConfigError
from sgl_spec.speculative.ngram_hash import RollingHash
from sgl_spec.speculative.ngram_index import HashIndex
from sgl_spec.speculative.ngram_log import CLOCK_LIMIT
from sgl_spec.speculative.ngram_nodes import BLOCK, LISTED, PARENT, NodeStore
from sgl_spec.speculative.trie import NgramTrie, Piece

Ints = npt.NDArray[np.int64]
Gram = tuple[int, ...]


def piece(trie: NgramTrie, parts: list[tuple[list[int], int, int]]) -> Piece:
    """Parts of streams: (text, number of its tokens given before, log position of the last)."""
    windows, known, starts, tails = [], [], [], []
    for text, done, tail in parts:
        starts.append(len(windows))
        tails.append(tail)
        for end in range(done, len(text)):
            window = text[max(0, end - trie.depth + 1) : end + 1][::-1]
            known.append(len(window))
            windows.append(window + [0] * (trie.depth - len(window)))
    return Piece(
        np.array(windows, np.int32).reshape(-1, trie.depth),
        np.array(known, np.int64),
        np.array(starts, np.int64),
        np.array(tails, np.int64),
    )


class Streams:
    """Texts that grow by turns, beside the dictionary that counts their n-grams."""

    def __init__(self, trie: NgramTrie, count: int) -> None:
        self.trie = trie
        self.texts: list[list[int]] = [[] for _ in range(count)]
        self.counts: Counter[Gram] = Counter()
        self._tails = [0] * count

    def grow(self, gains: dict[int, list[int]]) -> None:
        """One insertion: tokens gained by some of the streams."""
        parts = []
        for stream, tokens in gains.items():
            text = self.texts[stream]
            done = len(text)
            text += tokens
            parts.append((text, done, self._tails[stream]))
            for end in range(done + 1, len(text) + 1):
                for start in range(max(0, end - self.trie.depth), end):
                    self.counts[tuple(text[start:end])] += 1
        tails = self.trie.insert(piece(self.trie, parts))
        for stream, tail in zip(gains, tails.tolist(), strict=True):
            self._tails[stream] = tail


def node(trie: NgramTrie, gram: Gram) -> int:
    """The node of an n-gram, 0 if the trie does not have it."""
    hashed = trie.hash.tokens(np.array([gram[::-1]], np.int32))
    return int(trie.find(trie.hash.suffixes(hashed))[0, -1])


def children(trie: NgramTrie, of: int) -> set[int]:
    """Tokens of a node's listed children."""
    kids = trie.nodes.children(np.array([of]))
    return set(trie.tokens(kids[kids > 0]).tolist())


gains = st.lists(
    st.dictionaries(
        st.integers(0, 2), st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(rounds=gains, depth=st.integers(2, 6))
def test_counts_and_children_equal_a_dictionary(
    rounds: list[dict[int, list[int]]], depth: int
) -> None:
    """Incremental insertion counts each occurrence of each n-gram once, wherever rounds cut."""
    trie = NgramTrie(depth, 4096, seed=1)
    streams = Streams(trie, 3)
    for round_gains in rounds:
        streams.grow(round_gains)
    assert trie.num_nodes == len(streams.counts)
    following: dict[Gram, set[int]] = {}
    for gram in streams.counts:
        following.setdefault(gram[:-1], set()).add(gram[-1])
    for gram, count in streams.counts.items():
        found = node(trie, gram)
        assert found > 0
        assert trie.counts(np.array([found])).tolist() == [count]
        assert trie.tokens(np.array([found])).tolist() == [gram[-1]]
        expected = following.get(gram, set())
        assert trie.nodes.num_children(np.array([found])).tolist() == [len(expected)]
        assert children(trie, found) == expected
        parent = int(trie.nodes.column(np.array([found]), PARENT)[0])
        assert parent == (node(trie, gram[:-1]) if len(gram) > 1 else 0)


@settings(max_examples=20, deadline=None)
@given(rounds=gains)
def test_the_log_leads_on_from_the_last_occurrence(rounds: list[dict[int, list[int]]]) -> None:
    trie = NgramTrie(4, 4096, seed=1)
    streams = Streams(trie, 3)
    last: dict[Gram, tuple[int, int]] = {}
    for round_gains in rounds:
        before = {stream: len(streams.texts[stream]) for stream in round_gains}
        streams.grow(round_gains)
        for stream, done in before.items():
            text = streams.texts[stream]
            for end in range(done + 1, len(text) + 1):
                for start in range(max(0, end - 4), end):
                    last[tuple(text[start:end])] = (stream, end)
    for gram, (stream, end) in last.items():
        at = trie.last(np.array([node(trie, gram)])).astype(np.int64)
        tokens, found = trie.log.follow(at, 5)
        later = streams.texts[stream][end : end + 5]
        assert tokens[0, : len(later)].tolist() == later
        assert (found[0] > 0).tolist() == [True] * len(later) + [False] * (5 - len(later))


def test_a_long_piece_is_counted_as_its_slices() -> None:
    """`insert` cuts what exceeds a quarter of the capacity; the cut must not show."""
    text = np.random.default_rng(0).integers(0, 4, 400).tolist()
    whole, sliced = NgramTrie(3, 1024, seed=1), NgramTrie(3, 1024, seed=1)
    whole.insert(piece(whole, [(text, 0, 0)]))
    tail = 0
    for done in range(0, 400, 16):
        part = piece(sliced, [(text[: done + 16], done, tail)])
        tail = int(sliced.insert(part)[0])
    ids = sliced.nodes.all_ids()
    assert whole.num_nodes == sliced.num_nodes == ids.size
    assert whole.counts(whole.nodes.all_ids()).sum() == sliced.counts(ids).sum()


@pytest.mark.parametrize("by_count", [False, True])
def test_a_full_list_keeps_the_best_children(by_count: bool) -> None:
    """With more children than places, in one pass and over passes, the list keeps the last used or
    the most frequent ones."""
    trie = NgramTrie(2, 4096, rank_by_count=by_count, seed=1)
    streams = Streams(trie, 1)
    rng = np.random.default_rng(3)
    for _ in range(60):
        follow = np.minimum(rng.zipf(1.3, 20), 60)
        streams.grow({0: [token for other in follow.tolist() for token in (0, other)]})
    kids = {
        gram[1]: count for gram, count in streams.counts.items() if len(gram) == 2 and not gram[0]
    }
    assert len(kids) > 2 * LISTED
    listed = children(trie, node(trie, (0,)))
    ids = {kid: node(trie, (0, kid)) for kid in kids}
    worth = kids
    if not by_count:
        worth = {kid: int(trie.last(np.array([id_]))[0]) for kid, id_ in ids.items()}
    assert len(listed) == LISTED
    # The place in the record goes to the first who comes; those of the block go to the best.
    block = sorted((worth[kid] for kid in listed), reverse=True)[:BLOCK]
    assert max(worth[kid] for kid in kids.keys() - listed) <= block[-1]


def check_invariants(trie: NgramTrie) -> None:
    """Bounded; every node's parent is there; children counts and lists hold what is there."""
    ids = trie.nodes.all_ids()
    assert ids.size == trie.num_nodes <= trie.capacity
    parents = trie.nodes.column(ids, PARENT).astype(np.int64)
    assert np.isin(parents, np.append(ids, 0)).all()
    depths = trie.nodes.depth(ids)
    assert (depths[parents > 0] == trie.nodes.depth(parents[parents > 0]) + 1).all()
    assert (depths[parents == 0] == 1).all()
    number = np.bincount(parents, minlength=int(ids.max(initial=0)) + 1)
    assert (trie.nodes.num_children(ids) == number[ids]).all()
    kids = trie.nodes.children(ids)
    spot = np.nonzero(kids)
    assert (trie.nodes.column(kids[spot], PARENT) == ids[spot[0]]).all()
    assert np.unique(kids[spot]).size == spot[0].size


@pytest.mark.parametrize("kind", ["new", "loop", "fan", "mixed"])
@pytest.mark.parametrize(("depth", "capacity"), [(18, 1024), (18, 3000), (64, 2048), (2, 1024)])
def test_eviction_keeps_the_invariants(kind: str, depth: int, capacity: int) -> None:
    """Streams of new tokens, of loops, of one token followed by ever new ones, and all of it."""
    trie = NgramTrie(depth, capacity, seed=2)
    rng = np.random.default_rng(4)
    streams = Streams(trie, 3)
    for step in range(60):
        part = {"new": 0, "loop": 1, "fan": 2, "mixed": step % 3}[kind]
        new = rng.integers(0, 2**31 - 1, 12).tolist()
        gained = [new, [step % 5, 7, 7] * 4, [t for x in new[:6] for t in (3, x)]][part]
        streams.grow({step % 3: gained, (step + 1) % 3: gained[:5]})
        if step % 5 == 4:
            check_invariants(trie)
    assert trie.num_nodes <= capacity
    if kind == "new":
        assert trie.nodes.evicted > 0


def test_eviction_takes_the_old_and_keeps_the_used() -> None:
    """What is said in every round survives a flood of text that is said once."""
    trie = NgramTrie(4, 2048, seed=1)
    streams = Streams(trie, 2)
    rng = np.random.default_rng(5)
    phrase = [1, 2, 3, 4]
    for _ in range(120):
        streams.grow({0: phrase, 1: rng.integers(10, 2**30, 40).tolist()})
    assert trie.nodes.evicted > 5 * trie.capacity
    assert node(trie, (1, 2, 3, 4)) > 0
    flood = streams.texts[1]
    assert node(trie, tuple(flood[-4:])) > 0
    assert node(trie, tuple(flood[:4])) == 0


def test_what_hangs_on_an_evicted_context_is_left_out() -> None:
    """A stream that comes back after its context was evicted starts again with short n-grams."""
    trie = NgramTrie(4, 1024, seed=1)
    tail = int(trie.insert(piece(trie, [([5, 6, 7], 0, 0)]))[0])
    for flood in np.random.default_rng(6).integers(10, 2**30, (100, 60)).tolist():
        trie.insert(piece(trie, [(flood, 0, 0)]))
    assert node(trie, (7,)) == 0
    trie.insert(piece(trie, [([5, 6, 7, 8, 9], 3, tail)]))
    check_invariants(trie)
    assert node(trie, (8,)) > 0
    assert node(trie, (8, 9)) > 0
    assert node(trie, (7, 8)) == node(trie, (7, 8, 9)) == 0


def test_an_entry_without_room_takes_its_extensions_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the index cannot place an n-gram, no node is left whose parent is missing."""
    monkeypatch.setattr(HashIndex, "_add_by_moving", lambda self, key, new_id: (0, False))
    monkeypatch.setattr(HashIndex, "grow", lambda self, extra: None)  # 512 slots for ever
    trie = NgramTrie(8, 4096, seed=1)
    streams = Streams(trie, 1)
    rng = np.random.default_rng(7)
    for _ in range(40):
        streams.grow({0: rng.integers(0, 1000, 10).tolist()})
        check_invariants(trie)
    assert 400 < trie.num_nodes <= 512
    assert trie.num_nodes < len(streams.counts)


def test_index_moves_neighbours_when_both_buckets_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a load that fills many buckets, no key is lost and every slot is told."""
    monkeypatch.setattr("sgl_spec.speculative.ngram_index.LOAD", 0.9)
    slots: dict[int, int] = {}

    def placed(ids: Ints, at: Ints) -> None:
        slots.update(zip(ids.tolist(), at.tolist(), strict=True))

    moved = []
    move = HashIndex._move
    monkeypatch.setattr(HashIndex, "_move", lambda self, a, b: (moved.append(1), move(self, a, b)))
    index = HashIndex(4000, placed)
    rng = np.random.default_rng(8)
    keys = rng.integers(1, 2**63, 2000, dtype=np.uint64)
    kept = {}
    for start in range(0, 2000, 100):
        part = np.repeat(keys[start : start + 100], 2)
        index.grow(100)
        ids, new = index.add(part, np.arange(1 + start, 301 + start))
        assert new.size == np.unique(part[ids > 0]).size
        assert (ids[::2] == ids[1::2]).all()
        kept.update(zip(part.tolist(), ids.tolist(), strict=True))
    assert moved
    assert sum(id_ > 0 for id_ in kept.values()) > 1950
    present = np.array([key for key, id_ in kept.items() if id_], np.uint64)
    assert index.get(present).tolist() == [kept[key] for key in present.tolist()]
    assert index.find(present).tolist() == [slots[kept[key]] for key in present.tolist()]
    index.remove(index.find(present[:500]))
    assert not index.get(present[:500]).any()
    assert index.get(present[500:]).all()


def test_prefixes_and_spans_agree_with_suffixes() -> None:
    hashing = RollingHash(seed=3)
    text = np.random.default_rng(9).integers(0, 50000, 30)
    hashed = hashing.tokens(text)
    newest_first = hashed[::-1][None, :12]
    suffixes = hashing.suffixes(newest_first)
    prefixes = hashing.prefixes(suffixes, newest_first[:, 0])
    assert (prefixes == hashing.suffixes(hashed[-2::-1][None, :11])).all()
    lengths = np.arange(1, 13)[None, :]
    spans = hashing.spans(hashed[None, :], np.full(12, 29), lengths)
    assert (spans == suffixes).all()


def test_the_clock_is_set_back_before_it_overflows() -> None:
    trie = NgramTrie(3, 4096, seed=1)
    streams = Streams(trie, 1)
    trie.log.clock = CLOCK_LIMIT - 100
    for token in range(40):
        streams.grow({0: [1, 2, token + 3]})
    assert trie.log.clock < CLOCK_LIMIT // 2 + 200
    check_invariants(trie)
    ids = np.array([node(trie, (1, 2)), node(trie, (2, 42))])
    assert (trie.last(ids) <= trie.log.clock).all()
    assert trie.last(ids)[0] == trie.last(ids)[1] - 1
    tokens, found = trie.log.follow(trie.last(np.array([node(trie, (1,))])).astype(np.int64), 2)
    assert tokens.tolist() == [[2, 42]]
    assert found.all()


def test_memory_grows_with_use_and_stays_under_64_bytes_a_node() -> None:
    """Also where every node that has children has three, the dearest shape of the child lists."""
    rng = np.random.default_rng(10)
    trie = NgramTrie(18, 10_000_000, seed=1)
    assert trie.num_bytes < 100_000
    streams = Streams(trie, 4)
    for _ in range(40):
        streams.grow({i: np.minimum(rng.zipf(1.3, 25), 5000).tolist() for i in range(4)})
    assert trie.num_nodes > 30_000
    assert trie.num_bytes / trie.num_nodes <= 64
    fans = NgramTrie(8, 8192, seed=1)  # of 9840 possible n-grams
    streams = Streams(fans, 2)
    for _ in range(100):
        streams.grow({i: rng.integers(0, 3, 80).tolist() for i in range(2)})
    assert fans.nodes.evicted > 0
    assert fans.num_bytes / fans.capacity <= 64


def test_clear_empties() -> None:
    trie = NgramTrie(4, 4096, seed=1)
    empty = trie.num_bytes
    Streams(trie, 1).grow({0: [1, 2, 3, 1, 2, 3]})
    assert node(trie, (1, 2, 3)) > 0
    trie.clear()
    assert trie.num_nodes == 0
    assert node(trie, (1,)) == 0
    assert trie.num_bytes == empty


@pytest.mark.parametrize(("depth", "capacity"), [(1, 4096), (65, 4096), (4, 1023), (4, 2**30)])
def test_bad_sizes_are_refused(depth: int, capacity: int) -> None:
    with pytest.raises(ConfigError, match="must be"):
        NgramTrie(depth, capacity)


def test_a_store_without_blocks_lists_two_children() -> None:
    store = NodeStore(1024, rank=3, on_evict=lambda slots: None)
    store._top_block = store._blocks.shape[0]
    ids = store.reserve(20)[:8].copy()
    store.take(8)
    parents = np.array([0, *[ids[0]] * 7])
    born = store.create(ids, parents, np.arange(8, dtype=np.int32), np.array([1, *[2] * 7]))
    store.list_children(born)
    assert store.num_children(ids[:1]).tolist() == [7]
    assert (store.children(ids[:1]) > 0).sum() == 2
