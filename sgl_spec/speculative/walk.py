"""The walk of rules that judge drafts one by one: at a node, accept one of its children or emit a
token instead and stop.

A node without children draws as plain decoding does, from the same noise. So a round without drafts
is plain decoding under every rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_spec.speculative.noise import Stream, exponential, noise_bits, stream_keys, uniform
from sgl_spec.speculative.sampling import (
    SamplingRows,
    TokenMasks,
    draw,
    final_probs,
    one_thread,
)
from sgl_spec.speculative.tree import AcceptResult, TokenTree


@dataclass(frozen=True, slots=True)
class Verified:
    """A batch of trees with the target's logits; see `verify.sample_and_follow` for the fields."""

    tree: TokenTree
    logits: Tensor
    row_offsets: Tensor
    rows: SamplingRows
    committed_lens: Tensor
    masks: TokenMasks | None

    def probs(self, request: Tensor, node: Tensor, path: Tensor) -> Tensor:
        """[R, V]: the target's final distribution after node[r] of tree request[r], which `path`
        [R, depth] leads to."""
        where = self._where(request, path)
        return final_probs(
            self.logits,
            self.rows.select(request),
            where,
            self.row_offsets[request] + node,
            path=path,
            masks=self.masks,
        )

    def draw(self, request: Tensor, node: Tensor, path: Tensor) -> Tensor:
        """[R]: a token from each of `probs`, as plain decoding draws it."""
        where = self._where(request, path)
        return draw(
            self.logits,
            self.rows.select(request),
            where,
            self.row_offsets[request] + node,
            path=path,
            masks=self.masks,
        )

    def _where(self, request: Tensor, path: Tensor) -> Tensor:
        return self.committed_lens[request] + path.shape[1] + 1


@dataclass(slots=True)
class Level:
    """R nodes at one depth whose children are to be judged.

    request: [R] their trees. positions: [R], absolute, of the children. kids: [R, K] child nodes
    in the order in which they are judged, -1 behind the last. kid_tokens: [R, K]. probs: [R, V]
    the target's final distribution; a rule may overwrite it.
    """

    batch: Verified
    request: Tensor
    positions: Tensor
    node: Tensor
    depth: int
    kids: Tensor
    kid_tokens: Tensor
    probs: Tensor

    def coins(self, tokens: Tensor) -> Tensor:
        """[R] uniform numbers, one for each node and token [R]."""
        seed = self.batch.rows.seed[self.request]
        return acceptance_coins(seed, self.positions, self.depth + 1, tokens)


Judge = Callable[[Level], tuple[Tensor, Tensor]]
"""What a rule does at a level: [R] the accepted child or -1, and [R, V] what a token is drawn from
(it need not sum to 1) where no child is."""


def walk(batch: Verified, judge: Judge) -> AcceptResult:
    """All requests of a level at once, from the roots down to where each walk stops."""
    tree = batch.tree
    parents = torch.where(tree.used(), tree.parents, -1)
    tokens, nodes = torch.zeros_like(tree.tokens), torch.zeros_like(tree.tokens)
    counts = torch.zeros_like(batch.committed_lens)
    alive = torch.arange(tree.batch, device=tokens.device)
    node = torch.zeros_like(alive)
    with one_thread(batch.logits):
        for depth in range(tree.width):
            kids = _children(parents[alive], node)
            child, emitted = _step(batch, judge, alive, node, kids, tokens[alive, :depth])
            tokens[alive, depth] = emitted
            nodes[alive, depth] = node
            counts[alive] = depth + 1
            accepted = child >= 0
            if not bool(accepted.any()):
                break
            alive, node = alive[accepted], child[accepted]
    return AcceptResult(tokens=tokens, path=nodes, counts=counts)


def _step(
    batch: Verified, judge: Judge, request: Tensor, node: Tensor, kids: Tensor, path: Tensor
) -> tuple[Tensor, Tensor]:
    """[R] the accepted child of each node or -1, and the token that is emitted: that child's, one
    drawn from what the judge left, or the target's own where there are no children."""
    child, emitted = torch.full_like(node, -1), torch.zeros_like(node)
    (leaf,) = torch.nonzero(kids[:, 0] < 0, as_tuple=True)
    if leaf.numel():
        emitted[leaf] = batch.draw(request[leaf], node[leaf], path[leaf])
    (inner,) = torch.nonzero(kids[:, 0] >= 0, as_tuple=True)
    if inner.numel():
        level = _level(batch, request[inner], node[inner], path[inner], kids[inner])
        found, rest = judge(level)
        child[inner] = found
        emitted[inner] = batch.tree.tokens[level.request, found.clamp(min=0)]
        (stopped,) = torch.nonzero(found < 0, as_tuple=True)
        if stopped.numel():
            seed, where = batch.rows.seed[level.request[stopped]], level.positions[stopped]
            drawn = residual_draw(seed, where, level.depth + 1, rest[stopped])
            emitted[inner[stopped]] = drawn
    return child, emitted


def _children(parents: Tensor, node: Tensor) -> Tensor:
    """[R, K >= 1] the children of each node in ascending order, -1 behind the last."""
    mask = parents == node[:, None]
    most = max(1, int(mask.sum(1).max()))
    kids = mask.to(torch.int8).sort(dim=1, descending=True, stable=True).indices[:, :most]
    return torch.where(mask.gather(1, kids), kids, -1)


def _level(batch: Verified, request: Tensor, node: Tensor, path: Tensor, kids: Tensor) -> Level:
    depth = path.shape[1]
    return Level(
        batch=batch,
        request=request,
        positions=batch.committed_lens[request] + depth + 1,
        node=node,
        depth=depth,
        kids=kids,
        kid_tokens=batch.tree.tokens[request[:, None], kids.clamp(min=0)],
        probs=batch.probs(request, node, path),
    )


def acceptance_coins(seed: Tensor, positions: Tensor, depth: int, tokens: Tensor) -> Tensor:
    """[R] float64 in (0, 1). depth: of the judged nodes, in the round."""
    keys = stream_keys(seed, positions, Stream.ACCEPTANCE, depth)
    return uniform(noise_bits(keys, tokens[:, None].to(torch.int32)))[:, 0]


def residual_draw(seed: Tensor, positions: Tensor, depth: int | Tensor, weights: Tensor) -> Tensor:
    """[R] tokens in proportion to weights [R, V] float32, each row with some weight > 0. depth: of
    the tokens, in the round."""
    keys = stream_keys(seed, positions, Stream.RESIDUAL, depth)
    tokens = torch.arange(weights.shape[1], dtype=torch.int32, device=weights.device)
    # Noise over weights below the normal range would be infinite for all tokens alike.
    weights = weights / weights.amax(1, keepdim=True)
    return exponential(noise_bits(keys, tokens)).div_(weights).argmin(1)
