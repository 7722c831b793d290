"""Token trees: what a drafter proposes and the target verifies in one forward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sgl_spec.layers.transfer import on_device

MAX_TREE_NODES = 64  # an ancestor set is one int64 word per node


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """The distributions q that the children of a sampled tree's nodes were drawn from.

    probs: [Q, W] float32, each row sums to 1. row_of: [B, N] int64, the row of a node's children;
    -1 where a node has none. ids: [W] int64, the token of each column, for a drafter that knows
    part of the vocabulary (tokens outside have q = 0); None where columns are the vocabulary.
    """

    probs: Tensor
    row_of: Tensor
    ids: Tensor | None = None

    def rows(self, request: Tensor, node: Tensor, vocab_size: int) -> Tensor:
        """[R, V] float32: q of the children of node[r] in tree request[r]; a copy."""
        probs = self.probs.index_select(0, self.row_of[request, node])
        if self.ids is None:
            return probs
        wide = probs.new_zeros(probs.shape[0], vocab_size)
        return wide.index_copy_(1, self.ids, probs)

    def to(self, device: torch.device) -> DraftProbs:
        """The same on a device."""
        ids = None if self.ids is None else on_device(self.ids, device)
        return DraftProbs(on_device(self.probs, device), on_device(self.row_of, device), ids)

    def take(self, order: Tensor) -> DraftProbs:
        """Nodes in another order: node i of the result is node order[:, i] (order: [B, N])."""
        return replace(self, row_of=self.row_of.gather(1, order))


@dataclass(frozen=True, slots=True)
class NodeMasks:
    """The tokens that grammars allow after each node.

    words: [M, ceil(V / 32)] int32, bits as in `sampling.TokenMasks`. row_of: [B, N] int64, the row
    of each node, -1 where every token may follow.
    """

    words: Tensor
    row_of: Tensor

    def to(self, device: torch.device) -> NodeMasks:
        """The same on a device."""
        return NodeMasks(on_device(self.words, device), on_device(self.row_of, device))

    def take(self, order: Tensor) -> NodeMasks:
        """Nodes in another order: node i of the result is node order[:, i] (order: [B, N])."""
        return replace(self, row_of=self.row_of.gather(1, order))


@dataclass(frozen=True, slots=True)
class TokenTree:
    """B trees of up to N nodes.

    tokens: [B, N] int64. parents: [B, N] int64, index of the parent node, -1 for node 0; a parent
    comes before its children. num_nodes: [B] int64, nodes in use, at least 1: entries from
    num_nodes on mean nothing and are never verified. Node 0 is the root: the request's last token,
    whose KV is not yet written. Siblings hold distinct tokens. scores: [B, N] float32 or None, the
    drafter's estimate of the probability that the node is accepted (1 at the root, a child at most
    its parent's); the engine prunes by it. draft: what the tokens were drawn from, where a drafter
    samples them; siblings then stand in the order in which they were drawn. allowed: what grammars
    allow after the nodes; None where no request of the batch has one. The engine sets it.
    """

    tokens: Tensor
    parents: Tensor
    num_nodes: Tensor
    scores: Tensor | None = None
    draft: DraftProbs | None = None
    allowed: NodeMasks | None = None

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
        return self._index() < self.num_nodes[:, None]

    def depths(self) -> Tensor:
        """[B, N] int64: 0 at the root; positions are committed_len + depth."""
        link = self._links()
        depth = (self._index() > 0).to(torch.int64).expand_as(link)
        for _ in range(self._doublings()):
            depth = depth + depth.gather(1, link)
            link = link.gather(1, link)
        return depth

    def ancestor_words(self) -> Tensor:
        """[B, N] int64: bit j of node i is set iff j is i or an ancestor of i."""
        if self.width > MAX_TREE_NODES:
            raise ValueError(f"a tree mask holds at most {MAX_TREE_NODES} nodes, got {self.width}")
        link = self._links()
        words = torch.ones_like(link) << self._index()
        for _ in range(self._doublings()):
            words = words | words.gather(1, link)
            link = link.gather(1, link)
        return words

    def to(self, device: torch.device) -> TokenTree:
        """The same trees on a device, with what hangs on them; no copy where they are there."""
        if self.tokens.device == device:
            return self
        draft, allowed = self.draft, self.allowed
        return TokenTree(
            tokens=on_device(self.tokens, device),
            parents=on_device(self.parents, device),
            num_nodes=on_device(self.num_nodes, device),
            scores=None if self.scores is None else on_device(self.scores, device),
            draft=None if draft is None else draft.to(device),
            allowed=None if allowed is None else allowed.to(device),
        )

    def validate(self, vocab_size: int) -> None:
        """Raise `ValueError` naming the first rule above that a tree breaks.

        It reads the device: for trees from drafters that are not ours, and for tests.
        """
        if self.tokens.dim() != 2:
            raise ValueError(f"tokens are [B, N], got {list(self.tokens.shape)}")
        batch, width = self.tokens.shape
        shapes = (self.tokens.shape, self.parents.shape, (*self.num_nodes.shape, width))
        if set(shapes) != {(batch, width)} or not 1 <= width <= MAX_TREE_NODES:
            names = ("tokens", "parents", "num_nodes")
            got = [f"{name} {list(getattr(self, name).shape)}" for name in names]
            raise ValueError(
                "tokens and parents are [B, N] and num_nodes is [B], with N from 1 to "
                f"{MAX_TREE_NODES}, got {', '.join(got)}"
            )
        kinds = {self.tokens.dtype, self.parents.dtype, self.num_nodes.dtype}
        if kinds != {torch.int64}:
            raise ValueError(f"a tree's integers are int64, got {kinds}")
        inner = self.used() & (self._index() > 0)
        in_range = (self.num_nodes >= 1) & (self.num_nodes <= width)
        _require(in_range, f"num_nodes is 1 to {width}")
        _require(self.parents[:, 0] == -1, "the root's parent is -1")
        ordered = (self.parents >= 0) & (self.parents < self._index())
        _require((ordered | ~inner).all(1), "a parent comes before its children")
        known = (self.tokens >= 0) & (self.tokens < vocab_size)
        _require((known | ~self.used()).all(1), f"tokens are 0 to {vocab_size - 1}")
        _require(~self._has_twins(inner), "siblings hold distinct tokens")
        if self.scores is not None:
            kind = self.scores.dtype, self.scores.shape
            if kind != (torch.float32, self.tokens.shape):
                shape = list(self.scores.shape)
                raise ValueError(f"scores are float32 [B, N], got {self.scores.dtype} {shape}")
            _require(self._scores_fall(self.scores, inner), "scores start at 1 and never rise")

    def _has_twins(self, inner: Tensor) -> Tensor:
        same = self.tokens[:, :, None] == self.tokens[:, None, :]
        same &= self.parents[:, :, None] == self.parents[:, None, :]
        same &= inner[:, :, None] & inner[:, None, :]
        return same.sum((1, 2)) > inner.sum(1)  # more than every node with itself

    def _scores_fall(self, scores: Tensor, inner: Tensor) -> Tensor:
        above = scores.gather(1, self._links())
        falls = (scores >= 0) & (scores <= above)
        return (scores[:, 0] == 1) & (falls | ~inner).all(1)

    def _index(self) -> Tensor:
        return torch.arange(self.width, device=self.tokens.device)

    def _links(self) -> Tensor:
        """Parents, safe to follow any number of times: the root and unused entries lead to 0."""
        return torch.where(self.used(), self.parents, 0).clamp_(min=0)

    def _doublings(self) -> int:
        """Following links 1, 2, 4, ... far covers the longest path in this many steps."""
        return (self.width - 1).bit_length()


def _require(holds: Tensor, rule: str) -> None:
    if not bool(holds.all()):
        raise ValueError(f"tree {int((~holds).nonzero()[0])} of the batch breaks a rule: {rule}")


def root_only(roots: Tensor) -> TokenTree:
    """Trees that hold just their root: ordinary decoding. roots: [B] int64."""
    return TokenTree(
        tokens=roots[:, None],
        parents=torch.full_like(roots[:, None], -1),
        num_nodes=torch.ones_like(roots),
        scores=torch.ones(roots.shape[0], 1, device=roots.device),
    )


def narrow(tree: TokenTree) -> TokenTree:
    """The same trees without the columns that none of them uses."""
    width = int(tree.num_nodes.max())
    if width == tree.width:
        return tree
    scores, draft, allowed = tree.scores, tree.draft, tree.allowed
    if scores is not None:
        scores = scores[:, :width]
    if draft is not None:
        draft = replace(draft, row_of=draft.row_of[:, :width])
    if allowed is not None:
        allowed = replace(allowed, row_of=allowed.row_of[:, :width])
    tokens, parents = tree.tokens[:, :width], tree.parents[:, :width]
    return TokenTree(tokens, parents, tree.num_nodes, scores, draft, allowed)


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """What the target made of a tree.

    tokens: [B, W] int64, tokens emitted this round, accepted draft tokens then the bonus token.
    path: [B, W] int64, nodes whose rows drew them: path[:, 0] = 0, then the accepted nodes in
    order. counts: [B] int64, tokens emitted (1 .. W): counts - 1 draft tokens were accepted.
    Entries from counts on mean nothing. The KV rows of path[:, :counts] are the ones to keep.
    """

    tokens: Tensor
    path: Tensor
    counts: Tensor

    def on_host(self) -> AcceptResult:
        """The same on the CPU: this waits for the device."""
        return AcceptResult(self.tokens.cpu(), self.path.cpu(), self.counts.cpu())
