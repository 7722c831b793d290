"""What the worker keeps of a batch that runs on the device, and which batches can."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_spec.engine.batch import IntArray, Launched
from sgl_spec.engine.cuda.timing import Stopwatch
from sgl_spec.engine.cuda.transfer import Fetched
from sgl_spec.engine.req import Req
from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec.speculative.base import DraftBatch


@dataclass(frozen=True, slots=True)
class Running(Launched):
    """Work on the device. rows: [B] those it gives tokens to; tenancy: [B] whose they were. final:
    [B] where in the batch they stand, of `size`. draft: what a drafter on the host is to be told
    of, with the tree that it made, if it did. forced: whether accept lengths were given. drafted:
    whether there were drafts. watch: the time of it; before: that of the round which the host had
    to read first. facts: [size, 3] of n-grams that the device found, see `ngram.Chains`."""

    rows: IntArray
    tenancy: IntArray
    final: IntArray
    size: int
    results: Fetched | None
    proposed: list[int]
    draft: DraftBatch | None = None
    tree: ArrayTree | None = None
    forced: bool = False
    drafted: bool = False
    watch: Stopwatch | None = None
    before: Stopwatch | None = None
    is_round: bool = False
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
