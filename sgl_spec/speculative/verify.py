"""Verification: draw the target's token at a node, follow it if it is a child, else stop.

The draws are exactly those of plain decoding, so any tree gives the same text; a root-only tree IS
plain decoding. Only nodes on the walk are drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_spec.speculative.sampling import SamplingRows, TokenMasks, draw
from sgl_spec.speculative.tree import AcceptResult, TokenTree


def sample_and_follow(
    tree: TokenTree,
    logits: Tensor,
    row_offsets: Tensor,
    rows: SamplingRows,
    committed_lens: Tensor,
    *,
    masks: TokenMasks | None = None,
) -> AcceptResult:
    """Walk every tree of the batch from its root, all requests of a level at once.

    logits: [T, V] float32, the target's; node j of request i is row row_offsets[i] + j.
    row_offsets, committed_lens: [B] int64. rows: the B requests' parameters. The root sits at
    absolute position committed_lens[i], so a token drawn at depth d has position
    committed_lens[i] + d + 1. masks: what a grammar allows at each row of `logits`.
    """
    parents = torch.where(tree.used(), tree.parents, -1)
    tokens = torch.zeros_like(tree.tokens)
    path = torch.zeros_like(tree.tokens)
    counts = torch.zeros_like(committed_lens)
    alive = torch.arange(tree.batch, device=tokens.device)
    node = torch.zeros_like(alive)
    for depth in range(tree.width):
        positions = committed_lens[alive] + depth + 1
        index = row_offsets[alive] + node
        drawn = draw(logits, rows, positions, index, path=tokens[alive, :depth], masks=masks)
        tokens[alive, depth] = drawn
        path[alive, depth] = node
        counts[alive] = depth + 1
        child = (parents[alive] == node[:, None]) & (tree.tokens[alive] == drawn[:, None])
        followed = child.any(1)
        if not bool(followed.any()):
            break
        alive, rows = alive[followed], rows.select(followed)
        node = child[followed].to(torch.int64).argmax(1)
    return AcceptResult(tokens=tokens, path=path, counts=counts)
