"""Whether a draft model's work pays: how deep to draft, and whether to draft at all.

A further level of a tree costs one forward of the draft. It is worth that if the tokens it may add,
per millisecond, are more than the rounds bring anyway. And rounds that bring fewer tokens per
millisecond than plain decoding would are not drafted for: the drafter rests, and tries again now
and then. All of it is measured while serving. No model, no clock: times come from the caller.
"""

from __future__ import annotations

from collections import defaultdict

DEEPER = 0.6  # share of its parent's chance that a level's best node is taken to have
MIN_GAIN = 1.03  # drafting must bring so much more than plain decoding
TRIAL = 4  # rounds that are drafted before they are judged
REST = 8  # rounds of a first rest; every further one is twice as long
MAX_REST = 128
_BLEND = 0.25  # weight of the newest measurement


class DraftEconomy:
    """Running figures by batch size; one per drafter."""

    def __init__(self) -> None:
        self._step_ms: dict[int, float] = {}  # of a draft forward, by power of two of its requests
        self._rates: dict[int, float] = {}  # tokens per ms of drafted rounds, likewise
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
        if self._rates[size] >= MIN_GAIN * requests / plain_ms:
            self._rest[size] = REST
            return True
        self._drafted[size] = 0
        self._resting[size] = self._rest[size] - 1
        self._rest[size] = min(2 * self._rest[size], MAX_REST)
        return False

    def deeper(self, requests: int, chances: float, plain_ms: float | None) -> bool:
        """Whether a tree batch should grow another level. chances: summed over the requests, that
        their best node so far is accepted."""
        size = requests.bit_length()
        step = self._step_ms.get(size)
        if plain_ms is None or step is None:
            return True
        rate = max(requests / plain_ms, self._rates.get(size, 0.0))
        return chances * DEEPER >= step * rate

    def note_step(self, requests: int, ms: float) -> None:
        """A further level took `ms`."""
        size = requests.bit_length()
        self._step_ms[size] = _blend(self._step_ms.get(size), ms)

    def note_round(self, requests: int, tokens: int, ms: float) -> None:
        """A drafted round of `requests` brought `tokens` in `ms`, drafting and verifying."""
        size = requests.bit_length()
        self._rates[size] = _blend(self._rates.get(size), tokens / ms)
        self._drafted[size] += 1

    def clear(self) -> None:
        """Forget what was learned of acceptance; times stay."""
        self._rates.clear()
        for counts in (self._drafted, self._resting, self._rest):
            counts.clear()


def _blend(old: float | None, new: float) -> float:
    return new if old is None else old + _BLEND * (new - old)
