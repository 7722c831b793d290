"""Rounds of a draft model that lies on the device: without trees, or with those of one of a few
shapes, as the controller decides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from sgl_spec.engine.batch import DecodeBatch, IntArray
from sgl_spec.engine.control import Controller, Decision, Load, guessed_gain
from sgl_spec.engine.cuda.graphs import Replayed, Rounds
from sgl_spec.engine.cuda.model_trees import GrownTrees, kept_by
from sgl_spec.engine.cuda.round import DraftParts, Parts, Requests, Round, RoundKind
from sgl_spec.engine.cuda.running import Planned, RunningRound
from sgl_spec.engine.cuda.sources import RoundSource
from sgl_spec.engine.cuda.timing import timed
from sgl_spec.speculative.base import Drafter
from sgl_spec.speculative.model_drafter import ModelDrafter, TreeShape

logger = logging.getLogger(__name__)

PLAIN = 0  # option of the controller; the shapes follow
SMALLER = ((3, 1, 4), (5, 4, 8))  # steps, topk and nodes beside the flags' own shape
MOST_ROWS = 512  # of a round: where rows cost as much as that, only the smallest shape may pay


def draft_parts(drafter: Drafter | None) -> DraftParts | None:
    """Those of a draft model, None for any other drafter."""
    if not isinstance(drafter, ModelDrafter):
        return None
    return DraftParts(model=drafter.model, kv=drafter.kv, hidden=drafter.last)


def tree_shapes(largest: TreeShape) -> tuple[TreeShape, ...]:
    """The shapes to choose from, rising: no part of them is larger than the flags'."""
    shapes = [largest]
    for steps, topk, nodes in SMALLER:
        steps, topk = min(steps, largest.steps), min(topk, largest.topk)
        nodes = min(nodes, largest.draft_tokens, steps + 1 if topk == 1 else nodes)
        shapes.append(replace(largest, steps=steps, topk=topk, draft_tokens=nodes))
    return tuple(sorted(set(shapes), key=lambda shape: (shape.draft_tokens, shape.steps)))


class ModelRounds(RoundSource):
    """The model drafts, or rests and only follows. weighs: whether the controller decides; else all
    trees have the shape of the flags."""

    def __init__(
        self, parts: Parts, rounds: Rounds, drafter: ModelDrafter, *, weighs: bool
    ) -> None:
        super().__init__(parts, rounds)
        assert parts.draft is not None
        self.drafter = drafter
        self.shapes: tuple[TreeShape, ...] = (drafter.shape,)
        self.controller: Controller | None = None
        self._idle_ms: dict[tuple[int, int], float] = {}  # without requests, by size and option
        if weighs and rounds.sizes:
            self.shapes = tree_shapes(drafter.shape)
            gains = (guessed_gain(s.steps, s.topk, s.draft_tokens) for s in self.shapes)
            self.controller = Controller((0.0, *gains))

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
        size = self.rounds.padded(len(batch.rows), masked=kind.masked)
        decision, option = None, PLAIN
        if (batch.max_nodes > 1).any():
            decision = self._decide(size, kind.unseen)
            option = self.options(size)[-1] if decision is None else decision.option
        replayed = self.round_of(size, kind, option)
        facts = None
        if decision is not None and self._told(kind, option):
            assert isinstance(replayed.program, Round)
            assert isinstance(replayed.program.source, GrownTrees)
            facts = replayed.program.source.facts
        return Planned(
            replayed,
            facts=None if facts is None else facts[: len(batch.rows)],
            nodes=self.shapes[option - 1].draft_tokens if option else 1,
            decision=decision,
            timed=self.controller is not None,
        )

    def _decide(self, size: int, kind: RoundKind) -> Decision | None:
        """None where all rounds of the size are alike, or made anew each time."""
        if self.controller is None or size not in self.rounds.sizes_for(masked=kind.masked):
            return None
        options, load = self.options(size), Load(size, kind)
        made = [each for each in options if not each or self._key(size, kind, each) in self.rounds]
        for option in options:
            if (size, option) in self._idle_ms:
                self.controller.know(load, option, self._idle_ms[size, option])
        return self.controller.choose(load, made if any(made) else options)

    def options(self, size: int) -> list[int]:
        """What a round of so many requests may be; the one with most rows comes last."""
        if self.controller is None:
            return [len(self.shapes)]
        rows = [size * shape.draft_tokens for shape in self.shapes]
        fits = [i for i, most in enumerate(rows, 1) if i == 1 or most <= MOST_ROWS]
        return [PLAIN, *fits]

    def _key(self, size: int, kind: RoundKind, option: int) -> Hashable:
        return ("tree", size, kind, option) if option else ("plain", size, kind)

    def round_of(self, size: int, kind: RoundKind, option: int) -> Replayed:
        """size: padded."""
        if option == PLAIN:
            return self.plain(size, replace(kind, forced=False))

        def trees(parts: Parts, requests: Requests) -> GrownTrees:
            shape, told = self.shapes[option - 1], self._told(kind, option)
            return GrownTrees(parts, requests, shape, told=told)

        key = self._key(size, kind, option)
        return self.rounds.get(key, lambda: Round(self.parts, size, kind, trees), size)

    def _told(self, kind: RoundKind, option: int) -> bool:
        """Whether a round tells what smaller shapes would have brought."""
        return self.controller is not None and option > 1 and not kind.forced

    def proposed(self, batch: DecodeBatch, planned: Planned) -> list[int]:
        """See `RoundSource`: as many as the trees may have."""
        counts: list[int] = (np.minimum(batch.max_nodes, planned.nodes) - 1).tolist()
        return counts

    def collected(self, launched: RunningRound, lengths: IntArray, given: IntArray) -> list[int]:
        """See `RoundSource`."""
        decision = launched.planned.decision
        if self.controller is not None and decision is not None and launched.watch is not None:
            counts, smaller = given[: launched.size, 0], {}
            if launched.facts is not None:
                facts = launched.facts.wait().numpy()
                shapes = enumerate(self.shapes[: decision.option - 1], 1)
                smaller = {option: kept_by(shape, facts, counts) for option, shape in shapes}
            ms = self.parts.agree(launched.watch.ms())
            self.controller.note(decision, launched.size, int(counts.sum()), ms, smaller)
        return launched.proposed

    def flush(self) -> None:
        """See `RoundSource`."""
        if self.controller is not None:
            self.controller.clear()

    def stats(self) -> dict[str, float]:
        """See `RoundSource` and `Controller.stats`: option 0 drafts nothing, the others are
        `tree_shapes`."""
        return {} if self.controller is None else self.controller.stats()

    def prepare(self, kind: RoundKind) -> None:
        """See `RoundSource`."""
        for size in reversed(self.rounds.sizes):
            for option in reversed(self.options(size)):
                round_ = self.round_of(size, kind, option)
                if self.controller is not None:
                    self._idle_ms[size, option] = self.parts.agree(timed(round_))
        if self._idle_ms:
            times = (f"{size}/{option}:{ms:.2f}" for (size, option), ms in self._idle_ms.items())
            logger.info("Rounds in ms, by requests and shape: %s", " ".join(times))

    def every_round(self, kind: RoundKind) -> list[Callable[[], Replayed]]:
        """See `RoundSource`."""
        return [
            partial(self.round_of, size, kind, option)
            for size in reversed(self.rounds.sizes_for(masked=kind.masked))
            for option in reversed(self.options(size))
        ]
