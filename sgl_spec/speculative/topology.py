"""The shape of sampled trees: fixed before any token is drawn, so that no draw can influence it."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

SIBLING_COST = 3
"""What a later sibling costs in levels: a first sibling is accepted with chance a, each later one
with chance a of what is left, and (1 - a) = a^3, which is a = 0.68."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Parents of nodes 0, 1, ... (-1 for node 0, the root).

    Parents come before children and siblings stand in the order in which they are drawn and
    judged, so the first m nodes are a tree as well: the one of `topology(steps, topk, m)`.
    """

    parents: tuple[int, ...]

    @property
    def width(self) -> int:
        """Nodes, root included (N)."""
        return len(self.parents)

    def depths(self) -> tuple[int, ...]:
        """Depth of each node, 0 at the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node, in order."""
        found: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], 1):
            found[parent].append(node)
        return tuple(map(tuple, found))


def topology(steps: int, topk: int, draft_tokens: int) -> Topology:
    """The `draft_tokens` cheapest nodes of the tree with `topk` children per node and `steps`
    levels below the root.

    The r-th child (from 0) costs 1 + SIBLING_COST * r more than its parent; equal costs go to the
    shallower node, then to the one whose path takes earlier siblings. Nodes are numbered in this
    order. topk 1 gives a chain.
    """
    parents: list[int] = []
    queue: list[tuple[int, int, tuple[int, ...], int]] = [(0, 0, (), -1)]
    while queue and len(parents) < draft_tokens:
        cost, depth, path, parent = heapq.heappop(queue)
        node = len(parents)
        parents.append(parent)
        if depth < steps:
            heapq.heappush(queue, (cost + 1, depth + 1, (*path, 0), node))
        if path and path[-1] + 1 < topk:
            later = (*path[:-1], path[-1] + 1)
            heapq.heappush(queue, (cost + SIBLING_COST, depth, later, parent))
    if len(parents) < draft_tokens:
        raise ValueError(
            f"{steps} levels of {topk} children hold {len(parents)} nodes, not {draft_tokens}"
        )
    return Topology(tuple(parents))
