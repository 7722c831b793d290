"""What the worker keeps of a batch that runs on the device, which batches can, and as which."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from sgl_spec.engine.batch import IntArray, Launched
from sgl_spec.engine.cuda.graphs import Replayed
from sgl_spec.engine.cuda.rounds import RoundKind
from sgl_spec.engine.cuda.timing import Stopwatch
from sgl_spec.engine.cuda.transfer import Fetched
from sgl_spec.engine.req import Req
from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec.speculative.base import DraftBatch


@dataclass(frozen=True, slots=True)
class Planned:
    """A round to be launched, by the source of its drafts. draft: what a drafter on the host is to
    be told of, with the tree that it made, if it did. drafted: whether a drafter was asked. timed:
    whether the source wants to know how long it takes. facts: [size, 3] of n-grams, which the round
    leaves for the host, see `ngram_chains.Chains`."""

    replayed: Replayed
    draft: DraftBatch | None = None
    tree: ArrayTree | None = None
    drafted: bool = False
    timed: bool = False
    facts: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Running(Launched):
    """Work on the device. rows: [B] those it gives tokens to; tenancy: [B] whose they were. final:
    [B] where in the batch they stand, of `size`. proposed: draft tokens verified per request."""

    rows: IntArray
    tenancy: IntArray
    final: IntArray
    size: int
    results: Fetched | None
    proposed: list[int]


@dataclass(frozen=True, slots=True)
class RunningRound(Running):
    """A round. forced: whether accept lengths were given. watch: the time of it, if it is wanted;
    before: that of the round launched before, if nothing else was since. facts: see `Planned`."""

    planned: Planned
    forced: bool = False
    watch: Stopwatch | None = None
    before: Stopwatch | None = None
    facts: Fetched | None = None


def is_simple(req: Req) -> bool:
    """Whether a round of this request needs nothing of the host."""
    sampling = req.sampling
    return not (
        req.constraint is not None
        or sampling.grammar is not None
        or req.logprobs is not None
        or sampling.penalised
        or sampling.logit_bias
        or sampling.min_new_tokens
    )


class RowKinds:
    """What the requests in the rows ask for. forced: whether accept lengths are given."""

    def __init__(self, num_rows: int, *, forced: bool) -> None:
        asked = (np.zeros(num_rows, dtype=np.bool_) for _ in range(3))
        self._simple, self._sampled, self._filtered = asked
        self._forced = forced

    def open(self, row: int, req: Req) -> None:
        """A request took a row."""
        sampling = req.sampling
        filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        self._simple[row] = is_simple(req)
        self._sampled[row] = sampling.temperature > 0
        self._filtered[row] = filtered and sampling.temperature > 0

    def simple(self, rows: IntArray) -> bool:
        """Whether a round of these rows needs nothing of the host."""
        return bool(self._simple[rows].all())

    def of(self, rows: IntArray) -> RoundKind:
        """The kind of their round."""
        return RoundKind(
            sampled=bool(self._sampled[rows].any()),
            filtered=bool(self._filtered[rows].any()),
            forced=self._forced,
        )
