"""Rounds whose trees a draft model grows on the device, and its two parts in any round: it drafts,
and it follows the accepted text."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_spec.engine.cuda.rounds import (
    Acceptance,
    Cuts,
    DraftParts,
    IntArray,
    Parts,
    Requests,
    RoundKind,
    even_starts,
    verify,
)
from sgl_spec.layers.context import ForwardBatch
from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec.speculative.ranking import DRAFT_ERROR
from sgl_spec_kernels.draft_topk import draft_topk, topk_work
from sgl_spec_kernels.round_state import extend_buffers, extend_rows, gather_features
from sgl_spec_kernels.sample import Walked
from sgl_spec_kernels.tree_build import build_tree, device_tree, grow_state, grow_tree

_PRODUCT_ROWS = 64  # up to here a product takes as long as for one row: the weights are read once


def draft_prefix(draft: DraftParts, requests: Requests) -> Tensor:
    """[B] positions that hold the draft's KV when a round begins: those of the target's, and with a
    whole model the root's too. A view."""
    return requests.at.committed if draft.model.capture else requests.text


class Drafting:
    """Grows the trees, one level after the other."""

    def __init__(self, parts: Parts, draft: DraftParts, requests: Requests) -> None:
        batch, device, topk = len(requests.rows), parts.table.device, draft.topk
        self.parts, self.draft, self.requests = parts, draft, requests
        self.grown = grow_state(batch, draft.steps, topk, device)
        width = draft.model.logit_width
        self.values = [torch.zeros(batch * f, topk, device=device) for f in (1, topk)]
        self.drafted = [torch.zeros_like(v, dtype=torch.int64) for v in self.values]
        self.work = topk_work(batch * topk, width, topk, device)
        self.cuts = [Cuts.maybe(parts, requests.kind, batch, f) for f in (1, topk)]
        self.counts = [torch.full_like(requests.rows, f) for f in (1, topk)]
        self.starts = [even_starts(batch, f, device) for f in (1, topk)]
        self.columns = [torch.full_like(requests.rows, d * topk) for d in range(draft.steps)]
        self.prefix = draft_prefix(draft, requests)

    def grow(self) -> None:
        """All levels. Afterwards `grown` holds every candidate."""
        mine, steps = self.requests, self.draft.steps
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
            noise="shared" if draft.shared_noise else None,
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
            last=depth == draft.steps,
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
            max_q_len=draft.topk,
        )
        return draft.model.forward(batch, features, draft.kv)


class Extension:
    """Brings the draft's KV up to the accepted text, with one forward of up to `levels` + 1 rows a
    request, of which the last is where the next tree grows from."""

    def __init__(self, parts: Parts, draft: DraftParts, requests: Requests, levels: int) -> None:
        batch, device = len(requests.rows), parts.table.device
        self.parts, self.draft, self.requests = parts, draft, requests
        self.most = levels + 1
        self.buffers = extend_buffers(batch, levels, device)
        self.prefix = draft_prefix(draft, requests)
        self.starts = even_starts(batch, self.most, device)

    def extend(self, accepted: Walked, features: Tensor | None) -> None:
        """features: [T, C] of the verified rows."""
        mine, model, rows = self.requests, self.draft.model, self.buffers
        extend_rows(
            rows,
            accepted,
            "head" if model.capture else "whole",
            committed=mine.at.committed,
            roots=mine.at.last,
            rows=mine.rows,
            req_to_token=self.parts.table,
        )
        fused = None
        if features is not None:
            fused = model.fuse(gather_features(features, rows.features))
        batch = ForwardBatch(
            tokens=rows.tokens,
            positions=rows.positions,
            slots=rows.slots,
            req_to_token=self.parts.table,
            rows=mine.rows,
            prefix_lens=self.prefix,
            q_starts=self.starts,
            mask_words=rows.words,
            max_q_len=self.most,
            wanted=rows.last if len(rows.tokens) > _PRODUCT_ROWS else None,
        )
        hidden = model.forward(batch, fused, self.draft.kv)
        if batch.wanted is None:
            hidden = gather_features(hidden, rows.last)
        self.draft.hidden.index_copy_(0, mine.rows, hidden)


class TreeRound:
    """A round with drafts of a model. See `rounds.Round`."""

    def __init__(self, parts: Parts, batch: int, kind: RoundKind) -> None:
        draft, device = parts.draft, parts.table.device
        assert draft is not None
        self.parts, self.draft, self.batch = parts, draft, batch
        self.requests = Requests(parts, batch, kind)
        self.rows = self.requests.rows
        levels = min(draft.steps, draft.nodes - 1)
        self.acceptance = Acceptance(parts, self.requests, draft.nodes, levels)
        self.out, self.lengths = self.acceptance.out, self.acceptance.lengths
        self.tree = device_tree(batch, draft.nodes, device)
        self.starts = even_starts(batch, draft.nodes, device)
        self.drafting = Drafting(parts, draft, self.requests)
        self.extension = Extension(parts, draft, self.requests, levels)

    def load(self, rows: IntArray, tree: ArrayTree | None) -> None:
        """Give it its requests; those behind them fill the batch up."""
        assert tree is None, "the trees are the round's own"
        self.requests.load(rows)

    def __call__(self) -> None:
        mine = self.requests
        mine.begin(texts=True)
        self.drafting.grow()
        build_tree(
            self.tree, self.drafting.grown, mine.at.last, self.draft.steps,
            committed_lens=mine.at.committed, rows=self.rows, req_to_token=self.parts.table,
            max_nodes=mine.at.max_nodes,
        )  # fmt: skip
        logits, features = self._verify()
        self.acceptance.accept(self.tree, logits, self.starts[:-1])
        self.extension.extend(self.acceptance.walked, features)
        self.acceptance.finish()

    def _verify(self) -> tuple[Tensor, Tensor | None]:
        tree, nodes, model = self.tree, self.draft.nodes, self.parts.model
        batch = ForwardBatch(
            tokens=tree.tokens.view(-1),
            positions=tree.positions.view(-1),
            slots=tree.slots.view(-1),
            req_to_token=self.parts.table,
            rows=self.rows,
            prefix_lens=self.requests.at.committed,
            q_starts=self.starts,
            mask_words=tree.words.view(-1),
            max_q_len=nodes,
        )
        return verify(model, batch, self.parts.kv, self.draft.model.capture)
