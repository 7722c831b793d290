"""How likely a drafted token is to be accepted, learned while serving.

A candidate falls into a bucket by what the trie knows about it: the length of the match it
continues, its share of what followed that match, how often the match was seen, its rank. Each
bucket keeps a decayed success rate with a prior; each request adds its own offset in log-odds, the
running answer to "does this request accept more or less than its buckets promise".
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

UNKNOWN_SHARE = -1.0
_LENGTH_EDGES = [2, 3, 4, 5, 7, 10, 14, 17]  # 1 | 2 | 3 | 4 | 5-6 | 7-9 | 10-13 | 14-16 | 17+
_EVIDENCE_EDGES = [2, 4, 12]
_SHARE_EDGES = [2, 5, 10, 15, 19]  # twentieths: 0.1, 0.25, 0.5, 0.75, 0.95
_RANKS, _EVIDENCES = 2, len(_EVIDENCE_EDGES) + 1
_SHARES = len(_SHARE_EDGES) + 2  # the first: share unknown
_BY_EVIDENCE = _RANKS * np.searchsorted(_EVIDENCE_EDGES, np.arange(13), side="right")
_BY_SHARE = _RANKS * _EVIDENCES * (1 + np.searchsorted(_SHARE_EDGES, np.arange(21), side="right"))
_BY_SHARE = np.append(_BY_SHARE, np.zeros(20, np.int64))  # UNKNOWN_SHARE * 20 counts from the end
_BY_LENGTH = np.searchsorted(_LENGTH_EDGES, np.arange(18), side="right")
_BY_LENGTH *= _RANKS * _EVIDENCES * _SHARES
# From greedy outputs of SmolLM2-135M-Instruct, a little lower for matches of one and two tokens.
_PRIOR_BY_LENGTH = np.array([0.15, 0.3, 0.45, 0.55, 0.68, 0.75, 0.8, 0.85, 0.92])
_PRIOR_BY_SHARE = np.array([0.75, 0.06, 0.2, 0.35, 0.5, 0.75, 1.0])  # the first: share unknown
_PRIOR_WEIGHT = 6.0  # trials that the prior counts for
_MEMORY = 400.0  # trials a bucket remembers
_FADE_EVERY = 16  # rounds between steps back to the prior, so that a bucket that is never tried
_FADE = 0.985  # any more gets another chance, within about a thousand rounds
_STEP = 0.12  # how far one surprise moves a request's offset
_OFFSET_DECAY = 0.985
_MAX_OFFSET = 3.0
MAX_PROBABILITY = 0.985


class AcceptanceModel:
    """Success rates by bucket, offsets by request row."""

    def __init__(self, num_rows: int) -> None:
        """num_rows: request rows."""
        self._prior = _priors()
        self.offsets = np.zeros(num_rows)
        self.clear()

    def clear(self) -> None:
        """Forget everything learned."""
        self._tried = np.full(self._prior.size, _PRIOR_WEIGHT)
        self._won = self._prior * _PRIOR_WEIGHT
        self._log_odds = _log_odds(self._prior)
        self._age = 0
        self.offsets[:] = 0.0

    def start(self, row: int) -> None:
        """A new request has no record of its own."""
        self.offsets[row] = 0.0

    def bucket(self, length: Ints, share: Floats, evidence: Ints, rank: Ints) -> Ints:
        """Bucket numbers, elementwise.

        length: tokens of the match that the candidate continues. share: its part of what followed
        the match, or UNKNOWN_SHARE. evidence: occurrences of the match. rank: 0 for the match's
        first child.
        """
        out: Ints = _BY_LENGTH.take(np.minimum(length, 17))
        out = out + _BY_SHARE.take((share * 20).astype(np.int64))
        out += _BY_EVIDENCE.take(np.minimum(evidence, 12))
        return out + (rank > 0)

    def bucket_unseen(self, length: Ints) -> Ints:
        """Bucket numbers of candidates of which only the length of the match is known."""
        out: Ints = _BY_LENGTH.take(np.minimum(length, 17))
        return out

    def probability(self, bucket: Ints, rows: Ints) -> Floats:
        """P(accepted | parent accepted) of candidates, by bucket and request row; both
        broadcast."""
        odds = self._log_odds.take(bucket) + self.offsets.take(rows)
        p: Floats = 1.0 / (1.0 + np.exp(-odds))
        return np.minimum(p, MAX_PROBABILITY)

    def learn(self, rows: Ints, bucket: Ints, expected: Floats, won: Bools) -> None:
        """Trials that happened, one entry each; `expected` is the probability given for it then."""
        np.add.at(self._tried, bucket, 1.0)
        np.add.at(self._won, bucket, won.astype(np.float64))
        touched = np.flatnonzero(np.bincount(bucket, minlength=self._tried.size))
        excess = np.minimum(1.0, _MEMORY / self._tried[touched])
        self._tried[touched] *= excess
        self._won[touched] *= excess
        self._log_odds[touched] = _log_odds(self._won[touched] / self._tried[touched])
        self._age += 1
        if self._age % _FADE_EVERY == 0:
            self._fade()
        surprise = np.bincount(rows, won - expected, minlength=self.offsets.size)
        np.clip(
            (self.offsets + _STEP * surprise) * _OFFSET_DECAY,
            -_MAX_OFFSET,
            _MAX_OFFSET,
            out=self.offsets,
        )

    def _fade(self) -> None:
        self._tried += (1.0 - _FADE) * (_PRIOR_WEIGHT - self._tried)
        self._won += (1.0 - _FADE) * (_PRIOR_WEIGHT * self._prior - self._won)
        self._log_odds = _log_odds(self._won / self._tried)


def _log_odds(p: Floats) -> Floats:
    p = np.clip(p, 1e-3, 1.0 - 1e-3)
    return np.log(p / (1.0 - p))


def _priors() -> Floats:
    """Prior rate of every bucket: mildly hopeful for long matches, not for those of one or two
    tokens."""
    rate = _PRIOR_BY_LENGTH[:, None, None, None] * _PRIOR_BY_SHARE[None, :, None, None]
    rate = rate * np.array([0.9, 1.0, 1.0, 1.0])[None, None, :, None]
    rate = rate * np.array([1.0, 0.6])[None, None, None, :]
    return np.ascontiguousarray(rate).reshape(-1)
