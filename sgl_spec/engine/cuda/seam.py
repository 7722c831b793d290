"""How long the device waits for the host where the host judges what a round gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

from sgl_spec.engine.cuda.rounds import IntArray
from sgl_spec.engine.cuda.timing import Stopwatch

_BLEND = 1 / 16  # weight of the newest round
_MOST_WAITED = 250.0  # ms; in a longer time a kernel was compiled


class SeamClock:
    """The time per round in which no forward ran, neither the target's nor the draft model's.

    It holds what the host does between two forwards (grammars, drafting on the host, commits) and
    the small kernels that draw; not what a forward waits for that is launched kernel by kernel. A
    round counts if the device could have gone on at once: some request of the batch before has not
    ended, and nothing but such batches ran since. wait_ms: of a round lately, blended; 0 before the
    first.
    """

    def __init__(self, started: Callable[[], Stopwatch] = Stopwatch.started) -> None:
        self.wait_ms = 0.0
        self._started = started
        self._watches: list[Stopwatch] = []  # of the forwards since the last round's, its own first
        self._whole = False  # whether nothing is missing among them
        self._known = False  # whether a round was counted
        self._before: tuple[IntArray, IntArray] | None = None

    def enter(self, rows: IntArray, tenancy: IntArray) -> None:
        """A batch of these table rows begins. tenancy: of every row, another one for each request
        that it had."""
        before, self._before = self._before, (rows, tenancy[rows])
        if before is None or not (tenancy[before[0]] == before[1]).any():
            self.restart()

    def leave(self) -> None:
        """A batch was launched that is none of these."""
        self._before = None

    def restart(self) -> None:
        """What the device does now is not to be counted."""
        self._watches.clear()
        self._whole = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the launch of a forward; of one that no batch was entered for it takes no note."""
        if self._before is None:
            yield
            return
        watch = self._started()
        yield
        watch.stop()
        self._watches.append(watch)

    def round_over(self) -> None:
        """The host has read what a round gave, so that all forwards up to its own have ended."""
        if self._whole:
            waits = [one.ms_until(other) for one, other in pairwise(self._watches)]
            self._note(sum(max(0.0, ms) for ms in waits))
        del self._watches[:-1]
        self._whole = bool(self._watches)

    def _note(self, ms: float) -> None:
        if ms > _MOST_WAITED:
            return
        self.wait_ms += (_BLEND if self._known else 1.0) * (ms - self.wait_ms)
        self._known = True
