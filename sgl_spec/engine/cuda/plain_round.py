"""Plain decoding on the device: rounds of roots alone."""

from __future__ import annotations

import torch

from sgl_spec.engine.cuda.rounds import (
    Acceptance,
    ChainTrees,
    IntArray,
    Parts,
    Requests,
    RoundKind,
    even_starts,
    verify,
)
from sgl_spec.engine.cuda.tree_round import Extension
from sgl_spec.layers.context import ForwardBatch
from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec_kernels.tree_rows import tree_rows


class PlainRound:
    """A round without drafts. Its roots are the device's own, so it may be launched before the host
    knows them. A draft model, if there is one, follows: its KV has no holes when it drafts again.
    See `rounds.Round`."""

    def __init__(self, parts: Parts, batch: int, kind: RoundKind) -> None:
        draft = parts.draft
        self.parts = parts
        self.requests = Requests(parts, batch, kind)
        self.rows = self.requests.rows
        self.acceptance = Acceptance(parts, self.requests, 1, 0)
        self.out, self.lengths = self.acceptance.out, self.acceptance.lengths
        self.capture = () if draft is None else draft.model.capture
        self.extension = None if draft is None else Extension(parts, draft, self.requests, 0)
        self.starts = even_starts(batch, 1, parts.table.device)
        self.tree = ChainTrees.of_roots(self.requests.at.last)
        self.zeros, self.ones = torch.zeros_like(self.rows), torch.ones_like(self.rows)
        self.positions, self.slots = torch.zeros_like(self.rows), torch.zeros_like(self.rows)

    def load(self, rows: IntArray, tree: ArrayTree | None) -> None:
        """Give it its requests; those behind them fill the batch up."""
        assert tree is None, "there are no trees"
        self.requests.load(rows)

    def __call__(self) -> None:
        mine, parts = self.requests, self.parts
        mine.begin(texts=self.extension is not None)
        each = self.starts[:-1]
        tree_rows(
            each, self.zeros, self.zeros, mine.at.committed, self.rows, parts.table,
            self.positions, self.slots,
        )  # fmt: skip
        batch = ForwardBatch(
            tokens=mine.at.last,
            positions=self.positions,
            slots=self.slots,
            req_to_token=parts.table,
            rows=self.rows,
            prefix_lens=mine.at.committed,
            q_starts=self.starts,
            mask_words=self.ones,
            max_q_len=1,
        )
        logits, features = verify(parts.model, batch, parts.kv, self.capture)
        self.acceptance.accept(self.tree, logits, each)
        if self.extension is not None:
            self.extension.extend(self.acceptance.walked, features)
        self.acceptance.finish()
