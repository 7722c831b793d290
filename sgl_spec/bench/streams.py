"""What streamed replies say: tokens and when they came, accept length, errors.

A *chunk* is what one read brought: events that arrive together are one. With speculation it carries
several tokens. The latencies of a request with n tokens, whose first chunk comes at t_1 and whose
last one at t_k:

- TTFT: t_1 minus the time at which the request was sent;
- TPOT: (t_k - t_1) / (n - 1);
- inter-token latency: a chunk of m tokens that comes d after the chunk before it counts as m
  tokens of d / m each, so that the mean is the time a token takes and bursts do not count as zeros.
  What the first chunk holds behind its first token counts nowhere;
- chunk gap: that d, once per chunk: what a reader sees between two changes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from sgl_spec.bench.client import Reply

_END = b"[DONE]"


@dataclass(slots=True)
class Answer:
    """One request. arrivals: time of each chunk that brought tokens, and how many (0 where the
    server tells only their total). emitted: tokens of rounds, verified: rounds; 0 if not told.
    histogram: entry i = rounds that kept exactly i draft tokens. ids: of the answer, where the
    server tells them; text: the answer."""

    sent: float
    done: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    counted: bool = True
    emitted: float = 0.0
    verified: int = 0
    histogram: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    text: str = ""
    simulated: float | None = None
    problem: str = ""


def read_answer(reply: Reply) -> Answer:
    """The events of a reply of any of the three interfaces."""
    answer = Answer(reply.sent, reply.done, problem=reply.problem)
    if answer.problem:
        return answer
    pending, known = b"", 0
    for when, piece in reply.pieces:
        *events, pending = (pending + piece).split(b"\n\n")
        text = False
        for event in events:
            text |= _take(answer, event.strip())
        if answer.tokens > known:
            answer.arrivals.append((when, answer.tokens - known))
            known = answer.tokens
        elif text:
            answer.arrivals.append((when, 0))
    _close(answer)
    return answer


def _take(answer: Answer, event: bytes) -> bool:
    """Note what an event says; whether it brought text."""
    data = event.removeprefix(b"data:").strip()
    if not event.startswith(b"data:") or data == _END:
        return False
    try:
        content = orjson.loads(data)
    except orjson.JSONDecodeError:
        content = {"error": f"an event that is no JSON: {data[:80]!r}"}
    if content.get("error") is not None:
        answer.problem = answer.problem or f"error in the stream: {content['error']}"
        return False
    meta = content.get("meta_info")
    if meta is not None:
        answer.tokens = meta["completion_tokens"]
        answer.prompt_tokens = meta["prompt_tokens"]
        answer.text = content.get("text", "")
        answer.ids = content.get("output_ids") or []
        _take_spec(answer, meta)
        return False
    return _take_openai(answer, content)


def _take_openai(answer: Answer, content: dict[str, Any]) -> bool:
    usage = content.get("usage")
    if usage is not None:
        answer.tokens = usage.get("completion_tokens") or 0
        answer.prompt_tokens = usage["prompt_tokens"]
    _take_spec(answer, (content.get("sglext") or {}).get("spec_tokens_details") or {})
    answer.simulated = content.get("simulated_accept_length", answer.simulated)
    choice = (content.get("choices") or [{}])[0]
    text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    answer.text += text
    return bool(text)


def _take_spec(answer: Answer, details: dict[str, Any]) -> None:
    answer.simulated = details.get("simulated_accept_length", answer.simulated)
    if details.get("spec_verify_ct"):
        answer.verified = details["spec_verify_ct"]
        answer.emitted = details["spec_accept_length"] * answer.verified
        answer.histogram = details.get("spec_correct_drafts_histogram") or []


def _close(answer: Answer) -> None:
    """Judge the whole: chunks without counts make all of them unknown."""
    if not answer.problem and not (answer.tokens and answer.arrivals):
        answer.problem = "no tokens in the reply, or no count of them (usage)"
    answer.counted = all(count for _, count in answer.arrivals)
    if not answer.counted:  # the usage at the end is no arrival
        answer.arrivals = [arrival for arrival in answer.arrivals if not arrival[1]]


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, percentiles and maximum of latencies, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def spread(seconds: Sequence[float]) -> Spread | None:
    """None of nothing. A percentile is the smallest value that this share does not exceed."""
    if not seconds:
        return None
    ordered = sorted(value * 1e3 for value in seconds)

    def at(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    mean = math.fsum(ordered) / len(ordered)
    return Spread(mean, at(0.5), at(0.9), at(0.99), ordered[-1])


@dataclass(frozen=True, slots=True)
class Level:
    """What a concurrency gave. seconds: from the first request sent to the last reply's end. short:
    answers with fewer tokens than asked for. itl_ms: None where a server does not tell how many
    tokens a chunk holds. accept_length: tokens of rounds over rounds, None where not told."""

    concurrency: int
    requests: int
    errors: int
    problems: list[str]
    short: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    tokens_per_s: float
    requests_per_s: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    chunk_gap_ms: Spread | None
    tokens_per_chunk: float | None
    accept_length: float | None
    simulated: float | None


def level_of(answers: Sequence[Answer], concurrency: int, max_tokens: int) -> Level:
    """Sums and percentiles; failed requests count as errors and for the time alone."""
    good = [answer for answer in answers if not answer.problem]
    bad = [answer.problem for answer in answers if answer.problem]
    seconds = max(a.done for a in answers) - min(a.sent or a.done for a in answers)
    tokens, verified = sum(a.tokens for a in good), sum(a.verified for a in good)
    gaps = [_gaps(a) for a in good]
    counted = bool(good) and all(a.counted for a in good)
    per_token = [gap / n for each in gaps for gap, n in each if n for _ in range(n)]
    return Level(
        concurrency=concurrency,
        requests=len(answers),
        errors=len(bad),
        problems=list(dict.fromkeys(bad))[:3],
        short=sum(a.tokens < max_tokens for a in good),
        seconds=seconds,
        prompt_tokens=sum(a.prompt_tokens for a in good),
        output_tokens=tokens,
        tokens_per_s=tokens / seconds,
        requests_per_s=len(good) / seconds,
        ttft_ms=spread([a.arrivals[0][0] - a.sent for a in good]),
        tpot_ms=spread([tpot(a) for a in good if a.tokens > 1]),
        itl_ms=spread(per_token) if counted else None,
        chunk_gap_ms=spread([gap for each in gaps for gap, _ in each]),
        tokens_per_chunk=tokens / sum(len(a.arrivals) for a in good) if counted else None,
        accept_length=sum(a.emitted for a in good) / verified if verified else None,
        simulated=next((a.simulated for a in good if a.simulated is not None), None),
    )


def _gaps(answer: Answer) -> list[tuple[float, int]]:
    """Time since the chunk before, and tokens, of every chunk but the first."""
    arrivals = answer.arrivals
    pairs = itertools.pairwise(arrivals)
    return [(when - before, count) for (before, _), (when, count) in pairs]


def tpot(answer: Answer) -> float:
    """Seconds a token behind the first chunk."""
    return (answer.arrivals[-1][0] - answer.arrivals[0][0]) / (answer.tokens - 1)
