"""What the scheduler asks of the worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sgl_spec.engine.batch import Batch, Launched, StepOutput
from sgl_spec.engine.req import Req


class Runner(Protocol):
    """What the scheduler asks of the worker; see `engine.worker.Worker`.

    A row's calls, in this order: `open`; per prompt chunk `launch` and `collect`; `begin`; per
    round `launch`, `collect` and `observe`; `close`. Batches are collected in the order in which
    they were launched, and at most one is under way when another is launched. `close` comes when no
    batch with the row is under way: a row is not opened again before every batch with its last
    request was collected and observed. Its slots may be others' at once, because a device does
    everything in one order. `flush` comes when nothing is under way.
    """

    def open(self, req: Req) -> None: ...
    def begin(self, req: Req) -> None: ...
    def runs_ahead(self, reqs: Sequence[Req]) -> bool: ...
    def launch(self, batch: Batch) -> Launched: ...
    def collect(self, launched: Launched) -> StepOutput: ...
    def observe(self, taken: list[int]) -> None: ...
    def shareable(self, req: Req) -> int: ...
    def close(self, row: int) -> None: ...
    def flush(self) -> None: ...
