"""Thousands of requests of every kind against a running server: nothing leaks, nothing hangs.

Whole replies and streams; greedy, sampled, filtered and penalised; ends by length, stop string and
stop id; grammars; several completions of one prompt; long prompts; the chat route; clients that
abort and clients that hang up. After each quarter the server must be idle, every KV slot free, its
answer to one stored request as before, and its memory where it was after the first quarter.
--launch starts a server of ours and stops it at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import psutil
import uvloop

from sgl_spec.bench.load import Call, Connection, Reply, Target, ask
from sgl_spec.bench.own_server import OwnServer, end_of, own_server
from sgl_spec.bench.report import provenance, say, table, write_row
from sgl_spec.bench.serving import DEFAULT_URL, read_prompts
from sgl_spec.errors import SglSpecError

KINDS = (
    *("greedy", "sampled", "filtered", "penalised", "stop", "stop id", "one token", "json"),
    *("regex", "several", "long prompt", "chat", "logprobs", "abort", "leave"),
)
QUARTERS = 4
GROWTH_MB = 256  # that memory may grow by after the first quarter
_DRAIN_S = 30.0
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Job:
    """A request and what its client does. patience: seconds until it aborts or leaves."""

    kind: str
    call: Call
    stream: bool
    patience: float


@dataclass(slots=True)
class Findings:
    """What came of it. ends: how requests ended, by kind. memory_mb: after each quarter, of the
    server's processes (None where it is not ours) and of the GPU (None without one)."""

    ends: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    tokens: int = 0
    slowest_s: float = 0.0
    seconds: float = 0.0
    memory_mb: list[dict[str, float | None]] = field(default_factory=list)


def make_jobs(count: int, seed: int, most: int, long_words: int) -> list[Job]:
    """Every kind in turn. most: new tokens of the longest."""
    rng = random.Random(seed)
    texts = [line["prompt"] for line in read_prompts("bench96")]
    words = " ".join(texts).split()
    return [
        _job(KINDS[i % len(KINDS)], i, rng, texts, words, most, long_words) for i in range(count)
    ]


def _job(
    kind: str,
    number: int,
    rng: random.Random,
    texts: Sequence[str],
    words: Sequence[str],
    most: int,
    long_words: int,
) -> Job:
    params: dict[str, Any] = {
        "max_new_tokens": rng.randint(min(8, most), most),
        "temperature": 0.0 if kind == "greedy" else rng.choice([0.0, 0.7, 1.0]),
        "sampling_seed": number,
        "ignore_eos": rng.random() < 0.5,
    }
    text = rng.choice(texts)
    if kind == "long prompt":
        start = rng.randrange(max(1, len(words) - long_words))
        text = " ".join(words[start : start + rng.randint(long_words // 4, long_words)])
    params |= _settings(kind, rng)
    stream = rng.random() < 0.5 and kind != "several"
    if kind == "chat":
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": params["max_new_tokens"],
            "temperature": params["temperature"],
            "stream": stream,
        }
        return Job(kind, Call("/v1/chat/completions", body), stream, 0.0)
    body = {"text": text, "sampling_params": params, "stream": stream, "rid": f"soak-{number}"}
    if kind == "logprobs":
        body |= {"return_logprob": True, "top_logprobs_num": 2}
    return Job(kind, Call("/generate", body), stream, rng.uniform(0, 0.5))


def _settings(kind: str, rng: random.Random) -> dict[str, Any]:
    """Sampling parameters that make a kind."""
    if kind == "json":
        return {"json_schema": orjson.dumps(_SCHEMA).decode(), "ignore_eos": False}
    made: dict[str, dict[str, Any]] = {
        "sampled": {"temperature": 1.0},
        "filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        "penalised": {"frequency_penalty": 0.5, "presence_penalty": 0.2, "logit_bias": {"11": 3.0}},
        "stop": {"stop": [rng.choice([".", " the", "\n"]), "never said"]},
        "stop id": {"stop_token_ids": [rng.randrange(3, 400) for _ in range(20)]},
        "one token": {"max_new_tokens": 1},
        "regex": {"regex": "[a-z]{3,20}( [a-z]{2,9}){2,6}[.]", "ignore_eos": False},
        "several": {"n": 3, "temperature": 1.0},
    }
    return made.get(kind, {})


async def run_job(target: Target, job: Job, found: Findings) -> None:
    """Send it and note how it ended."""
    start = time.perf_counter()
    try:
        end = await _ended(target, job, found)
    except (SglSpecError, KeyError, TypeError, ValueError) as error:
        end = "problem"
        found.problems.append(f"{job.kind}: {type(error).__name__}: {error}")
    found.ends[f"{job.kind}: {end}"] += 1
    found.slowest_s = max(found.slowest_s, time.perf_counter() - start)


async def _ended(target: Target, job: Job, found: Findings) -> str:
    connection = Connection(target)
    sent = connection.send(target.request("POST", job.call.path, orjson.dumps(job.call.body)))
    try:
        if job.kind == "leave":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(sent, job.patience)
            return "left"
        if job.kind == "abort":
            reply, _ = await asyncio.gather(sent, _abort(target, job))
        else:
            reply = await sent
        return _end_of(reply, job, found)
    finally:
        connection.close()


async def _abort(target: Target, job: Job) -> None:
    await asyncio.sleep(job.patience)
    reply = await ask(target, "POST", "/abort_request", {"rid": job.call.body["rid"]})
    if reply.problem:
        raise SglSpecError(f"/abort_request: {reply.problem}")


def _end_of(reply: Reply, job: Job, found: Findings) -> str:
    """How a reply says it ended. Raises `SglSpecError` for one that is not whole."""
    if reply.problem:
        raise SglSpecError(reply.problem)
    last: Any = None
    if not job.stream:
        last = orjson.loads(reply.content)
    else:
        events = [part for part in reply.content.split(b"\n\n") if part.strip()]
        if events[-1] != b"data: [DONE]":
            raise SglSpecError(f"a stream that ends in {events[-1][:80]!r}")
        last = orjson.loads(events[-2].removeprefix(b"data: "))
    one = last[0] if isinstance(last, list) else last
    if "choices" in one:
        return str(one["choices"][0]["finish_reason"])
    meta = one["meta_info"]
    tokens = meta["completion_tokens"]
    most = job.call.body["sampling_params"]["max_new_tokens"]  # type: ignore[index]
    if tokens != len(one["output_ids"]) or tokens > most:
        raise SglSpecError(f"{tokens} tokens of {most}, {len(one['output_ids'])} ids")
    found.tokens += tokens
    return str(meta["finish_reason"]["type"])


async def soak(
    target: Target, jobs: Sequence[Job], clients: int, own: OwnServer | None
) -> Findings:
    """All jobs, and the checks behind each quarter."""
    found, start = Findings(), time.perf_counter()
    stored = await _stored_answer(target)
    size = -(-len(jobs) // QUARTERS)
    for first in range(0, len(jobs), size):
        todo = iter(jobs[first : first + size])
        await asyncio.gather(*[_client(target, todo, found) for _ in range(clients)])
        await _check_idle(target, found)
        if await _stored_answer(target) != stored:
            found.problems.append("the stored request was answered in another way")
        found.memory_mb.append({"server": _server_mb(own), "gpu": _gpu_mb()})
        done, waited = min(first + size, len(jobs)), time.perf_counter() - start
        say(f"{done} of {len(jobs)} after {waited:.0f} s, {len(found.problems)} problems")
    found.seconds = time.perf_counter() - start
    _check_memory(found)
    return found


async def _client(target: Target, todo: Iterator[Job], found: Findings) -> None:
    for job in todo:
        await run_job(target, job, found)


async def _stored_answer(target: Target) -> list[int]:
    """What the server, its caches empty, says to one greedy prompt."""
    await _post(target, "/flush_cache?timeout=30", {})
    params = {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True}
    reply = await _post(target, "/generate", {"text": "The sea is", "sampling_params": params})
    ids: list[int] = reply["output_ids"]
    return ids


async def _post(target: Target, path: str, body: dict[str, Any]) -> Any:
    reply = await ask(target, "POST", path, body)
    if reply.problem:
        raise SglSpecError(f"{path}: {reply.problem}")
    return orjson.loads(reply.content) if reply.content[:1] in (b"{", b"[") else None


async def _state(target: Target) -> dict[str, Any]:
    reply = await ask(target, "GET", "/server_info")
    if reply.problem:
        raise SglSpecError(f"/server_info: {reply.problem}")
    state: dict[str, Any] = orjson.loads(reply.content)["internal_states"][0]
    return state


async def _check_idle(target: Target, found: Findings) -> None:
    """Nothing runs, and behind a flush every slot is free."""
    deadline = time.monotonic() + _DRAIN_S
    while (now := await _state(target))["running"] + now["queued"]:
        if time.monotonic() > deadline:
            found.problems.append(f"{now['running']} running, {now['queued']} queued at the end")
            return
        await asyncio.sleep(0.05)
    await _post(target, "/flush_cache?timeout=30", {})
    now = await _state(target)
    capacity = now["memory_usage"]["token_capacity"]
    if now["free_tokens"] != capacity or now["held_tokens"] or now["cached_tokens"]:
        kept = {name: now[name] for name in ("free_tokens", "held_tokens", "cached_tokens")}
        found.problems.append(f"slots are missing: {kept} of {capacity}")


def _server_mb(own: OwnServer | None) -> float | None:
    """Resident memory of the server's processes."""
    if own is None:
        return None
    total = 0
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getsid(process.pid) == own.pid:
                total += process.memory_info().rss
    return total / 1e6


def _gpu_mb() -> float | None:
    """Memory in use on the first GPU, by whomever."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return float(done.stdout.splitlines()[0])


def _check_memory(found: Findings) -> None:
    for name in ("server", "gpu"):
        values = [quarter[name] for quarter in found.memory_mb]
        first, last = values[0], values[-1]
        if first is not None and last is not None and last > first + GROWTH_MB:
            found.problems.append(f"memory of {name} grew from {first:.0f} to {last:.0f} MB")


def main(argv: Sequence[str]) -> None:
    """`python -m sgl_spec.bench soak`. Raises `SglSpecError` when something went wrong."""
    options = _parser().parse_args(argv)
    if options.launch is None:
        _run(options, argv, options.url, None)
        return
    with own_server(options.launch) as server:
        _run(options, argv, server.url, server)
        log = server.log.read_text(encoding="utf-8", errors="replace")
        if " ERROR " in log or "Traceback" in log:
            raise SglSpecError(f"the server's log has errors:\n{end_of(server.log)}")


def _run(options: argparse.Namespace, argv: Sequence[str], url: str, own: OwnServer | None) -> None:
    target = Target(url, None, options.timeout)
    jobs = make_jobs(options.requests, options.seed, options.max_tokens, options.long_words)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(soak(target, jobs, options.clients, own))
        server = runner.run(_state(target))
    print(table(["ended", "requests"], sorted(found.ends.items())))
    print(
        f"{len(jobs)} requests, {found.tokens} tokens in {found.seconds:.1f} s; the slowest took "
        f"{found.slowest_s:.1f} s; {server['retracted_total']} retractions; "
        f"{len(found.problems)} problems"
    )
    for name in ("server", "gpu"):
        values = [f"{mb:.0f}" for quarter in found.memory_mb if (mb := quarter[name]) is not None]
        if values:
            print(f"memory of {name} after each quarter: {', '.join(values)} MB")
    if options.json:
        command = ["python", "-m", "sgl_spec.bench", "soak", *argv]
        row = {name: getattr(found, name) for name in Findings.__slots__}
        row["retracted"] = server["retracted_total"]
        write_row(Path(options.json), provenance(command, options.seed) | row)
    if found.problems:
        raise SglSpecError("\n".join(found.problems[:20]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_spec.bench soak", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--url", default=DEFAULT_URL)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=160, help="of the longest answers")
    parser.add_argument("--long-words", type=int, default=3000, help="of the longest prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of one request")
    parser.add_argument("--json", help="append one JSON row to this file")
    parser.add_argument(
        "--launch",
        nargs=argparse.REMAINDER,
        metavar="FLAG",
        help="start a server of ours with all the flags that follow, and stop it at the end",
    )
    return parser
