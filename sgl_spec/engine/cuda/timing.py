"""How long rounds take on the device, without waiting for those that run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np
import torch

from sgl_spec.engine.cuda.graphs import Replayed

_RUNS = 5


class Mark:
    """A place in the stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def ms_until(self, later: Mark) -> float:
        """GPU time to another's place; waits until the device came there."""
        later._event.synchronize()
        return float(self._event.elapsed_time(later._event))


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """GPU time between two places in the stream."""

    start: torch.cuda.Event
    end: torch.cuda.Event

    @classmethod
    def started(cls) -> Stopwatch:
        """Starts when the device comes to it."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        return cls(start, end)

    def stop(self) -> None:
        """Likewise."""
        self.end.record()

    def ms(self) -> float:
        """Waits until the device came to the end."""
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end))

    def ms_until(self, later: Stopwatch) -> float:
        """From this one's end to another's start, once the device came to both."""
        return float(self.end.elapsed_time(later.start))


def timed(round_: Replayed) -> float:
    """Milliseconds of a round without requests, the median of a few."""
    round_.program.load(np.zeros(0, dtype=np.int64), None)
    times = []
    for _ in range(_RUNS):
        watch = Stopwatch.started()
        round_.run()
        watch.stop()
        times.append(watch.ms())
    return statistics.median(times)
