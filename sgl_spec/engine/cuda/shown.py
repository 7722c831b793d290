"""The trees of a round on their way to the requests that ask to see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sgl_spec.engine.cuda.round import IntArray, Round
from sgl_spec.engine.cuda.timing import Mark
from sgl_spec.engine.cuda.transfer import Fetched
from sgl_spec.request import DraftRound, RoundTimes

FloatArray = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class ShownRound:
    """A round that is shown. asking: where in the batch the requests stand. before: where the shown
    round before it ended, if nothing else was launched since. begun, proposed, verified, ended:
    places of this one; None where they are not known."""

    asking: Sequence[int]
    before: Mark | None = None
    begun: Mark | None = None
    proposed: Mark | None = None
    verified: Mark | None = None
    ended: Mark | None = None
    trees: Fetched | None = None
    logprobs: Fetched | None = None
    scores: Fetched | None = None

    def fetch(self, program: Round, size: int, ended: Mark | None) -> ShownRound:
        """All of it is enqueued."""
        assert program.shown is not None
        scores = program.source.scores
        return replace(
            self,
            ended=ended,
            trees=Fetched(program.drafted[:size]),
            logprobs=Fetched(program.shown.values[:size]),
            scores=None if scores is None else Fetched(scores[:size]),
        )

    def read(
        self, given: IntArray, option: int | None, known: FloatArray | None
    ) -> list[DraftRound | None]:
        """Per request of the batch. given: [B, 1 + N], how many tokens each got, and which. option:
        what the controller chose. known: [B, N] scores, where the device has none."""
        assert self.trees is not None
        assert self.logprobs is not None
        trees, probs = self.trees.wait().numpy(), self.logprobs.wait().exp().numpy()
        scores = known if self.scores is None else self.scores.wait().numpy()
        times = self._times()
        shown: list[DraftRound | None] = [None] * len(given)
        most = trees.shape[1] // 2
        for i in self.asking:
            nodes, count = int(trees[i, -1]), int(given[i, 0])
            tokens, parents = trees[i, :nodes], trees[i, most : most + nodes]
            emitted = given[i, 1 : 1 + count]
            shown[i] = DraftRound(
                tokens=tokens.tolist(),
                parents=parents.tolist(),
                scores=[1.0]
                if nodes == 1
                else []
                if scores is None
                else scores[i, :nodes].tolist(),
                probs=[1.0, *probs[i, 1:nodes].tolist()],
                path=walked_path(tokens, parents, emitted),
                emitted=emitted.tolist(),
                emitted_probs=probs[i, most : most + count].tolist(),
                requests=len(given),
                option=option,
                times=times,
            )
        return shown

    def _times(self) -> RoundTimes:
        if self.begun is None or self.ended is None:
            return RoundTimes()
        gap = 0.0 if self.before is None else max(0.0, self.before.ms_until(self.begun))
        round_ms = gap + self.begun.ms_until(self.ended)
        if self.proposed is None or self.verified is None:
            return RoundTimes(round_ms=round_ms)
        return RoundTimes(
            round_ms=round_ms,
            draft_ms=self.begun.ms_until(self.proposed),
            verify_ms=self.proposed.ms_until(self.verified),
            host_ms=gap + self.verified.ms_until(self.ended),
        )


def walked_path(tokens: IntArray, parents: IntArray, emitted: IntArray) -> list[int]:
    """The accepted nodes: siblings are distinct, so tokens name a path."""
    path, node = [], 0
    for token in emitted.tolist():
        (found,) = np.nonzero((parents == node) & (tokens == token))
        if not len(found):
            break
        node = int(found[0])
        path.append(node)
    return path
