"""How likely a copied chain is to be accepted: learned from the chains that were verified.

A chain behind m matched tokens is judged by m alone: its first token is accepted with chance
q[m, 0], the next one, if that was, with q[m, 1], and so on. The score of a node is the chance of
the whole path to it, so scores fall along a chain, and the best nodes of a batch are those above
one cutoff. Pure policy: arrays, no tensors, no clock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_FIRST, _NEXT = 0.35, 0.75  # chances before anything was seen
_WEIGHT = 2.0  # trials that these count as
_MEMORY = 4096.0  # trials of a node after which the older ones count half


class ChainScores:
    """nodes: of a chain, root included. most_matched: larger matches count as so many. cutoffs:
    thresholds to choose from."""

    def __init__(self, nodes: int, most_matched: int, cutoffs: int) -> None:
        self.shape = (most_matched + 1, nodes - 1)
        # Quadratic: finest where most nodes are, near 0.
        self.cutoffs: npt.NDArray[Any] = np.square(np.linspace(1, 0, cutoffs))
        self.cutoffs[0] = 2.0  # nothing reaches the first
        self._guess = np.full(self.shape, _NEXT)
        self._guess[:, :1] = _FIRST
        self.clear()

    def clear(self) -> None:
        """Forget what was learned."""
        self._tried = np.zeros(self.shape)
        self._won = np.zeros(self.shape)

    def scores(self) -> Floats:
        """[most_matched + 1, nodes - 1] chance of the path to each node."""
        chances = (self._won + _WEIGHT * self._guess) / (self._tried + _WEIGHT)
        scores: Floats = np.cumprod(chances, axis=1, dtype=np.float64)
        scores[0] = 0.0
        return scores

    def depths(self) -> npt.NDArray[np.int32]:
        """[cutoffs, most_matched + 1] how many nodes of a chain reach each cutoff."""
        reached = self.scores() >= self.cutoffs[:, None, None]
        counts: npt.NDArray[np.int32] = reached.sum(axis=2).astype(np.int32)
        return counts

    def learn(self, matched: Ints, drafted: Ints, accepted: Ints) -> None:
        """What became of chains: tokens matched, drafts verified and drafts accepted, [B] each. The
        first draft that was not accepted was tried, those behind it were not."""
        depth = np.arange(self.shape[1])
        won = depth < np.minimum(accepted, drafted)[:, None]
        tried = depth < np.minimum(accepted + 1, drafted)[:, None]
        np.add.at(self._tried, matched, tried)
        np.add.at(self._won, matched, won)
        old = self._tried > _MEMORY
        if old.any():
            self._tried[old] /= 2
            self._won[old] /= 2

    def gains(self, matched: Ints, available: Ints, budgets: Ints) -> Floats:
        """Tokens that the best nodes of a batch are expected to give, for each number of nodes that
        may be verified. matched, available: [B], the chains and how many drafts each has."""
        scores = self.scores()[matched]
        scores[np.arange(self.shape[1]) >= available[:, None]] = 0.0
        falling = np.sort(scores, axis=None)[::-1]
        total = np.concatenate([[0.0], np.cumsum(falling)])
        gains: Floats = total[np.minimum(budgets, falling.size)]
        return gains
