"""Rounds of a draft model that lies on the device, and when it rests: speculation must not make a
batch slower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from sgl_spec.engine.batch import DecodeBatch, IntArray
from sgl_spec.engine.cuda.graphs import Replayed, Rounds
from sgl_spec.engine.cuda.model_trees import GrownTrees
from sgl_spec.engine.cuda.round import DraftParts, Parts, Requests, Round, RoundKind
from sgl_spec.engine.cuda.running import Planned, RunningRound
from sgl_spec.engine.cuda.sources import RoundSource
from sgl_spec.engine.cuda.timing import timed
from sgl_spec.speculative.base import Drafter
from sgl_spec.speculative.draft_economy import DraftEconomy
from sgl_spec.speculative.model_drafter import ModelDrafter

_BLEND = 1 / 16  # weight of the newest resting round


def draft_parts(drafter: Drafter | None) -> DraftParts | None:
    """Those of a draft model, None for any other drafter."""
    if not isinstance(drafter, ModelDrafter):
        return None
    return DraftParts(model=drafter.model, kv=drafter.kv, hidden=drafter.last)


class Resting:
    """Whether a draft model drafts for the next round; see `DraftEconomy`, which decides by what
    rounds brought and took. Times of rounds at rest are known by padded batch size."""

    def __init__(self, economy: DraftEconomy) -> None:
        self.economy = economy
        self._rest_ms: dict[int, float] = {}

    def drafts(self, size: int) -> bool:
        """size: of the padded batch."""
        plain = self._rest_ms.get(size)
        return plain is None or self.economy.drafts(size, plain)

    def know(self, size: int, ms: float) -> None:
        """A round at rest takes so long."""
        self._rest_ms[size] = ms

    def note(self, size: int, requests: int, tokens: int, ms: float, *, drafted: bool) -> None:
        """A round of `requests`, run as `size`, brought `tokens` in `ms`."""
        if drafted:
            # In tokens of a full batch, since the time is one's.
            self.economy.note_round(size, round(tokens * size / requests), ms)
        elif size in self._rest_ms:
            self._rest_ms[size] += _BLEND * (ms - self._rest_ms[size])


class ModelRounds(RoundSource):
    """The model drafts, or rests and only follows. weighs: whether it rests where drafting does not
    pay."""

    def __init__(
        self,
        parts: Parts,
        rounds: Rounds,
        drafter: ModelDrafter,
        *,
        weighs: bool,
    ) -> None:
        super().__init__(parts, rounds)
        assert parts.draft is not None
        self.drafter, self.shape = drafter, drafter.shape
        self.resting = Resting(DraftEconomy()) if weighs and rounds.sizes else None

    def filled(self, rows: IntArray, ends: IntArray) -> None:
        """See `RoundSource`. The model has read the same rows."""
        self._mark_written(rows, ends)

    def kept(self, rows: IntArray, lengths: IntArray) -> None:
        """See `RoundSource`. The model has followed."""
        self._mark_written(rows, lengths - self.drafter.shift)

    def _mark_written(self, rows: IntArray, ends: IntArray) -> None:
        """The draft's KV holds so many positions."""
        at = torch.from_numpy(rows)
        self.drafter.written[at] = self.drafter.known[at] = torch.from_numpy(ends)

    def plan(self, batch: DecodeBatch, kind: RoundKind, *, behind: bool) -> Planned:
        """See `RoundSource`."""
        drafts = self.drafts(batch)
        replayed = self.round_of(len(batch.rows), kind, drafts=drafts)
        return Planned(replayed, drafted=drafts, timed=self.resting is not None)

    def drafts(self, batch: DecodeBatch) -> bool:
        """Whether the model drafts in this round."""
        if not (batch.max_nodes > 1).any():
            return False
        return self.resting is None or self.resting.drafts(self.rounds.padded(len(batch.rows)))

    def round_of(self, size: int, kind: RoundKind, *, drafts: bool) -> Replayed:
        """The round of so many requests."""
        if not drafts:
            return self.plain(size, replace(kind, forced=False))
        padded = self.rounds.padded(size, masked=kind.masked)
        key = ("tree", padded, kind)
        return self.rounds.get(key, lambda: self._make(padded, kind), padded)

    def _make(self, batch: int, kind: RoundKind) -> Round:
        def trees(parts: Parts, requests: Requests) -> GrownTrees:
            return GrownTrees(parts, requests, self.shape)

        return Round(self.parts, batch, kind, trees)

    def proposed(self, batch: DecodeBatch, planned: Planned) -> list[int]:
        """See `RoundSource`: as many as the trees may have."""
        if not planned.drafted:
            return super().proposed(batch, planned)
        counts: list[int] = (np.minimum(batch.max_nodes, self.shape.draft_tokens) - 1).tolist()
        return counts

    def collected(self, launched: RunningRound, lengths: IntArray, given: IntArray) -> list[int]:
        """See `RoundSource`."""
        if self.resting is not None and launched.watch is not None:
            self.resting.note(
                self.rounds.padded(launched.size),
                launched.size,
                int(given[:, 0].sum()),
                launched.watch.ms(),
                drafted=launched.planned.drafted,
            )
        return launched.proposed

    def prepare(self, kind: RoundKind) -> None:
        """See `RoundSource`."""
        for size in reversed(self.rounds.sizes):
            self.round_of(size, kind, drafts=True)
            if self.resting is not None:
                self.resting.know(size, timed(self.round_of(size, kind, drafts=False)))

    def every_round(self, kind: RoundKind) -> list[Callable[[], Replayed]]:
        """See `RoundSource`."""
        kinds = (True, False) if self.resting is not None else (True,)
        sizes = reversed(self.rounds.sizes_for(masked=kind.masked))
        return [partial(self.round_of, size, kind, drafts=each) for size in sizes for each in kinds]
