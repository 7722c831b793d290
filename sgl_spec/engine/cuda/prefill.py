"""Prompt chunks on the device: run them, draw the tokens behind prompts that are through, and let
the draft model follow. The host waits for nothing, and launches one graph: a forward of a few
hundred rows is done sooner than its kernels could be launched one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgl_spec.engine.batch import PrefillBatch
from sgl_spec.engine.cuda.graphs import Replayed, Rounds
from sgl_spec.engine.cuda.round import (
    KINDS,
    Acceptance,
    ChainTrees,
    DraftParts,
    Parts,
    Requests,
    even_starts,
)
from sgl_spec.engine.cuda.timing import timed
from sgl_spec.engine.cuda.transfer import send
from sgl_spec.engine.memory import CAPTURED_ROWS, row_counts
from sgl_spec.engine.policy import PREFILL_REQUESTS_CUDA
from sgl_spec.layers.context import ForwardBatch
from sgl_spec.speculative.array_tree import ArrayTree

IntArray = npt.NDArray[np.int64]

_EVERY_KIND = KINDS[-1]  # a forward draws too little to matter


class _Block:
    """What the host tells a forward of T rows of B requests, in one block of words.

    tokens, following, positions, table_rows: [T], each row's token, the token behind it (what is
    drawn is missing), position and table row. rows, prefix, starts: [B], [B], [B + 1], the
    requests. drawn: [B] table rows whose prompts are through, the filler elsewhere; ends: [B]
    lengths of those prompts, 1 elsewhere; roots: [B] their last tokens; behind: [B] where in
    `following` the token goes that is drawn (T: nowhere).
    """

    def __init__(self, rows: int, requests: int, device: torch.device) -> None:
        sizes = [rows, rows + 1, rows, rows, *[requests] * 2, requests + 1, *[requests] * 4]
        self.host = torch.zeros(sum(sizes), dtype=torch.int64)
        self.device = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self.parts = torch.split(self.device, sizes)
        self._flat = [part.numpy() for part in torch.split(self.host, sizes)]

    def blank(self, filler: int) -> None:
        """Rows and requests that are nobody's."""
        for part in self._flat:
            part[:] = 0
        _, following, _, table_rows, rows, _, _, drawn, ends, _, behind = self._flat
        table_rows[:], rows[:], drawn[:] = filler, filler, filler
        ends[:], behind[:] = 1, len(following) - 1

    def fill(self, batch: PrefillBatch, texts: npt.NDArray[np.int32], filler: int) -> None:
        """Write all of it."""
        self.blank(filler)
        tokens, following, positions, table_rows, rows, prefix, starts, *ends = self._flat
        drawn, lengths, roots, behind = ends
        at = 0
        for row, start, take in zip(batch.rows, batch.starts, batch.takes, strict=True):
            span, end = slice(at, at + take), start + take
            tokens[span] = texts[row, start:end]
            following[span] = texts[row, start + 1 : end + 1]
            positions[span] = np.arange(start, end)
            table_rows[span] = row
            at += take
        size = len(batch.rows)
        rows[:size], prefix[:size] = batch.rows, batch.starts
        np.cumsum(batch.takes, out=starts[1 : size + 1])
        starts[size + 1 :] = at
        (final,) = np.nonzero(batch.finals)
        drawn[final] = batch.rows[final]
        lengths[final] = (batch.starts + batch.takes)[final]
        behind[final] = starts[final + 1] - 1
        roots[final] = tokens[behind[final]]


class PrefillRound:
    """A forward of up to `rows` rows of up to `requests` requests. See `round.Program`.

    out: [requests, 2] int32, a count and the token drawn; the count is 0 where a prompt is not
    through. The row state knows of the tokens as well. whole: whether `hidden` keeps the final
    hidden of all rows, which log-probabilities of prompts need.
    """

    split = False

    def __init__(self, parts: Parts, rows: int, requests: int, *, whole: bool = False) -> None:
        device = parts.table.device
        self.parts, self.size, self.whole = parts, rows, whole
        self.block = _Block(rows, requests, device)
        names = self.block.parts
        self.tokens, self._following, self.positions, self.table_rows = names[:4]
        self.requests, self.prefix, self.starts = names[4:7]
        self.drawn, self.ends, self.roots, self.behind = names[7:]
        self.drawing = Requests(parts, requests, _EVERY_KIND)
        self.drawing.rows = self.drawn
        self.acceptance = Acceptance(parts, self.drawing, 1, 0, requests)
        self.offsets = even_starts(requests, 1, device)
        self.tree = ChainTrees.of_roots(self.drawing.at.last)
        self.out = self.acceptance.out
        self.hidden: Tensor | None = None

    @property
    def pieces(self) -> tuple[Callable[[], None], ...]:
        """See `round.Program`."""
        return (self._run,)

    def load(self, rows: IntArray, tree: ArrayTree | None) -> None:
        """Nothing, as a round is captured; see `fill`."""
        assert not len(rows)
        assert tree is None
        self.block.blank(self.parts.rows.filler)
        send(self.block.host, self.block.device)

    def fill(
        self,
        batch: PrefillBatch,
        texts: npt.NDArray[np.int32],
        words: npt.NDArray[np.int32],
        row_of: IntArray,
    ) -> None:
        """Give it its chunks. texts: [rows, width], every request's text. words, row_of: masks of
        the tokens behind the prompts, see `NodeMasks.send`."""
        self.block.fill(batch, texts, self.parts.rows.filler)
        send(self.block.host, self.block.device)
        assert self.acceptance.masks is not None
        self.acceptance.masks.send(words, row_of)

    def _run(self) -> None:
        parts, draft = self.parts, self.parts.draft
        forward = ForwardBatch(
            tokens=self.tokens,
            positions=self.positions,
            slots=parts.table[self.table_rows, self.positions].long(),
            req_to_token=parts.table,
            rows=self.requests,
            prefix_lens=self.prefix,
            q_starts=self.starts,
            mask_words=None,
            max_q_len=self.size,
            wanted=(self.starts[1:] - 1).clamp(min=0),
        )
        hidden, features = self._read(forward)
        self._draw(hidden)
        if draft is not None:
            self._follow(draft, forward, features)

    def _read(self, forward: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """The last hidden rows of the chunks, and the features of all rows if there is a head."""
        model, kv, draft = self.parts.model, self.parts.kv, self.parts.draft
        capture = () if draft is None else draft.model.capture
        needs_all = self.whole or model.config.num_layers in capture
        batch = replace(forward, wanted=None) if needs_all else forward
        features = None
        if capture:
            hidden, features = model.forward_features(batch, kv, capture)
        else:
            hidden = model.forward(batch, kv)
        if not needs_all:
            return hidden, features
        if self.whole:
            self.hidden = hidden
        assert forward.wanted is not None
        return hidden.index_select(0, forward.wanted), features

    def _draw(self, hidden: Tensor) -> None:
        """A round of roots alone whose logits the prompts have given: first tokens take the same
        path as all others."""
        state = self.parts.rows.state
        state.committed.index_copy_(0, self.drawn, self.ends - 1)
        state.last.index_copy_(0, self.drawn, self.roots)
        self.drawing.begin()
        logits = self.parts.model.raw_logits(hidden)
        self.acceptance.accept(self.tree, logits, self.offsets[:-1])
        self.acceptance.finish()
        self._following.index_copy_(0, self.behind, self.acceptance.walked.tokens[:, 0])

    def _follow(self, draft: DraftParts, forward: ForwardBatch, features: Tensor | None) -> None:
        """The draft model over the same rows, and a whole model over the new roots as well."""
        model, fused = draft.model, None
        if features is not None:
            forward = replace(forward, tokens=self._following[: self.size])
            fused = model.fuse(features)
        draft.hidden.index_copy_(0, self.requests, model.forward(forward, fused, draft.kv))
        if features is not None:
            return
        # A request whose prompt is not through writes its root in the filler's slots.
        at = torch.where(self.drawn == self.parts.rows.filler, 0, self.ends)
        roots = ForwardBatch(
            tokens=self.acceptance.walked.tokens[:, 0],
            positions=at,
            slots=self.parts.table[self.drawn, at].long(),
            req_to_token=self.parts.table,
            rows=self.drawn,
            prefix_lens=at,
            q_starts=self.offsets,
            mask_words=torch.ones_like(at),
            max_q_len=1,
        )
        draft.hidden.index_copy_(0, self.drawn, model.forward(roots, None, draft.kv))


class Prefills:
    """The captured forwards. most: prompt tokens of one forward."""

    def __init__(self, parts: Parts, rounds: Rounds, most: int) -> None:
        self._parts, self._rounds = parts, rounds
        most = min(most, CAPTURED_ROWS)
        self.sizes = row_counts(most) if rounds.captures and most else ()

    def run(
        self,
        batch: PrefillBatch,
        texts: npt.NDArray[np.int32],
        words: npt.NDArray[np.int32],
        row_of: IntArray,
        *,
        whole: bool,
    ) -> PrefillRound:
        """By the graph of the next larger forward, or launch by launch if there is none or the
        `whole` of the hidden rows is asked for. See `PrefillRound.fill` for the rest."""
        total, requests = int(batch.takes.sum()), len(batch.rows)
        size = next((count for count in self.sizes if count >= total), None)
        if whole or size is None or requests > PREFILL_REQUESTS_CUDA:
            replayed = Replayed(PrefillRound(self._parts, total, requests, whole=whole))
        else:
            replayed = self._captured(size)
        program = replayed.program
        assert isinstance(program, PrefillRound)
        program.fill(batch, texts, words, row_of)
        replayed.run()
        return program

    def prepare(self) -> None:
        """Capture them all, the largest first."""
        for size in reversed(self.sizes):
            self._captured(size)

    def tokens_within(self, ms: float) -> int | None:
        """Tokens of the largest captured forward that takes no longer, of the smallest if none
        does; None if all do. By bisection: a forward of more tokens takes longer."""
        low, high = 0, len(self.sizes)
        while low < high:
            middle = (low + high) // 2
            if self._parts.agree(timed(self._captured(self.sizes[middle]))) <= ms:
                low = middle + 1
            else:
                high = middle
        return None if low == len(self.sizes) else self.sizes[max(0, low - 1)]

    def _captured(self, size: int) -> Replayed:
        return self._rounds.get(
            ("prefill", size), lambda: PrefillRound(self._parts, size, PREFILL_REQUESTS_CUDA)
        )
