"""Forwards of which one row a request is read (`ForwardBatch.wanted`): their last layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from sgl_spec.layers.context import AttnBatch, ForwardBatch

S = TypeVar("S")


def only(rows: Tensor, wanted: Tensor | None) -> Tensor:
    """The rows that are wanted; None: all."""
    return rows if wanted is None else rows.index_select(0, wanted)


def attend_wanted(batch: ForwardBatch) -> AttnBatch:
    """The attention of the wanted rows alone, behind a prefix that holds all rows before them."""
    assert batch.wanted is not None
    assert batch.tree_lens is None, "the rows of a tree's later levels are no chain"
    before = batch.wanted - batch.q_starts[:-1]  # below 0 where a request has no rows
    return AttnBatch(
        req_to_token=batch.req_to_token,
        rows=batch.rows,
        prefix_lens=(batch.prefix_lens + before).clamp(min=0),
        q_starts=torch.arange(len(batch.rows) + 1, device=batch.rows.device),
        mask_words=torch.ones_like(batch.rows),
        max_q_len=1,
    )


def shared_by_layer(
    batch: ForwardBatch, layers: int, share: Callable[[AttnBatch, Tensor | None], S]
) -> Iterator[S]:
    """What each of `layers` layers reads: the last one goes on with the wanted rows alone. share:
    makes it of an attention and the rows wanted; a plan may end with the one before it, so each is
    made when it is needed."""
    whole = layers if batch.wanted is None else layers - 1
    if whole:
        shared = share(batch, None)
        for _ in range(whole):
            yield shared
    if whole < layers:
        yield share(attend_wanted(batch), batch.wanted)
