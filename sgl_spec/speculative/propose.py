"""For drafters that sample: draw a tree's tokens from the drafter's own distribution.

trees = SampledTrees(batch, topology)
for level in trees.levels():
    trees.grow(level, logits_after(level))  # [M, W], one row per node of the level
return trees.finish()
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_spec.layers.transfer import on_device
from sgl_spec.speculative.base import DraftBatch
from sgl_spec.speculative.noise import Stream, exponential, noise_bits, stream_keys
from sgl_spec.speculative.sampling import one_thread
from sgl_spec.speculative.topology import Topology
from sgl_spec.speculative.tree import DraftProbs, TokenTree


@dataclass(frozen=True, slots=True)
class Level:
    """M nodes at one depth that get children now. request, node: [M] int64."""

    depth: int
    request: Tensor
    node: Tensor


class SampledTrees:
    """Grows a batch's trees level by level, each request's as far as its `max_nodes` allow.

    topology: what the engine prescribes (`DrafterContext.topology`). ids: [W] int64, the token of
    each column of the drafter's logits; None where the columns are the vocabulary. tokens: [B, N]
    int64, filled as levels grow. All lies on the device of `batch.sampling`, which is the target's.
    """

    def __init__(self, batch: DraftBatch, topology: Topology, ids: Tensor | None = None) -> None:
        assert batch.sampling is not None
        self.seed = batch.sampling.seed
        self.temperature = batch.sampling.temperature
        device = self.seed.device
        self.ids = None if ids is None else on_device(ids, device)
        self.lengths = on_device(batch.lengths, device)
        self.num_nodes = on_device(batch.max_nodes, device).clamp(max=topology.width)
        size = (len(batch.rows), topology.width)
        self.tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self.tokens[:, 0] = on_device(batch.roots(), device)
        self._parents = torch.tensor(topology.parents, device=device)
        self._depths = torch.tensor(topology.depths(), device=device)
        self._children = on_device(_padded(topology.children()), device)
        self._deepest = max(topology.depths())
        self._row_of = torch.full_like(self.tokens, -1)
        self._probs: list[Tensor] = []

    def levels(self) -> Iterator[Level]:
        """The levels that get children, from the roots down. Which nodes these are is known before
        any token is."""
        first = self._children[:, 0]
        grows = (first >= 0) & (first < self.num_nodes[:, None])  # [B, N]
        for depth in range(self._deepest):
            request, node = torch.nonzero(grows & (self._depths == depth), as_tuple=True)
            if not request.numel():
                return
            yield Level(depth, request, node)

    def grow(self, level: Level, logits: Tensor) -> None:
        """Draw the children of a level's nodes. logits: [M, W] float32, the drafter's, W at least
        the children of a node."""
        request, kids = level.request, self._children[level.node]
        logits = on_device(logits, self.tokens.device)
        count = int((kids >= 0).sum(1).max())
        where = self.lengths[request] + level.depth
        temperature, seed = self.temperature[request], self.seed[request]
        keys = stream_keys(seed, where, Stream.PROPOSAL, level.depth + 1)
        picked, probs = draw_siblings(logits, temperature, keys, count, self.ids)
        at, rank = torch.nonzero(
            (kids >= 0) & (kids < self.num_nodes[request][:, None]), as_tuple=True
        )
        self.tokens[request[at], kids[at, rank]] = picked[at, rank]
        start = sum(p.shape[0] for p in self._probs)
        places = torch.arange(start, start + len(request), device=request.device)
        self._row_of[request, level.node] = places
        self._probs.append(probs)

    def finish(self) -> TokenTree:
        """The trees, with what their tokens were drawn from."""
        width = 1 if self.ids is None else len(self.ids)
        none = torch.zeros(0, width, device=self.tokens.device)
        probs = torch.cat(self._probs) if self._probs else none
        return TokenTree(
            tokens=self.tokens,
            parents=self._parents.expand_as(self.tokens).clone(),
            num_nodes=self.num_nodes,
            draft=DraftProbs(probs=probs, row_of=self._row_of, ids=self.ids),
        )


def require_sampled(tree: TokenTree, topology: Topology) -> None:
    """Raise `ValueError` if a drafter's trees are not samples of the prescribed shape: such a tree
    would bias the text."""
    if tree.width > topology.width:
        raise ValueError(f"a sampled tree has at most {topology.width} nodes, got {tree.width}")
    wanted = torch.tensor(topology.parents[: tree.width], device=tree.parents.device)
    if bool(((tree.parents != wanted) & tree.used()).any()):
        raise ValueError(f"sampled trees have the parents {list(topology.parents)}")
    if tree.draft is None and int(tree.num_nodes.max()) > 1:
        raise ValueError("sampled trees carry the distributions of their tokens (TokenTree.draft)")


def draw_siblings(
    logits: Tensor, temperature: Tensor, keys: Tensor, count: int, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw `count` distinct tokens per row, one after the other without replacement: [R, count]
    tokens in that order, and the [R, W] float32 distributions q that the first came from.

    logits: [R, W] float32, W at least `count`; q is their softmax at temperature [R]. A greedy row
    takes its best tokens in order, and its q has all mass on the first. keys: [R, 2], of the
    noise. Where q has fewer than `count` tokens with mass the last ones are arbitrary; no rule
    accepts them.
    """
    assert logits.shape[1] >= count, f"{count} distinct drafts out of {logits.shape[1]} tokens"
    greedy = (temperature == 0)[:, None]
    tokens = torch.arange(logits.shape[1], device=logits.device) if ids is None else ids
    with one_thread(logits):
        q = (logits / temperature[:, None].masked_fill(greedy, 1)).softmax(1)
        scores = exponential(noise_bits(keys, tokens.to(torch.int32))).div_(q)
        columns = torch.where(greedy, -logits, scores).topk(count, dim=1, largest=False).indices
        best = torch.zeros_like(q).scatter_(1, columns[:, :1], 1)
        return tokens[columns], torch.where(greedy, best, q)


def _padded(lists: tuple[tuple[int, ...], ...]) -> Tensor:
    """[N, K >= 1] int64, -1 behind the last of each."""
    most = max(1, *map(len, lists))
    return torch.tensor([[*row, *[-1] * (most - len(row))] for row in lists])
