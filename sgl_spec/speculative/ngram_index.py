"""A hash index from 64-bit keys to int32 ids that never stops to rehash.

Two tables of buckets of 8 slots (a cache line of keys); a key has one candidate bucket in each (low
half of the key in the first, high half in the second) and goes to the emptier. The tables grow by
turns with linear hashing: bucket s of a table splits into s and s + 2^level, a few buckets at a
time. An entry keeps its slot number within the bucket when it moves, so a run of splits is a few
of vector operations on contiguous memory. Storage is reserved at full size and backed by the system
page by page in use.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from sgl_spec.speculative.ngram_memory import lazy_zeros

Keys = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

SLOTS = 8
LOAD = 0.55  # mean fill, kept by splitting: few new keys then meet two full buckets
BYTES_PER_SLOT = 12
_FIRST_BUCKETS = 32
_BYTE_SUM = np.uint64(0x0101010101010101)
# (2^(8 i) * _SLOT_OF) >> 61 == i for i in 0 .. 7: the number of the lowest byte set.
_SLOT_OF = np.uint64(sum(i << (61 - 8 * i) for i in range(SLOTS)))
_ONE = np.uint64(1)


class HashIndex:
    """Maps nonzero uint64 keys to int32 ids above 0, up to `capacity` of them.

    on_place(ids, slots) is told the slot of every entry that is added or moves; a slot stays an
    entry's own until told otherwise. Two different keys never share an entry: what can collide is
    only what the caller hashes into one key.
    """

    def __init__(self, capacity: int, on_place: Callable[[Ints, Ints], None]) -> None:
        self._max_buckets = max(_FIRST_BUCKETS, math.ceil(capacity / (2 * SLOTS * LOAD)))
        self._on_place = on_place
        self.clear()

    def clear(self) -> None:
        """Forget every entry and give the memory back."""
        self._keys = lazy_zeros((2 * self._max_buckets, SLOTS), np.uint64)
        self._flat_keys = self._keys.reshape(-1)
        self._ids = lazy_zeros(2 * self._max_buckets * SLOTS + 1, np.int32)  # the last, -1, stays 0
        self._buckets = [_FIRST_BUCKETS, _FIRST_BUCKETS]
        self.used = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the buckets in use (what the system backs with memory, to a page)."""
        return sum(self._buckets) * SLOTS * BYTES_PER_SLOT

    def _address(self, keys: Keys) -> Ints:
        """[2m] candidate buckets of [m] keys: all in the first table, then all in the second."""
        words = keys.view(np.uint32)
        out = np.empty((2, keys.size), np.int64)
        for table, count in enumerate(self._buckets):
            half = 1 << (count.bit_length() - 1)
            if count == half:
                word = words[table::2] & np.uint32(half - 1)
            else:
                word = words[table::2] & np.uint32(2 * half - 1)
                word -= (word >= np.uint32(count)) * np.uint32(half)
            np.add(word, table * self._max_buckets, out=out[table])
        return out.reshape(-1)

    def find(self, keys: Keys) -> Ints:
        """[m] slot of each key, -1 where it has no entry."""
        slots = np.full(keys.size, -1, np.int64)
        address = self._address(keys)
        rows = self._keys.take(address, axis=0).reshape(2, keys.size, SLOTS)
        hits = np.flatnonzero(rows == keys[:, None])
        bucket = hits >> 3
        slots[bucket % keys.size] = address.take(bucket) * SLOTS + (hits & 7)
        return slots

    def get(self, keys: Keys) -> Ints:
        """[m] id of each key, 0 where it has no entry."""
        return self._ids.take(self.find(keys)).astype(np.int64)

    def add(self, keys: Keys, ids: Ints) -> tuple[Ints, Ints]:
        """Enter [m] keys that have no entry yet; a key may repeat and then gets one entry.

        ids: [>= m] distinct ids to give out. Returns the [m] id of each key (0 where no room could
        be made), and the [k] indices into `keys` whose entries are new, one per distinct key: entry
        i of them got ids[i].
        """
        slots = self._claim(keys)
        placed = np.flatnonzero(slots >= 0)
        spots = slots.take(placed)
        self._ids[spots] = placed  # a key's repeats share a spot: the last of them speaks for it
        new = placed[self._ids.take(spots) == placed]
        spots = slots.take(new)
        self._ids[spots] = ids[: new.size]
        self.used += new.size
        self._on_place(ids[: new.size], spots)
        out = self._ids.take(slots).astype(np.int64)
        for at in np.flatnonzero(slots < 0):
            out[at], was_new = self._add_by_moving(keys[at : at + 1], int(ids[new.size]))
            if was_new:
                new = np.append(new, at)
        return out, new

    def _claim(self, keys: Keys) -> Ints:
        """[m] slots now holding the keys, -1 where both buckets were full."""
        slots = np.full(keys.size, -1, np.int64)
        pending = np.arange(keys.size)
        while pending.size:
            wanted = keys.take(pending)
            chosen = self._free_slot(wanted)
            has_room = chosen >= 0
            if not has_room.all():
                pending, wanted, chosen = pending[has_room], wanted[has_room], chosen[has_room]
            self._flat_keys[chosen] = wanted  # of different keys after one slot, one stays
            won = self._flat_keys.take(chosen) == wanted
            slots[pending[won]] = chosen[won]
            pending = pending[~won]
        return slots

    def _free_slot(self, keys: Keys) -> Ints:
        """[m] first free slot in the emptier candidate bucket, -1 if both are full."""
        address = self._address(keys)
        rows = self._keys.take(address, axis=0)
        free = (rows == 0).view(np.uint64).reshape(-1)  # a byte of 0 or 1 per slot
        room = (free * _BYTE_SUM) >> np.uint64(56)
        pick = np.arange(keys.size) + (room[keys.size :] > room[: keys.size]) * keys.size
        flags = free.take(pick)
        slot = ((flags & (~flags + _ONE)) * _SLOT_OF) >> np.uint64(61)
        return np.where(flags == 0, -1, address.take(pick) * SLOTS + slot.astype(np.int64))

    def _add_by_moving(self, key: Keys, new_id: int) -> tuple[int, bool]:
        """Enter one key whose buckets were full by moving a neighbour to its other bucket.

        Returns the key's id (0 if no neighbour could move) and whether the entry is new.
        """
        known = int(self.get(key)[0])
        if known:  # a repeat, entered a moment ago
            return known, False
        slot = int(self._free_slot(key)[0])
        if slot < 0:
            here = (self._address(key)[:, None] * SLOTS + np.arange(SLOTS)).reshape(-1)
            target = self._free_slot(self._flat_keys.take(here))
            movable = np.flatnonzero(target >= 0)
            if not movable.size:
                return 0, False
            slot = int(here[movable[0]])
            self._move(here[movable[:1]], target[movable[:1]])
        self._flat_keys[slot] = key[0]
        self._ids[slot] = new_id
        self.used += 1
        self._on_place(np.array([new_id]), np.array([slot]))
        return new_id, True

    def _move(self, source: Ints, target: Ints) -> None:
        self._flat_keys[target] = self._flat_keys[source]
        ids = self._ids[source]
        self._ids[target] = ids
        self._on_place(ids.astype(np.int64), target)

    def remove(self, slots: Ints) -> None:
        """Free distinct slots."""
        self._flat_keys[slots] = 0
        self.used -= slots.size

    def grow(self, extra: int) -> None:
        """Split buckets until `extra` more entries fit at the intended load."""
        want = int((self.used + extra) / (SLOTS * LOAD)) + 1
        want = min(want, 2 * self._max_buckets)
        while sum(self._buckets) < want:
            table = int(self._buckets[1] < self._buckets[0])
            if self._is_mid_level(1 - table):  # the other one is in the middle of its turn
                table = 1 - table
            have = self._buckets[table]
            half = 1 << (have.bit_length() - 1)
            stop = min(have + want - sum(self._buckets), 2 * half, self._max_buckets)
            self._split(table, have - half, stop - half, half)

    def _is_mid_level(self, table: int) -> bool:
        n = self._buckets[table]
        return n & (n - 1) != 0 and n < self._max_buckets

    def _split(self, table: int, start: int, stop: int, half: int) -> None:
        """Split buckets start .. stop - 1 of a table that has `half` + start buckets."""
        base = table * self._max_buckets
        old = self._keys[base + start : base + stop]
        words = old.view(np.uint32).reshape(-1, SLOTS, 2)[:, :, table]
        moves = (words & np.uint32(half)) != 0
        np.multiply(old, moves, out=self._keys[base + start + half : base + stop + half])
        old[moves] = 0
        self._buckets[table] += stop - start
        source = np.flatnonzero(moves) + (base + start) * SLOTS
        target = source + half * SLOTS
        ids = self._ids.take(source)
        self._ids[target] = ids
        self._on_place(ids.astype(np.int64), target)
