"""Node records of the n-gram trie: links, counts, listed children, and eviction."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sgl_spec.speculative.ngram_memory import lazy_zeros

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

BLOCK = 10  # children a block lists
LISTED = 1 + BLOCK  # children a node lists at most
PLACES = 2 + BLOCK  # columns of `children`
PARENT, TOKEN, COUNT, LAST, META, CHILD0, CHILD1, SLOT = range(8)  # columns of a record
FIELDS = 8
_DEPTH_SHIFT = 23  # META: number of children in the low 23 bits, then 7 of depth, then a flag
_CHILDREN = (1 << _DEPTH_SHIFT) - 1
_IS_LISTED = 1 << 30  # the node stands in its parent's list
_FIRST_BLOCKS = 64  # and one more for every 10 nodes: 4 bytes a node
_SWEEP = 16384  # records an eviction step looks at
_HORIZON_SWEEPS = 8  # steps between samples of the age
_SAMPLE = 2048
_OLD_SHARE = 0.25  # share of the nodes, oldest first, that a sweep may evict


class NodeStore:
    """Up to `capacity` nodes, numbered from 1; 0 is the empty n-gram, the parent of the shortest.

    A node lists up to LISTED of its children: two in its record (CHILD0, CHILD1) or, from the third
    on, CHILD0 and the block -CHILD1. When the list is full the best stay, by `rank` (COUNT or
    LAST), and a node that was left out is considered again each time it is touched. Blocks are
    bounded too; without a free one a node lists two.
    """

    def __init__(self, capacity: int, rank: int, on_evict: Callable[[Ints], None]) -> None:
        """on_evict is told the index slots of the nodes that are leaving."""
        self.capacity = capacity
        self._rank = rank
        self._on_evict = on_evict
        self._records = lazy_zeros((capacity + 1, FIELDS), np.int32)
        self._flat = self._records.reshape(-1)
        self._blocks = lazy_zeros((capacity // 8 + 1, BLOCK), np.int32)  # block 0 stays empty
        self._flat[CHILD0] = -1  # the empty n-gram lists nothing: no draft starts from it
        self._free_blocks = np.zeros(0, np.int64)
        self._top_block = 1
        self._top = 1
        self._free = np.zeros(0, np.int64)
        self._hand = 1
        self._horizon = 0  # last use from which on a node is too young to go
        self._sweeps = 0
        self._rng = np.random.default_rng(0)
        self.evicted = 0

    @property
    def num_bytes(self) -> int:
        """Bytes in use."""
        lists = self._top_block * BLOCK * 4 + self._free_blocks.nbytes
        return self._top * FIELDS * 4 + lists + self._free.nbytes

    def column(self, ids: Ints, field: int) -> Ints32:
        """One field of each node."""
        return self._flat.take(ids * FIELDS + field)

    def num_children(self, ids: Ints) -> Ints32:
        """Children of each node, listed or not."""
        return self.column(ids, META) & _CHILDREN

    def rank_value(self, ids: Ints) -> Ints32:
        """What a parent ranks these nodes by: larger is better."""
        return self.column(ids, self._rank)

    def depth(self, ids: Ints) -> Ints32:
        """Tokens in each node's n-gram."""
        return (self.column(ids, META) >> _DEPTH_SHIFT) & 127

    def children(self, ids: Ints) -> Ints:
        """[m, PLACES] listed children of each node, 0 where a place is empty."""
        pair = self._records.take(ids, axis=0)[:, CHILD0 : CHILD1 + 1]
        out = np.empty((ids.size, PLACES), np.int64)
        np.maximum(pair, 0, out=out[:, :2])
        out[:, 2:] = self._blocks.take(np.maximum(-pair[:, 1], 0), axis=0)
        return out

    def all_ids(self) -> Ints:
        """Every node in use, ascending."""
        return np.flatnonzero(self._records[: self._top, META][1:]) + 1

    def placed(self, ids: Ints, slots: Ints) -> None:
        """Remember where the index keeps these nodes."""
        self._flat[ids * FIELDS + SLOT] = slots

    def slots(self, ids: Ints) -> Ints:
        """Where the index keeps these nodes."""
        return self.column(ids, SLOT).astype(np.int64)

    # ---- ids

    def reserve(self, need: int) -> Ints:
        """At least `need` unused ids (need at most a quarter of the capacity), evicting as it must.

        They stay unused until `take`.
        """
        parts = [self._free]
        have = self._free.size
        fresh = min(max(0, need - have), self.capacity + 1 - self._top)
        if fresh:
            parts.append(np.arange(self._top, self._top + fresh))
            self._top += fresh
            have += fresh
        tries = 0
        while have < need:
            parts.append(self._sweep(min(1.0, _OLD_SHARE * 2 ** (tries // 4))))
            have += parts[-1].size
            tries += 1
        if len(parts) > 1:
            self._free = np.concatenate(parts)
        return self._free

    def take(self, count: int) -> None:
        """The first `count` reserved ids are in use from now on."""
        self._free = self._free[count:]

    def give_back(self, ids: Ints) -> None:
        """Taken ids that will not become nodes after all."""
        self._free = np.concatenate([self._free, ids])

    def create(self, ids: Ints, parents: Ints, tokens: Ints32, depths: Ints) -> Ints:
        """Taken ids become nodes. A parent may be among them; 0 is the empty n-gram.

        Returns those that are not in their parent's list yet: a first child is, at once.
        """
        base = ids * FIELDS
        self._flat[base + PARENT] = parents
        self._flat[base + TOKEN] = tokens
        first = parents * FIELDS + CHILD0
        free = np.flatnonzero(self._flat.take(first) == 0)
        self._flat[first.take(free)] = ids.take(free)
        listed = self._flat.take(first) == ids
        self._flat[base + META] = (depths << _DEPTH_SHIFT) + listed * _IS_LISTED
        np.add.at(self._flat, parents * FIELDS + META, np.int32(1))
        unlisted: Ints = ids[~listed]
        return unlisted

    def touch(self, ids: Ints, positions: Ints) -> Bools:
        """Count an occurrence of each node, ending at a log position (ascending; ids may repeat).

        Returns which of them are not in their parent's list.
        """
        base = ids * FIELDS
        np.add.at(self._flat, base + COUNT, np.int32(1))
        self._flat[base + LAST] = positions
        unlisted: Bools = (self._flat.take(base + META) & _IS_LISTED) == 0
        return unlisted

    def list_children(self, ids: Ints) -> None:
        """Put distinct nodes in their parents' lists, as far as they deserve it."""
        parents = self.column(ids, PARENT).astype(np.int64)
        ids, parents = ids[parents > 0], parents[parents > 0]
        for field in (CHILD0, CHILD1):
            at = parents * FIELDS + field
            free = self._flat.take(at) == 0
            self._flat[at[free]] = ids[free]
            placed = self._flat.take(at) == ids
            self._set_listed(ids[placed])
            ids, parents = ids[~placed], parents[~placed]
        if ids.size:
            self._list_in_blocks(ids, parents)

    def _set_listed(self, ids: Ints) -> None:
        self._flat[ids * FIELDS + META] |= _IS_LISTED

    def _list_in_blocks(self, ids: Ints, parents: Ints) -> None:
        """The same for parents whose own two places are taken."""
        self._open_blocks(parents)
        block = -self.column(parents, CHILD1).astype(np.int64)
        value = self.column(ids, self._rank).astype(np.int64)
        order = np.argsort((block << 32) - value)
        ids, block, value = ids.take(order), block.take(order), value.take(order)
        better = np.arange(block.size) - np.searchsorted(block, block)  # siblings that go before
        kept = np.flatnonzero((better < BLOCK) & (block > 0))  # without a block there is no room
        ids, block, value, better = (x.take(kept) for x in (ids, block, value, better))
        held = self._blocks.take(block, axis=0)  # [k, BLOCK]
        worth = np.where(held > 0, self._flat.take(held.astype(np.int64) * FIELDS + self._rank), -1)
        # The i-th best new child of a parent competes for the parent's i-th worst place.
        place = np.argsort(worth, axis=1, kind="stable")[np.arange(ids.size), better]
        at = np.arange(ids.size) * BLOCK + place
        wins = worth.reshape(-1).take(at) <= value
        out = held.reshape(-1).take(at)[wins].astype(np.int64)
        out = out[out > 0]
        self._flat[out * FIELDS + META] &= ~_IS_LISTED
        self._blocks.reshape(-1)[(block * BLOCK + place)[wins]] = ids[wins]
        self._set_listed(ids[wins])

    def _open_blocks(self, parents: Ints) -> None:
        """Give blocks to parents that have none, as far as there are any."""
        second = self.column(parents, CHILD1)
        if not (second > 0).any():
            return
        parents, where = np.unique(parents[second > 0], return_index=True)
        second = second[second > 0].take(where)
        limit = min(self._blocks.shape[0], 1 + _FIRST_BLOCKS + self._top // 10)
        room = max(0, self._free_blocks.size + limit - self._top_block)
        parents, second = parents[:room], second[:room]
        reused = min(parents.size, self._free_blocks.size)
        fresh = np.arange(self._top_block, self._top_block + parents.size - reused)
        blocks = np.concatenate([self._free_blocks[:reused], fresh])
        self._free_blocks = self._free_blocks[reused:]
        self._top_block += fresh.size
        self._blocks[blocks, 0] = second
        self._flat[parents * FIELDS + CHILD1] = -blocks

    # ---- eviction

    def _sweep(self, share: float) -> Ints:
        """Evict old nodes among the next records, children first; returns their ids.

        A node goes if its last use lies in the oldest `share` of a sample and no child of it stays.
        """
        start = self._hand
        stop = min(start + _SWEEP, self._top)
        self._hand = stop if stop < self._top else 1
        if share > _OLD_SHARE or self._sweeps % _HORIZON_SWEEPS == 0:
            sample = self._records[self._rng.integers(1, self._top, _SAMPLE), LAST]
            sample.sort()
            self._horizon = int(sample[int(share * (_SAMPLE - 1))])
        self._sweeps += 1
        slab = self._records[start:stop]
        goes = (slab[:, LAST] <= self._horizon) & (slab[:, META] != 0)
        self._keep_ancestors(slab, start, goes)
        ids = np.flatnonzero(goes) + start
        self._evict(ids, goes, start)
        return ids

    def _keep_ancestors(self, slab: Ints32, start: int, goes: Bools) -> None:
        """Clear `goes` where a child stays, up to a fixed point; children may lie outside the
        slab."""
        parent = slab[:, PARENT].astype(np.int64) - start
        inside = (parent >= 0) & (parent < goes.size)
        leaving = np.bincount(parent[goes & inside], minlength=goes.size)
        stays = np.flatnonzero(goes & ((slab[:, META] & _CHILDREN) != leaving))
        while stays.size:
            goes[stays] = False
            above = parent[stays][inside[stays]]
            stays = np.unique(above[goes[above]])

    def _evict(self, ids: Ints, goes: Bools, start: int) -> None:
        """Remove a set of nodes that holds every child of its members."""
        self._on_evict(self.slots(ids))
        parents = self.column(ids, PARENT).astype(np.int64)
        inside = (parents >= start) & (parents < start + goes.size)
        stays = ~(inside & goes.take(np.where(inside, parents - start, 0)))
        np.subtract.at(self._flat, parents[stays] * FIELDS + META, np.int32(1))
        self._unlist(ids[stays & (parents > 0)], parents[stays & (parents > 0)])
        second = self.column(ids, CHILD1)
        blocks = -second[second < 0].astype(np.int64)
        self._blocks[blocks] = 0
        self._free_blocks = np.concatenate([self._free_blocks, blocks])
        self._records[ids] = 0
        self.evicted += ids.size

    def _unlist(self, ids: Ints, parents: Ints) -> None:
        """Take nodes out of their parents' lists, where they stand in them."""
        for field in (CHILD0, CHILD1):
            at = parents * FIELDS + field
            self._flat[at[self._flat.take(at) == ids]] = 0
        block = np.maximum(-self.column(parents, CHILD1).astype(np.int64), 0)
        hits = np.flatnonzero(self._blocks.take(block, axis=0) == ids[:, None])
        self._blocks.reshape(-1)[block.take(hits // BLOCK) * BLOCK + hits % BLOCK] = 0

    def set_back(self, shift: int) -> None:
        """Lower every last use by `shift` and halve every count, keeping both at least 1."""
        self._horizon = 0
        used = self._records[1 : self._top]
        alive = used[:, META] != 0
        used[:, LAST] = np.maximum(used[:, LAST] - shift, 1) * alive
        used[:, COUNT] = np.maximum(used[:, COUNT] // 2, 1) * alive
