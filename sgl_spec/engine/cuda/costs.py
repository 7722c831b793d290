"""What rounds cost on this card, so that trees are as large as pays."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import accumulate

import numpy as np
import torch

from sgl_spec.engine.cuda.graphs import Replayed
from sgl_spec.speculative.prune import CostTable

SHARES = (0.0, 0.125, 0.25, 0.5, 1.0)  # of the drafts a batch may have, that rounds are made for
_RUNS = 5


def drafted_rows(batch: int, most_nodes: int) -> tuple[int, ...]:
    """Drafts that a round of `batch` requests can be made for, rising, 0 first. most_nodes: of a
    tree, root included."""
    most = batch * (most_nodes - 1)
    return tuple(sorted({round(share * most) for share in SHARES}))


class DeviceCosts:
    """Milliseconds of rounds by batch size and rows, measured when a batch size first comes.

    made: the round of a padded batch size with so many drafts, without requests. padded: the size
    that a batch is run with.
    """

    def __init__(
        self,
        made: Callable[[int, int], Replayed],
        padded: Callable[[int], int],
        most_nodes: int,
    ) -> None:
        self._made, self._padded, self._most = made, padded, most_nodes
        self._times: dict[int, tuple[float, ...]] = {}

    def table(self, requests: int) -> CostTable:
        """Cost by total rows of a round of `requests` trees."""
        size = self._padded(requests)
        drafts = drafted_rows(size, self._most)
        if size not in self._times:
            times = [self._measure(size, count) for count in drafts]
            self._times[size] = tuple(accumulate(times, max))
        # Rounds of this many requests have a root each; what fills the batch up costs as well.
        return CostTable(tuple(requests + count for count in drafts), self._times[size])

    def add(self, requests: int, rows: int, seconds: float) -> None:
        """Times of rounds say nothing here: they are replays of what was measured."""

    def _measure(self, size: int, drafts: int) -> float:
        round_ = self._made(size, drafts)
        round_.program.load(np.zeros(0, dtype=np.int64), None)
        times: list[float] = []
        for _ in range(_RUNS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            round_.run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times)
