"""Whether drafts are worth their price in batches that the host judges.

Their rounds come one after the other, or behind a prompt or a round on the device, and a round is
charged the time from where the device was done with what came before to its own end, whoever spent
it. The books (`tree_ledger`) are apart from those of rounds on the device, where the same trees
take other times. What a round takes without drafts nobody knows beforehand: at every batch size a
few such rounds come first. No device; the clock is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

from sgl_spec.engine.cuda.tree_ledger import TreeLedger

FIRST = 3  # rounds without drafts that open an account, with the least of their times


class Mark(Protocol):
    """A place in what the device does."""

    def ms_until(self, later: Self, /) -> float:
        """From here to there; waits for the device to come there."""


@dataclass(frozen=True, slots=True)
class _Round:
    """Under way. since: behind what came before, if anything did. made: how many graphs there were
    when it began."""

    size: int
    asked: bool
    since: Mark | None
    made: int


class SeamTrees:
    """See the module. made: how many graphs there are by now: a round that captures one does not
    count. mark: behind all that was launched. asked, left: rounds with and without drafts."""

    def __init__(self, made: Callable[[], int], mark: Callable[[], Mark]) -> None:
        self._made, self._mark = made, mark
        self.clear()

    def clear(self) -> None:
        """Forget all rounds."""
        self.ledger = TreeLedger()
        self.asked = self.left = 0
        self._firsts: dict[int, list[float]] = {}  # ms, by batch size
        self._tried: set[int] = set()  # batch sizes that had drafts
        self._round: _Round | None = None
        self._ended: Mark | None = None
        self._over: tuple[_Round, float, Mark, Mark] | None = None  # not counted yet

    def begin(self, requests: int, *, wanted: bool) -> bool:
        """A round of so many requests begins. wanted: whether any of them may have drafts. Returns
        whether to make some."""
        self._count()
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
        self._ended = now = self._mark()
        first = this.asked and this.size not in self._tried
        if first:  # what it needs may have been compiled
            self._tried.add(this.size)
        if not first and this.since is not None and this.made == self._made():
            self._over = this, tokens, this.since, now

    def _count(self) -> None:
        """Note the round that is over: not at once, as the device may be at what its drafter left
        there, which the host need not wait for."""
        if self._over is None:
            return
        (this, tokens, since, now), self._over = self._over, None
        ms = since.ms_until(now)
        firsts = self._firsts[this.size]
        if len(firsts) < FIRST:
            firsts.append(ms)
        else:
            self.ledger.note(this.size, tokens, ms, asked=this.asked)

    def passed(self) -> None:
        """A batch was launched that is no such round; the device may still be at it."""
        self._ended = self._mark()

    def stats(self) -> dict[str, float]:
        """seam_asked, seam_left: rounds with and without drafts. seam_rest: 1 while drafts rest.
        seam_tree_ms, seam_plain_ms: what both kinds take lately, at the present batch size."""
        self._count()
        known = self.ledger.stats()
        figures = {"seam_asked": float(self.asked), "seam_left": float(self.left)}
        names = {
            "trees_rest": "seam_rest",
            "tree_round_ms": "seam_tree_ms",
            "plain_round_ms": "seam_plain_ms",
        }
        return figures | {names[name]: value for name, value in known.items() if name in names}
