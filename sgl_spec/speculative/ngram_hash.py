"""Rolling hashes of n-grams, vectorised over tokens and lengths."""

from __future__ import annotations

import random
import secrets

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]


class RollingHash:
    """Hashes of all n-grams that end at a token, of their prefixes, and of spans of a text.

    h(t_1 .. t_n) = sum of f(t_i) * m^(n - i) mod 2^64, m odd: so h(x t) = h(x) * m + f(t), and a
    prefix follows from the n-gram by m's inverse. f and m are secret, so that nobody can aim many
    n-grams at one bucket.
    """

    def __init__(self, seed: int | None = None) -> None:
        """seed: makes the hash repeatable."""
        rng = random.Random(secrets.randbits(128) if seed is None else seed)
        base = rng.getrandbits(61) << 3 | 5
        self._inverse = np.uint64(pow(base, -1, 2**64))
        self._mix = np.uint64(rng.getrandbits(64) | 1)
        self._shift = np.uint64(rng.getrandbits(64))
        size = 256  # longer than any match with the draft that follows it
        self._up = np.array([pow(base, i, 2**64) for i in range(size)], np.uint64)
        self._down = np.array([pow(base, -i, 2**64) for i in range(size)], np.uint64)

    def tokens(self, tokens: npt.NDArray[np.signedinteger]) -> Hashes:
        """f of every token."""
        x: Hashes = tokens.astype(np.uint64)
        x += self._shift
        x *= self._mix
        x ^= x >> np.uint64(29)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(32)
        return x

    def suffixes(self, hashed: Hashes) -> Hashes:
        """[T, n] f of windows, newest token first -> [T, n]: hashes of the last 1 .. n tokens."""
        return np.cumsum(hashed * self._up[: hashed.shape[1]], axis=1, dtype=np.uint64)

    def prefixes(self, suffixes: Hashes, newest: Hashes) -> Hashes:
        """[T, n] -> [T, n - 1]: the same n-grams of 2 .. n tokens without their newest token."""
        out: Hashes = (suffixes[:, 1:] - newest[:, None]) * self._inverse
        return out

    def spans(self, hashed: Hashes, ends: Ints, lengths: Ints) -> Hashes:
        """Hashes of spans of B texts.

        hashed: [B, L] f of each text's tokens, oldest first, L at most 256. ends: [E] columns
        at which spans end. lengths: [B, E] tokens of each span, at most end + 1. Returns [B, E].
        """
        width = hashed.shape[1]
        sums = np.zeros((hashed.shape[0], width + 1), np.uint64)
        np.cumsum(hashed * self._down[:width], axis=1, out=sums[:, 1:])
        first = np.arange(sums.shape[0])[:, None] * (width + 1) + ends + 1 - lengths
        out: Hashes = (sums[:, ends + 1] - sums.take(first)) * self._up[ends]
        return out


def index_keys(raw: Hashes) -> Hashes:
    """Index keys of raw hashes: the low half stirred by the high half, and never 0."""
    return np.maximum(raw ^ (raw >> np.uint64(32)), np.uint64(1))
