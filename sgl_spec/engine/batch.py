"""Batches: which requests run in one forward, and the forward's rows built from them. No policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgl_spec.engine.kv_pool import SlotTable
from sgl_spec.layers.context import ForwardBatch
from sgl_spec.layers.transfer import batch_on_device
from sgl_spec.request import DraftRound, Logprobs
from sgl_spec.speculative.tree import TokenTree

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Prompt chunks of B requests.

    rows: [B] request rows. starts: [B] tokens whose KV is valid. takes: [B] tokens to compute now.
    finals: [B] whether the chunk ends at the request's last token, so that the next one is drawn.
    unscored: [B] first position whose logits a log-probability of the prompt waits for, see
    `Req.unscored`.
    """

    rows: IntArray
    starts: IntArray
    takes: IntArray
    finals: npt.NDArray[np.bool_]
    unscored: IntArray


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One speculation round of B requests.

    rows: [B]. committed: [B] tokens whose KV is valid; the root lies at that position. max_nodes:
    [B] most tree nodes, root included. remaining: [B] tokens the request may still generate; nodes
    deeper than remaining - 1 cannot be kept and are not verified.
    """

    rows: IntArray
    committed: IntArray
    max_nodes: IntArray
    remaining: IntArray


Batch = PrefillBatch | DecodeBatch


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one forward gave each request of its batch.

    tokens: tokens to append, a list per request (empty for a chunk that is not a prompt's last).
    proposed: draft tokens verified per request (0 for prefill). logprobs: per request, those of
    `tokens`, for requests that ask; prompt_logprobs: those that follow what the request has of its
    prompt. trees: per request, its round, for requests that ask. None where nobody asks.
    """

    tokens: list[list[int]]
    proposed: list[int]
    logprobs: list[Logprobs | None] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    trees: list[DraftRound | None] | None = None


class Launched:
    """A batch under way, from `launch` to `collect`. What it holds is its worker's affair."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Computed(Launched):
    """A batch that was computed when it was launched."""

    output: StepOutput


def prefill_forward(
    batch: PrefillBatch, tokens: npt.NDArray[np.int32], table: SlotTable
) -> ForwardBatch:
    """Forward rows of a prefill batch, on the table's device. tokens: [rows, width], every
    request's text."""
    spans = [(r, s, s + t) for r, s, t in zip(batch.rows, batch.starts, batch.takes, strict=True)]
    flat = np.concatenate([tokens[r, s:e] for r, s, e in spans]).astype(np.int64)
    slots = np.concatenate([table.host[r, s:e] for r, s, e in spans]).astype(np.int64)
    forward = ForwardBatch(
        tokens=torch.from_numpy(flat),
        positions=torch.from_numpy(np.concatenate([np.arange(s, e) for _, s, e in spans])),
        slots=torch.from_numpy(slots),
        req_to_token=table.device,
        rows=torch.from_numpy(batch.rows),
        prefix_lens=torch.from_numpy(batch.starts),
        q_starts=starts_of(torch.from_numpy(batch.takes)),
        mask_words=None,
        max_q_len=int(batch.takes.max()),
    )
    return batch_on_device(forward, table.device.device)


def following_tokens(batch: PrefillBatch, tokens: npt.NDArray[np.int32]) -> IntArray:
    """[T] the token behind each row of a prefill batch, the one that was drawn behind a prompt
    included. tokens: as for `prefill_forward`."""
    spans = zip(batch.rows, batch.starts + 1, batch.starts + 1 + batch.takes, strict=True)
    return np.concatenate([tokens[r, s:e] for r, s, e in spans]).astype(np.int64)


def tree_forward(
    tree: TokenTree, rows: Tensor, committed: Tensor, req_to_token: Tensor
) -> ForwardBatch:
    """Forward rows of a tree batch: node i of a request is written at logical position committed +
    i and rotated at committed + depth. Only nodes in use become rows, request by request. All lies
    on one device."""
    used = tree.used()
    node = torch.arange(tree.width, device=rows.device)
    write = (committed[:, None] + node[None, :])[used]
    row_of = rows[:, None].expand(-1, tree.width)[used]
    return ForwardBatch(
        tokens=tree.tokens[used],
        positions=(committed[:, None] + tree.depths())[used],
        slots=req_to_token[row_of, write].long(),
        req_to_token=req_to_token,
        rows=rows,
        prefix_lens=committed,
        q_starts=starts_of(tree.num_nodes),
        mask_words=tree.ancestor_words()[used],
        max_q_len=tree.width,
    )


def starts_of(lens: Tensor) -> Tensor:
    """[B] lengths to [B + 1] offsets."""
    return torch.cat([lens.new_zeros(1), lens.cumsum(0)])
