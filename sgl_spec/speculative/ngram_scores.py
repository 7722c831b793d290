"""How likely n-gram drafts are to be accepted: learned from what the texts went on with.

The trie counts for every kind of node (match length, depth, rank, own text) how often it was right
where its parent was (`ngram_ref.judge`). A guess stands for the first few trials of each kind.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_spec_kernels.ngram_ref import MOST_MATCHED, TokenIndex

_UNITS = 1024  # of cost that halve a chance
_LEAST, _MOST = 2.0**-10, 0.985  # chances
_WEIGHT = 4.0  # trials that the guess counts for
_MEMORY = 4096  # trials of a kind after which the older ones count half
_BY_MATCH = ((0, 0.05), (1, 0.16), (4, 0.45), (8, 0.7), (16, 0.95))  # the first token, greedy text


class NgramScores:
    """Keeps `TokenIndex.costs` true."""

    def __init__(self, index: TokenIndex) -> None:
        self._index = index
        self._guess = _guesses(index.costs)
        self.refresh()

    def refresh(self) -> None:
        """Take in what was judged since."""
        tried, won = self._index.tried, self._index.won
        chances = (won + _WEIGHT * self._guess) / (tried + _WEIGHT)
        costs = chances.clamp(_LEAST, _MOST).log2().mul(-_UNITS).round()
        self._index.costs.copy_(costs)
        halvings = (tried > _MEMORY).int()
        tried >>= halvings
        won >>= halvings


def scores(facts: Tensor) -> Tensor:
    """[B, N] float32 chances of paths, from `NgramDrafts.facts`; 1 for the roots."""
    chances = (facts.float() / -_UNITS).exp2()
    chances[:, 0] = 1.0
    return chances


def _guesses(like: Tensor) -> Tensor:
    """Chances before anything was judged, in the shape of `TokenIndex.costs`."""
    ranks = like.shape[2]
    lengths, chances = (torch.tensor(column) for column in zip(*_BY_MATCH, strict=True))
    matched = torch.arange(MOST_MATCHED + 1)
    right = torch.bucketize(matched, lengths).clamp(min=1)
    low, high = lengths[right - 1], lengths[right]
    share = (matched - low) / (high - low)
    first = chances[right - 1].lerp(chances[right], share)
    guess = torch.full(like.shape, 0.75)
    guess[:, 0] = first[:, None, None]
    later_ranks = 0.3 / torch.arange(1, ranks)
    guess[:, :, 1:] *= later_ranks[:, None]
    return guess.to(like.device)
