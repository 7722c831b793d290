"""Trees that a drafter on the host makes for rounds on the device.

Making them needs the tokens of the round before, so the device waits meanwhile. Where trees promise
less than that costs, rounds run ahead without any, and the drafter is asked behind each of them
whether it has something better (`base.Looks`): that costs nothing, and a tree comes two rounds
after it was seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sgl_spec.engine.cuda.costs import DeviceCosts
from sgl_spec.speculative.array_tree import ArrayTree, accepted_of
from sgl_spec.speculative.base import DraftBatch, Drafter
from sgl_spec.speculative.prune import MIN_GAIN, choose
from sgl_spec.speculative.tree import TokenTree

IntArray = npt.NDArray[np.int64]

_WAITED_GAIN = 0.02  # of a tree, over none, once the device has waited for it


@dataclass(frozen=True, slots=True)
class _Told:
    """A round whose tokens are known: what the drafter is to be told. tree: None without trees."""

    draft: DraftBatch
    tree: ArrayTree | None
    tokens: list[list[int]]


class HostDrafting:
    """See the module. costs: None verifies whatever is drafted.

    looks: whether the drafter can look. idle: whether rounds run ahead without trees.
    """

    def __init__(self, drafter: Drafter, costs: DeviceCosts | None) -> None:
        self.drafter = drafter
        self.costs = costs
        look: Callable[[DraftBatch], TokenTree] | None = getattr(drafter, "look", None)
        self.looks = look is not None
        self._look = None if costs is None else look
        self.idle = False
        self._told: _Told | None = None

    def begin(self) -> None:
        """A request came that may be drafted for."""
        self.idle = False

    def plan(self, draft: DraftBatch, remaining: IntArray) -> ArrayTree:
        """The trees to verify now. remaining: [B] tokens the requests may still generate."""
        if not (draft.max_nodes > 1).any():
            return ArrayTree.roots(draft.roots())
        tree = ArrayTree.of(self.drafter.propose(draft))
        if tree.width > remaining.min() or (tree.num_nodes > draft.max_nodes).any():
            tree = tree.keep(_useful(tree, remaining, draft.max_nodes))
        if self.costs is not None and tree.scores is not None:
            tree = self._worthwhile(tree, self.costs)
        return tree

    def _worthwhile(self, tree: ArrayTree, costs: DeviceCosts) -> ArrayTree:
        choice = choose(tree, costs.table(tree.batch), _WAITED_GAIN)
        self._weigh(tree.batch, choice.rate, costs)
        return tree.keep(choice.keep)

    def _weigh(self, batch: int, rate: float, costs: DeviceCosts) -> None:
        """Compare trees with rounds that run ahead. rate: expected tokens per millisecond, the wait
        included."""
        if self._look is not None:
            self.idle = rate < (1 + MIN_GAIN) * batch / costs.plain_ahead(batch)

    def tell(self, draft: DraftBatch, tree: ArrayTree | None, tokens: list[list[int]]) -> None:
        """What a round gave its requests. draft.lengths: of their texts before it."""
        self._told = _Told(draft, tree, tokens)

    def observe(self, taken: list[int], *, behind: bool) -> None:
        """Hand on what was told. taken: tokens that each request kept. behind: whether the next
        round is under way."""
        told, self._told = self._told, None
        if told is None:
            return
        draft, tree, tokens = told.draft, told.tree, told.tokens
        if tree is None and 0 in taken:  # requests that ended while this round ran behind
            index = np.flatnonzero(taken)
            draft = draft.take(index)
            tokens, taken = [tokens[i] for i in index], [taken[i] for i in index]
        if not taken:
            return
        tree = tree or ArrayTree.roots(draft.roots())
        self.drafter.observe(draft, tree.tensors(), accepted_of(tree, tokens, taken))
        if self.idle and behind:
            self._look_at(replace(draft, lengths=draft.lengths + np.array(taken)))

    def _look_at(self, draft: DraftBatch) -> None:
        assert self._look is not None
        assert self.costs is not None
        found = ArrayTree.of(self._look(draft))
        choice = choose(found, self.costs.table(found.batch))
        self._weigh(found.batch, choice.rate, self.costs)


def _useful(tree: ArrayTree, remaining: IntArray, max_nodes: IntArray) -> npt.NDArray[np.bool_]:
    """[B, N]: the nodes that a request can still keep and may verify; a drafter may forget its
    bound."""
    useful = tree.used() & (tree.depths < remaining[:, None])
    useful &= np.arange(tree.width) < max_nodes[:, None]
    return useful
