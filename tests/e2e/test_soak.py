"""Hundreds of requests of every kind over a pool that is too small: nothing leaks, nothing sticks.

Texts are compared with those of the plain engine in this process, which decodes the same requests
in one batch from a large pool.
"""

from __future__ import annotations

import functools
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from serving import Launch, Server
from talk import (
    Canary,
    Reply,
    accepted,
    body,
    check_counts,
    drained,
    generate,
    send,
    state,
    stream,
    stream_events,
    together,
)
from tiny import end_on, make_tiny

from sgl_spec import LLM, Completion

VOCAB = 512
POOL = 480  # holds about two of the longest requests; sixteen may run
STALL_S = 10.0
KINDS = (
    *("length", "eos", "stop", "length", "stop id", "one token", "abort", "leave"),
    *("penalised", "filtered", "regex"),
)
SETTINGS: dict[str, dict[str, Any]] = {
    "penalised": {"frequency_penalty": 0.5, "presence_penalty": 0.2, "logit_bias": {"11": 3.0}},
    "filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "regex": {"regex": "[a-z]{3,20}( [a-z]{2,9}){2,6}[.]", "ignore_eos": False},
}

# What the scheduler expects of a request when it lets it in is a fraction of the longest of these.
LENGTHS = {"one token": (1, 1), "length": (120, 240)}


@dataclass(frozen=True)
class Job:
    """One request and what its client does with it."""

    name: str
    kind: str
    prompt: list[int]
    sampling: dict[str, Any]
    stream: bool
    patience: float  # seconds until the client aborts or leaves, if it does


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that ends some of its texts."""
    return end_on(make_tiny(tmp_path_factory.mktemp("soak")), range(4, VOCAB, 41))


@pytest.fixture(scope="module")
def plain(model: Path) -> LLM:
    return LLM(str(model), max_total_tokens=30_000, max_running_requests=32)


def make_jobs(count: int, seed: int, plain: LLM) -> list[Job]:
    """Every kind in turn; a third of the prompts share a beginning."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB) for _ in range(40)]
    return [_job(i, rng, shared, plain) for i in range(count)]


def _job(i: int, rng: random.Random, shared: list[int], plain: LLM) -> Job:
    kind = KINDS[i % len(KINDS)]
    prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 50))]
    sampling: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.8, 1.0]),
        "seed": i,
        "max_new_tokens": rng.randint(*LENGTHS.get(kind, (20, 120))),
        "ignore_eos": kind != "eos",
    }
    if kind == "stop":
        letters = plain.engine.tokenizer.decode([rng.randrange(259, VOCAB)])
        sampling["stop"] = [letters, "never said"]
    elif kind == "stop id":
        sampling["stop_token_ids"] = rng.sample(range(3, VOCAB), 20)
    sampling |= SETTINGS.get(kind, {})
    prompt = shared + prompt if i % 3 == 0 else prompt
    return Job(f"job-{i}", kind, prompt, sampling, i % 2 == 0, rng.uniform(0, 0.3))


def run(server: Server, job: Job) -> Reply | None:
    """The reply; None when the client did not wait for it."""
    if job.kind == "leave":
        connection = send(server, body(job.prompt, stream=job.stream, **job.sampling))
        time.sleep(job.patience)
        connection.close()
        return None
    if job.kind != "abort":
        return (stream if job.stream else generate)(server, job.prompt, **job.sampling)
    request = body(job.prompt, stream=job.stream, **job.sampling) | {"rid": job.name}

    def ask() -> Reply:
        if job.stream:
            return stream_events(server, request)[-1]
        reply: Reply = server.client.post("/generate", json=request).json()
        return reply

    def abort() -> Reply:
        time.sleep(job.patience)
        assert server.client.post("/abort_request", json={"rid": job.name}).status_code == 200
        return {}

    reply = together([ask, abort], 2)[0]
    check_counts(reply, job.sampling)
    return reply


def check(job: Job, reply: Reply | None, expected: Completion) -> str:
    """The reply is the plain engine's, or the beginning of it; returns how it ended."""
    if reply is None:
        return "left"
    finish = reply["meta_info"]["finish_reason"]
    if finish["type"] == "abort":
        assert job.kind == "abort"
        ids = reply["output_ids"]
        assert ids == expected.output_ids[: len(ids)]
        return "abort"
    assert reply["output_ids"] == expected.output_ids, job
    assert reply["text"] == expected.text, job
    assert (finish["type"], finish.get("matched")) == (
        expected.finish.kind,
        expected.finish.matched,
    )
    return str(finish["type"])


def soak(
    server: Server, plain: LLM, jobs: Sequence[Job], waves: Sequence[int], clients: int
) -> None:
    """Run `jobs`; after each count of `waves` the server must be empty and its old self."""
    expected = plain.generate([job.prompt for job in jobs], [job.sampling for job in jobs])
    canary = Canary(server, [5, 6, 7])
    ends: Counter[str] = Counter()
    replies: list[Reply | None] = []
    for start, end in zip([0, *waves], waves, strict=False):
        replies += together(
            [functools.partial(run, server, job) for job in jobs[start:end]], clients
        )
        drained(server)
        canary.alive()
    for job, reply, one in zip(jobs, replies, expected, strict=True):
        ends[check(job, reply, one)] += 1
    assert set(ends) == {"left", "abort", "length", "stop"}, ends
    kept = [reply for reply in replies if reply is not None]
    assert sum(map(accepted, kept)) > 0
    retracted = state(server)["retracted_total"]
    print(f"{len(jobs)} requests: {dict(ends)}, {retracted} retractions")
    assert retracted > 0, "the pool was meant to run out"
    assert any(reply["meta_info"]["num_retractions"] for reply in kept)


FLAGS = ("--speculative-algorithm", "NGRAM", "--max-running-requests", "16")


@pytest.mark.parametrize("page", [1, 16])
def test_five_hundred_requests(launch: Launch, model: Path, plain: LLM, page: int) -> None:
    # A forward of the tiny model takes hardly longer than asking for drafts.
    flags = (*FLAGS, "--speculative-verify-whole-trees", "--page-size", str(page))
    server = launch(*flags, "--max-total-tokens", str(POOL), model=model)
    soak(server, plain, make_jobs(500, page, plain), (1, 10, 100, 500), 24)
    server.stop()
    log = server.stderr.read_text()
    assert "leak" not in log
    assert " ERROR " not in log


@pytest.mark.slow
def test_two_thousand_requests(launch: Launch, model: Path, plain: LLM) -> None:
    server = launch(*FLAGS, "--max-total-tokens", "2000", model=model)
    soak(server, plain, make_jobs(2000, 3, plain), (500, 1000, 2000), 50)


# --- a steady load --------------------------------------------------------------------------------


def timed_stream(server: Server, prompt: list[int], sampling: dict[str, Any]) -> float:
    """The longest pause between two events of a stream, in seconds."""
    request = body(prompt, stream=True, **sampling)
    longest, last = 0.0, None
    with server.client.stream("POST", "/generate", json=request) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            now = time.monotonic()
            if line and last is not None:
                longest = max(longest, now - last)
            last = now if line else last
    return longest


def steady_load(server: Server, count: int, clients: int) -> None:
    """Random arrivals, lengths 1 to 300, half at temperature 0.8: no error, and no running request
    waits ten seconds for its next token."""
    rng = random.Random(4)

    def one(pause: float, prompt: list[int], sampling: dict[str, Any]) -> float:
        time.sleep(pause)
        return timed_stream(server, prompt, sampling)

    jobs = []
    for i in range(count):
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 80))]
        sampling = {
            "temperature": 0.8 * (i % 2),
            "max_new_tokens": rng.randint(1, 300),
            "ignore_eos": True,
        }
        jobs.append(functools.partial(one, rng.expovariate(20), prompt, sampling))
    pauses = together(jobs, clients)
    assert max(pauses) < STALL_S
    drained(server)


def test_a_steady_load(launch: Launch, model: Path) -> None:
    steady_load(launch(*FLAGS, "--max-total-tokens", "4000", model=model), 150, 24)


@pytest.mark.slow
def test_a_long_steady_load(launch: Launch, model: Path) -> None:
    steady_load(launch(*FLAGS, "--max-total-tokens", "4000", model=model), 2000, 50)
