"""Runs a model on the fused path beside the same model on plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from model_runs import Piece, Run
from torch import Tensor

from sgl_spec.layers.context import ForwardBatch, KVCache
from sgl_spec.models.decoder import Decoder
from sgl_spec.models.loader import load_model

NEAR = {"atol": 1e-4, "rtol": 0.0}


def both(directory: Path, device: str = "cpu", **options: Any) -> tuple[Decoder, Decoder]:
    """(plain, fused)."""
    plain, fused = (
        load_model(directory, device=device, attention_backend=name, **options)
        for name in ("torch", "triton")
    )
    assert (plain.kernels, fused.kernels) == ("torch", "triton")
    return plain, fused


def batch_of(run: Run, *pieces: Piece) -> ForwardBatch:
    """The forward of some pieces, on the model's device; the host knows the longest."""
    longest = max(len(piece.tokens) for piece in pieces)
    return on(run.kv.k.device, replace(run._batch(pieces), max_q_len=longest))


def with_fillers(batch: ForwardBatch, count: int) -> ForwardBatch:
    """`count` rows more that nobody owns."""

    def longer(values: Tensor, value: int) -> Tensor:
        return torch.cat((values, values.new_full((count,), value)))

    assert batch.mask_words is not None
    return replace(
        batch,
        tokens=longer(batch.tokens, 0),
        positions=longer(batch.positions, 0),
        slots=longer(batch.slots, -1),
        mask_words=longer(batch.mask_words, 1),
    )


def on(device: torch.device, batch: ForwardBatch) -> ForwardBatch:
    """The batch there."""
    given = {field.name: getattr(batch, field.name) for field in fields(batch)}
    moved = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in given.items()}
    return ForwardBatch(**moved)


def assert_same_kv(ours: KVCache, theirs: KVCache, error: float = 1e-4) -> None:
    """Both hold the same, NaN where nobody wrote."""
    for mine, other in ((ours.k, theirs.k), (ours.v, theirs.v)):
        torch.testing.assert_close(mine, other, atol=error, rtol=0, equal_nan=True)


def compare(
    plain: Decoder, fused: Decoder, steps: Sequence[Sequence[Piece]], near: dict[str, float] = NEAR
) -> None:
    """Logits and KV of a few forwards, one after the other, in both."""
    runs = [Run(model, 3, 60) for model in (plain, fused)]
    for pieces in steps:
        logits = []
        for run in runs:
            with torch.inference_mode():
                hidden = run.model.forward(batch_of(run, *pieces), run.kv)
                logits.append(run.model.logits(hidden))
        torch.testing.assert_close(logits[1], logits[0], **near)
    assert_same_kv(runs[1].kv, runs[0].kv, near["atol"])
