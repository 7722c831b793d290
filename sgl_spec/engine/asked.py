"""For a drafter that is asked on the host: whether to ask it, how deep it may draft, and what of
its trees to verify. The drafter gives scores and nothing else. See `control` for the first
question.

Scores are scaled by what became of earlier ones: a draft model's probability of a token is not the
chance that a greedy text goes on with it, and a plug-in may promise anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sgl_spec.engine.control import Average, Controller, Decision, Load
from sgl_spec.engine.costs import Costs
from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec.speculative.prune import BoolArray, FloatArray, choose
from sgl_spec.speculative.tree import AcceptResult

IntArray = npt.NDArray[np.int64]

DEPTHS, HALVINGS = 4, 8  # that are told apart: of nodes, and of their scores below 1
TRUST = 4.0  # promised drafts for which scores of one kind are taken to be as good as all others
MEMORY = 64.0  # promised drafts of one kind that are remembered
DEEPER = 0.8  # share of its parent's chance that a level's best node is taken to have
FORGET = 0.98  # of the time of a draft forward that seemed too dear, so that it is tried again
STEPS = 8.0  # draft forwards that their time is an average of
PLAIN, ASK = 0, 1  # options of the controller


class Calibration:
    """How much more often drafts are accepted than their scores say, by depth and score, apart for
    sampled and greedy texts."""

    def __init__(self) -> None:
        self._promised = np.zeros((2, DEPTHS, HALVINGS))
        self._kept = np.zeros_like(self._promised)

    def scaled(self, scores: FloatArray, depths: IntArray, sampled: BoolArray) -> FloatArray:
        """[B, N] scores that keep what they promise. depths: [B, N], from 1 on; what lies above is
        a root, whose score stays. sampled: [B]."""
        overall = (self._kept.sum() + TRUST) / (self._promised.sum() + TRUST)
        factors = (self._kept + TRUST * overall) / (self._promised + TRUST)
        scaled = np.minimum(scores * factors[_cells(scores, depths, sampled)], 1.0)
        return np.where(depths > 0, scaled, scores)

    def learn(self, tree: ArrayTree, accepted: BoolArray, sampled: BoolArray) -> None:
        """What became of verified trees. accepted: [B, N]."""
        assert tree.scores is not None
        drafts = tree.used() & (tree.depths > 0)
        cells = _cells(tree.scores, tree.depths, sampled)
        at = tuple(each[drafts] for each in np.broadcast_arrays(*cells))
        np.add.at(self._promised, at, tree.scores[drafts])
        np.add.at(self._kept, at, accepted[drafts])
        excess = np.maximum(self._promised / MEMORY, 1.0)
        self._promised /= excess
        self._kept /= excess


def _cells(
    scores: FloatArray, depths: IntArray, sampled: BoolArray
) -> tuple[IntArray, IntArray, IntArray]:
    halvings = -np.log2(np.maximum(scores, 2.0**-HALVINGS))
    return (
        sampled.astype(np.int64)[:, None],
        np.clip(depths - 1, 0, DEPTHS - 1),
        np.minimum(halvings, HALVINGS - 1).astype(np.int64),
    )


class AskedDrafts:
    """See the module. costs: of rounds. wait: for the device, before the clock is read.

    The controller compares times in rounds without drafts of the same batch, so that batches of
    about the same size share an account.
    """

    def __init__(
        self,
        costs: Costs,
        wait: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.costs, self._wait, self._clock = costs, wait, clock
        self.calibration = Calibration()
        self.controller = Controller((0.0, 1.0))
        self._steps: dict[int, Average] = {}  # ms of draft forwards, by size
        self._load, self._requests = Load(0), 1  # that were decided about last
        self._depth = 0
        self._begun: float | None = None  # when the draft forward under way began

    def decide(self, requests: int) -> Decision:
        """Whether the drafter is to be asked for a round: option `ASK`, or `PLAIN`."""
        size = requests.bit_length()
        self._load, self._requests, self._depth = Load(size, size), requests, 0
        self.controller.know(self._load, PLAIN, 1.0)
        return self.controller.choose(self._load, (PLAIN, ASK))

    def deeper(self, chances: Tensor, sampled: Tensor) -> bool:
        """Whether trees should grow another level: the drafts that it may add must be worth the
        draft's forward. chances: [B], that the best node so far is accepted; sampled: [B] bool."""
        self._time_step()
        self._depth += 1
        scores = chances.numpy(force=True)[:, None]
        depths = np.full(scores.shape, self._depth)
        tokens = self.calibration.scaled(scores, depths, sampled.numpy(force=True)).sum() * DEEPER
        step = self._step
        tokens_ms = self._requests * self.controller.rate(self._load) / self._unit(self._requests)
        if not step.weight or tokens >= step.value * tokens_ms:
            self._begun = self._clock()
            return True
        step.value *= FORGET
        return False

    def _unit(self, requests: int) -> float:
        """Milliseconds of a round without drafts, as the model of costs has it for good."""
        model = self.costs.model
        return model.modelled(model.size_of(requests), 0)

    @property
    def _step(self) -> Average:
        return self._steps.setdefault(self._load.size, Average(STEPS))

    def _time_step(self) -> None:
        if self._begun is not None:
            self._wait()
            self._step.add((self._clock() - self._begun) * 1e3)
            self._begun = None

    def worthwhile(
        self, tree: ArrayTree, sampled: BoolArray, fixed_ms: float, min_gain: float, *, trial: bool
    ) -> BoolArray:
        """[B, N]: the nodes to verify; all of them where there are no scores. sampled: [B].
        fixed_ms: that the round takes besides the forward. min_gain: see `prune.choose`. trial:
        whether the drafter rests otherwise; then it is taken at its word, or what its scores were
        once worth would never be seen to have changed."""
        self._time_step()
        if tree.scores is None:
            return tree.used()
        scores = tree.scores
        if not trial:
            scores = self.calibration.scaled(scores, tree.depths, sampled)
        table = self.costs.table(tree.batch)
        table = replace(table, fixed=table.fixed + fixed_ms)
        return choose(tree.with_scores(scores), table, min_gain)

    def learn(self, tree: ArrayTree, accepted: AcceptResult, sampled: BoolArray) -> None:
        """What became of the trees that were verified."""
        if tree.scores is None or not tree.drafts:
            return
        path, counts = accepted.path.numpy(force=True), accepted.counts.numpy(force=True)
        kept = np.zeros(tree.tokens.shape, np.bool_)
        request, step = np.nonzero(np.arange(path.shape[1]) < counts[:, None])
        kept[request, path[request, step]] = True
        self.calibration.learn(tree, kept, sampled)

    def note(self, decision: Decision, requests: int, tokens: int, ms: float) -> None:
        """A round brought its requests so many tokens, and took so long in all."""
        self.controller.note(decision, requests, tokens, ms / self._unit(requests))

    def stats(self) -> dict[str, float]:
        """See `Controller.stats`."""
        return self.controller.stats(self._unit(self._requests)) if self._load.size else {}

    def clear(self) -> None:
        """Forget what was learned of texts."""
        self.controller.clear()
        self.calibration = Calibration()
