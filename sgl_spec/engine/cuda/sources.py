"""Who drafts in the rounds of a server. The worker runs rounds; a source says which, and learns
from what they gave.

    RoundSource      nobody: plain decoding
    ModelRounds      a draft model, on the device (`model_rounds`)
    NgramRounds      an index of n-grams on the device (`ngram_round`)
    HostTreeRounds   a drafter on the host (`drafting`)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from sgl_spec.engine.batch import DecodeBatch, IntArray
from sgl_spec.engine.cuda.costs import DeviceCosts, TreeShapes
from sgl_spec.engine.cuda.graphs import Replayed, Rounds
from sgl_spec.engine.cuda.round import Parts, Round, RoundKind
from sgl_spec.engine.cuda.running import Planned, RunningRound
from sgl_spec.engine.cuda.timing import timed
from sgl_spec.engine.cuda.trees import Roots

logger = logging.getLogger(__name__)


class RoundSource:
    """See the module; this one drafts nothing, and is what the others do unless they say otherwise.

    costs: what rounds cost, where trees may be cut by it.
    """

    costs: DeviceCosts | None = None

    def __init__(self, parts: Parts, rounds: Rounds) -> None:
        self.parts, self.rounds = parts, rounds

    # --- requests and their texts -----------------------------------------------------------------

    def open(self, row: int, most: int) -> None:
        """A request took a row; its text may come to `most` tokens."""

    def begin(self) -> None:
        """A request came that may be drafted for."""

    def filled(self, rows: IntArray, ends: IntArray) -> None:
        """Prompts were launched up to these positions."""

    def kept(self, rows: IntArray, lengths: IntArray) -> None:
        """The host has read texts up to these lengths."""

    # --- rounds -----------------------------------------------------------------------------------

    def waits(self) -> bool:
        """Whether the next round needs tokens that the host has read."""
        return False

    def plan(self, batch: DecodeBatch, kind: RoundKind, *, behind: bool) -> Planned:
        """The round for a batch. behind: whether there are rounds that the host has not read."""
        return Planned(self.plain(len(batch.rows), kind))

    def plain(self, size: int, kind: RoundKind) -> Replayed:
        """A round of so many requests without drafts."""
        padded = self.rounds.padded(size, masked=kind.masked)
        key = ("plain", padded, kind)
        return self.rounds.get(key, lambda: Round(self.parts, padded, kind, Roots), padded)

    def proposed(self, batch: DecodeBatch, planned: Planned) -> list[int]:
        """Draft tokens verified per request, as far as is known before the round has run."""
        return [0] * len(batch.rows)

    def collected(self, launched: RunningRound, lengths: IntArray, given: IntArray) -> list[int]:
        """Learn from a round. lengths: [B] of its requests' texts before it. given: [B, 1 + N], how
        many tokens it gave, and which. Returns the draft tokens verified per request."""
        return launched.proposed

    def observe(self, taken: list[int], *, behind: bool) -> None:
        """The tokens that each request took of the round collected last. behind: whether another
        batch was launched before."""

    def flush(self) -> None:
        """Forget what was learned of texts."""

    def stats(self) -> dict[str, float]:
        """Figures beside the drafter's own."""
        return {}

    # --- made beforehand --------------------------------------------------------------------------

    def prepare(self, kind: RoundKind) -> None:
        """Make all rounds of a kind, the largest first, and time what is to be weighed."""
        for make in self.every_round(kind):
            make()

    def every_round(self, kind: RoundKind) -> list[Callable[[], Replayed]]:
        """What makes the rounds of a kind, the largest first."""
        return [
            partial(self.plain, size, kind)
            for size in reversed(self.rounds.sizes_for(masked=kind.masked))
        ]


class ShapedRounds(RoundSource):
    """Rounds that share a number of rows among their requests. shapes: batch sizes and rows of
    those that are captured; costs: None verifies every draft."""

    def __init__(
        self, parts: Parts, rounds: Rounds, shapes: TreeShapes, costs: DeviceCosts | None
    ) -> None:
        super().__init__(parts, rounds)
        self.shapes, self.costs = shapes, costs

    def round_of(self, size: int, rows: int, kind: RoundKind) -> Replayed:
        """rows: equal to the size where nothing is verified beside the roots."""
        raise NotImplementedError

    def _largest_first(self) -> list[tuple[int, int]]:
        shapes = [*self.shapes, *((size, size) for size in self.rounds.sizes)]
        return sorted(shapes, key=lambda shape: shape[1], reverse=True)

    def prepare(self, kind: RoundKind) -> None:
        """See `RoundSource`."""
        for size, rows in self._largest_first():
            round_ = self.round_of(size, rows, kind)
            if self.costs is not None:
                self.costs.know(size, rows, self.parts.agree(timed(round_)))
        if self.costs is not None:
            logger.info("Rounds in ms: %s", self.costs)

    def every_round(self, kind: RoundKind) -> list[Callable[[], Replayed]]:
        """See `RoundSource`."""
        return [partial(self.round_of, size, rows, kind) for size, rows in self._largest_first()]
