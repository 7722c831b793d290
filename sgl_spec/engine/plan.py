"""Batches as the scheduler plans them, with their requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sgl_spec.engine.batch import Batch, DecodeBatch, IntArray, Launched, PrefillBatch
from sgl_spec.engine.req import Req


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of a batch, and the batch."""

    reqs: list[Req]
    batch: Batch


@dataclass(frozen=True, slots=True)
class Flight:
    """A batch that was launched and is not collected. ahead: whether another may be launched
    before it is."""

    plan: Plan
    launched: Launched
    ahead: bool


def prefill_plan(reqs: list[Req], takes: Sequence[int]) -> Plan:
    """A forward of so many more tokens of each prompt."""
    finals = [take == req.unfilled for req, take in zip(reqs, takes, strict=True)]
    batch = PrefillBatch(
        rows=_ints(r.held.row for r in reqs),
        starts=_ints(r.held.committed_len for r in reqs),
        takes=_ints(takes),
        finals=np.array(finals, dtype=np.bool_),
        unscored=_ints(r.unscored for r in reqs),
    )
    return Plan(reqs, batch)


def decode_plan(reqs: list[Req], draft_tokens: int) -> Plan:
    """A round. draft_tokens: most nodes of a tree, root included."""
    batch = DecodeBatch(
        rows=_ints(r.held.row for r in reqs),
        committed=_ints(r.held.committed_len for r in reqs),
        max_nodes=_ints(r.sampling.max_nodes(draft_tokens) for r in reqs),
        remaining=_ints(r.remaining for r in reqs),
    )
    return Plan(reqs, batch)


def _ints(values: Iterable[int]) -> IntArray:
    return np.fromiter(values, dtype=np.int64)
