"""Trees that a draft model grows on the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgl_spec.engine.cuda.round import (
    Cuts,
    DraftParts,
    IntArray,
    Parts,
    Requests,
    draft_prefix,
    even_starts,
)
from sgl_spec.layers.context import ForwardBatch
from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec.speculative.model_drafter import TreeShape
from sgl_spec.speculative.ranking import DRAFT_ERROR
from sgl_spec_kernels.draft_topk import draft_topk, topk_work
from sgl_spec_kernels.round_state import gather_features
from sgl_spec_kernels.sample import Walked
from sgl_spec_kernels.tree_build import build_tree, device_tree, grow_state, grow_tree


class Growth:
    """Grows the trees, one level after the other."""

    def __init__(
        self, parts: Parts, draft: DraftParts, requests: Requests, shape: TreeShape
    ) -> None:
        batch, device, topk = len(requests.rows), parts.table.device, shape.topk
        self.parts, self.draft, self.requests, self.shape = parts, draft, requests, shape
        self.grown = grow_state(batch, shape.steps, topk, device)
        width = draft.model.logit_width
        self.values = [torch.zeros(batch * f, topk, device=device) for f in (1, topk)]
        self.drafted = [torch.zeros_like(v, dtype=torch.int64) for v in self.values]
        self.work = topk_work(batch * topk, width, topk, device)
        self.cuts = [Cuts.maybe(parts, requests.kind, batch, f) for f in (1, topk)]
        self.counts = [torch.full_like(requests.rows, f) for f in (1, topk)]
        self.starts = [even_starts(batch, f, device) for f in (1, topk)]
        self.columns = [torch.full_like(requests.rows, d * topk) for d in range(shape.steps)]
        self.prefix = draft_prefix(draft, requests)

    def grow(self) -> None:
        """All levels. Afterwards `grown` holds every candidate."""
        mine, steps = self.requests, self.shape.steps
        hidden = gather_features(self.draft.hidden, mine.rows)
        for depth in range(1, steps + 1):
            self._expand(hidden, depth)
            if depth < steps:
                hidden = self._forward(hidden, depth)

    def _expand(self, hidden: Tensor, depth: int) -> None:
        """Take the children of the nodes at depth - 1."""
        draft, mine = self.draft, self.requests
        at = 0 if depth == 1 else 1
        logits, cuts = draft.model.raw_logits(hidden), self.cuts[at]
        mine.cuts(logits, self.starts[at][:-1], self.counts[at], cuts)
        draft_topk(
            logits,
            self.values[at],
            self.drafted[at],
            self.work,
            error=DRAFT_ERROR,
            depth=depth - 1,
            lengths=mine.text,
            seed=mine.at.seed,
            temperature=mine.drawn_at,
            noise="shared" if self.shape.shared_noise else None,
            ids=draft.model.token_ids,
            cuts=None if cuts is None else cuts.cuts.view(-1),
        )
        grow_tree(
            self.grown,
            self.values[at],
            self.drafted[at],
            depth,
            prefix_lens=self.prefix,
            rows=mine.rows,
            req_to_token=self.parts.table,
            last=depth == self.shape.steps,
        )

    def _forward(self, hidden: Tensor, depth: int) -> Tensor:
        """The draft model over the frontier at `depth`. hidden: of the nodes above."""
        grown, draft = self.grown, self.draft
        features = None
        if draft.model.capture:
            above = self.starts[0 if depth == 1 else 1][:-1, None] + grown.parents
            features = gather_features(hidden, above.view(-1))
        batch = ForwardBatch(
            tokens=grown.tokens.view(-1),
            positions=grown.positions.view(-1),
            slots=grown.slots.view(-1),
            req_to_token=self.parts.table,
            rows=self.requests.rows,
            prefix_lens=self.prefix,
            q_starts=self.starts[1],
            mask_words=grown.words.view(-1),
            tree_lens=self.columns[depth - 1],
            max_q_len=self.shape.topk,
        )
        return draft.model.forward(batch, features, draft.kv)


class GrownTrees:
    """The best nodes of what the draft model grows. See `round.TreeSource`.

    Penalties, biases and masks do not move the draft's logits: with EAGLE3 on SmolLM2 a frequency
    penalty of 0.3 leaves the accept length as it is (3.05, trees of 8), one of 1.0 takes 5 % of it.
    """

    def __init__(
        self, parts: Parts, requests: Requests, shape: TreeShape, *, told: bool = False
    ) -> None:
        """told: whether the host wants to know where the accepted nodes stood, `facts`."""
        draft, batch, device = parts.draft, len(requests.rows), parts.table.device
        assert draft is not None
        self.parts, self.requests, self.shape = parts, requests, shape
        self.nodes = shape.draft_tokens
        self.levels = min(shape.steps, self.nodes - 1)
        self.total = batch * self.nodes
        self.tree = device_tree(batch, self.nodes, device)
        self.scores: Tensor = self.tree.scores
        self.starts = even_starts(batch, self.nodes, device)
        self.offsets = self.starts[:-1]
        self.facts = torch.zeros(batch, 4 * self.nodes, device=device) if told else None
        self._growth = Growth(parts, draft, requests, shape)

    def load(self, rows: IntArray, tree: ArrayTree | None) -> None:
        """See `round.Program`."""
        assert tree is None, "the trees are the round's own"
        self.requests.load(rows)

    def propose(self) -> None:
        """See `round.TreeSource`."""
        self._growth.grow()
        mine = self.requests
        build_tree(
            self.tree, self._growth.grown, mine.at.last, self.shape.steps,
            committed_lens=mine.at.committed, rows=mine.rows, req_to_token=self.parts.table,
            max_nodes=mine.at.max_nodes,
        )  # fmt: skip

    def forward(self) -> ForwardBatch:
        """See `round.TreeSource`."""
        tree = self.tree
        return ForwardBatch(
            tokens=tree.tokens.view(-1),
            positions=tree.positions.view(-1),
            slots=tree.slots.view(-1),
            req_to_token=self.parts.table,
            rows=self.requests.rows,
            prefix_lens=self.requests.at.committed,
            q_starts=self.starts,
            mask_words=tree.words.view(-1),
            max_q_len=self.nodes,
        )

    def learn(self, walked: Walked) -> None:
        """See `round.TreeSource`."""
        if self.facts is not None:
            tree = self.tree
            told = (walked.path, tree.parents, tree.depths, tree.scores)
            torch.cat(told, dim=1, out=self.facts)


def kept_by(shape: TreeShape, facts: npt.NDArray[np.float32], counts: IntArray) -> int:
    """Tokens that a round would have brought with trees of a smaller shape. facts: [B, 4 N], see
    `GrownTrees`. counts: [B], tokens that it brought each request.

    A smaller tree has the best nodes down to its depth, which are among those of the larger one; a
    chain has the best child of each of its nodes.
    """
    path, parents, depths = (each.astype(np.int64) for each in np.split(facts, 4, axis=1)[:3])
    eligible = (depths > 0) & (depths <= min(shape.steps, shape.draft_tokens - 1))
    scores = np.where(eligible, facts[:, -path.shape[1] :], -np.inf)
    ranks = np.argsort(np.argsort(-scores, axis=1, kind="stable"), axis=1)
    every = np.arange(len(path))[:, None]
    if shape.topk == 1:
        best = np.full_like(ranks, ranks.shape[1])
        np.minimum.at(best, (every, np.where(eligible, parents, 0)), ranks)
        held = eligible & (ranks == best[every, parents])
    else:
        held = eligible & (ranks < shape.draft_tokens - 1)
    accepted = np.arange(1, path.shape[1]) < counts[:, None]
    return len(path) + int((held[every, path[:, 1:]] & accepted).cumprod(axis=1).sum())
