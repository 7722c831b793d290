"""The radix tree against a dict of page prefixes, which is too simple to be wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from sgl_spec.engine.prefix_cache import InsertResult, PrefixCache

POOL_PAGES = 64
Prefix = tuple[int, ...]  # page patterns, not tokens

# A text is a list of page patterns. Patterns of one page size differ in the last token only, or in
# the first, so that a walk which compares less than a whole page goes wrong.
page_texts = st.lists(st.integers(0, 3), max_size=6).map(tuple)


def page_tokens(pattern: int, page_size: int) -> list[int]:
    """Tokens of one page: pattern bit 0 sits in the last token, bit 1 in the first."""
    page = [7] * page_size
    page[-1] += pattern & 1
    page[0] += 10 * (pattern >> 1)
    return page


def tokens_of(text: Prefix, page_size: int) -> list[int]:
    return [token for pattern in text for token in page_tokens(pattern, page_size)]


def slots_of(pages: list[int], page_size: int) -> np.ndarray:
    return (np.array(pages, dtype=np.int64)[:, None] * page_size + np.arange(page_size)).ravel()


class CacheMachine(RuleBasedStateMachine):
    """Random insert, match, lock, unlock, evict and reset beside the model.

    Model: `pages` maps each cached page prefix to its pool page, `used` to its last use. Every page
    is free, cached, or on its way between the two inside one rule.
    """

    page_size = 0
    held = Bundle("held")

    @initialize()
    def start(self) -> None:
        self.cache = PrefixCache(self.page_size)
        self.pages: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}
        self.locks: list[Prefix] = []
        self.free = list(range(POOL_PAGES))
        self.clock = 0

    def touch(self, text: Prefix) -> None:
        self.clock += 1
        for end in range(1, len(text) + 1):
            self.used[text[:end]] = self.clock

    def cached_part(self, text: Prefix) -> Prefix:
        end = 0
        while end < len(text) and text[: end + 1] in self.pages:
            end += 1
        return text[:end]

    def model_slots(self, text: Prefix) -> np.ndarray:
        return slots_of([self.pages[text[:end]] for end in range(1, len(text) + 1)], self.page_size)

    def is_locked(self, text: Prefix) -> bool:
        return any(lock[: len(text)] == text for lock in self.locks)

    def oldest_leaf(self) -> Prefix | None:
        inner = {text[:-1] for text in self.pages}
        leaves = [t for t in self.pages if t not in inner and not self.is_locked(t)]
        return min(leaves, key=lambda text: self.used[text], default=None)

    @rule(
        target=held,
        text=page_texts,
        cut=st.integers(0, 40),
        extra=st.integers(0, 15),
        lock=st.booleans(),
    )
    def match(self, text: Prefix, cut: int, extra: int, lock: bool) -> object:
        tokens = tokens_of(text, self.page_size) + [99] * (extra % self.page_size)
        limit = len(tokens) - cut
        expected = self.cached_part(text[: max(limit, 0) // self.page_size])
        assert self.cache.peek(tokens, limit) == len(expected) * self.page_size
        hit = self.cache.match(tokens, limit)
        np.testing.assert_array_equal(hit.slots, self.model_slots(expected))
        self.touch(expected)
        return self.hold(hit.node, expected) if lock else multiple()

    @rule(target=held, text=page_texts, reuse=st.booleans(), lock=st.booleans())
    def insert(self, text: Prefix, reuse: bool, lock: bool) -> object:
        known = self.cached_part(text)
        fresh = len(text) - (len(known) if reuse else 0)
        if fresh > len(self.free):
            return multiple()
        own = [self.free.pop() for _ in range(fresh)]
        mine = slots_of(own, self.page_size)
        if reuse:
            mine = np.concatenate([self.model_slots(known), mine])
        result = self.cache.insert(np.array(tokens_of(text, self.page_size), np.int64), mine)
        self.check_insert(text, known, mine, result)
        return self.hold(result.node, text) if lock else multiple()

    def check_insert(
        self, text: Prefix, known: Prefix, mine: np.ndarray, result: InsertResult
    ) -> None:
        for end in range(len(known) + 1, len(text) + 1):
            self.pages[text[:end]] = int(mine[(end - 1) * self.page_size]) // self.page_size
        np.testing.assert_array_equal(result.slots, self.model_slots(text))
        spare = set(mine.tolist()) - set(self.model_slots(text).tolist())
        assert sorted(result.duplicates.tolist()) == sorted(spare)
        self.give_back(result.duplicates)
        self.touch(text)

    def hold(self, node: object, text: Prefix) -> object:
        self.cache.lock(node)
        self.locks.append(text)
        return (node, text)

    @rule(handle=consumes(held))
    def unlock(self, handle: tuple[object, Prefix]) -> None:
        node, text = handle
        self.cache.unlock(node)
        self.locks.remove(text)
        self.touch(text)

    @rule(pages=st.integers(0, 8), ragged=st.integers(0, 15))
    def evict(self, pages: int, ragged: int) -> None:
        freed = self.cache.evict(pages * self.page_size - ragged % self.page_size)
        expected = []
        while len(expected) < pages and (leaf := self.oldest_leaf()) is not None:
            expected.append(self.pages.pop(leaf))
        assert sorted(freed.tolist()) == sorted(slots_of(expected, self.page_size).tolist())
        self.free += expected

    def give_back(self, slots: np.ndarray) -> None:
        pages = slots.reshape(-1, self.page_size)
        assert (pages == pages[:, :1] + np.arange(self.page_size)).all()
        self.free += (pages[:, 0] // self.page_size).tolist()

    @rule()
    def reset(self) -> None:
        if self.locks:
            with pytest.raises(AssertionError, match="still held"):
                self.cache.reset()
            return
        self.give_back(self.cache.reset())
        self.pages.clear()

    @invariant()
    def books_agree(self) -> None:
        self.cache.check()
        assert len(set(self.free)) == len(self.free)
        assert set(self.free) | set(self.pages.values()) == set(range(POOL_PAGES))
        assert self.cache.cached_tokens == len(self.pages) * self.page_size
        locked = sum(self.is_locked(text) for text in self.pages) * self.page_size
        assert self.cache.evictable_tokens == self.cache.cached_tokens - locked


def machine(page_size: int) -> type:
    """A unittest case that runs the machine at one page size."""
    cls = type(f"CacheMachine{page_size}", (CacheMachine,), {"page_size": page_size})
    cls.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
    return cls.TestCase


TestPageSize1 = machine(1)
TestPageSize2 = machine(2)
TestPageSize16 = machine(16)


def filled(page_size: int = 2) -> PrefixCache:
    """[1 1 | 2 2 | 3 3] under slots 0 to 5 and [1 1 | 4 4] under 0, 1, 6, 7."""
    cache = PrefixCache(page_size)
    cache.insert([1, 1, 2, 2, 3, 3], [0, 1, 2, 3, 4, 5])
    cache.insert([1, 1, 4, 4], [0, 1, 6, 7])
    cache.check()
    return cache


def test_insert_reports_only_the_callers_own_duplicates() -> None:
    result = filled().insert([1, 1, 2, 2], [0, 1, 8, 9])
    assert result.slots.tolist() == [0, 1, 2, 3]
    assert result.duplicates.tolist() == [8, 9]


def test_handle_survives_a_split_of_its_edge() -> None:
    cache = PrefixCache(1)
    node = cache.insert([1, 2, 3, 4], [0, 1, 2, 3]).node
    cache.lock(node)
    cache.insert([1, 2, 9], [0, 1, 4])
    assert cache.cached_tokens - cache.evictable_tokens == 4
    assert cache.evict(99).tolist() == [4]
    cache.unlock(node)
    cache.check()
    assert sorted(cache.evict(99).tolist()) == [0, 1, 2, 3]


def test_longer_insert_does_not_widen_an_earlier_lock() -> None:
    cache = PrefixCache(1)
    cache.lock(cache.insert([1, 2], [0, 1]).node)
    cache.insert([1, 2, 3], [0, 1, 2])
    assert cache.cached_tokens - cache.evictable_tokens == 2
    assert cache.evict(99).tolist() == [2]


def test_evict_cuts_the_tail_of_a_leaf() -> None:
    cache = PrefixCache(2)
    cache.insert([5] * 8, np.arange(8))
    assert cache.evict(3).tolist() == [4, 5, 6, 7]
    assert cache.match([5] * 8, 8).slots.tolist() == [0, 1, 2, 3]
    cache.check()


def test_peek_is_no_use() -> None:
    cache = filled()
    cache.peek([1, 1, 2, 2, 3, 3], 6)
    assert cache.evict(2).tolist() == [4, 5]


def test_insert_of_part_of_a_page_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        PrefixCache(2).insert([1, 2, 3], [0, 1, 2])


def test_unlock_without_lock_is_our_mistake() -> None:
    cache = filled()
    with pytest.raises(AssertionError, match="not locked"):
        cache.unlock(cache.match([1, 1], 2).node)


def root_child(cache: PrefixCache) -> object:
    return cache.match([1, 1], 2).node


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda c: setattr(c, "_cached", 99), id="cached count"),
        pytest.param(lambda c: setattr(c, "_locked", 2), id="locked count"),
        pytest.param(lambda c: c._heap.pop(), id="leaf lost to eviction"),
        pytest.param(lambda c: root_child(c).children.popitem(), id="child lost"),
        pytest.param(lambda c: root_child(c).slots.__setitem__(0, 4), id="slot twice"),
        pytest.param(lambda c: root_child(c).tokens.__setitem__(0, 8), id="wrong key"),
        pytest.param(lambda c: root_child(c).slots.__iadd__(1), id="slots straddle pages"),
        pytest.param(lambda c: setattr(root_child(c), "tokens", np.ones(1)), id="part of a page"),
        pytest.param(lambda c: setattr(root_child(c), "parent", None), id="parent lost"),
        pytest.param(lambda c: setattr(root_child(c), "last_use", 0), id="child younger"),
        pytest.param(
            lambda c: setattr(c.match([1, 1, 4, 4], 4).node, "locks", 1),
            id="lock skips its parents",
        ),
    ],
)
def test_check_finds(damage: object) -> None:
    cache = filled()
    damage(cache)
    with pytest.raises(AssertionError):
        cache.check()


@pytest.mark.timeout(60)
def test_eviction_is_not_quadratic() -> None:
    """30,000 leaves, evicted one at a time with uses between: seconds if an eviction costs
    O(log n), beyond the time-out if it scans."""
    cache, count = PrefixCache(1), 30_000
    for leaf in range(count):
        cache.insert([leaf % 100, leaf], [2 * leaf, 2 * leaf + 1])
    for leaf in range(count):
        cache.match([leaf % 100, leaf // 2], 2)
        assert len(cache.evict(1)) == 1
    cache.check()
