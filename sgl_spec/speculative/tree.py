"""Token trees: what a drafter proposes and the target verifies in one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_TREE_NODES = 64  # an ancestor set is one int64 word per node


@dataclass(frozen=True, slots=True)
class TokenTree:
    """B trees of up to N nodes.

    tokens: [B, N] int64. parents: [B, N] int64, index of the parent node, -1 for node 0; a parent comes
    before its children. num_nodes: [B] int64, nodes in use, at least 1: entries from num_nodes on mean
    nothing and are never verified. Node 0 is the root: the request's last token, whose KV is not yet
    written. Siblings hold distinct tokens. scores: [B, N] float32 or None, the drafter's estimate of the
    probability that the node is accepted (1 at the root, a child at most its parent's); the engine
    prunes by it.
    """

    tokens: Tensor
    parents: Tensor
    num_nodes: Tensor
    scores: Tensor | None = None

    @property
    def batch(self) -> int:
        """Number of trees."""
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        """Nodes a tree may hold (N)."""
        return self.tokens.shape[1]

    def used(self) -> Tensor:
        """[B, N] bool: which entries are nodes."""
        index = torch.arange(self.width, device=self.tokens.device)
        return index[None, :] < self.num_nodes[:, None]

    def depths(self) -> Tensor:
        """[B, N] int64: 0 at the root; positions are committed_len + depth."""
        depth = torch.zeros_like(self.parents)
        for i in range(1, self.width):
            parent = self.parents[:, i : i + 1].clamp(min=0)
            depth[:, i] = depth.gather(1, parent)[:, 0] + 1
        return depth

    def ancestor_words(self) -> Tensor:
        """[B, N] int64: bit j of node i is set iff j is i or an ancestor of i."""
        words = torch.zeros_like(self.parents)
        words[:, 0] = 1
        for i in range(1, self.width):
            parent = self.parents[:, i : i + 1].clamp(min=0)
            bit = torch.tensor(1, dtype=torch.int64) << i
            words[:, i] = words.gather(1, parent)[:, 0] | bit
        return words


def root_only(roots: Tensor) -> TokenTree:
    """Trees that hold just their root: ordinary decoding. roots: [B] int64."""
    return TokenTree(
        tokens=roots[:, None],
        parents=torch.full_like(roots[:, None], -1),
        num_nodes=torch.ones_like(roots),
        scores=torch.ones(roots.shape[0], 1),
    )


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """What the target made of a tree.

    tokens: [B, W] int64, tokens emitted this round, accepted draft tokens then the bonus token.
    path: [B, W] int64, nodes whose rows drew them: path[:, 0] = 0, then the accepted nodes in order.
    counts: [B] int64, tokens emitted (1 .. W): counts - 1 draft tokens were accepted. Entries from
    counts on mean nothing. The KV rows of path[:, :counts] are the ones to keep.
    """

    tokens: Tensor
    path: Tensor
    counts: Tensor
