"""Rows and slots of requests: what a request takes when it is admitted, grows by, publishes to the
prefix cache and gives back. Glue between `kv_pool` (who owns a slot) and `prefix_cache` (what is
reusable).

A slot is shared by all texts that agree about what its KV depends on. The target's depends on the
tokens up to its position. A drafter that reads ahead depends on the next token too; the cache is
then keyed by pairs of neighbouring tokens, so that two texts share every position but the one
before the first token in which they differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from sgl_spec.engine.kv_pool import (
    Holding,
    PageAllocator,
    SlotTable,
    ceil_page,
    floor_page,
)
from sgl_spec.engine.policy import Need, PoolCounts
from sgl_spec.engine.prefix_cache import PrefixCache, Tokens
from sgl_spec.engine.req import Req

GROW_AHEAD = 32  # tokens


class SlotManager:
    """Owns the slot table, the page allocator and the prefix cache.

    reads_ahead: whether the KV at a position depends on the next token as well; to be set before
    anything is cached. device, scratch: see `SlotTable`; the KV caches need `cache_slots`.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        page_size: int,
        num_rows: int,
        width: int,
        use_cache: bool,
        device: torch.device | str = "cpu",
        scratch: int = 0,
    ) -> None:
        self.page_size = page_size
        self.cache_slots = num_slots + scratch
        self.table = SlotTable(num_rows, width, device=device, num_slots=num_slots, scratch=scratch)
        self.pages = PageAllocator(num_slots, page_size)
        self.cache = PrefixCache(page_size)
        self.use_cache = use_cache
        self.reads_ahead = False

    def counts(self) -> PoolCounts:
        """The pool as admission sees it."""
        return PoolCounts(self.pages.free_slots, self.cache.evictable_tokens, self.page_size)

    def cached_len(self, req: Req) -> int:
        """Tokens of a waiting request that it would find cached now."""
        return self.cache.peek(self._keys(req), self._limit(req))

    def _limit(self, req: Req) -> int:
        return req.reusable if self.use_cache else 0

    def _keys(self, req: Req) -> Tokens:
        """What the cache files a request's positions under: one per position whose KV is
        determined."""
        if not self.reads_ahead:
            return req.ids
        ids = np.asarray(req.ids, dtype=np.int64)
        return (ids[:-1] << 32) | ids[1:]

    def reach(self, tokens: int) -> int:
        """Slots that `tokens` positions take in whole pages, within a row."""
        return min(ceil_page(tokens, self.page_size), self.table.width)

    def pin_prefix(self, req: Req) -> int:
        """Match and lock a waiting request's cached prefix, so that making room cannot evict it."""
        match = self.cache.match(self._keys(req), self._limit(req))
        self.cache.lock(match.node)
        req.node = match.node
        return len(match.slots)

    def unpin(self, req: Req) -> None:
        """Undo `pin_prefix`."""
        assert req.node is not None
        self.cache.unlock(req.node)
        req.node = None

    def open(self, req: Req, tokens: int) -> None:
        """Give a pinned request a row and slots for `tokens` positions; the caller has checked
        room."""
        shared = self.cache.match(self._keys(req), self._limit(req)).slots
        row = self.table.take_row()
        self.table.write(row, 0, shared)
        length = len(shared)
        req.holding = Holding(row, shared_len=length, committed_len=length, allocated_len=length)
        self.grow(req, tokens)

    def make_room(self, num_slots: int) -> bool:
        """Evict cached prefixes until `num_slots` are free; False if they cannot be."""
        missing = num_slots - self.pages.free_slots
        if missing > self.cache.evictable_tokens:
            return False
        if missing > 0:
            self.pages.free(self.cache.evict(missing))
        return True

    def shortfall(self, req: Req, tokens: int) -> int:
        """Slots a request lacks for `tokens` positions."""
        return max(0, self.reach(tokens) - req.held.allocated_len)

    def grow(self, req: Req, tokens: int) -> None:
        """Extend a request's slots to `tokens` positions, in whole pages. Never shrinks."""
        self.grow_all([req], [self.shortfall(req, tokens)])

    def grow_all(self, reqs: Sequence[Req], missing: Sequence[int]) -> None:
        """Give requests what they lack, as `shortfall` tells it, and those that lack something a
        little more where slots are plenty."""
        if not any(missing):
            return
        missing = self._with_ahead(reqs, missing)
        total = sum(missing)
        roomy = self.make_room(total)
        assert roomy, "growth was not checked against the pool"
        slots, used = self.pages.alloc(total), 0
        for req, more in zip(reqs, missing, strict=True):
            if more:
                held = req.held
                self.table.write(held.row, held.allocated_len, slots[used : used + more])
                held.allocated_len += more
                used += more

    def _with_ahead(self, reqs: Sequence[Req], missing: Sequence[int]) -> Sequence[int]:
        """Slots for the next rounds too, if the table has a copy on a device: it is then sent some
        once in a while and not in every round."""
        most = self.pages.free_slots - sum(missing)
        if not self.table.mirrored or most < 2 * len(reqs) * (GROW_AHEAD + self.page_size):
            return missing
        return [
            self.shortfall(req, req.held.allocated_len + more + GROW_AHEAD) if more else 0
            for req, more in zip(reqs, missing, strict=True)
        ]

    def need(self, req: Req, reserve: int) -> Need:
        """A running request's claim, for the policy."""
        held = req.held
        tokens = max(len(req.ids) - 1, held.committed_len) + reserve
        return Need(have=held.allocated_len, tokens=tokens, remaining=req.remaining)

    def publish(self, req: Req, length: int) -> None:
        """Hand the first `length` tokens (KV valid) to the prefix cache, in whole pages.

        Where the cache already has them the request adopts the cache's slots and frees its own.
        """
        held, keys = req.held, self._keys(req)
        length = floor_page(min(length, len(keys)), self.page_size)
        if not self.use_cache or length <= held.shared_len:
            return
        assert length <= held.committed_len, "only committed tokens may be shared"
        result = self.cache.insert(keys[:length], self.table.slots(held.row, 0, length))
        self.cache.lock(result.node)
        self.unpin(req)
        req.node = result.node
        self.table.write(held.row, 0, result.slots)
        if len(result.duplicates):
            self.pages.free(result.duplicates)
        held.shared_len = length

    def release(self, req: Req, keep: int) -> None:
        """Take the slots back from a request that ends or is retracted; its first `keep` tokens
        stay reusable until their slots are needed. Its row is its own until `give_row`."""
        self.publish(req, keep)
        held = req.held
        own = self.table.slots(held.row, held.shared_len, held.allocated_len)
        if len(own):
            self.pages.free(own)
        self.unpin(req)
        req.holding = Holding(held.row)

    def give_row(self, req: Req) -> None:
        """Take the row back from a request that was released."""
        self.table.give_row(req.held.row)
        req.holding = None

    def flush(self) -> None:
        """Drop every cached prefix; nothing may be in use."""
        slots = self.cache.reset()
        if len(slots):
            self.pages.free(slots)

    def held_slots(self, live: Iterable[Req]) -> int:
        """Slots owned by requests (not by the cache)."""
        return sum(r.held.allocated_len - r.held.shared_len for r in live)

    def check_counts(self, live: Iterable[Req]) -> None:
        """The cheap invariant: free + cached + held == total, rows likewise."""
        live = list(live)
        held, cached, free = self.held_slots(live), self.cache.cached_tokens, self.pages.free_slots
        assert free + cached + held == self.pages.total, (
            f"slots leak: free {free} + cached {cached} + held {held} != {self.pages.total}"
        )
        assert self.table.free_rows + len(live) == self.table.num_rows, "rows leak"
        for req in live:
            mark = req.held
            assert mark.shared_len <= mark.committed_len <= mark.allocated_len, mark

    def check(self, live: Iterable[Req]) -> None:
        """The whole invariant, O(slots): no slot is owned twice or by nobody."""
        live = list(live)
        self.check_counts(live)
        self.cache.check()
        own = [self.table.slots(r.held.row, r.held.shared_len, r.held.allocated_len) for r in live]
        cached = self.cache.all_slots()
        everything = np.concatenate([*own, cached, self.pages.free_set()])
        assert len(np.unique(everything)) == len(everything) == self.pages.total, "owned twice"
        for req in live:
            shared = self.table.slots(req.held.row, 0, req.held.shared_len)
            assert np.isin(shared, cached).all(), "a shared slot is not the cache's"
