"""Judging a draft on held-out greedy answers by the ranks it gives to their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from sgl_spec.training.acceptance import BEYOND, SHAPES, accept_length, accepted, hit_rates
from sgl_spec.training.shards import IntArray, TokenBatch, TokenShards

MAX_STEPS = max(shape.steps for shape in SHAPES)

RankFunction = Callable[[TokenBatch], Tensor]
"""[B, S, MAX_STEPS] int64 on the CPU: at root position r and depth j, the rank of token r + 1 + j.
What lies beyond a sequence's end may hold anything."""


class HeldOut:
    """A fixed sample of held-out greedy answers."""

    def __init__(
        self, shards: TokenShards, *, tokens: int, batch_tokens: int, max_len: int
    ) -> None:
        """tokens: about how many are judged; the sample depends on the data alone."""
        self.shards = shards
        indices = shards.held_out()
        indices = indices[shards.temperatures[indices] == 0]
        indices = np.random.default_rng(0).permutation(indices)
        used = np.cumsum(np.minimum(shards.lens[indices], max_len)) <= tokens
        used[:1] = True
        self.indices: IntArray = indices[used]
        self._batch_tokens, self._max_len = batch_tokens, max_len

    def batches(self) -> Iterator[TokenBatch]:
        """The sample in batches."""
        return self.shards.batches(
            self.indices, tokens=self._batch_tokens, max_len=self._max_len, seed=0
        )

    @torch.no_grad()
    def judge(self, ranks_of: RankFunction) -> dict[str, float]:
        """Accept lengths by shape and kind of prompt, and top-1 agreement per depth.

        Agreement at a depth is given that every depth above agreed. Empty without greedy answers.
        """
        answers: list[IntArray] = []
        kinds: list[int] = []
        for batch in self.batches():
            ranks = ranks_of(batch).numpy()
            for row, (length, prompt) in enumerate(zip(batch.lens, batch.prompt_lens, strict=True)):
                if length - prompt >= 2:
                    answers.append(_cut(ranks[row], int(prompt), int(length)))
                    kinds.append(int(batch.kinds[row]))
        if not answers:
            return {}
        figures = _lengths(answers)
        joined = np.concatenate(answers)
        for depth, rate in enumerate(hit_rates(joined, 1)):
            figures[f"agree{depth + 1}"] = rate
        for kind in sorted(set(kinds)):
            of_kind = [answer for answer, its in zip(answers, kinds, strict=True) if its == kind]
            for name, value in _lengths(of_kind).items():
                figures[f"{self.shards.kind_names[kind]} {name}"] = value
        return figures


def _cut(ranks: IntArray, prompt: int, length: int) -> IntArray:
    """[roots, MAX_STEPS] for the roots prompt .. length - 2."""
    roots = np.arange(prompt, length - 1)
    beyond = roots[:, None] + 1 + np.arange(ranks.shape[1]) >= length
    return np.where(beyond, BEYOND, ranks[roots])


def _lengths(answers: list[IntArray]) -> dict[str, float]:
    return {
        str(shape): accept_length([accepted(ranks, shape) for ranks in answers]) for shape in SHAPES
    }
