"""What the worker keeps of a batch that runs on the device, which batches can, and as which."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from sgl_spec.engine.batch import IntArray, Launched, PrefillBatch
from sgl_spec.engine.control import Decision
from sgl_spec.engine.cuda.graphs import Replayed
from sgl_spec.engine.cuda.round import RoundKind, kind_for
from sgl_spec.engine.cuda.row_logprobs import RowLogprobs
from sgl_spec.engine.cuda.shown import ShownRound
from sgl_spec.engine.cuda.timing import Mark, Stopwatch
from sgl_spec.engine.cuda.transfer import Fetched
from sgl_spec.engine.req import Req
from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec.speculative.base import DraftBatch


@dataclass(frozen=True, slots=True)
class Planned:
    """A round to be launched, by the source of its drafts. draft: what a drafter on the host is to
    be told of, with the tree that it made, if it did. timed: whether the source wants to know how
    long it takes. decision: of the controller, which is told what came of it. nodes: most of a tree
    that the device grows. facts: [size, N], what the round leaves for the host, see
    `ngram_ref.NgramDrafts` and `model_trees.GrownTrees`."""

    replayed: Replayed
    draft: DraftBatch | None = None
    tree: ArrayTree | None = None
    timed: bool = False
    decision: Decision | None = None
    nodes: int = 1
    facts: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Running(Launched):
    """Work on the device. rows: [B] those it gives tokens to; tenancy: [B] whose they were. final:
    [B] where in the batch they stand, of `size`. proposed: draft tokens verified per request.
    results: [size, 1 + N], how many tokens each gets, and which; None where nobody gets any, or
    before `DeviceWorker.resume`. logprobs: those of the tokens, if some request asks."""

    rows: IntArray
    tenancy: IntArray
    final: IntArray
    size: int
    results: Fetched | None
    proposed: list[int]
    logprobs: RowLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPrompts(Running):
    """Prompt chunks. hidden: of all rows, where log-probabilities of the prompts are asked for."""

    batch: PrefillBatch
    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRound(Running):
    """A round. forced: whether accept lengths were given. watch: the time of it, if it is wanted;
    before: that of the round launched before, if nothing else was since. facts: see `Planned`.
    drafted: the trees of a masked round, which waits for their masks. verified, masked: where its
    forward ended, and where the masks came. shown: what some of its requests ask to see."""

    planned: Planned
    forced: bool = False
    watch: Stopwatch | None = None
    before: Stopwatch | None = None
    facts: Fetched | None = None
    drafted: Fetched | None = None
    verified: Mark | None = None
    masked: Mark | None = None
    shown: ShownRound | None = None


class RowKinds:
    """What the requests in the rows ask for. forced: whether accept lengths are given."""

    def __init__(self, num_rows: int, *, forced: bool) -> None:
        asked = (np.zeros(num_rows, dtype=np.bool_) for _ in range(4))
        self._sampled, self._filtered, self._settings, self._masked = asked
        self._forced = forced

    def open(self, req: Req) -> None:
        """A request took a row."""
        row, sampling = req.held.row, req.sampling
        filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        moved = sampling.penalised or sampling.logit_bias or sampling.min_new_tokens
        self._sampled[row] = sampling.temperature > 0
        self._filtered[row] = filtered and sampling.temperature > 0
        self._settings[row] = bool(moved) or req.logprobs is not None
        self._masked[row] = req.constraint is not None

    def of(self, rows: IntArray) -> RoundKind:
        """The kind of their round."""
        kind = kind_for(
            sampled=bool(self._sampled[rows].any()),
            filtered=bool(self._filtered[rows].any()),
            settings=bool(self._settings[rows].any()),
            masked=bool(self._masked[rows].any()),
        )
        return replace(kind, forced=self._forced)
