"""Who owns which KV slot. Host-side counts and tables only: the KV rows live in
`layers.context.KVCache`.

A slot is one token's place in every layer's cache. Slots are handed out in pages of `page_size`. A
request's row of `SlotTable` maps its logical positions to slots; three marks divide the row:

    [0, shared_len)                 owned by the prefix cache, never written by the request
    [shared_len, committed_len)     the request's own, KV valid
    [committed_len, allocated_len)  the request's own, room for the next rounds' trees

Invariant: free + cached + held == total, where held is the sum of allocated_len - shared_len.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgl_spec.layers.transfer import on_device

SlotArray = npt.NDArray[np.int64]

_COMPARED = 64  # so many slots are sent rather than looked at


def ceil_page(tokens: int, page_size: int) -> int:
    """`tokens` rounded up to whole pages."""
    return -(-tokens // page_size) * page_size


def floor_page(tokens: int, page_size: int) -> int:
    """`tokens` rounded down to whole pages."""
    return tokens // page_size * page_size


class PageAllocator:
    """A stack of free pages.

    Freshly freed pages are handed out first, because their cache lines are the warm ones.
    """

    def __init__(self, num_slots: int, page_size: int) -> None:
        assert num_slots % page_size == 0
        self.page_size = page_size
        self.total = num_slots
        self._pages = np.arange(num_slots // page_size - 1, -1, -1, dtype=np.int64)
        self._top = len(self._pages)

    @property
    def free_slots(self) -> int:
        """Slots nobody owns."""
        return self._top * self.page_size

    def alloc(self, num_slots: int) -> SlotArray:
        """Take whole pages; the caller has checked that `num_slots` are free."""
        count = num_slots // self.page_size
        assert num_slots % self.page_size == 0
        assert count <= self._top, f"asked for {count} pages of {self._top} free"
        self._top -= count
        pages = self._pages[self._top : self._top + count][::-1]
        offsets = np.arange(self.page_size, dtype=np.int64)
        return (pages[:, None] * self.page_size + offsets).reshape(-1)

    def free(self, slots: SlotArray) -> None:
        """Give back whole pages, in any order of pages; `slots` lists every slot of each page."""
        pages = np.unique(slots // self.page_size)
        assert len(slots) == len(pages) * self.page_size, "part of a page, or a slot twice"
        assert self._top + len(pages) <= len(self._pages), "more pages freed than exist"
        self._pages[self._top : self._top + len(pages)] = pages
        self._top += len(pages)

    def free_set(self) -> SlotArray:
        """Every free slot, for integrity checks."""
        offsets = np.arange(self.page_size, dtype=np.int64)
        return (self._pages[: self._top, None] * self.page_size + offsets).reshape(-1)


@dataclass(slots=True)
class Holding:
    """One request's marks on its row (see the module's head)."""

    row: int
    shared_len: int = 0
    committed_len: int = 0
    allocated_len: int = 0


class SlotTable:
    """`req_to_token`: the slot of each logical position of each request row.

    `host` [num_rows, width] is the authority; `device` is what forwards read. Without scratch slots
    the two are one memory. With them `device` [num_rows + 1, width] lies on a device of its own and
    says what `host` said at the last `sync`. Its last row, `filler`, belongs to nobody and names
    the scratch slots alone, those behind the pool's: what pads a batch writes there.
    """

    def __init__(
        self,
        num_rows: int,
        width: int,
        *,
        device: torch.device | str = "cpu",
        num_slots: int = 0,
        scratch: int = 0,
    ) -> None:
        """num_slots: of the pool, before the `scratch` slots; both matter for a device alone."""
        self.host: npt.NDArray[np.int32] = np.zeros((num_rows, width), dtype=np.int32)
        self.mirrored = scratch > 0
        self.device: Tensor = torch.from_numpy(self.host)
        if self.mirrored:
            self.device = torch.zeros(num_rows + 1, width, dtype=torch.int32, device=device)
            self.device[-1] = num_slots + torch.arange(width, device=device) % scratch
        self.filler = num_rows
        self._unsent: list[tuple[int, int, int]] = []  # row, start and length of what was written
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self.num_rows = num_rows
        self.width = width

    @property
    def free_rows(self) -> int:
        """Rows no request holds."""
        return len(self._free_rows)

    def take_row(self) -> int:
        """A free row."""
        return self._free_rows.pop()

    def give_row(self, row: int) -> None:
        """Return a row."""
        assert row not in self._free_rows
        self._free_rows.append(row)

    def slots(self, row: int, start: int, end: int) -> SlotArray:
        """Slots of logical positions start .. end of a row, as a copy."""
        return self.host[row, start:end].astype(np.int64)

    def write(self, row: int, start: int, slots: SlotArray) -> None:
        """Set the slots of logical positions from `start` on."""
        place = self.host[row, start : start + len(slots)]
        if self.mirrored:
            first, last = 0, len(slots)
            if last > _COMPARED:  # a prompt's pages are published again and again
                (changed,) = np.nonzero(place != slots)
                first, last = (changed[0], changed[-1] + 1) if len(changed) else (0, 0)
            if last > first:
                self._unsent.append((row, start + int(first), int(last - first)))
        place[:] = slots

    def sync(self) -> None:
        """Bring `device` up to `host`, in the order of the device's stream and without waiting for
        it."""
        if not self._unsent:
            return
        rows, starts, counts = np.array(self._unsent, dtype=np.int64).T
        self._unsent.clear()
        before = np.cumsum(counts) - counts
        place = np.repeat(rows * self.width + starts - before, counts) + np.arange(counts.sum())
        written = np.stack((place, self.host.reshape(-1)[place]))
        at, slots = on_device(written, self.device.device)
        self.device.view(-1).index_copy_(0, at, slots.to(torch.int32))
