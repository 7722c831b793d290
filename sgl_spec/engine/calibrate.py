"""What a verify costs on this machine, so that drafting can know its price.

Measured at start-up, and kept true by the rounds themselves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from sgl_spec.engine.batch import starts_of
from sgl_spec.layers.context import ForwardBatch, KVCache
from sgl_spec.speculative.prune import CostTable
from sgl_spec.speculative.tree import MAX_TREE_NODES

if TYPE_CHECKING:
    from sgl_spec.models.decoder import Decoder

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)
PASSES = 6
PREFIX = 64
SLOW_S = 0.1  # a forward that takes longer is timed once
RECENT = 8  # rounds of about the same size whose best time counts
REFRESH_ROUNDS = 16


class CostMeter:
    """The cost table, refreshed by the rounds that run.

    A moment in which the machine was busy may have spoilt a measurement at start-up, and the
    machine may change; a time that rounds show again and again replaces it.
    """

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._recent: list[deque[float]] = [deque(maxlen=RECENT) for _ in table.rows]
        self._rounds = 0

    def add(self, rows: int, seconds: float) -> None:
        """Note that a forward of `rows` rows took `seconds`."""
        table = self.table
        if rows > table.rows[-1]:
            return
        nearest = min(range(len(table.rows)), key=lambda i: abs(table.rows[i] - rows))
        scale = table.ms[nearest] / table.cost(rows)
        self._recent[nearest].append(seconds * 1e3 * scale)
        self._rounds += 1
        if self._rounds % REFRESH_ROUNDS == 0:
            self._refresh()

    def _refresh(self) -> None:
        times = [
            min(recent) if len(recent) == RECENT else ms
            for recent, ms in zip(self._recent, self.table.ms, strict=True)
        ]
        self.table = CostTable(self.table.rows, rising(times))


def rising(times: Sequence[float]) -> tuple[float, ...]:
    """More rows never cost less: what still says so is noise, and the lower time is taken."""
    return tuple(accumulate(reversed(times), min))[::-1]


@torch.inference_mode()
def measure_costs(model: Decoder, kv: KVCache, max_rows: int) -> CostTable:
    """Forward time (ms, logits included) by rows.

    Every count is timed in several passes, so that a moment in which the machine was busy cannot
    spoil one count, and the best counts. It writes into the pool's first slots, so it must run
    before anything is served. Counts beyond the last measured one are extrapolated by the table.
    """
    counts = [n for n in ROW_COUNTS if n <= max(max_rows, 2)]
    batches = [_dummy_batch(n, kv.k.shape[1]) for n in counts]
    best = [float("inf")] * len(counts)
    for number in range(PASSES):
        for i, batch in enumerate(batches):
            if number == 0 or best[i] < SLOW_S:
                best[i] = min(best[i], _time_forward(model, kv, batch))
    return CostTable(tuple(counts), rising([seconds * 1e3 for seconds in best]))


def _time_forward(model: Decoder, kv: KVCache, batch: ForwardBatch) -> float:
    start = time.perf_counter()
    model.logits(model.forward(batch, kv))
    return time.perf_counter() - start


def _dummy_batch(rows: int, num_slots: int) -> ForwardBatch:
    """Trees of up to MAX_TREE_NODES chain nodes over a short prefix, all in the pool's first
    slots."""
    prefix = min(PREFIX, num_slots - 1)
    lens = [MAX_TREE_NODES] * (rows // MAX_TREE_NODES)
    lens += [rows % MAX_TREE_NODES] if rows % MAX_TREE_NODES else []
    q_lens = torch.tensor(lens)
    within = torch.cat([torch.arange(n) for n in lens])
    width = prefix + max(lens)
    table = (torch.arange(width, dtype=torch.int32) % num_slots).expand(len(lens), -1).contiguous()
    positions = prefix + within
    full = torch.ones_like(within) << within
    return ForwardBatch(
        tokens=torch.zeros(rows, dtype=torch.int64),
        positions=positions,
        slots=table[0].long()[positions],
        req_to_token=table,
        rows=torch.arange(len(lens)),
        prefix_lens=torch.full((len(lens),), prefix),
        q_starts=starts_of(q_lens),
        mask_words=full | (full - 1),
    )
