"""What a round costs on this machine, by its requests and the rows that they verify.

A model of the costs says what a round takes before one has run; the rounds that run correct it.
The model of forwards one at a time is measured at start-up (`measure_forwards`), once per machine:

    ms(B, e) = together(B) + rows(B + e) - rows(B) + (e > 0) uneven(B)

for B requests with one row each and e drafted rows: `together` is the time of B single rows, `rows`
that of one request's rows, `uneven` what it costs that some requests have more rows than others
(attention then runs in groups).
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from sgl_spec import __version__
from sgl_spec.engine.batch import starts_of
from sgl_spec.engine.device import device_name
from sgl_spec.kept import measured_once
from sgl_spec.layers.context import ForwardBatch, KVCache
from sgl_spec.layers.transfer import batch_on_device, wait_for
from sgl_spec.speculative.prune import CostTable
from sgl_spec.speculative.tree import MAX_TREE_NODES

if TYPE_CHECKING:
    from sgl_spec.models.decoder import Decoder

logger = logging.getLogger(__name__)

RECENT = 9  # rounds of one shape whose median counts
BELIEVED = 5  # as many of them must have run
REFRESH_ROUNDS = 16  # of a batch size, after which its table is made anew


class CostModel(Protocol):
    """Milliseconds before a round has run. size_of: the batch size under which rounds of so many
    requests are known. extras: counts of drafted rows that are told apart, 0 first. filled: whether
    a round is filled up to the next of them."""

    @property
    def filled(self) -> bool: ...
    def size_of(self, requests: int) -> int: ...
    def extras(self, size: int) -> Sequence[int]: ...
    def modelled(self, size: int, extra: int) -> float: ...


class Costs:
    """A cost model, corrected by rounds that ran: the median of a shape's own, or how much longer
    than the model says other rounds took, those of the same batch size if there are any."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        recent = partial(deque[float], maxlen=RECENT)
        self._seen: dict[tuple[int, int], deque[float]] = defaultdict(recent)
        self._factors: dict[int | None, deque[float]] = defaultdict(recent)  # None: of any size
        self._rounds: dict[int, int] = defaultdict(int)
        self._times: dict[int, list[float]] = {}

    def table(self, requests: int) -> CostTable:
        """Cost by total rows of a round of `requests` trees. More rows never cost less."""
        size = self.model.size_of(requests)
        if size not in self._times:
            self._times[size] = rising([self._ms(size, e) for e in self.model.extras(size)])
        rows = tuple(requests + extra for extra in self.model.extras(size))
        return CostTable(rows, tuple(self._times[size]), steps=self.model.filled)

    def plain_ms(self, requests: int) -> float:
        """Of a round without drafts."""
        return self.table(requests).cost(requests)

    def add(self, requests: int, drafts: int, ms: float) -> None:
        """A round of `requests` with so many drafted rows took `ms`."""
        size = self.model.size_of(requests)
        extras = self.model.extras(size)
        nearest = min(extras, key=lambda extra: abs(extra - drafts))
        if self.model.filled:
            nearest = next((extra for extra in extras if extra >= drafts), nearest)
        else:
            table = self.table(requests)
            ms *= table.cost(requests + nearest) / table.cost(requests + drafts)
        self._seen[size, nearest].append(ms)
        for each in (size, None):
            self._factors[each].append(ms / self.model.modelled(size, nearest))
        self._rounds[size] += 1
        if self._rounds[size] % REFRESH_ROUNDS == 0:
            self._times.pop(size, None)

    def _ms(self, size: int, extra: int) -> float:
        seen = self._seen[size, extra]
        if len(seen) >= BELIEVED:
            return statistics.median(seen)
        factors = next(
            (each for each in (self._factors[size], self._factors[None]) if len(each) >= BELIEVED),
            (1.0,),
        )
        return self.model.modelled(size, extra) * statistics.median(factors)


def rising(times: Sequence[float]) -> list[float]:
    """The rising times that lie closest to these (isotonic regression by pooling): more rows never
    cost less, and what still says so is noise."""
    pools: list[tuple[float, int]] = []
    for ms in times:
        mean, count = ms, 1
        while pools and pools[-1][0] > mean:
            before, more = pools.pop()
            mean, count = (mean * count + before * more) / (count + more), count + more
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


# --- forwards one at a time, measured -------------------------------------------------------------

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 192)
REQUEST_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
EXTRA_ROWS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
PASSES = 3
PREFIX = 128
BUDGET_S = 4.0  # no further forward begins after that: rounds correct what was not measured


@dataclass(frozen=True, slots=True)
class ForwardCosts:
    """The measured parts of the formula above; see the module. A `CostModel`."""

    rows: CostTable
    together: CostTable
    uneven: CostTable | None
    filled: bool = False

    @classmethod
    def fitted(cls, measured: dict[tuple[int, ...], float]) -> ForwardCosts:
        """From times by shape, the rows of each request."""
        singles = {shape: ms for shape, ms in measured.items() if set(shape) == {1}}
        alone = {s: ms for s, ms in measured.items() if len(s) == 1 or min(s[:-1]) > 2}
        rows = _table((sum(shape), ms) for shape, ms in alone.items())
        together = _table((len(shape), ms) for shape, ms in singles.items())
        uneven = {}
        for shape, ms in measured.items():
            if set(shape) == {1, 2}:
                n = len(shape)
                more = ms - together.cost(n) - rows.cost(sum(shape)) + rows.cost(n)
                uneven[n] = max(more, 0.01)
        table = CostTable(tuple(uneven), tuple(uneven.values())) if uneven else None
        return cls(rows, together, table)

    def size_of(self, requests: int) -> int:
        """See `CostModel`."""
        return requests

    def extras(self, size: int) -> Sequence[int]:
        """See `CostModel`."""
        return EXTRA_ROWS

    def modelled(self, size: int, extra: int) -> float:
        """See `CostModel`."""
        base = self.together.cost(size) - self.rows.cost(size)
        uneven = self.uneven.cost(size) if extra and size > 1 and self.uneven else 0.0
        return self.rows.cost(size + extra) + base + uneven

    def __str__(self) -> str:
        return f"rows {self.rows}; requests {self.together}; uneven {self.uneven or 'unknown'}"


def _table(times: Iterable[tuple[int, float]]) -> CostTable:
    counts, ms = zip(*sorted(times), strict=True)
    return CostTable(counts, tuple(rising(ms)))


def forward_costs(model: Decoder, kv: KVCache, *, max_requests: int, max_rows: int) -> ForwardCosts:
    """What forwards of up to `max_rows` rows and `max_requests` requests take, measured now or by
    an earlier start of the same model, machine and version."""
    facts = (__version__, torch.__version__, device_name(model.device), torch.get_num_threads())
    forms = (repr(model.config), str(model.dtype), model.backend.name, max_requests, max_rows)
    measure = partial(measure_forwards, model, kv, max_requests=max_requests, max_rows=max_rows)
    if model.ranks.size > 1:  # all of them measure or none does, whatever each would find
        agreed = model.ranks.agree(list(measure().items()))
        return ForwardCosts.fitted({tuple(shape): ms for shape, ms in agreed})
    measured = measured_once(
        "costs",
        facts + forms,
        measure,
        read=lambda kept: {tuple(shape): float(ms) for shape, ms in kept},
        write=lambda found: list(found.items()),
    )
    return ForwardCosts.fitted(measured)


@torch.inference_mode()
def measure_forwards(
    model: Decoder, kv: KVCache, *, max_requests: int, max_rows: int
) -> dict[tuple[int, ...], float]:
    """Milliseconds of forwards (logits included) by the rows of their requests. It writes into the
    pool's first slots, so it must run before anything is served.

    Each shape is timed beside a forward of one row, and only the quotient counts: a machine that is
    slow for a while spoils neither. The smallest shapes come first, for a model so slow that the
    time is up before all are through.
    """
    logger.info("Measuring what a verify costs on this machine, at most %.0f s.", BUDGET_S)
    slots, start = kv.k.shape[1], model.clock()
    shapes = [_split(n) for n in ROW_COUNTS if n <= max(max_rows, 2)]
    sizes = [n for n in REQUEST_COUNTS if n <= max(max_requests, 2)]
    shapes += [(1,) * n for n in sizes]
    shapes += [tuple(1 + i % 2 for i in range(n)) for n in sizes if n > 1]
    shapes = sorted(set(shapes) - {(1,)}, key=sum)
    batches = {shape: dummy_batch(shape, slots, model.device) for shape in [(1,), *shapes]}
    ones, quotients = [], defaultdict(list)
    _time_forward(model, kv, batches[1,])
    for shape in ((1,), *shapes * PASSES):
        if model.clock() - start > BUDGET_S and (1,) in quotients:
            break
        ones.append(_time_forward(model, kv, batches[1,]))
        quotients[shape].append(_time_forward(model, kv, batches[shape]) / ones[-1])
    one = statistics.median(ones)
    return {shape: 1e3 * one * statistics.median(each) for shape, each in quotients.items()}


def _time_forward(model: Decoder, kv: KVCache, batch: ForwardBatch) -> float:
    wait_for(model.device)
    start = time.perf_counter()
    model.logits(model.forward(batch, kv))
    wait_for(model.device)
    return time.perf_counter() - start


def _split(rows: int) -> tuple[int, ...]:
    """`rows` as one request's tree, or several where one cannot hold them."""
    whole, rest = divmod(rows, MAX_TREE_NODES)
    return (MAX_TREE_NODES,) * whole + (rest,) * (rest > 0)


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
