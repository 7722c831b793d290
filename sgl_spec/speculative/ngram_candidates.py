"""Candidate nodes of a batch of draft trees, in fixed columns, and the choice among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

SIBLING_TOTAL = 0.985  # siblings exclude each other: their probabilities sum to at most this
_PROBE_SCORES = np.array([0.9, 0.8, 0.7])  # of the first nodes of the main chain in a probe


@dataclass(frozen=True, slots=True)
class Draft:
    """Trees of N nodes as in `TokenTree`, and what they were judged by.

    tokens, parents: [B, N]. num_nodes: [B]. scores: [B, N]. buckets: [B, N] of the acceptance
    model,
    chances: [B, N] acceptance probability given an accepted parent; both mean nothing at the root.
    suffixes: [B, depth - 1] trie nodes of the last 1, 2, ... tokens of the texts, 0 where there is
    none.
    """

    tokens: Ints
    parents: Ints
    num_nodes: Ints
    scores: Floats
    buckets: Ints
    chances: Floats
    suffixes: Ints


class Layout:
    """The columns of a request's candidates for trees of `nodes` nodes.

    firsts: children of the root, best first. main: the chain below the first of them, `steps` long.
    sides: chains below the next `sides` firsts. forks: `forks` other children beside each main
    node.
    parent: [C] column of the parent, -1 for the root; it is smaller than the column's own.
    """

    def __init__(self, nodes: int, sides: int, forks: int) -> None:
        self.firsts = nodes - 1
        self.steps = nodes - 2
        self.sides = min(sides, nodes - 2)
        self.forks = forks
        self.main = slice(self.firsts, self.firsts + self.steps)
        self.side = slice(self.main.stop, self.main.stop + self.sides * self.steps)
        self.fork = slice(self.side.stop, self.side.stop + forks * self.steps)
        chain = np.arange(self.steps)
        above = [np.where(chain, self.firsts + chain - 1, 0)]
        for i in range(self.sides):
            start = self.side.start + i * self.steps
            above.append(np.where(chain, start + chain - 1, 1 + i))
        above.append(np.repeat(above[0], forks))
        self.parent = np.concatenate([np.full(self.firsts, -1), *above]).astype(np.int64)
        self.columns = self.parent.size


class Candidates:
    """[B, C] candidates: token, acceptance model bucket, chance given an accepted parent, score
    (the chance of the whole path)."""

    def __init__(self, batch: int, layout: Layout) -> None:
        shape = (batch, layout.columns)
        self.layout = layout
        self.tokens = np.zeros(shape, np.int64)
        self.buckets = np.zeros(shape, np.int64)
        self.chances = np.zeros(shape)
        self.scores = np.zeros(shape)
        self.valid = np.zeros(shape, np.bool_)

    def put_firsts(self, at: Ints, tokens: Ints, buckets: Ints, chances: Floats) -> None:
        """at: [m] request * firsts + rank; the others [m]."""
        at = at // self.layout.firsts * self.layout.columns + at % self.layout.firsts
        for target, values in (
            (self.tokens, tokens),
            (self.buckets, buckets),
            (self.chances, chances),
        ):
            target.reshape(-1)[at] = values
        self.valid.reshape(-1)[at] = True
        own = self.chances[:, : self.layout.firsts]
        total = np.maximum(own.sum(axis=1, keepdims=True), SIBLING_TOTAL)
        self.scores[:, : self.layout.firsts] = own * (SIBLING_TOTAL / total)

    def put_main(self, tokens: Ints, buckets: Ints, chances: Floats, valid: Bools) -> None:
        """All [B, steps]."""
        where = self.layout.main
        self.tokens[:, where] = tokens
        self.buckets[:, where] = buckets
        self.chances[:, where] = chances * valid
        self.scores[:, where] = self.scores[:, :1] * np.cumprod(chances, axis=1)
        self.valid[:, where] = valid

    def put_sides(self, tokens: Ints, buckets: Ints, chances: Floats, valid: Bools) -> None:
        """All [B, sides, steps]."""
        where, batch = self.layout.side, self.tokens.shape[0]
        own = slice(1, 1 + self.layout.sides)
        self.tokens[:, where] = tokens.reshape(batch, -1)
        self.buckets[:, where] = buckets.reshape(batch, -1)
        self.chances[:, where] = chances.reshape(batch, -1)
        path = self.scores[:, own, None] * np.cumprod(chances, axis=2)
        self.scores[:, where] = path.reshape(batch, -1)
        self.valid[:, where] = valid.reshape(batch, -1)

    def put_forks(
        self, at: Ints, tokens: Ints, buckets: Ints, chances: Floats, valid: Bools
    ) -> None:
        """at: [m] request * steps + step of the main node they stand beside; the others [m,
        forks]."""
        layout = self.layout
        text, step = at // layout.steps, at % layout.steps
        beside = self.chances[text, layout.main.start + step]
        chances = chances * valid
        room = np.maximum(SIBLING_TOTAL - beside, 0.0)[:, None]
        total = np.maximum(chances.sum(axis=1, keepdims=True), 1e-9)
        above = self.scores[text, layout.parent[layout.main.start + step]][:, None]
        scores = above * chances * np.minimum(1.0, room / total)
        columns = layout.fork.start + step[:, None] * layout.forks + np.arange(layout.forks)
        spots = text[:, None] * layout.columns + columns
        for target, values in (
            (self.tokens, tokens),
            (self.buckets, buckets),
            (self.chances, chances),
            (self.scores, scores),
            (self.valid, valid),
        ):
            target.reshape(-1)[spots] = values

    def probe(self, texts: Bools) -> None:
        """Raise the scores of the first main nodes of the texts marked."""
        if not texts.any():
            return
        steps = self.layout.firsts + np.arange(self.layout.steps)
        lead = np.concatenate([[0], steps])[: _PROBE_SCORES.size]
        raised = np.maximum(self.scores[:, lead], _PROBE_SCORES[: lead.size])
        self.scores[:, lead] = np.where(texts[:, None], raised, self.scores[:, lead])

    def select(self, roots: Ints, max_nodes: Ints, suffixes: Ints) -> Draft:
        """The candidates of highest score, at most max_nodes - 1 [B] a request, as trees.

        A child's score is below its parent's, so every set of best candidates is a tree.
        """
        batch, columns = self.tokens.shape
        size = self.layout.firsts
        worth = np.where(self.valid, self.scores, -1.0)
        best = np.argsort(-worth, axis=1)[:, :size]
        taken = pick(self.valid, best) & (np.arange(size) < (max_nodes - 1)[:, None])
        chosen = np.zeros((batch, columns), np.bool_)
        chosen.reshape(-1)[best + np.arange(0, batch * columns, columns)[:, None]] = taken
        place = np.cumsum(chosen, axis=1)  # in its tree: parents stand left of children
        num_nodes = 1 + place[:, -1]
        width = int(num_nodes.max(initial=1))
        spots = np.flatnonzero(chosen)
        text = spots // columns
        above = self.layout.parent.take(spots - text * columns)
        target = text * width + place.reshape(-1).take(spots)

        def filled(first: Any, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            out = np.zeros((batch, width), values.dtype)
            out[:, 0] = first
            out.reshape(-1)[target] = values
            return out

        parents = place.reshape(-1).take(text * columns + np.maximum(above, 0)) * (above >= 0)
        return Draft(
            tokens=filled(roots, self.tokens.take(spots)),
            parents=filled(-1, parents),
            num_nodes=num_nodes,
            scores=filled(1.0, self.scores.take(spots)),
            buckets=filled(0, self.buckets.take(spots)),
            chances=filled(1.0, self.chances.take(spots)),
            suffixes=suffixes,
        )


def pick(values: npt.NDArray[Any], index: Ints) -> npt.NDArray[Any]:
    """[m, w] values at [m, k] columns (`take_along_axis` along rows, without its overhead)."""
    width = values.shape[1]
    return values.reshape(-1).take(index + np.arange(0, values.size, width)[:, None])
