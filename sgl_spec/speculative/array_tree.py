"""Token trees in NumPy, for what happens while a device waits: a call of torch takes five times as
long, and nothing here is worth a copy to the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from sgl_spec.speculative.tree import AcceptResult, TokenTree

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class ArrayTree:
    """B trees of up to N nodes; see `TokenTree`.

    tokens, parents, depths: [B, N] int64, of which a tree's first num_nodes [B] count. scores: [B,
    N] or None; none is above its parent's.
    """

    tokens: IntArray
    parents: IntArray
    num_nodes: IntArray
    depths: IntArray
    scores: FloatArray | None

    @classmethod
    def of(cls, tree: TokenTree) -> ArrayTree:
        """The same trees, wherever they lie; scores that rise along a path are cut to their
        parents'."""
        tokens, parents, num_nodes = (
            each.numpy(force=True) for each in (tree.tokens, tree.parents, tree.num_nodes)
        )
        scores = None if tree.scores is None else tree.scores.numpy(force=True)
        link = _links(parents, num_nodes)
        depths = (np.arange(tree.width) < num_nodes[:, None]).astype(np.int64)
        depths[:, 0] = 0
        for _ in range(_doublings(tree.width)):
            depths = depths + depths.take(link)
            link = link.take(link)
        found = cls(tokens, parents, num_nodes, depths, None)
        return found if scores is None else found.with_scores(scores)

    def with_scores(self, scores: FloatArray) -> ArrayTree:
        """The same trees with other scores [B, N], which are cut as those of `of`."""
        link = _links(self.parents, self.num_nodes)
        for _ in range(_doublings(self.width)):
            scores = np.minimum(scores, scores.take(link))
            link = link.take(link)
        return replace(self, scores=scores)

    @classmethod
    def roots(cls, tokens: IntArray) -> ArrayTree:
        """Trees of one node. tokens: [B]."""
        batch = len(tokens)
        none = np.zeros((batch, 1), np.int64)
        ones = np.ones(batch, np.int64)
        return cls(tokens[:, None], none - 1, ones, none, np.ones((batch, 1)))

    @property
    def batch(self) -> int:
        """B."""
        return len(self.tokens)

    @property
    def width(self) -> int:
        """N."""
        return int(self.tokens.shape[1])

    @property
    def drafts(self) -> int:
        """Nodes that are not roots, of all trees."""
        return int(self.num_nodes.sum()) - self.batch

    def used(self) -> BoolArray:
        """[B, N]: which entries are nodes."""
        used: BoolArray = np.arange(self.width) < self.num_nodes[:, None]
        return used

    def words(self) -> IntArray:
        """[B, N]: bit j of node i is set iff j is i or an ancestor of i. What is no node has the
        root's and its own."""
        link = _links(self.parents, self.num_nodes)
        words = np.tile(np.left_shift(1, np.arange(self.width)), (self.batch, 1))
        for _ in range(_doublings(self.width)):
            words = words | words.take(link)
            link = link.take(link)
        return words

    def keep(self, mask: BoolArray) -> ArrayTree:
        """The trees restricted to `mask` [B, N], as narrow as they can be; see
        `prune.keep_nodes`."""
        place = mask.cumsum(axis=1)
        place -= 1
        num_nodes = place[:, -1] + 1
        width = int(num_nodes.max(initial=1))
        spots = np.flatnonzero(mask)
        first = spots // self.width
        target = first * width + place.take(spots)

        def taken(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
            out = np.zeros(self.batch * width, values.dtype)
            out[target] = values.take(spots)
            return out.reshape(self.batch, width)

        above = np.maximum(self.parents.take(spots), 0) + first * self.width
        parents = np.zeros(self.batch * width, np.int64)
        parents[target] = place.take(above)
        parents[::width] = -1
        scores = None if self.scores is None else taken(self.scores)
        return ArrayTree(
            taken(self.tokens),  # type: ignore[arg-type]
            parents.reshape(self.batch, width),
            num_nodes,
            taken(self.depths),  # type: ignore[arg-type]
            scores,  # type: ignore[arg-type]
        )

    def tensors(self) -> TokenTree:
        """As a drafter's `observe` gets them, in the same memory."""
        scores = None if self.scores is None else torch.from_numpy(self.scores)
        return TokenTree(
            torch.from_numpy(self.tokens),
            torch.from_numpy(self.parents),
            torch.from_numpy(self.num_nodes),
            scores,
        )


def accepted_of(
    tree: ArrayTree, emitted: IntArray, lengths: IntArray, kept: IntArray
) -> AcceptResult:
    """The result of a round of which only the emitted tokens are known: siblings are distinct, so
    tokens name a path. emitted: [B, W] and how many of them count [B]. kept: [B] how many of these
    their requests took."""
    path = np.zeros(emitted.shape, np.int64)
    inner = tree.used()
    inner[:, 0] = False
    alive = np.arange(tree.batch)
    for step in range(1, emitted.shape[1]):
        alive = alive.take(np.flatnonzero(lengths.take(alive) > step))
        found = tree.parents.take(alive, axis=0) == path[alive, step - 1][:, None]
        found &= tree.tokens.take(alive, axis=0) == emitted[alive, step - 1][:, None]
        found &= inner.take(alive, axis=0)
        path[alive, step] = found.argmax(axis=1)
    return AcceptResult(*(torch.from_numpy(each) for each in (emitted, path, kept)))


def _links(parents: IntArray, num_nodes: IntArray) -> IntArray:
    """[B, N] flat index of each node's parent; the root's own for roots and what is no node."""
    batch, width = parents.shape
    inner = np.arange(width) < num_nodes[:, None]
    inner[:, 0] = False
    return np.where(inner, parents, 0) + np.arange(0, batch * width, width)[:, None]


def _doublings(width: int) -> int:
    """Links of 1, 2, 4, ... steps reach the root from everywhere in so many."""
    return (width - 1).bit_length()
