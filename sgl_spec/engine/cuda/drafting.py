"""Trees that a drafter on the host makes for rounds on the device.

Making them needs the tokens of the round before, so the device waits meanwhile. Where trees promise
less than that costs, rounds run ahead without any, and the drafter is asked behind each of them
whether it has something better (`base.Looks`): that costs nothing, and a tree comes two rounds
after it was seen. Where trees have brought less than that costs, rounds run ahead whatever is
promised, for a time (`tree_ledger`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sgl_spec.engine.batch import DecodeBatch
from sgl_spec.engine.cuda.costs import DeviceCosts, TreeShapes
from sgl_spec.engine.cuda.graphs import Replayed, Rounds
from sgl_spec.engine.cuda.round import Parts, Requests, Round, RoundKind
from sgl_spec.engine.cuda.running import Planned, RunningRound
from sgl_spec.engine.cuda.sources import ShapedRounds
from sgl_spec.engine.cuda.tree_ledger import TreeLedger
from sgl_spec.engine.cuda.trees import HostTrees
from sgl_spec.speculative.array_tree import ArrayTree, accepted_of
from sgl_spec.speculative.base import DraftBatch, Drafter
from sgl_spec.speculative.prune import choose, useful_nodes
from sgl_spec.speculative.tree import TokenTree

IntArray = npt.NDArray[np.int64]

_WAITED_GAIN = 0.02  # of a tree, over none, once the device has waited for it


@dataclass(slots=True)
class _Told:
    """A round that is over. lengths: [B] of its requests' texts before it. given: [B, 1 + N], how
    many tokens it gave, and which. taken: how many of them its requests took."""

    round: RunningRound
    lengths: IntArray
    given: IntArray
    taken: list[int] | None = None


class HostDrafting:
    """See the module. costs: None verifies whatever is drafted.

    looks: whether the drafter can look. idle: whether nothing is worth asking for, until a look or
    a request says otherwise. ledger: what trees have brought; empty without costs.
    """

    def __init__(self, drafter: Drafter, costs: DeviceCosts | None) -> None:
        self.drafter = drafter
        self.costs = costs
        look: Callable[[DraftBatch], TokenTree] | None = getattr(drafter, "look", None)
        self.looks = look is not None
        self._look = None if costs is None else look
        self.idle = False
        self.ledger = TreeLedger()
        self._told: _Told | None = None

    def stats(self) -> dict[str, float]:
        """device_wait_ms: how long the device lately waited for the trees of a round. See also
        `TreeLedger.stats`."""
        if self.costs is None:
            return {}
        return {"device_wait_ms": self.costs.wait} | self.ledger.stats()

    def waits(self) -> bool:
        """Whether the next round is to be one that the drafter is asked for."""
        return not (self.idle or self.ledger.resting)

    def begin(self) -> None:
        """A request came that may be drafted for."""
        self.idle = False

    def plan(self, draft: DraftBatch, remaining: IntArray) -> ArrayTree | None:
        """The trees to verify now; None if the drafter was not asked. remaining: [B] tokens the
        requests may still generate."""
        if not (draft.max_nodes > 1).any():
            self.idle = True  # until another request comes
            return None
        self.expect(len(draft.rows))
        if self.ledger.resting:
            return None
        tree = ArrayTree.of(self.drafter.propose(draft))
        if tree.width > remaining.min() or (tree.num_nodes > draft.max_nodes).any():
            tree = tree.keep(useful_nodes(tree, remaining, draft.max_nodes))
        if self.costs is not None and tree.scores is not None:
            tree = self._worthwhile(tree, self.costs)
        return tree

    def expect(self, requests: int) -> None:
        """A round of so many requests comes."""
        if self.costs is not None:
            self.ledger.open(self.costs.size_of(requests), self.costs.plain_ahead(requests))

    def _worthwhile(self, tree: ArrayTree, costs: DeviceCosts) -> ArrayTree:
        choice = choose(tree, costs.table(tree.batch), _WAITED_GAIN)
        self._weigh(tree.batch, choice.rate, costs)
        return tree.keep(choice.keep)

    def _weigh(self, batch: int, rate: float, costs: DeviceCosts) -> None:
        """Compare trees with rounds that run ahead. rate: expected tokens per millisecond, the wait
        included."""
        if self._look is not None:
            self.idle = rate < batch / self.ledger.plain_ms(costs.size_of(batch))

    def tell(self, launched: RunningRound, lengths: IntArray, given: IntArray) -> None:
        """What a round gave its requests; see `_Told`."""
        self._told = _Told(launched, lengths, given)

    def observe(self, taken: list[int]) -> None:
        """What they took of it."""
        if self._told is None:  # its batch ran one forward at a time
            return
        self._told.taken = taken
        if not self.looks:
            self.learn()

    def learn(self, *, look: bool = False) -> None:
        """Hand on what was observed: when the next round is under way, for which the drafter may
        have proposed by then, or before a request of the last round is gone. look: whether the
        round under way was launched without what is handed on now."""
        told = self._told
        if told is None or told.taken is None:
            return
        self._told = None
        taken = np.array(told.taken)
        self._note_times(told.round, taken)
        draft = self._inform(told, taken)
        if self._look is None:
            return
        if self.ledger.resting:
            self.idle = True  # what it is to be asked for then, a look says
        elif look and self.idle and draft is not None:
            self._look_at(draft, self._look)

    def _inform(self, told: _Told, taken: IntArray) -> DraftBatch | None:
        """Let the drafter observe a round. Returns where its requests stand now."""
        planned, given = told.round.planned, told.given
        assert planned.draft is not None
        draft, tree = replace(planned.draft, lengths=told.lengths), planned.tree
        if tree is None and not taken.all():  # ended while this round ran behind
            (index,) = np.nonzero(taken)
            draft, given, taken = draft.take(index), given[index], taken[index]
        if not len(taken):
            return None
        tree = tree or ArrayTree.roots(draft.roots())
        counts = given[:, 0]
        emitted = given[:, 1 : 1 + counts.max()].astype(np.int64)
        self.drafter.observe(draft, tree.tensors(), accepted_of(tree, emitted, counts, taken))
        return replace(draft, lengths=draft.lengths + taken)

    def _note_times(self, launched: RunningRound, taken: IntArray) -> None:
        if self.costs is None or launched.watch is None:
            return
        planned, size, ms = launched.planned, launched.size, launched.watch.ms()
        self.costs.ran(size, 0 if planned.tree is None else planned.tree.drafts, ms)
        gap = 0.0  # behind a prompt the host's work is hidden
        if launched.before is not None:
            gap = max(0.0, launched.before.ms_until(launched.watch))
            if planned.drafted:
                self.costs.waited(size, gap)
        live = max(1, int((taken > 0).sum()))  # who ended before took nothing
        self.ledger.note(
            self.costs.size_of(size), int(taken.sum()) / live, gap + ms, asked=planned.drafted
        )

    def _look_at(self, draft: DraftBatch, look: Callable[[DraftBatch], TokenTree]) -> None:
        assert self.costs is not None
        self.expect(len(draft.rows))
        found = ArrayTree.of(look(draft))
        choice = choose(found, self.costs.table(found.batch))
        self._weigh(found.batch, choice.rate, self.costs)


class HostTreeRounds(ShapedRounds):
    """Rounds over the trees of a drafter on the host, or without any. texts: [rows, width], every
    request's. draft_of: what the drafter may know of a batch, sampling included."""

    def __init__(
        self,
        parts: Parts,
        rounds: Rounds,
        shapes: TreeShapes,
        costs: DeviceCosts | None,
        drafter: Drafter,
        *,
        texts: npt.NDArray[np.int32],
        draft_of: Callable[[DecodeBatch], DraftBatch],
    ) -> None:
        super().__init__(parts, rounds, shapes, costs)
        self.drafting = HostDrafting(drafter, costs)
        self.texts, self._draft_of = texts, draft_of

    def begin(self) -> None:
        """See `RoundSource`."""
        self.drafting.begin()

    def close(self) -> None:
        """See `RoundSource`. The drafter is told while it still knows the request."""
        self.drafting.learn()

    def waits(self) -> bool:
        """See `RoundSource`: trees follow tokens that the host knows."""
        return self.drafting.waits()

    def plan(self, batch: DecodeBatch, kind: RoundKind, *, behind: bool) -> Planned:
        """See `RoundSource`."""
        size, draft, timed = len(batch.rows), self._seen(batch), self.costs is not None
        if behind:
            self.drafting.expect(size)
        tree = None if behind else self.drafting.plan(draft, batch.remaining)
        asked, drafts = tree is not None, 0 if tree is None else tree.drafts
        if drafts:
            replayed = self.round_of(*self.shapes.fit(size, drafts), kind)
        else:
            tree, replayed = None, self.plain(size, kind)
        return Planned(replayed, draft, tree, drafted=asked, timed=timed)

    def _seen(self, batch: DecodeBatch) -> DraftBatch:
        """What the drafter may look at, as far as the host knows."""
        if self.drafting.looks:
            return DraftBatch(batch.rows, batch.committed + 1, batch.max_nodes, self.texts)
        return self._draft_of(batch)

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
        self.drafting.tell(launched, lengths, given)
        return launched.proposed

    def observe(self, taken: list[int], *, behind: bool) -> None:
        """See `RoundSource`."""
        self.drafting.observe(taken)
        if behind:
            self.drafting.learn(look=True)

    def settle(self) -> None:
        """See `RoundSource`: the drafter hears of the round before."""
        self.drafting.learn()

    def stats(self) -> dict[str, float]:
        """See `RoundSource`."""
        return self.drafting.stats()
