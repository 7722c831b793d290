"""Grow token trees from a draft model's logits, as EAGLE-2 does (Li et al. 2024, arXiv 2406.16858).

trees = GrownTrees(roots, lengths, sampling, steps=5, topk=4, draft_tokens=8)
trees.expand(logits_of_the_roots)
while trees.depth < 5:
    trees.expand(logits_of(trees.frontier()))
tree = trees.finish(max_nodes)

Each step keeps, of all children of the frontier, the `topk` with the best paths; at the end the
best of everything seen becomes the tree. A path is worth the sum of its log-probabilities: products
would underflow, and a child could then seem as good as its parent.

At temperature > 0 the target draws by Gumbel-max from noise that (seed, position, token) fix, so a
draft may look at that noise without changing what is drawn. Candidates are then ranked by the
draft's own perturbed logits, which find the target's token whenever the two models agree closely
enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from sgl_spec.speculative.ranking import DRAFT_ERROR, Ranking
from sgl_spec.speculative.sampling import SamplingRows
from sgl_spec.speculative.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Frontier:
    """The nodes that a draft forward extends, K per request, and how to feed them.

    tokens: [B, K] int64. parents: [B, K] int64, the row of the parent in the expansion before (0,
    the root, for the first frontier). words: [B, K] int64, the ancestors of each node and itself
    over the draft's KV columns: node j of the frontier at depth d owns column (d - 1) * K + j.
    Fillers for requests with fewer candidates are never part of a tree. depth: of all these nodes.
    """

    tokens: Tensor
    parents: Tensor
    words: Tensor
    depth: int


@dataclass(frozen=True, slots=True)
class _Candidates:
    """All children of one expansion, M per request.

    scores: [B, M] float32, log-probability of the path, -inf for what is none. tokens: [B, M].
    parents: [B, M] int64, index of the parent among the candidates of all expansions, -1 for the
    root.
    """

    scores: Tensor
    tokens: Tensor
    parents: Tensor


class GrownTrees:
    """The trees of B requests while they grow.

    roots: [B] int64, the last token of each text. lengths: [B] int64, tokens of the texts, so that
    a node at depth d has the absolute position lengths + d - 1. sampling: the B requests'
    parameters; None is greedy. steps, topk, draft_tokens: most levels below the root, branches per
    step, and nodes of a tree with its root. shared_noise: rank by the target's noise where a
    request is sampled. error: see `ranking.Ranking`.
    """

    def __init__(
        self,
        roots: Tensor,
        lengths: Tensor,
        sampling: SamplingRows | None,
        *,
        steps: int,
        topk: int,
        draft_tokens: int,
        shared_noise: bool = True,
        error: float = DRAFT_ERROR,
    ) -> None:
        self.roots = roots
        self.lengths = lengths
        self.steps = steps
        self.topk = topk
        self.draft_tokens = draft_tokens
        self.ranking = Ranking(sampling, topk, shared_noise=shared_noise, error=error)
        self.depth = 0
        self._scores = torch.zeros(len(roots), 1, device=roots.device)  # of the rows to expand
        self._flat = torch.full_like(roots[:, None], -1)  # their indices among the candidates
        self._words = torch.zeros_like(roots[:, None])
        self._paths = roots.new_zeros(len(roots), 1, 0)  # [B, F, depth], tokens that lead to them
        self._candidates: list[_Candidates] = []
        self._frontier: Frontier | None = None

    def expand(self, logits: Tensor, ids: Tensor | None = None) -> None:
        """Take the logits of the rows to expand: the roots' at first, then the frontier's.

        logits: [B * F, W] float32, row-major by request, F = 1 for the roots, else topk; -inf marks
        a token that must not be drafted. ids: [W] int64, the token of each column; None where the
        columns are the vocabulary.
        """
        assert self.depth < self.steps, f"a tree of {self.steps} steps is grown"
        batch, rows = self._scores.shape
        request = torch.arange(batch, device=logits.device).repeat_interleave(rows)
        positions = self.lengths[request] + self.depth
        paths = self._paths.flatten(0, 1)
        log_probs, tokens = self.ranking.best(logits, request, positions, ids, paths)
        scores = self._scores[:, :, None] + log_probs.view(batch, rows, -1)
        found = _Candidates(
            scores=scores.flatten(1),
            tokens=tokens.view(batch, -1),
            parents=self._flat.repeat_interleave(self.topk, dim=1),
        )
        self.depth += 1
        if self.depth < self.steps:
            self._advance(found)
        self._candidates.append(found)

    def _advance(self, found: _Candidates) -> None:
        """Make the best `topk` of the new candidates the frontier."""
        order = _falling(found.scores)[:, : self.topk]
        parents = order // self.topk
        column = (self.depth - 1) * self.topk + torch.arange(self.topk, device=order.device)
        words = self._words.gather(1, parents) | (1 << column)
        self._scores = found.scores.gather(1, order)
        self._flat = sum(c.scores.shape[1] for c in self._candidates) + order
        self._words = words
        tokens = found.tokens.gather(1, order)
        above = self._paths.gather(1, parents[:, :, None].expand(-1, -1, self.depth - 1))
        self._paths = torch.cat([above, tokens[:, :, None]], 2)
        self._frontier = Frontier(
            tokens=tokens,
            parents=parents,
            words=words,
            depth=self.depth,
        )

    def frontier(self) -> Frontier:
        """The nodes whose logits the next `expand` takes. There is none after the last: a draft
        forward there would be wasted."""
        assert self._frontier is not None, "the roots come first"
        assert self.depth < self.steps, "the trees are grown"
        return self._frontier

    def chances(self) -> Tensor:
        """[B] estimated probability that the best node of the frontier is accepted."""
        return self._scores.max(dim=1).values.exp()

    def finish(self, max_nodes: Tensor | None = None) -> TokenTree:
        """The best `draft_tokens` - 1 candidates under their roots, or fewer: those there are.

        max_nodes: [B] int64, at least 1, further bounds on a tree's nodes, its root included.
        Scores estimate the probability that the target accepts a node.
        """
        scores = self._joined([c.scores for c in self._candidates], self._scores[:, :0])
        tokens = self._joined([c.tokens for c in self._candidates], self._flat[:, :0])
        parents = self._joined([c.parents for c in self._candidates], self._flat[:, :0])
        chosen = self._choose(scores[:, :-1], max_nodes)
        node = torch.arange(1, chosen.shape[1] + 1, device=chosen.device)
        node_of = torch.zeros_like(parents).scatter_(1, chosen, node.expand_as(chosen))
        return TokenTree(
            tokens=torch.cat([self.roots[:, None], tokens.gather(1, chosen)], 1),
            parents=self._linked(node_of, parents.gather(1, chosen)),
            num_nodes=1 + (chosen < scores.shape[1] - 1).sum(1),
            scores=pad(scores.gather(1, chosen), (1, 0)).exp(),
        )

    def _joined(self, parts: list[Tensor], empty: Tensor) -> Tensor:
        """[B, C + 1]: of all candidates, and of none."""
        return pad(torch.cat([*parts, empty], 1), (0, 1))

    def _choose(self, scores: Tensor, max_nodes: Tensor | None) -> Tensor:
        """[B, N - 1] candidates that become nodes in rising order, so that parents come first; C
        stands for none."""
        best = _falling(scores)[:, : self.draft_tokens - 1]
        kept = scores.gather(1, best) > -torch.inf
        if max_nodes is not None:
            kept &= torch.arange(1, best.shape[1] + 1, device=best.device) < max_nodes[:, None]
        return best.masked_fill(~kept, scores.shape[1]).sort(dim=1).values

    def _linked(self, node_of: Tensor, parents: Tensor) -> Tensor:
        """[B, N] parents as nodes, from parents as candidates [B, N - 1] (-1 for the root)."""
        links = node_of.gather(1, parents.clamp(min=0)).masked_fill(parents < 0, 0)
        return pad(links, (1, 0), value=-1)


def _falling(scores: Tensor) -> Tensor:
    """Indices by falling score. Candidates stand in the order of depth, then of their parents'
    rank, so the stable sort gives ties to the shallower node, then to the lower index."""
    return scores.sort(dim=1, descending=True, stable=True).indices
