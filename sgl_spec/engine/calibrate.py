"""What a verify costs on this machine, so that drafting can know its price.

Measured at start-up, and kept true by the rounds themselves. The time of a forward depends on how
many requests share it (each has keys of its own to read) and on how many rows they bring:

    cost(B, e) = together(B) + rows(B + e) - rows(B) + (e > 0) uneven(B)

for B requests with one row each and e drafted rows: `together` is the time of B single rows,
`rows` that of one request's rows, `uneven` what it costs that some requests have more rows than
others (attention then runs in groups).
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from sgl_spec.engine.batch import starts_of
from sgl_spec.layers.context import ForwardBatch, KVCache
from sgl_spec.layers.transfer import batch_on_device, wait_for
from sgl_spec.speculative.prune import CostTable
from sgl_spec.speculative.tree import MAX_TREE_NODES

if TYPE_CHECKING:
    from sgl_spec.models.decoder import Decoder

logger = logging.getLogger(__name__)

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 192)
REQUEST_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
EXTRA_ROWS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
PASSES = 4
PREFIX = 128
SLOW_S = 0.06  # a forward that takes longer is timed once
SETTLED = 1.05  # two times of a shape that differ by less are believed
BUDGET_S = 3.0  # after that long no further pass begins; rounds correct what noise there is
RECENT = 8  # rounds of about the same shape whose best time counts
REFRESH_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class CostModel:
    """The measured parts of the formula above, in milliseconds; see the module."""

    rows: CostTable
    together: CostTable
    uneven: tuple[float, ...]

    def __str__(self) -> str:
        rows = " ".join(f"{n}:{t:.1f}" for n, t in zip(self.rows.rows, self.rows.ms, strict=True))
        sizes = zip(self.together.rows, self.together.ms, self.uneven, strict=True)
        together = " ".join(f"{n}:{t:.1f}+{u:.1f}" for n, t, u in sizes)
        return f"rows {rows}; requests (+uneven) {together}"

    def costs(self, requests: int) -> tuple[float, ...]:
        """Time of a verify of `requests` trees at each count of EXTRA_ROWS."""
        base = self.together.cost(requests) - self.rows.cost(requests)
        nearest = _nearest(self.together.rows, requests)
        return tuple(
            self.rows.cost(requests + extra) + base + (self.uneven[nearest] if extra else 0.0)
            for extra in EXTRA_ROWS
        )


class CostMeter:
    """The model, corrected by the rounds that run.

    A moment in which the machine was busy may have spoilt a measurement at start-up, and the
    machine may change. A time that rounds of one shape show again and again replaces the model's;
    more rows are then taken to cost at least as much.
    """

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._seen: dict[int, list[deque[float]]] = defaultdict(
            lambda: [deque(maxlen=RECENT) for _ in EXTRA_ROWS]
        )
        self._tables: dict[int, CostTable] = {}
        self._rounds = 0

    def table(self, requests: int) -> CostTable:
        """Cost by total rows of a verify of `requests` trees."""
        if requests not in self._tables:
            times = accumulate(self._times(requests), max)
            rows = tuple(requests + extra for extra in EXTRA_ROWS)
            self._tables[requests] = CostTable(rows, tuple(times))
        return self._tables[requests]

    def add(self, requests: int, rows: int, seconds: float) -> None:
        """Note that a verify of `requests` trees with `rows` nodes in all took `seconds`."""
        nearest = _nearest(EXTRA_ROWS, rows - requests)
        table = self.table(requests)
        scale = table.cost(requests + EXTRA_ROWS[nearest]) / table.cost(rows)
        self._seen[requests][nearest].append(seconds * 1e3 * scale)
        self._rounds += 1
        if self._rounds % REFRESH_ROUNDS == 0:
            self._tables.clear()

    def _times(self, requests: int) -> Iterator[float]:
        seen = self._seen.get(requests)
        for i, modelled in enumerate(self.model.costs(requests)):
            known = seen is not None and len(seen[i]) == RECENT
            yield min(seen[i]) if known and seen is not None else modelled


def _nearest(counts: Sequence[int], count: int) -> int:
    return min(range(len(counts)), key=lambda i: abs(counts[i] - count))


@torch.inference_mode()
def measure_costs(model: Decoder, kv: KVCache, *, max_requests: int, max_rows: int) -> CostModel:
    """Time forwards (logits included) of up to `max_rows` rows and `max_requests` requests.

    It writes into the pool's first slots, so it must run before anything is served. Counts beyond
    the last measured ones are extrapolated by the tables.
    """
    slots = kv.k.shape[1]
    counts = [n for n in ROW_COUNTS if n <= max(max_rows, 2)]
    sizes = [n for n in REQUEST_COUNTS if n <= max(max_requests, 2)]
    shapes = [_split(n) for n in counts]
    shapes += [[1] * n for n in sizes]
    shapes += [[1 + i % 2 for i in range(n)] for n in sizes]
    distinct = sorted({tuple(shape) for shape in shapes}, key=sum)
    batches = [dummy_batch(shape, slots, model.device) for shape in distinct]
    _announce(_time_forward(model, kv, batches[0]), distinct)
    measured = dict(zip(distinct, _time_shapes(model, kv, batches), strict=True))
    times = [measured[tuple(shape)] for shape in shapes]
    rows = CostTable(tuple(counts), rising(times[: len(counts)]))
    single = times[len(counts) : len(counts) + len(sizes)]
    together = CostTable(tuple(sizes), rising(single))
    uneven = tuple(
        max(0.0, mixed - together.cost(n) - rows.cost(n + n // 2) + rows.cost(n))
        for n, mixed in zip(sizes, times[len(counts) + len(sizes) :], strict=True)
    )
    return CostModel(rows, together, (0.0, *uneven[1:]))


def rising(times: Sequence[float]) -> tuple[float, ...]:
    """More rows never cost less: what still says so is noise, and the lower time is taken."""
    return tuple(accumulate(reversed(times), min))[::-1]


def _announce(single_s: float, shapes: Sequence[Sequence[int]]) -> None:
    """Say how long the start will wait, from the time of the smallest forward. Most shapes are
    timed twice; on a CPU some 16 rows take as long again as the first."""
    rows = sum(map(sum, shapes))
    seconds = single_s * (2 * len(shapes) + rows / 16)
    logger.info("Measuring what a verify costs on this machine, about %.0f s.", max(1, seconds))


def _time_shapes(model: Decoder, kv: KVCache, batches: list[ForwardBatch]) -> list[float]:
    """Best time of each batch (ms). The batches take turns, so that a moment in which the machine
    was busy cannot spoil all tries of one."""
    start = time.perf_counter()
    seen: list[list[float]] = [[_time_forward(model, kv, batch)] for batch in batches]
    for _ in range(PASSES - 1):
        waiting = [i for i, times in enumerate(seen) if not _settled(times)]
        if not waiting or time.perf_counter() - start > BUDGET_S:
            break
        for i in waiting:
            seen[i].append(_time_forward(model, kv, batches[i]))
    return [min(times) * 1e3 for times in seen]


def _settled(times: Sequence[float]) -> bool:
    """Whether a shape needs no further try: it is slow, or its best time came twice."""
    first, *others = sorted(times)
    return first > SLOW_S or bool(others and others[0] <= first * SETTLED)


def _time_forward(model: Decoder, kv: KVCache, batch: ForwardBatch) -> float:
    wait_for(model.device)
    start = time.perf_counter()
    model.logits(model.forward(batch, kv))
    wait_for(model.device)
    return time.perf_counter() - start


def _split(rows: int) -> list[int]:
    """`rows` as one request's tree, or several where one cannot hold them."""
    whole, rest = divmod(rows, MAX_TREE_NODES)
    return [MAX_TREE_NODES] * whole + [rest] * (rest > 0)


def dummy_batch(
    q_lens: Sequence[int], num_slots: int, device: torch.device | str = "cpu"
) -> ForwardBatch:
    """Chains of `q_lens` nodes over a short prefix, all in the pool's first slots."""
    prefix = min(PREFIX, num_slots - 1)
    lens = torch.tensor(q_lens)
    within = torch.cat([torch.arange(n) for n in q_lens])
    width = prefix + max(q_lens)
    table = torch.arange(width, dtype=torch.int32) % num_slots
    positions = prefix + within
    bit = torch.ones_like(within) << within
    batch = ForwardBatch(
        tokens=torch.zeros(len(within), dtype=torch.int64),
        positions=positions,
        slots=table.long()[positions],
        req_to_token=table.expand(len(q_lens), -1).contiguous().to(device),
        rows=torch.arange(len(q_lens)),
        prefix_lens=torch.full((len(q_lens),), prefix),
        q_starts=starts_of(lens),
        mask_words=bit | (bit - 1),
        max_q_len=max(q_lens),
    )
    return batch_on_device(batch, batch.req_to_token.device)
