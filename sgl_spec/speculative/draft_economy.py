"""Whether a draft model on a GPU rests: rounds that bring fewer tokens per millisecond than plain
decoding would are not drafted for, and tried again now and then. No model, no clock."""

from __future__ import annotations

from collections import defaultdict

MIN_GAIN = 0.95  # of plain decoding: its time is a best case, which drafted rounds' is not
TRIAL = 12  # rounds that are drafted before they are judged
REST = 8  # rounds of a first rest; every further one is twice as long
MAX_REST = 128
_BLEND = 1 / 12  # weight of the newest round


class DraftEconomy:
    """Running figures by batch size; one per drafter."""

    def __init__(self) -> None:
        self._rounds: dict[int, tuple[float, float]] = {}  # tokens and ms of a drafted one
        self._drafted: dict[int, int] = defaultdict(int)  # rounds of this trial
        self._resting: dict[int, int] = defaultdict(int)  # rounds to go
        self._rest: dict[int, int] = defaultdict(lambda: REST)  # length of the next rest

    def drafts(self, requests: int, plain_ms: float | None) -> bool:
        """Whether to draft for a round of `requests`, which takes `plain_ms` without drafts; None
        stands for 'at any price'."""
        size = requests.bit_length()
        if plain_ms is None:
            return True
        if self._resting[size]:
            self._resting[size] -= 1
            return False
        if self._drafted[size] < TRIAL:
            return True
        if self._rate(size) >= MIN_GAIN * requests / plain_ms:
            self._rest[size] = REST
            return True
        self._drafted[size] = 0
        self._resting[size] = self._rest[size] - 1
        self._rest[size] = min(2 * self._rest[size], MAX_REST)
        return False

    def note_round(self, requests: int, tokens: int, ms: float) -> None:
        """A drafted round of `requests` brought `tokens` in `ms`, drafting and verifying."""
        size = requests.bit_length()
        had, took = self._rounds.get(size, (tokens, ms))
        self._rounds[size] = (had + _BLEND * (tokens - had), took + _BLEND * (ms - took))
        self._drafted[size] += 1

    def clear(self) -> None:
        """Forget what was learned of acceptance; times stay."""
        self._rounds.clear()
        for counts in (self._drafted, self._resting, self._rest):
            counts.clear()

    def _rate(self, size: int) -> float:
        """Tokens per ms of drafted rounds, 0 where none is known."""
        tokens, ms = self._rounds.get(size, (0.0, 1.0))
        return tokens / ms
