"""Rows of a draft model's forwards, over the target's slot table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_spec.layers.context import ForwardBatch
from sgl_spec.layers.transfer import on_device
from sgl_spec.speculative.tree import MAX_TREE_NODES


@dataclass(frozen=True, slots=True)
class Span:
    """T committed rows of B requests: positions starts[i] .. starts[i] + counts[i] - 1 of table row
    rows[i], request by request. On the host, where all of it is known.

    request: [T] int64, index of each row's request. positions: [T] int64. ends: [B] int64, each
    request's last row; counts are at least 1.
    """

    rows: Tensor
    starts: Tensor
    counts: Tensor
    request: Tensor
    positions: Tensor

    @property
    def ends(self) -> Tensor:
        """[B] int64, the index of each request's last row."""
        return self.counts.cumsum(0) - 1

    def within(self) -> Tensor:
        """[T] int64, index of each row among its request's."""
        return self.positions - self.starts[self.request]

    def forward(self, tokens: Tensor, req_to_token: Tensor) -> ForwardBatch:
        """These rows with `tokens` [T], each seeing all positions up to its own; on the device of
        the slot table."""
        most, device = int(self.counts.max()), req_to_token.device
        bit = 1 << self.within() if most <= MAX_TREE_NODES else None
        row_of, positions = on_device(
            torch.stack((self.rows[self.request], self.positions)), device
        )
        return ForwardBatch(
            tokens=on_device(tokens, device),
            positions=positions,
            slots=req_to_token[row_of, positions].long(),
            req_to_token=req_to_token,
            rows=on_device(self.rows, device),
            prefix_lens=on_device(self.starts, device),
            q_starts=on_device(_offsets(self.counts), device),
            # As chains, short spans of many requests are planned together.
            mask_words=None if bit is None else on_device(bit | (bit - 1), device),
            max_q_len=most,
        )


def span(rows: Tensor, starts: Tensor, counts: Tensor) -> Span:
    """The rows of these positions. rows, starts, counts: [B] int64."""
    request = torch.arange(len(rows), device=rows.device).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts)[request]
    within = torch.arange(len(request), device=rows.device) - first
    return Span(rows, starts, counts, request, starts[request] + within)


class DraftTrees:
    """Where the nodes of B draft trees lie while they are run, a few at a time.

    A tree's columns are the logical positions from prefix[i] on. A node at depth d (1 below the
    root) is rotated at prefix[i] + d - 1, whatever its column.

    rows: [B] int64, table rows. prefix: [B] int64, positions that hold the draft's KV. All of it
    lies on the device of the slot table.
    """

    def __init__(self, req_to_token: Tensor, rows: Tensor, prefix: Tensor) -> None:
        self.req_to_token = req_to_token
        self.rows = rows
        self.prefix = prefix
        self.used = torch.zeros_like(prefix)  # columns taken so far

    def columns(self, request: Tensor) -> Tensor:
        """[M] int64, the columns that M further nodes take. request: [M] int64, rising."""
        counts = torch.bincount(request, minlength=len(self.rows))
        first = counts.cumsum(0) - counts
        within = torch.arange(len(request), device=request.device) - first[request]
        return self.used[request] + within

    def forward(self, request: Tensor, tokens: Tensor, words: Tensor, depth: int) -> ForwardBatch:
        """The next nodes of some trees, all at `depth`; they take the columns that `columns` says.

        request, tokens, words: [M] int64; request rises, words hold the ancestors' columns and
        their own.
        """
        counts = torch.bincount(request, minlength=len(self.rows))
        (active,) = torch.nonzero(counts, as_tuple=True)
        prefix = self.prefix[request]
        batch = ForwardBatch(
            tokens=tokens,
            positions=prefix + (depth - 1),
            slots=self.req_to_token[self.rows[request], prefix + self.columns(request)].long(),
            req_to_token=self.req_to_token,
            rows=self.rows[active],
            prefix_lens=self.prefix[active],
            q_starts=_offsets(counts[active]),
            mask_words=words,
            tree_lens=self.used[active],
            max_q_len=int(counts.max()),
        )
        self.used = self.used + counts
        return batch


def _offsets(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
