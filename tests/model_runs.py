"""Drives a `Decoder` the way the engine does: requests in scattered KV slots, ragged batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sgl_spec.layers.context import ForwardBatch
from sgl_spec.models.decoder import Decoder


@dataclass(frozen=True)
class Piece:
    """New rows of one request: `parents` None for a causal chunk, else a tree's parent indices."""

    request: int
    prefix: int
    tokens: Sequence[int]
    parents: Sequence[int] | None = None


class Run:
    """`requests` table rows of `width` positions over a pool whose slots are dealt out at random.

    The pool starts as NaN, so that reading a slot nobody wrote cannot go unnoticed.
    """

    def __init__(self, model: Decoder, requests: int, width: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = model
        self.kv = model.new_kv_cache(requests * width + 7)
        self.kv.k.fill_(torch.nan)
        self.kv.v.fill_(torch.nan)
        order = torch.randperm(requests * width + 7, generator=generator)[: requests * width]
        self.table = order.view(requests, width).int()

    @torch.inference_mode()
    def logits(self, *pieces: Piece) -> list[Tensor]:
        """Logits [rows, vocab] of every piece, in one forward."""
        lens = [len(piece.tokens) for piece in pieces]
        out = self.model.logits(self.model.forward(self._batch(pieces), self.kv))
        return list(out.split(lens))

    def _batch(self, pieces: Sequence[Piece]) -> ForwardBatch:
        tree = any(piece.parents is not None for piece in pieces)
        tokens, positions, slots, words, starts = [], [], [], [], [0]
        for piece in pieces:
            own, depths = tree_words(piece.parents or range(-1, len(piece.tokens) - 1))
            words += own
            tokens += piece.tokens
            positions += [piece.prefix + depth for depth in depths]
            span = slice(piece.prefix, piece.prefix + len(piece.tokens))
            slots += self.table[piece.request, span].tolist()
            starts.append(len(tokens))
        return ForwardBatch(
            tokens=torch.tensor(tokens),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            req_to_token=self.table,
            rows=torch.tensor([piece.request for piece in pieces]),
            prefix_lens=torch.tensor([piece.prefix for piece in pieces]),
            q_starts=torch.tensor(starts),
            mask_words=torch.tensor(words) if tree else None,
        )


def tree_words(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Signed 64-bit ancestor words and depths of a tree given by its parent indices."""
    words: list[int] = []
    depths: list[int] = []
    for node, parent in enumerate(parents):
        above = words[parent] % 2**64 if parent >= 0 else 0
        word = above | 1 << node
        words.append(word - 2**64 if word >= 2**63 else word)
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return words, depths


def reference_logits(directory: Path, ids: Sequence[int]) -> Tensor:
    """transformers' logits [len(ids), vocab] in fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(ids)])).logits[0]
    return logits
