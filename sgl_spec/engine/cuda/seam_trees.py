"""Whether drafts are worth their price in batches that the host judges.

Their rounds come one after the other, and a round is charged the time from the end of the one
before to its own, whoever spent it. The books (`tree_ledger`) are apart from those of rounds on the
device, where the same trees take other times. What a round takes without drafts nobody knows
beforehand: at every batch size a few such rounds come first. No device; the clock is the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sgl_spec.engine.cuda.tree_ledger import TreeLedger

FIRST = 3  # rounds without drafts that open an account, with the least of their times


@dataclass(frozen=True, slots=True)
class _Round:
    """Under way. since: the end of the round before, None if something else ran in between. made:
    how many graphs there were when it began."""

    size: int
    asked: bool
    since: float | None
    made: int


class SeamTrees:
    """See the module. made: how many graphs there are by now: a round that captures one does not
    count. clock: seconds. asked, left: rounds with and without drafts."""

    def __init__(
        self, made: Callable[[], int], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.ledger = TreeLedger()
        self.asked = self.left = 0
        self._made, self._clock = made, clock
        self._firsts: dict[int, list[float]] = {}  # ms, by batch size
        self._tried: set[int] = set()  # batch sizes that had drafts
        self._round: _Round | None = None
        self._ended: float | None = None

    def begin(self, requests: int, *, wanted: bool) -> bool:
        """A round of so many requests begins. wanted: whether any of them may have drafts. Returns
        whether to make some."""
        size = 1 << (requests - 1).bit_length()
        firsts = self._firsts.setdefault(size, [])
        asks = False
        if len(firsts) == FIRST:
            self.ledger.open(size, min(firsts))
            asks = wanted and not self.ledger.resting
        self._round, self._ended = _Round(size, asks, self._ended, self._made()), None
        self.asked += asks
        self.left += not asks
        return asks

    def end(self, tokens: float) -> None:
        """It is over, its drafter told. tokens: it gave a request, on average."""
        this, self._round = self._round, None
        assert this is not None
        self._ended = now = self._clock()
        first = this.asked and this.size not in self._tried
        if first:  # what it needs may have been compiled
            self._tried.add(this.size)
        if first or this.since is None or this.made != self._made():
            return
        self._note(this, tokens, (now - this.since) * 1e3)

    def _note(self, this: _Round, tokens: float, ms: float) -> None:
        firsts = self._firsts[this.size]
        if len(firsts) < FIRST:
            firsts.append(ms)
        else:
            self.ledger.note(this.size, tokens, ms, asked=this.asked)

    def leave(self) -> None:
        """A batch was launched that is no such round. The device may be at it when the next one
        begins, so that says nothing of what rounds take."""
        self._ended = None

    def stats(self) -> dict[str, float]:
        """seam_asked, seam_left: rounds with and without drafts. seam_rest: 1 while drafts rest.
        seam_tree_ms, seam_plain_ms: what both kinds take lately, at the present batch size."""
        known = self.ledger.stats()
        figures = {"seam_asked": float(self.asked), "seam_left": float(self.left)}
        names = {
            "trees_rest": "seam_rest",
            "tree_round_ms": "seam_tree_ms",
            "plain_round_ms": "seam_plain_ms",
        }
        return figures | {names[name]: value for name, value in known.items() if name in names}
