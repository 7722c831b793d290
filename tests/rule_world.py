"""A world small enough to know exactly: a target and a drafter over a few tokens, whose
distributions depend on the whole text, and rounds of any acceptance rule for many requests at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from chi_square import p_value
from torch import Tensor

from sgl_spec.request import SamplingParams
from sgl_spec.speculative.base import DraftBatch
from sgl_spec.speculative.propose import Level, SampledTrees
from sgl_spec.speculative.rules import AcceptanceRule
from sgl_spec.speculative.sampling import SamplingRows, build_rows, final_probs
from sgl_spec.speculative.topology import Topology
from sgl_spec.speculative.tree import AcceptResult, TokenTree

STATES = 101
START = 7

DRAWS = 40_000
# All seeds are fixed, so a test passes always or never. A right rule misses LEVEL for one in 10,000
# choices of the seeds; the biased ones that are tried here give less than BIASED.
LEVEL = 1e-4
BIASED = 1e-9


def follow(state: Tensor, token: Tensor) -> Tensor:
    """The state of a text with one more token."""
    return (state * 31 + token + 1) % STATES


@dataclass(frozen=True)
class World:
    """target, draft: logits [STATES, V] and [STATES, W]. ids: the token of each draft column."""

    target: Tensor
    draft: Tensor
    ids: Tensor

    @property
    def vocab(self) -> int:
        return self.target.shape[1]

    def probs(self, params: SamplingParams) -> Tensor:
        """[STATES, V] the target's final distribution in each state."""
        rows = rows_of(params, STATES)
        return final_probs(self.target, rows, torch.full((STATES,), 50)).double()

    def draft_probs(self, temperature: float) -> Tensor:
        """[STATES, V] the drafter's distribution in each state; 0 outside its vocabulary."""
        q = torch.zeros(STATES, self.vocab, dtype=torch.float64)
        q[:, self.ids] = (self.draft.double() / temperature).softmax(1)
        return q

    def joint(self, params: SamplingParams, length: int) -> Tensor:
        """[V ** length] exact probability of the next `length` tokens."""
        probs, total = self.probs(params), []
        for text in itertools.product(range(self.vocab), repeat=length):
            state, chance = START, 1.0
            for token in text:
                chance *= float(probs[state, token])
                state = int(follow(torch.tensor(state), torch.tensor(token)))
            total.append(chance)
        return torch.tensor(total, dtype=torch.float64)


def world(
    vocab: int = 4, off: float = 1.0, ids: Sequence[int] | None = None, seed: int = 5
) -> World:
    """off: how far the drafter's logits lie from the target's. ids: the tokens it knows."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(STATES, vocab, generator=generator)
    draft = target + off * torch.randn(STATES, vocab, generator=generator)
    known = torch.arange(vocab) if ids is None else torch.tensor(ids)
    return World(target, draft[:, known], known)


def rows_of(params: SamplingParams, count: int, first_seed: int = 0) -> SamplingRows:
    """`count` requests that differ in their seed."""
    rows = build_rows([params], [1], []).select(torch.zeros(count, dtype=torch.int64))
    rows.seed.copy_(torch.arange(first_seed, first_seed + count))
    return rows


@dataclass(frozen=True)
class Round:
    """One round of R requests: their trees, and what a rule made of them."""

    tree: TokenTree
    states: Tensor
    result: AcceptResult


def play(
    place: World,
    rule: AcceptanceRule,
    shape: Topology,
    rows: SamplingRows,
    *,
    state: Tensor,
    committed: Tensor,
    max_nodes: Tensor | None = None,
) -> Round:
    """One round. state, committed: [R] of each root. max_nodes: [R], None is the whole shape."""
    count = rows.count
    nodes = torch.full((count,), shape.width) if max_nodes is None else max_nodes
    batch = DraftBatch(
        rows=np.zeros(count, dtype=np.int64),
        lengths=committed.numpy() + 1,
        max_nodes=nodes.numpy(),
        tokens=np.broadcast_to(np.zeros((1, 1), dtype=np.int32), (1, int(committed.max()) + 1)),
        sampling=rows,
    )
    trees = SampledTrees(batch, shape, place.ids)
    states = torch.zeros(count, shape.width, dtype=torch.int64)
    states[:, 0] = state
    for level in trees.levels():
        logits = place.draft[states[level.request, level.node]]
        if rule.samples:
            trees.grow(level, logits)
        else:
            take_best(trees, level, logits, shape, place.ids)
        for node in range(1, shape.width):
            states[:, node] = follow(states[:, shape.parents[node]], trees.tokens[:, node])
    tree = trees.finish()
    logits = place.target[states.flatten()]
    offsets = torch.arange(count) * shape.width
    return Round(tree, states, rule(tree, logits, offsets, rows, committed))


def take_best(
    trees: SampledTrees, level: Level, logits: Tensor, shape: Topology, ids: Tensor
) -> None:
    """Children that are the drafter's best tokens, as drafters choose them that do not sample."""
    order = logits.argsort(1, descending=True)
    for node, kids in enumerate(shape.children()):
        at = torch.nonzero(level.node == node)[:, 0]
        for rank, kid in enumerate(kids):
            trees.tokens[level.request[at], kid] = ids[order[at, rank]]


def generate(
    place: World,
    rule: AcceptanceRule,
    shape: Topology,
    params: SamplingParams,
    *,
    draws: int,
    length: int,
    by: str = "seed",
) -> Tensor:
    """[draws, length]: round after round until every request has `length` tokens.

    by: the requests differ in their seed, or in where their text starts.
    """
    rows = rows_of(params, draws)
    start = torch.full((draws,), 6)
    if by == "position":
        rows.seed.fill_(17)
        start = 100 * torch.arange(draws)
    text = torch.zeros(draws, length + shape.width, dtype=torch.int64)
    have, state = torch.zeros(draws, dtype=torch.int64), torch.full((draws,), START)
    while bool((have < length).any()):
        who = torch.nonzero(have < length)[:, 0]
        committed = start[who] + have[who]
        done = play(place, rule, shape, rows.select(who), state=state[who], committed=committed)
        tokens, counts = done.result.tokens, done.result.counts
        for i in range(int(counts.max())):
            some = counts > i
            text[who[some], have[who[some]] + i] = tokens[some, i]
            state[who[some]] = follow(state[who[some]], tokens[some, i])
        have[who] += counts
    return text[:, :length]


def outcomes(text: Tensor, vocab: int) -> Tensor:
    """[vocab ** length] how often each text came."""
    index = torch.zeros(len(text), dtype=torch.int64)
    for token in text.T:
        index = index * vocab + token
    return torch.bincount(index, minlength=vocab ** text.shape[1])


def joint_p_value(
    place: World,
    rule: AcceptanceRule,
    shape: Topology,
    params: SamplingParams | None = None,
    *,
    by: str = "seed",
    length: int = 3,
) -> float:
    """Of the first tokens, over as many rounds as they take."""
    params = params or SamplingParams(seed=0)
    text = generate(place, rule, shape, params, draws=DRAWS, length=length, by=by)
    return p_value(outcomes(text, place.vocab), place.joint(params, length))


def close(seen: float, wanted: float, draws: int = DRAWS) -> bool:
    """Within five standard errors of a proportion."""
    return abs(seen - wanted) < 5 * math.sqrt(max(wanted * (1 - wanted), 1e-3) / draws)


def constant(p: list[float], q: list[float]) -> World:
    """The same distributions after every text."""
    tables = [torch.tensor(x).log().expand(STATES, -1).contiguous() for x in (p, q)]
    return World(tables[0], tables[1], torch.arange(len(p)))


def likely_p_value(observed: Tensor, probability: Tensor) -> float:
    """`p_value` with all outcomes that are expected less than 10 times taken as one."""
    rare = probability * observed.sum() < 10
    together = [torch.cat([x[~rare], x[rare].sum()[None]]) for x in (observed, probability)]
    return p_value(*together)
