"""How many draft nodes a batch should verify: as many as pay for their rows.

A verify of R rows costs what the machine takes for R rows, measured, and emits one token per
request plus every accepted node. The best R maximises expected tokens per time over the whole
batch, so a node of one request competes with the nodes of all others. Pure policy: no model, no
clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgl_spec.layers.transfer import on_device
from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec.speculative.tree import TokenTree

FloatArray = npt.NDArray[np.floating]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CostTable:
    """Time of a round as a function of the rows it verifies.

    rows: rising row counts. ms: measured forward time at each, milliseconds. fixed: milliseconds
    that every round costs besides the forward. Between the counts the time is interpolated
    linearly, or, with `steps`, it is that of the next count, because rounds are filled up to it.
    Below the first it is the first, beyond the last it goes on with the last slope.
    """

    rows: tuple[int, ...]
    ms: tuple[float, ...]
    fixed: float = 0.0
    steps: bool = False

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.rows, self.rows[1:], strict=False))
        if not self.rows or len(self.rows) != len(self.ms) or not rising or min(self.ms) <= 0:
            raise ValueError(f"a cost table needs rising rows and positive times, got {self!r}")

    def __str__(self) -> str:
        return " ".join(f"{n}:{ms:.1f}" for n, ms in zip(self.rows, self.ms, strict=False))

    def cost(self, rows: int) -> float:
        """Milliseconds of a round of `rows` rows."""
        return float(self.costs(rows, rows)[0])

    def costs(self, first: int, last: int) -> FloatArray:
        """Milliseconds of rounds of first, first + 1, ... last rows."""
        counts = np.arange(first, last + 1)
        if self.steps:
            filled = np.searchsorted(self.rows, counts).clip(max=len(self.rows) - 1)
            times = np.asarray(self.ms).take(filled)
        else:
            times = np.interp(counts, self.rows, self.ms)
        if last > self.rows[-1] and len(self.rows) > 1:
            slope = (self.ms[-1] - self.ms[-2]) / (self.rows[-1] - self.rows[-2])
            times += max(slope, 0.0) * np.maximum(counts - self.rows[-1], 0)
        return times + self.fixed


MIN_GAIN = 0.08
"""Expected gain below which the engine verifies nothing: handling a tree has costs beside its
forward, and measured times and estimated chances are only nearly right."""


def choose(tree: ArrayTree, table: CostTable, min_gain: float = 0.0) -> BoolArray:
    """[B, N]: the nodes whose verification maximises expected tokens per millisecond.

    Nodes are taken over the whole batch by falling score; among equals the shallower, then the
    lower index first. A score counts as its parent's at most, so ancestors come first. Of equally
    good choices the largest is taken; one that promises less than `min_gain` over the bare roots is
    not. Roots are always kept.
    """
    assert tree.scores is not None
    drafted = tree.used()
    drafted[:, 0] = False
    flat = np.flatnonzero(drafted)
    gains = tree.scores.take(flat).astype(np.float64)
    order = np.lexsort((flat % tree.width, tree.depths.take(flat), -gains))
    emitted = np.empty(flat.size + 1)
    emitted[0] = tree.batch
    np.cumsum(gains.take(order), out=emitted[1:])
    emitted[1:] += tree.batch
    rate = emitted / table.costs(tree.batch, tree.batch + flat.size)
    count = flat.size - int(rate[::-1].argmax())  # the last of equal maxima
    if rate[count] < rate[0] * (1 + min_gain):
        count = 0
    keep = np.zeros_like(drafted)
    keep[:, 0] = True
    keep.reshape(-1)[flat.take(order[:count])] = True
    return keep


def keep_nodes(tree: TokenTree, mask: Tensor) -> TokenTree:
    """The trees restricted to `mask` [B, N] bool, nodes in their old order, parents renumbered.

    The mask holds the roots and every kept node's ancestors. The width stays N.
    """
    mask = mask & tree.used()
    front = mask.to(torch.int8).sort(dim=1, descending=True, stable=True)  # kept nodes first
    order = front.indices
    renumbered = mask.cumsum(1) - 1
    parents = renumbered.gather(1, tree.parents.clamp(0, tree.width - 1)).gather(1, order)
    parents[:, 0] = -1
    return replace(
        tree,
        tokens=tree.tokens.gather(1, order),
        parents=parents,
        num_nodes=mask.sum(1),
        scores=None if tree.scores is None else tree.scores.gather(1, order),
        draft=None if tree.draft is None else tree.draft.take(order),
        allowed=None if tree.allowed is None else tree.allowed.take(order),
    )


def bounded(tree: TokenTree, remaining: IntArray, max_nodes: IntArray) -> TokenTree:
    """The trees without nodes that their requests cannot keep or may not verify; a drafter may
    forget its bound. remaining, max_nodes: [B], see `engine.batch.DecodeBatch`."""
    small = bool((tree.num_nodes.numpy(force=True) <= max_nodes).all())
    if small and tree.width <= int(remaining.min()):
        return tree
    useful = useful_nodes(ArrayTree.of(tree), remaining, max_nodes)
    return keep_nodes(tree, on_device(useful, tree.tokens.device))


def useful_nodes(tree: ArrayTree, remaining: IntArray, max_nodes: IntArray) -> BoolArray:
    """[B, N]: the nodes that `bounded` keeps. Parents come first, so a tree may be cut anywhere."""
    useful = tree.used() & (tree.depths < remaining[:, None])
    useful &= np.arange(tree.width) < max_nodes[:, None]
    return useful
