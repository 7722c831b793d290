"""A worker whose device is late: what the scheduler tells it happens in the order in which it was
told, but as late as it can be.

The device has its own table, texts and committed lengths, as a real one has. It learns of the
host's table when a batch is launched, and moves its lengths on with every token that it accepts,
whatever the host keeps of them. Every rule of `engine.runner` that the calls must keep is checked.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from fakes import SumModel

from sgl_spec.engine.batch import Batch, Computed, DecodeBatch, Launched, PrefillBatch, StepOutput
from sgl_spec.engine.kv_pool import SlotTable
from sgl_spec.engine.req import Req
from sgl_spec.engine.worker import Worker
from sgl_spec.layers.context import KVCache
from sgl_spec.speculative.base import Drafter


class UnderWay(Launched):
    """output: set once the device came to it."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.output: StepOutput | None = None


class LateWorker:
    """ahead: which requests let batches run ahead. haste: how often the device does the next thing
    before it must."""

    def __init__(
        self,
        model: SumModel,
        kv: KVCache,
        table: SlotTable,
        *,
        drafter: Drafter | None,
        ahead: Callable[[Req], bool] = lambda _: True,
        haste: float = 0.0,
    ) -> None:
        self.ahead = ahead
        self.haste = haste
        self.table = table
        self.device = Worker(
            model,  # type: ignore[arg-type]
            kv,
            SlotTable(table.num_rows, table.width),
            drafter=drafter,
        )
        self.committed = np.zeros(table.num_rows, np.int64)
        self.rng = random.Random(5)
        self.most_behind = 0  # tokens that the host did not know of a request it launched
        self.rounds = 0
        self.behind = 0  # launches behind a batch under way
        self.dropped = 0  # tokens that the host did not take
        self._todo: deque[Callable[[], None]] = deque()
        self._under_way: deque[UnderWay] = deque()
        self._open: set[int] = set()
        self._observing: UnderWay | None = None
        self._launched: Callable[[], None] | None = None  # waits for the masks of a grammar

    # --- what the scheduler calls -----------------------------------------------------------------

    def open(self, req: Req) -> None:
        row, seen = req.held.row, _as_of_now(req)
        assert row not in self._open
        assert all(row not in each.batch.rows for each in self._under_way), "rows not yet collected"
        self._open.add(row)

        def happen() -> None:
            self.device.open(seen)
            self.committed[row] = seen.held.committed_len

        self._tell(happen)

    def begin(self, req: Req) -> None:
        seen = _as_of_now(req)
        req.drafted = len(req.ids)
        self._tell(lambda: self.device.begin(seen))

    def runs_ahead(self, reqs: Sequence[Req]) -> bool:
        return all(map(self.ahead, reqs))

    def launch(self, batch: Batch) -> Launched:
        assert self._observing is None, "a round was not observed"
        assert set(batch.rows.tolist()) <= self._open
        assert len(self._under_way) <= 1
        self.behind += len(self._under_way)
        launched, table = UnderWay(batch), self.table.host.copy()
        self._under_way.append(launched)
        self._launched = lambda: self._run(launched, table)
        if not self._waits_for_masks(batch):
            self._tell(self._launched)
            self._launched = None
        return launched

    def _waits_for_masks(self, batch: Batch) -> bool:
        return any(row in self.device._constraints for row in batch.rows.tolist())

    def settle(self) -> None:
        assert self._under_way

    def resume(self, launched: Launched) -> Launched:
        assert launched is self._under_way[-1]
        assert len(self._under_way) == 1, "the batches before it are not committed"
        if self._launched is not None:
            self._tell(self._launched)
            self._launched = None
        return launched

    def collect(self, launched: Launched) -> StepOutput:
        assert launched is self._under_way.popleft(), "out of order"
        assert self._observing is None, "a round was not observed"
        assert isinstance(launched, UnderWay)
        while launched.output is None:
            self._todo.popleft()()
        if isinstance(launched.batch, DecodeBatch):
            self._observing = launched
        return launched.output

    def observe(self, taken: list[int]) -> None:
        assert self._observing is not None
        assert self._observing.output is not None
        given = [len(tokens) for tokens in self._observing.output.tokens]
        assert all(0 <= kept <= count for kept, count in zip(taken, given, strict=True))
        self.dropped += sum(given) - sum(taken)
        self._observing = None

    def shareable(self, req: Req) -> int:
        return req.held.committed_len

    def close(self, row: int) -> None:
        assert all(row not in each.batch.rows for each in self._under_way), "still under way"
        self._open.remove(row)
        self._tell(lambda: self.device.close(row))

    def flush(self) -> None:
        assert not self._under_way
        assert not self._open
        while self._todo:
            self._todo.popleft()()
        self.device.flush()

    # --- the device -------------------------------------------------------------------------------

    def _tell(self, what: Callable[[], None]) -> None:
        self._todo.append(what)
        while self._todo and self.rng.random() < self.haste:
            self._todo.popleft()()

    def _run(self, launched: UnderWay, table: np.ndarray) -> None:
        self.device.table.host[:] = table
        batch = launched.batch
        if isinstance(batch, PrefillBatch):
            launched.output = self._compute(batch)
            self.committed[batch.rows] += batch.takes
            return
        self.rounds += 1
        now = self.committed[batch.rows]
        behind = now - batch.committed
        assert (behind >= 0).all(), "the host knows more than there is"
        self.most_behind = max(self.most_behind, int(behind.max()))
        launched.output = self._compute(replace(batch, committed=now))
        accepted = [len(tokens) for tokens in launched.output.tokens]
        self.device.observe(accepted)
        self.committed[batch.rows] += accepted

    def _compute(self, batch: Batch) -> StepOutput:
        done = self.device.launch(batch)
        assert isinstance(done, Computed)
        return done.output


def _as_of_now(req: Req) -> Req:
    seen = copy.copy(req)
    seen.ids, seen.holding = list(req.ids), copy.copy(req.holding)
    return seen
