"""Prompt chunks on the device: run them, draw the tokens behind prompts that are through, and let
the draft model follow. The host waits for nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgl_spec.engine.batch import PrefillBatch
from sgl_spec.engine.cuda.rounds import (
    Acceptance,
    DraftParts,
    Parts,
    Requests,
    Roots,
    RoundKind,
    even_starts,
)
from sgl_spec.layers.context import ForwardBatch
from sgl_spec.layers.transfer import on_device


@dataclass(frozen=True, slots=True)
class _Chunks:
    """A forward of prompt chunks. following: [T] int64, the token behind each row; what is drawn
    is missing. final: [F] requests whose prompts are through, ends: [F] lengths of their prompts,
    last: [F] their last rows. roots: [F] int64, their last tokens."""

    forward: ForwardBatch
    following: Tensor
    final: npt.NDArray[np.int64]
    ends: Tensor
    last: Tensor
    roots: Tensor


def run_prefill(
    parts: Parts, batch: PrefillBatch, texts: npt.NDArray[np.int32], kind: RoundKind
) -> Tensor | None:
    """Enqueue it all. texts: [rows, width]. [F, 2] int32, a count (1) and the token drawn for each
    request whose prompt is through, also in the row state; None where there is none."""
    chunks = _chunks(parts, batch, texts)
    draft = parts.draft
    features = None
    if draft is not None and draft.model.capture:
        hidden, features = parts.model.forward_features(
            chunks.forward, parts.kv, draft.model.capture
        )
    else:
        hidden = parts.model.forward(chunks.forward, parts.kv)
    first = None
    if len(chunks.final):
        first = _draw_first(parts, chunks, batch.rows[chunks.final], hidden, kind)
        chunks.following.index_copy_(0, chunks.last, first[:, 1].long())
    if draft is not None:
        _follow(parts, draft, chunks, features, batch.rows)
    return first


def _chunks(parts: Parts, batch: PrefillBatch, texts: npt.NDArray[np.int32]) -> _Chunks:
    ends = batch.starts + batch.takes
    (final,) = np.nonzero(batch.finals)
    spans = list(zip(batch.rows, batch.starts, ends, strict=True))
    tokens = np.concatenate([texts[row, start:end] for row, start, end in spans])
    following = np.concatenate([texts[row, start + 1 : end + 1] for row, start, end in spans])
    positions = np.concatenate([np.arange(start, end) for _, start, end in spans])
    starts = np.concatenate(([0], np.cumsum(batch.takes)))
    at = np.repeat(batch.rows, batch.takes)
    last = starts[1:][final] - 1
    flat = [
        tokens, following, positions, at, batch.rows, batch.starts, starts,
        ends[final], last, tokens[last],
    ]  # fmt: skip
    sizes = [len(part) for part in flat]
    words = on_device(np.concatenate(flat).astype(np.int64), parts.table.device)
    block = torch.split(words, sizes)
    forward = ForwardBatch(
        tokens=block[0],
        positions=block[2],
        slots=parts.table[block[3], block[2]].long(),
        req_to_token=parts.table,
        rows=block[4],
        prefix_lens=block[5],
        q_starts=block[6],
        mask_words=None,
        max_q_len=int(batch.takes.max()),
    )
    return _Chunks(forward, block[1], final, *block[7:])


def _draw_first(
    parts: Parts,
    chunks: _Chunks,
    rows: npt.NDArray[np.int64],
    hidden: Tensor,
    kind: RoundKind,
) -> Tensor:
    """A round of roots alone whose logits the prompt has given: first tokens take the same path as
    all others."""
    requests = Requests(parts, len(rows), replace(kind, forced=False))
    parts.rows.place(rows, chunks.ends - 1, chunks.roots)
    requests.rows = on_device(rows, parts.table.device)
    requests.begin()
    acceptance = Acceptance(parts, requests, 1, 0)
    logits = parts.model.raw_logits(hidden.index_select(0, chunks.last))
    offsets = even_starts(len(rows), 1, parts.table.device)[:-1]
    acceptance.accept(Roots.of(requests.at.last), logits, offsets)
    acceptance.finish()
    return acceptance.out


def _follow(
    parts: Parts,
    draft: DraftParts,
    chunks: _Chunks,
    features: Tensor | None,
    rows: npt.NDArray[np.int64],
) -> None:
    """The draft model over the same rows, and a whole model over the new roots as well."""
    forward, fused = chunks.forward, None
    if features is not None:
        forward = replace(forward, tokens=chunks.following)
        fused = draft.model.fuse(features)
    hidden = draft.model.forward(forward, fused, draft.kv)
    draft.hidden.index_copy_(0, forward.rows, hidden.index_select(0, forward.q_starts[1:] - 1))
    if features is not None or not len(chunks.final):
        return
    at = on_device(rows[chunks.final], parts.table.device)
    roots = ForwardBatch(
        tokens=chunks.following.index_select(0, chunks.last),
        positions=chunks.ends,
        slots=parts.table[at, chunks.ends].long(),
        req_to_token=parts.table,
        rows=at,
        prefix_lens=chunks.ends,
        q_starts=even_starts(len(at), 1, parts.table.device),
        mask_words=torch.ones_like(at),
        max_q_len=1,
    )
    draft.hidden.index_copy_(0, at, draft.model.forward(roots, None, draft.kv))
