"""The trees of rounds, for the requests that ask to see them (`return_draft_trees`). A batch in
which nobody asks costs a look into an empty dictionary."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgl_spec.engine.batch import IntArray, StepOutput
from sgl_spec.engine.req import Req, TreeRecord
from sgl_spec.layers.transfer import on_device
from sgl_spec.request import DraftRound, RoundTimes
from sgl_spec.speculative.tree import AcceptResult, TokenTree

FloatArray = npt.NDArray[np.floating]


class TreeReader:
    """Knows which of the table's rows ask, and reads their trees from a round."""

    def __init__(self) -> None:
        self._asked: dict[int, TreeRecord] = {}

    def open(self, req: Req) -> None:
        """Note whether the request in a row asks."""
        if req.trees is not None:
            self._asked[req.held.row] = req.trees

    def close(self, row: int) -> None:
        """The row's request ended or was retracted."""
        self._asked.pop(row, None)

    def asking(self, rows: IntArray) -> list[int]:
        """Where in a batch the requests stand whose next round is to be reported."""
        if not self._asked:
            return []
        found = (self._asked.get(row) for row in rows.tolist())
        return [i for i, record in enumerate(found) if record is not None and record.left > 0]

    def of_round(
        self,
        rows: IntArray,
        tree: TokenTree,
        accepted: AcceptResult,
        logits: Tensor,
        offsets: Tensor,
        times: RoundTimes,
        option: int | None,
    ) -> list[DraftRound | None] | None:
        """The rounds of the requests that ask. logits: [T, V], request i's nodes from row
        offsets[i] on. accepted, offsets: on the CPU. option: what the controller chose."""
        asking = self.asking(rows)
        if not asking:
            return None
        tree = tree.to(torch.device("cpu"))
        shown: list[DraftRound | None] = [None] * len(rows)
        for i in asking:
            nodes, count = int(tree.num_nodes[i]), int(accepted.counts[i])
            parents, tokens = tree.parents[i, :nodes], tree.tokens[i, :nodes]
            path, emitted = accepted.path[i, :count], accepted.tokens[i, :count]
            begin = int(offsets[i])
            part = logits[begin : begin + nodes]
            probs = token_probs(
                part, torch.cat([parents[1:], path]), torch.cat([tokens[1:], emitted])
            )
            scores = [] if tree.scores is None else tree.scores[i, :nodes].tolist()
            shown[i] = DraftRound(
                tokens=tokens.tolist(),
                parents=parents.tolist(),
                scores=scores,
                probs=[1.0, *probs[: nodes - 1]],
                path=path[1:].tolist(),
                emitted=emitted.tolist(),
                emitted_probs=probs[nodes - 1 :],
                requests=len(rows),
                option=option,
                times=times,
            )
        return shown


def token_probs(logits: Tensor, rows: Tensor, tokens: Tensor) -> list[float]:
    """The model's own probabilities of `tokens` [K] at `rows` [K] of logits [N, V]; rows and tokens
    lie on the CPU."""
    used, place = torch.unique(rows, return_inverse=True)
    chosen = logits[on_device(used, logits.device)].float()
    totals = chosen.logsumexp(1)
    at = on_device(place, logits.device)
    values = chosen[at, on_device(tokens, logits.device)] - totals[at]
    probs: list[float] = values.exp().tolist()
    return probs


class RoundClock:
    """Where the time of rounds goes on the host that computes them in turn. What lies between two
    batches, the scheduler's work for the most part, is the host's time of the later one."""

    def __init__(self) -> None:
        self._ended = self._begun = self._proposed = self._verified = time.perf_counter()
        self._followed_ms = 0.0

    def begin(self) -> float:
        """A round begins; seconds."""
        self._begun = time.perf_counter()
        return self._begun

    def proposed(self) -> None:
        """Its trees are there."""
        self._proposed = time.perf_counter()

    def verified(self) -> None:
        """The target's logits are there."""
        self._verified = time.perf_counter()

    def end(self) -> RoundTimes:
        """The round, or a prompt chunk, is over."""
        gap, now = self._begun - self._ended, time.perf_counter()
        self._ended = now
        followed_ms, self._followed_ms = self._followed_ms, 0.0
        draft_ms = (self._proposed - self._begun) * 1e3 + followed_ms
        host_ms = (gap + now - self._verified) * 1e3
        return RoundTimes(
            draft_ms=draft_ms,
            verify_ms=(self._verified - self._proposed) * 1e3,
            host_ms=host_ms,
            round_ms=(gap + now - self._begun) * 1e3 + followed_ms,
        )

    def followed(self, begun: float) -> None:
        """The draft model has read what was accepted since `begun`: its time is part of the next
        draft."""
        now = time.perf_counter()
        self._followed_ms = (now - begun) * 1e3
        self._ended = now


def keep_trees(reqs: list[Req], output: StepOutput, taken: list[int]) -> None:
    """Take the trees that a round gave, cut where the tokens were. taken: tokens that each request
    kept; who kept none had ended."""
    for req, tree, kept in zip(reqs, output.trees or (), taken, strict=False):
        if tree is not None and kept and req.trees is not None:
            req.trees.add(tree.cut(kept, req.output_len - kept))
