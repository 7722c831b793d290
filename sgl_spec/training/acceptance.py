"""Accept lengths from teacher forcing on held-out greedy answers.

Along a greedy answer, a chain drafter's rounds are known without running it: from a root, the draft
is accepted as far as its best token is the answer's next one, and the next root is the token after
that. For trees the answer's token has a rank in each draft distribution on its path, and the tree
is estimated to hold the path as long as everything ranked at or above it fits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_spec.training.shards import IntArray

Ranks = npt.NDArray[np.int64]
"""[roots, steps]: how many tokens the draft prefers to the answer's, at each depth; a large number
(OUTSIDE) where the answer's token is no column of the draft, a larger one (BEYOND) past its end."""

OUTSIDE = 1 << 30
BEYOND = 1 << 31  # the answer ends before this depth


@dataclass(frozen=True, slots=True)
class TreeShape:
    """steps: depth; topk: candidates of a node; draft_tokens: nodes, the root included."""

    steps: int
    topk: int
    draft_tokens: int

    def __str__(self) -> str:
        return f"({self.steps},{self.topk},{self.draft_tokens})"


SHAPES = (TreeShape(5, 1, 6), TreeShape(5, 4, 8), TreeShape(7, 8, 32))


def accepted(ranks: Ranks, shape: TreeShape) -> IntArray:
    """[roots]: draft tokens that are accepted from each root.

    Exact for a chain. For a tree, a path with ranks r1, r2, ... is taken to be in it while
    (r1 + 1) + (r1 + 1)(r2 + 1) + ... <= draft_tokens - 1: the nodes that beat it if every node's
    distribution were alike.
    """
    ranks = ranks[:, : shape.steps]
    inside = ranks < shape.topk
    before = np.cumsum(np.cumprod(np.minimum(ranks, shape.topk) + 1, axis=1), axis=1)
    held = inside & (before <= shape.draft_tokens - 1)
    result: IntArray = np.cumprod(held, axis=1).sum(axis=1).astype(np.int64)
    return result


def accept_length(per_root: list[IntArray]) -> float:
    """Mean tokens of a round over whole answers.

    per_root: for each answer, what is accepted at each of its positions as the root. A round that
    is cut by the answer's end is not counted.
    """
    tokens = rounds = 0
    for counts in per_root:
        root = 0
        while root < len(counts):
            step = int(counts[root]) + 1
            if root + step > len(counts):
                break
            tokens, rounds, root = tokens + step, rounds + 1, root + step
    return tokens / rounds if rounds else float("nan")


def hit_rates(ranks: Ranks, best: int) -> list[float]:
    """Share of roots where, at each depth, the answer's token is among the `best` first, given
    that it was at every depth above; roots whose answer has ended are not counted."""
    held = np.cumprod(ranks < best, axis=1)
    above = np.concatenate((np.ones((len(ranks), 1), dtype=np.int64), held[:, :-1]), axis=1)
    counted = (above * (ranks != BEYOND)).sum(axis=0)
    return [float(hits / max(1, roots)) for hits, roots in zip(held.sum(0), counted, strict=True)]
