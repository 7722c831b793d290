"""Trees that a drafter on the host makes for rounds on the device.

Making them needs the tokens of the round before, so the device waits meanwhile. Where trees bring
less than that costs, rounds run ahead without any (`engine.asked`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sgl_spec.engine.asked import ASK, PLAIN, AskedDrafts
from sgl_spec.engine.batch import DecodeBatch
from sgl_spec.engine.control import Average, Decision
from sgl_spec.engine.costs import Costs
from sgl_spec.engine.cuda.costs import DeviceCosts, TreeShapes
from sgl_spec.engine.cuda.graphs import Replayed, Rounds
from sgl_spec.engine.cuda.round import Parts, Requests, Round, RoundKind
from sgl_spec.engine.cuda.running import Planned, RunningRound
from sgl_spec.engine.cuda.sources import ShapedRounds
from sgl_spec.engine.cuda.trees import HostTrees
from sgl_spec.speculative.array_tree import ArrayTree, accepted_of
from sgl_spec.speculative.base import DraftBatch, Drafter
from sgl_spec.speculative.prune import useful_nodes

IntArray = npt.NDArray[np.int64]

_WAITED_GAIN = 0.02  # of a tree, over none, once the device has waited for it
_MOST_WAITED = 20.0  # ms; a longer gap is none of the host's work


@dataclass(frozen=True, slots=True)
class _Done:
    """A round that was collected. lengths: [B] of its requests' texts before it. given: [B, 1 + N],
    how many tokens it gave, and which."""

    round: RunningRound
    lengths: IntArray
    given: IntArray


class HostTreeRounds(ShapedRounds):
    """Rounds over the trees of a drafter on the host, or without any. costs: None verifies whatever
    is drafted. draft_of: what the drafter may know of a batch."""

    def __init__(
        self,
        parts: Parts,
        rounds: Rounds,
        shapes: TreeShapes,
        costs: DeviceCosts | None,
        drafter: Drafter,
        *,
        draft_of: Callable[[DecodeBatch], DraftBatch],
    ) -> None:
        super().__init__(parts, rounds, shapes, costs)
        self.drafter, self._draft_of = drafter, draft_of
        self.asked = None if costs is None else AskedDrafts(Costs(costs), clock=parts.model.clock)
        self._wait = Average(16)  # ms, of the device for a round's trees
        self._next: Decision | None = None  # about the round that comes
        self._wanted = True  # a request that is run may have drafts
        self._done: _Done | None = None

    def begin(self) -> None:
        """See `RoundSource`."""
        self._wanted = True

    def waits(self) -> bool:
        """See `RoundSource`: trees follow tokens that the host knows."""
        return self._wanted and (self._next is None or self._next.option == ASK)

    def plan(self, batch: DecodeBatch, kind: RoundKind, *, behind: bool) -> Planned:
        """See `RoundSource`."""
        size, draft, tree = len(batch.rows), self._draft_of(batch), None
        self._wanted = bool((batch.max_nodes > 1).any())
        decision = self._decide(size) if self._wanted else None
        if self._wanted and not behind and (decision is None or decision.option == ASK):
            tree = self._trees(draft, batch.remaining, decision)
        elif decision is not None and decision.option == ASK:  # the host has not read the texts
            decision = replace(decision, option=PLAIN, trial=False)
        if tree is not None and tree.drafts:
            replayed = self.round_of(*self.shapes.fit(size, tree.drafts), kind)
        else:
            tree, replayed = None, self.plain(size, kind)
        timed = self.asked is not None
        return Planned(replayed, draft, tree, timed=timed, decision=decision)

    def _decide(self, size: int) -> Decision | None:
        """About this round, as `waits` has told, and at once about the next."""
        if self.asked is None:
            return None
        decision, following = self._next, self.asked.decide(size)
        self._next = following
        return following if decision is None or decision.load != following.load else decision

    def _trees(
        self, draft: DraftBatch, remaining: IntArray, decision: Decision | None
    ) -> ArrayTree:
        """What is worth verifying of the drafter's trees. remaining: [B] tokens that the requests
        may still generate."""
        tree = ArrayTree.of(self.drafter.propose(draft))
        if tree.width > remaining.min() or (tree.num_nodes > draft.max_nodes).any():
            tree = tree.keep(useful_nodes(tree, remaining, draft.max_nodes))
        if self.asked is None or decision is None:
            return tree
        wait, alike = self._wait.value, np.zeros(tree.batch, np.bool_)
        keep = self.asked.worthwhile(tree, alike, wait, _WAITED_GAIN, trial=decision.trial)
        return tree.keep(keep)

    def round_of(self, size: int, rows: int, kind: RoundKind) -> Replayed:
        """See `ShapedRounds`."""
        if rows == size:
            return self.plain(size, kind)

        def trees(parts: Parts, requests: Requests) -> HostTrees:
            return HostTrees(parts, requests, rows, self.shapes.most_nodes)

        key = ("host", size, rows, kind)
        return self.rounds.get(key, lambda: Round(self.parts, size, kind, trees), size)

    def proposed(self, batch: DecodeBatch, planned: Planned) -> list[int]:
        """See `RoundSource`."""
        if planned.tree is None:
            return super().proposed(batch, planned)
        counts: list[int] = (planned.tree.num_nodes - 1).tolist()
        return counts

    def collected(self, launched: RunningRound, lengths: IntArray, given: IntArray) -> list[int]:
        """See `RoundSource`."""
        self._done = _Done(launched, lengths, given)
        return launched.proposed

    def observe(self, taken: list[int], *, behind: bool) -> None:
        """See `RoundSource`."""
        done, self._done = self._done, None
        assert done is not None
        self._note_times(done.round, np.array(taken))
        self._inform(done, np.array(taken))

    def _inform(self, done: _Done, taken: IntArray) -> None:
        """Let the drafter observe a round."""
        planned, given = done.round.planned, done.given
        assert planned.draft is not None
        draft, tree = replace(planned.draft, lengths=done.lengths), planned.tree
        if tree is None and not taken.all():  # ended while this round ran behind
            (index,) = np.nonzero(taken)
            draft, given, taken = draft.take(index), given[index], taken[index]
        if not len(taken):
            return
        tree = tree or ArrayTree.roots(draft.roots())
        counts = given[:, 0]
        emitted = given[:, 1 : 1 + counts.max()].astype(np.int64)
        accepted = accepted_of(tree, emitted, counts, taken)
        if self.asked is not None:
            self.asked.learn(tree, accepted, np.zeros(tree.batch, np.bool_))
        self.drafter.observe(draft, tree.tensors(), accepted)

    def _note_times(self, launched: RunningRound, taken: IntArray) -> None:
        """A round is charged the time from the end of the round before to its own."""
        planned, size = launched.planned, launched.size
        if self.asked is None or launched.watch is None:
            return
        ms, gap = launched.watch.ms(), 0.0  # behind a prompt the host's work is hidden
        if launched.before is not None:
            gap = max(0.0, launched.before.ms_until(launched.watch))
        ms, gap = self.parts.agree(ms), self.parts.agree(gap)
        drafts = 0 if planned.tree is None else planned.tree.drafts
        self.asked.costs.add(size, drafts, ms)
        if planned.decision is None:
            return
        if planned.decision.option == ASK and gap < _MOST_WAITED:
            self._wait.add(gap)
        live = max(1, int((taken > 0).sum()))  # who ended before took nothing
        self.asked.note(planned.decision, live, int(taken.sum()), gap + ms)

    def flush(self) -> None:
        """See `RoundSource`."""
        if self.asked is not None:
            self.asked.clear()

    def stats(self) -> dict[str, float]:
        """See `Controller.stats`: option 1 asks the drafter. device_wait_ms: how long the device
        lately waited for the trees of a round."""
        if self.asked is None:
            return {}
        return {"device_wait_ms": self._wait.value} | self.asked.stats()
