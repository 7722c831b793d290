"""A ring of the tokens the n-gram trie has seen, each with the position of its successor in its
stream."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sgl_spec.speculative.ngram_memory import lazy_zeros

Ints = npt.NDArray[np.int64]

CLOCK_LIMIT = 1 << 30  # positions are int32; the owner sets the clock back before it gets here


class TokenLog:
    """Positions count up from 1 over all streams: they are also the trie's clock."""

    def __init__(self, size: int) -> None:
        """size: tokens kept, a power of two; 8 bytes each, backed by memory as they fill up."""
        assert size & (size - 1) == 0
        self.size = size
        self._tokens = lazy_zeros(size, np.int32)
        self._next = lazy_zeros(size, np.int32)
        self.clock = 0

    @property
    def num_bytes(self) -> int:
        """Bytes in use."""
        return min(self.clock + 1, self.size) * 8

    def append(self, tokens: npt.NDArray[np.int32], starts: Ints, tails: Ints) -> Ints:
        """Add [T] tokens of S streams, fewer than `size`; returns their [T] positions.

        starts: [S] index of each stream's first token, ascending from 0. tails: [S] position of the
        token before it, 0 if there is none.
        """
        mask = self.size - 1
        if (self.clock & mask) + tokens.size > mask:
            self.clock = (
                self.clock | mask
            ) + 1  # to the start of the ring, of which place 0 is left
        at = np.arange(self.clock + 1, self.clock + tokens.size + 1)
        self.clock += tokens.size
        successor = at + 1
        successor[last_of(starts, tokens.size)] = 0
        self._tokens[at & mask] = tokens
        self._next[at & mask] = successor
        live = self._live(tails) & (tails < at[0])
        self._next[tails[live] & mask] = at[starts[live]]
        return at

    def _live(self, positions: Ints) -> npt.NDArray[np.bool_]:
        """Which positions are still in the ring."""
        return (positions > max(0, self.clock - self.size)) & (positions <= self.clock)

    def follow(self, positions: Ints, steps: int) -> tuple[Ints, Ints]:
        """Read on from log positions: [m] -> tokens and their positions, each [m, steps].

        Column j is token j + 1 after the one at the position; its position is 0 (and its token
        means nothing) where the stream ends or the ring was overwritten.
        """
        mask = self.size - 1
        found = np.zeros((steps + 1, positions.size), np.int32)
        found[0] = positions * self._live(positions)
        for step in range(steps):  # place 0 of the ring is never used: from 0 it leads to 0
            self._next.take(found[step] & mask, out=found[step + 1], mode="wrap")
        tokens = self._tokens.take(found[1:] & mask)
        return tokens.T.astype(np.int64), found[1:].T.astype(np.int64)

    def set_back(self) -> int:
        """Lower the clock and every position by half the limit; returns by how much.

        The shift is a multiple of the ring's size, so that a position keeps its place in it.
        """
        shift = (CLOCK_LIMIT // 2) // self.size * self.size
        np.maximum(self._next - shift, 0, out=self._next)
        self.clock -= shift
        return shift


def last_of(starts: Ints, total: int) -> Ints:
    """[S] index of the last item of each run, given where the runs start in `total` items."""
    last = np.empty_like(starts)
    last[:-1] = starts[1:] - 1
    last[-1:] = total - 1
    return last
