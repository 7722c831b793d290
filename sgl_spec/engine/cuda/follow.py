"""The default rule on a GPU, for batches that the host judges: a few kernels, which are enqueued
while the forward still runs.

`speculative.verify.sample_and_follow` defines what is drawn; it reads the device at every level of
the trees. What comes of the trees here is read once, when all of it is done.
"""

from __future__ import annotations

from itertools import product

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from sgl_spec.engine.cuda.rounds import DRAW_ALL_NODES, SharedHeads
from sgl_spec.request import SamplingParams
from sgl_spec.speculative.penalties import BiasRows, PenaltyRows
from sgl_spec.speculative.rules import FollowRule
from sgl_spec.speculative.sampling import SamplingRows, TokenMasks, build_rows
from sgl_spec.speculative.tree import AcceptResult, NodeMasks, TokenTree
from sgl_spec_kernels.adjust import Biases, Masks, Penalties, adjust_logits
from sgl_spec_kernels.filters import token_cuts
from sgl_spec_kernels.sample import Trees, draw_all, draw_walk, walked


class DeviceFollow(FollowRule):
    """See the module. most_nodes: of a tree; kernels are compiled for trees of one node and for
    trees of these. heads: the filters' work space; what else uses it runs in the same stream."""

    def __init__(self, most_nodes: int, heads: SharedHeads) -> None:
        self.most_nodes, self.heads = most_nodes, heads

    @torch.inference_mode()
    def compile(self, vocab: int, device: torch.device) -> None:
        """Judge trees of nobody, so that the first batch with a grammar need not wait for it."""
        words = torch.full((1, (vocab + 31) // 32), -1, dtype=torch.int32, device=device)
        for width, heat in product({1, self.most_nodes}, (0.0, 1.0)):
            rows = build_rows([SamplingParams(temperature=heat, seed=0)], [1], [], device)
            nodes = torch.zeros(1, width, dtype=torch.int64, device=device)
            tree = TokenTree(nodes, nodes - 1, nodes[:, 0] + 1, allowed=NodeMasks(words, nodes))
            at, logits = torch.zeros_like(nodes[:, 0]), torch.zeros(width, vocab, device=device)
            self(tree, logits, at, rows, at, masks=TokenMasks(words, nodes[0]))

    def __call__(
        self,
        tree: TokenTree,
        logits: Tensor,
        row_offsets: Tensor,
        rows: SamplingRows,
        committed_lens: Tensor,
        *,
        masks: TokenMasks | None = None,
    ) -> AcceptResult:
        """As `verify.sample_and_follow`. The masks are those of `tree.allowed`."""
        assert (masks is None) == (tree.allowed is None)
        width = tree.width
        tree = _widened(tree, 1 if width == 1 else self.most_nodes)
        depths = tree.depths().contiguous()
        if tree.allowed is not None or _moves_logits(rows):
            logits = logits.clone()  # log-probabilities are of the model's own
            _adjust(tree, depths, logits, row_offsets, rows, committed_lens)
        trees = Trees(
            tree.tokens,
            tree.parents,
            depths,
            tree.num_nodes,
            logits,
            row_offsets,
            committed_lens,
            rows.seed,
            rows.temperature if rows.any_sampled else None,
            self._cuts(tree, logits, row_offsets, rows),
        )
        out = walked(tree.batch, tree.width, logits.shape[1], logits.device)
        if tree.tokens.numel() <= DRAW_ALL_NODES:
            draw_all(trees, out)
        else:
            draw_walk(trees, out, width)
        return AcceptResult(out.tokens[:, :width], out.path[:, :width], out.counts)

    def _cuts(
        self, tree: TokenTree, logits: Tensor, row_offsets: Tensor, rows: SamplingRows
    ) -> Tensor | None:
        """What top_k, top_p and min_p keep of every node's logits."""
        if not (rows.any_sampled and rows.any_filtered):
            return None
        cuts = torch.zeros_like(tree.tokens)
        heads = self.heads.of(cuts.numel(), cuts.device)
        token_cuts(
            logits, row_offsets, tree.num_nodes, rows.temperature, rows.top_k, rows.top_p,
            rows.min_p, cuts, heads,
        )  # fmt: skip
        return cuts


def _widened(tree: TokenTree, width: int) -> TokenTree:
    """The same trees with room for `width` nodes each, every row contiguous."""
    more = width - tree.width
    assert more >= 0, f"a tree of {tree.width} nodes, at most {width} are expected"

    def wide(values: Tensor, fill: int) -> Tensor:
        return F.pad(values, (0, more), value=fill) if more else values.contiguous()

    allowed = tree.allowed
    if allowed is not None:
        allowed = NodeMasks(allowed.words, wide(allowed.row_of, -1))
    tokens, parents = wide(tree.tokens, 0), wide(tree.parents, -1)
    return TokenTree(tokens, parents, tree.num_nodes, allowed=allowed)


def _moves_logits(rows: SamplingRows) -> bool:
    """Whether some request has more than a mask to adjust."""
    return rows.penalties is not None or rows.bias is not None or rows.any_minimum


def _adjust(
    tree: TokenTree,
    depths: Tensor,
    logits: Tensor,
    row_offsets: Tensor,
    rows: SamplingRows,
    committed_lens: Tensor,
) -> None:
    """Penalties, biases, masks and minimum lengths, in place."""
    allowed = tree.allowed
    adjust_logits(
        logits,
        row_offsets,
        committed_lens,
        tree.num_nodes,
        tree.tokens,
        depths,
        tree.ancestor_words(),
        torch.full_like(tree.num_nodes, _moves_logits(rows), dtype=torch.bool),
        rows.end_from,
        _rounded(rows.end_ids),
        None if rows.penalties is None else _penalties(rows.penalties),
        None if rows.bias is None else _biases(rows.bias),
        None if allowed is None else Masks(allowed.words, allowed.row_of),
    )


def _penalties(rows: PenaltyRows) -> Penalties:
    return Penalties(
        rows.row,
        rows.counts.text,
        rows.counts.output,
        rows.repetition.contiguous(),
        rows.frequency.contiguous(),
        rows.presence.contiguous(),
    )


def _biases(rows: BiasRows) -> Biases:
    more = _next(rows.values.shape[1]) - rows.values.shape[1]
    return Biases(
        _rounded(rows.ids),
        F.pad(rows.values, (0, more)),
        _rounded(rows.banned),
        rows.has_banned,
        _rounded(rows.forced),
        rows.has_forced,
    )


def _rounded(ids: Tensor) -> Tensor:
    """[B, K] ids with the first one of each row repeated, K then being a power of two: kernels are
    compiled for every K."""
    more = _next(ids.shape[1]) - ids.shape[1]
    return torch.cat((ids, ids[:, :1].expand(-1, more)), dim=1) if more else ids.contiguous()


def _next(count: int) -> int:
    """The next power of two; 0 stays 0."""
    return triton.next_power_of_2(count) if count else 0
