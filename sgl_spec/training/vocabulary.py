"""The draft vocabulary: the tokens that the data's answers use most."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sgl_spec.errors import ConfigError
from sgl_spec.training.shards import IntArray, TokenShards

_PROMPT_WEIGHT = 0.1  # of a prompt's token beside an answer's


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """ids: [W] int64 on the CPU, ascending target ids of the draft's columns."""

    ids: Tensor
    vocab_size: int

    @classmethod
    def most_frequent(cls, shards: TokenShards, size: int) -> DraftVocabulary:
        """The `size` most frequent tokens of the training part, answers weighing ten times as much
        as prompts; ties go to the lower id."""
        if not 1 <= size <= shards.vocab_size:
            raise ConfigError(
                f"--draft-vocab {size} is out of range; allowed: 1 to {shards.vocab_size}."
            )
        answers, prompts = counts(shards, shards.training())
        ranked = np.argsort(-(answers + _PROMPT_WEIGHT * prompts), kind="stable")
        return cls(torch.from_numpy(np.sort(ranked[:size])), shards.vocab_size)

    def columns(self) -> Tensor:
        """[vocab_size] int64: the column of each target id, -1 where it has none."""
        columns = torch.full((self.vocab_size,), -1, dtype=torch.int64)
        columns[self.ids] = torch.arange(len(self.ids))
        return columns

    def coverage(self, shards: TokenShards, indices: IntArray) -> float:
        """Share of the answer tokens of `indices` that have a column."""
        answers, _ = counts(shards, indices)
        return float(answers[self.ids.numpy()].sum() / max(1, answers.sum()))


def counts(shards: TokenShards, indices: IntArray) -> tuple[IntArray, IntArray]:
    """How often each token id occurs in answers, and in prompts."""
    chosen = np.zeros(len(shards), dtype=bool)
    chosen[indices] = True
    answers = shards.lens - shards.prompt_lens
    spans = np.stack((shards.prompt_lens, answers), axis=1).flatten()
    is_answer = np.repeat(np.tile([False, True], len(shards)), spans)
    is_chosen = np.repeat(chosen, shards.lens)

    def count(mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> IntArray:
        return np.bincount(shards.tokens[mask & is_chosen], minlength=shards.vocab_size)

    return count(is_answer), count(~is_answer)
