"""Rounds in which a draft model rests, and when: speculation must not make a batch slower."""

from __future__ import annotations

import torch

from sgl_spec.engine.cuda.rounds import (
    Acceptance,
    Extension,
    IntArray,
    Parts,
    Requests,
    Roots,
    RoundKind,
    even_starts,
    verify,
)
from sgl_spec.layers.context import ForwardBatch
from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec.speculative.draft_economy import DraftEconomy
from sgl_spec_kernels.tree_rows import tree_rows

_BLEND = 1 / 16  # weight of the newest resting round


class RestRound:
    """Plain decoding that the draft model follows, so that its KV has no holes when it drafts
    again. See `rounds.Round`."""

    def __init__(self, parts: Parts, batch: int, kind: RoundKind) -> None:
        draft, device = parts.draft, parts.table.device
        assert draft is not None
        self.parts, self.capture = parts, draft.model.capture
        self.requests = Requests(parts, batch, kind)
        self.rows = self.requests.rows
        self.acceptance = Acceptance(parts, self.requests, 1, 0)
        self.out, self.lengths = self.acceptance.out, self.acceptance.lengths
        self.extension = Extension(parts, draft, self.requests, 0)
        self.starts = even_starts(batch, 1, device)
        self.tree = Roots.of(self.requests.at.last)
        self.zeros, self.ones = torch.zeros_like(self.rows), torch.ones_like(self.rows)
        self.positions, self.slots = torch.zeros_like(self.rows), torch.zeros_like(self.rows)

    def load(self, rows: IntArray, tree: ArrayTree | None) -> None:
        """Give it its requests; those behind them fill the batch up."""
        assert tree is None, "there are no trees"
        self.requests.load(rows)

    def __call__(self) -> None:
        mine, parts = self.requests, self.parts
        mine.begin(texts=True)
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
        self.extension.extend(self.acceptance.walked, features)
        self.acceptance.finish()


class Resting:
    """Whether a draft model drafts for the next round; see `DraftEconomy`, which decides by what
    rounds brought and took. Times of rounds at rest are known by padded batch size."""

    def __init__(self, economy: DraftEconomy) -> None:
        self.economy = economy
        self._rest_ms: dict[int, float] = {}

    def drafts(self, size: int) -> bool:
        """size: of the padded batch."""
        plain = self._rest_ms.get(size)
        return plain is None or self.economy.drafts(size, plain)

    def know(self, size: int, ms: float) -> None:
        """A round at rest takes so long."""
        self._rest_ms[size] = ms

    def note(self, size: int, requests: int, tokens: int, ms: float, *, drafted: bool) -> None:
        """A round of `requests`, run as `size`, brought `tokens` in `ms`."""
        if drafted:
            # In tokens of a full batch, since the time is one's.
            self.economy.note_round(size, round(tokens * size / requests), ms)
        elif size in self._rest_ms:
            self._rest_ms[size] += _BLEND * (ms - self._rest_ms[size])
