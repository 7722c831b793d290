"""What acceptance is worth: tokens of a round as expected and as measured, and the best tree.

With every draft accepted with chance a, whatever its depth, a chain of k drafts gives

    E = 1 + a + ... + a^k = (1 - a^(k+1)) / (1 - a)

tokens a round (Leviathan et al. 2023, eq. 1). If a draft step takes c times as long as decoding a
token, speculation is E / (k c + 1) times as fast (theorem 3.8). For trees, p_r is the chance that a
node's r-th child is the accepted one; a node then counts with the product along its path, and the
best tree of n nodes is that of the n largest products.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sgl_spec.request import DraftRound


def expected_tokens(a: float, steps: int) -> float:
    """E of a chain of `steps` drafts."""
    return sum(a**depth for depth in range(steps + 1))


def tree_tokens(ranks: Sequence[float], steps: int, nodes: int) -> float:
    """Tokens of a round with the best tree of `nodes` nodes, the root included, `steps` deep.

    ranks: p_r, the chance that the r-th child of an accepted node is accepted.
    """
    total, waiting = 0.0, [(-1.0, 0)]  # (- chance of the node, its depth)
    for _ in range(nodes):
        if not waiting:
            break
        chance, depth = heapq.heappop(waiting)
        total -= chance
        if depth < steps:
            for rank in ranks:
                if rank > 0:
                    heapq.heappush(waiting, (chance * rank, depth + 1))
    return total


@dataclass(frozen=True, slots=True)
class Cost:
    """A round over a token without speculation: 1 + step * steps + node * (nodes - 1)."""

    step: float
    node: float

    def of(self, steps: int, nodes: int) -> float:
        """The ratio of a shape."""
        return 1 + self.step * steps + self.node * (nodes - 1)


def fit_cost(shapes: Sequence[tuple[int, int]], ratios: Sequence[float]) -> Cost:
    """From measured (steps, nodes) and their ratios, least squares without negative parts. One
    shape tells its steps alone."""
    wanted = np.array(ratios) - 1
    columns = np.array([(steps, nodes - 1) for steps, nodes in shapes], dtype=float)
    if np.linalg.matrix_rank(columns) == 2:
        step, node = np.linalg.lstsq(columns, wanted, rcond=None)[0]
        if step >= 0 and node >= 0:
            return Cost(float(step), float(node))
    by = 0 if columns[:, 0].any() else 1  # n-grams take no steps
    one = max(0.0, float((columns[:, by] @ wanted) / max(1.0, columns[:, by] @ columns[:, by])))
    return Cost(one, 0.0) if by == 0 else Cost(0.0, one)


@dataclass(frozen=True, slots=True)
class Best:
    """A shape with what the model says of it."""

    steps: int
    topk: int
    nodes: int
    tokens: float
    speedup: float


def best_shape(ranks: Sequence[float], cost: Cost, steps: int, nodes: int) -> Best:
    """The fastest of all shapes of at most `steps` and `nodes`, for these chances and costs. Beyond
    what was measured costs grow in other ways."""
    return max(_shapes(ranks, cost, steps, nodes), key=lambda best: best.speedup)


def _shapes(ranks: Sequence[float], cost: Cost, most: int, most_nodes: int) -> Iterator[Best]:
    for steps in range(1, most + 1):
        for topk in range(1, len(ranks) + 1):
            for nodes in range(2, min(most_nodes, 1 + steps * topk**2) + 1):
                tokens = tree_tokens(ranks[:topk], steps, nodes)
                yield Best(steps, topk, nodes, tokens, tokens / cost.of(steps, nodes))


class RankTally:
    """Which children of accepted nodes were accepted."""

    def __init__(self) -> None:
        self.offered: Counter[int] = Counter()
        self.accepted: Counter[int] = Counter()

    def add(self, one: DraftRound) -> None:
        """Count a round. Siblings are ranked by score, else by their order in the tree."""
        for node, accepted in itertools.zip_longest([0, *one.path], one.path):
            children = [i for i, parent in enumerate(one.parents) if parent == node]
            if one.scores:
                children.sort(key=lambda child: -one.scores[child])
            self.offered.update(range(len(children)))
            if accepted is not None:
                self.accepted[children.index(accepted)] += 1

    def ranks(self) -> list[float]:
        """p_r by rank; [] where nothing was drafted."""
        return [self.accepted[rank] / count for rank, count in sorted(self.offered.items())]


def by_depth(rounds: Sequence[int]) -> list[float]:
    """From tokens of rounds: the share that kept a draft at depth 1, 2, ... of those that kept all
    above it."""
    most = max(rounds, default=1)
    reached = [sum(tokens > depth for tokens in rounds) for depth in range(most)]
    return [below / above for above, below in itertools.pairwise(reached)]
