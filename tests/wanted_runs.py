"""A forward of which one row a request is read, beside the same forward read whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from fused_runs import assert_same_kv, on
from model_runs import Piece, Run
from torch import Tensor

from sgl_spec.layers.context import ForwardBatch, KVCache

Forward = Callable[[ForwardBatch, KVCache], Sequence[Tensor]]
"""(batch, KV) to the rows that are read, and what else the model gives of all rows."""

STEPS: list[list[Piece]] = [
    [Piece(0, 0, range(5, 14)), Piece(2, 0, [9]), Piece(1, 0, [30, 31])],  # prompts
    [Piece(2, 1, [8, 3]), Piece(0, 9, [60])],  # chunks behind a prefix
    [Piece(1, 2, [6, 7, 8], [-1, 0, 1]), Piece(0, 10, [1, 2], [-1, 0])],  # chains of a tree's words
]


def check_wanted(runs: tuple[Run, Run], forward: Forward, error: float = 1e-4) -> None:
    """runs: two of one model, whose slots are dealt alike. The last row of every request is wanted,
    and where rows are words, the row before it: what lies behind the wanted row is left out too."""
    for pieces in STEPS:
        batch = on(runs[0].kv.k.device, runs[0]._batch(pieces))
        wanted = batch.q_starts[1:] - (1 if batch.mask_words is None else 2)
        with torch.inference_mode():
            whole, *others = forward(batch, runs[0].kv)
            read, *same = forward(replace(batch, wanted=wanted), runs[1].kv)
        assert len(read) == len(pieces) < len(whole)
        torch.testing.assert_close(read, whole[wanted], atol=error, rtol=0)
        for one, other in zip(same, others, strict=True):
            torch.testing.assert_close(one, other, atol=error, rtol=0)
    assert_same_kv(runs[1].kv, runs[0].kv, error)


def features_of(width: int) -> Callable[[ForwardBatch], Tensor]:
    """Made-up features of a batch's rows, the same for the same tokens. width: of a row."""
    table = torch.randn(512, width, generator=torch.Generator().manual_seed(4))
    return lambda batch: table.to(batch.tokens.device)[batch.tokens]
