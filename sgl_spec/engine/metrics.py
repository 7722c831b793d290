"""Counters of the engine, as plain numbers that only grow."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start.

    rounds: decode forwards. Speculation counts follow `request.SpecStats`: decode rounds only, a
    request's share of a round counts one verify. histogram: entry i = request rounds that kept
    exactly i draft tokens.
    """

    requests: int = 0
    admitted: int = 0
    aborted: int = 0
    refused: int = 0
    retracted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated: int = 0
    rounds: int = 0
    verify_ct: int = 0
    proposed: int = 0
    accepted: int = 0
    emitted: int = 0
    histogram: list[int] = field(default_factory=list)

    def add_round(self, *, proposed: int, accepted: int, emitted: int) -> None:
        """Count one request's part of one round."""
        self.verify_ct += 1
        self.proposed += proposed
        self.accepted += accepted
        self.emitted += emitted
        self.histogram.extend([0] * (accepted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1

    def as_dict(self) -> dict[str, Any]:
        """For `Control("state")`."""
        return {
            "requests_total": self.requests,
            "aborted_total": self.aborted,
            "refused_total": self.refused,
            "retracted_total": self.retracted,
            "prompt_tokens_total": self.prompt_tokens,
            "cached_tokens_total": self.cached_tokens,
            "generation_tokens_total": self.generated,
            "spec_verify_total": self.verify_ct,
            "spec_proposed_total": self.proposed,
            "spec_accepted_total": self.accepted,
            "spec_emitted_total": self.emitted,
            "spec_histogram": list(self.histogram),
        }


@dataclass(slots=True)
class Throughput:
    """Tokens per second over the last few seconds."""

    window_s: float = 5.0
    _marks: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, total: int) -> None:
        """Note the running total of generated tokens."""
        now = time.monotonic()
        self._marks.append((now, total))
        while len(self._marks) > 2 and now - self._marks[0][0] > self.window_s:
            self._marks.popleft()

    def rate(self) -> float:
        """Tokens per second between the oldest and the newest mark of the window; 0 when idle."""
        if len(self._marks) < 2 or time.monotonic() - self._marks[-1][0] > self.window_s:
            return 0.0
        (start, first), (end, last) = self._marks[0], self._marks[-1]
        return (last - first) / (end - start) if end > start else 0.0


DRAFTS_ENOUGH = 2000  # to judge a draft model by
NEAR_NOTHING = 0.01  # the accepted share of drafts that no draft model for its target falls below


def useless_drafts(now: EngineCounters) -> str | None:
    """What is wrong if almost no draft of a model is ever accepted; None while that is not so."""
    if now.proposed < DRAFTS_ENOUGH or now.accepted >= NEAR_NOTHING * now.proposed:
        return None
    return (
        f"The target accepted {now.accepted} of {now.proposed} tokens that the draft model "
        "proposed. Likely causes: it was trained for another target or another chat template, its "
        "vocabulary map (d2t) is lost or wrong, or it reads other layers than it was trained on."
    )


class RoundLog:
    """A log line every `interval` decode rounds, about the rounds since the last one. simulated:
    the accept length that the server was told to simulate, if it was."""

    def __init__(self, interval: int, simulated: float | None = None) -> None:
        self.interval = interval
        self._mark = "" if simulated is None else " (simulated)"
        self._last = EngineCounters()
        self._admitted = EngineCounters()
        self._since = time.monotonic()

    def prefill_line(
        self, now: EngineCounters, *, running: int, queued: int, used: float
    ) -> str | None:
        """The line about requests that were let in since the last such line, if there are any."""
        last, self._admitted = self._admitted, replace(now)
        if now.admitted == last.admitted:
            return None
        cached = now.cached_tokens - last.cached_tokens
        return (
            f"Prefill batch, #new-seq: {now.admitted - last.admitted}, "
            f"#new-token: {now.prompt_tokens - last.prompt_tokens - cached}, "
            f"#cached-token: {cached}, token usage: {used:.2f}, #running-req: {running}, "
            f"#queue-req: {queued}"
        )

    def line(self, now: EngineCounters, *, running: int, queued: int, used: float) -> str | None:
        """The line when it is due. used: share of the KV slots that requests hold."""
        last = self._last
        if now.rounds - last.rounds < self.interval:
            return None
        seconds = time.monotonic() - self._since
        self._last, self._since = replace(now), time.monotonic()
        verified, proposed = now.verify_ct - last.verify_ct, now.proposed - last.proposed
        parts = [f"#running-req: {running}", f"token usage: {used:.2f}"]
        if verified:
            length = (now.emitted - last.emitted) / verified
            parts.append(f"accept len: {length:.2f}{self._mark}")
            rate = (now.accepted - last.accepted) / proposed if proposed else 0.0
            parts.append(f"accept rate: {rate:.2f}{self._mark}")
        speed = (now.generated - last.generated) / seconds
        parts += [f"gen throughput (token/s): {speed:.2f}", f"#queue-req: {queued}"]
        return "Decode batch, " + ", ".join(parts)
