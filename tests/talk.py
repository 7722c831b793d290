"""Requests to a real server, and what must be true of every reply and of every idle server."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx
from serving import Server

Prompt = str | Sequence[int]
Reply = dict[str, Any]
T = TypeVar("T")

DRAIN_S = 5.0


def body(prompt: Prompt, *, stream: bool = False, **sampling: Any) -> dict[str, Any]:
    """A /generate body for one prompt."""
    where = "text" if isinstance(prompt, str) else "input_ids"
    given = prompt if isinstance(prompt, str) else list(prompt)
    return {where: given, "stream": stream, "sampling_params": sampling}


def generate(server: Server, prompt: Prompt, **sampling: Any) -> Reply:
    """One reply that comes whole."""
    answer = server.client.post("/generate", json=body(prompt, **sampling))
    assert answer.status_code == 200, answer.text
    reply: Reply = answer.json()
    check_counts(reply, sampling)
    return reply


def stream(server: Server, prompt: Prompt, **sampling: Any) -> Reply:
    """The last event of a stream, after checking that each event only adds to the one before."""
    events = stream_events(server, body(prompt, stream=True, **sampling))
    for before, after in itertools.pairwise(events):
        assert after["text"].startswith(before["text"]), (before["text"], after["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
    check_counts(events[-1], sampling)
    return events[-1]


def stream_events(server: Server, request: dict[str, Any], route: str = "/generate") -> list[Any]:
    """The events of a stream, without the [DONE] that must end it."""
    with server.client.stream("POST", route, json=request) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]", lines[-1]
    return [json.loads(line) for line in lines[:-1]]


def in_both_modes(server: Server, prompt: Prompt, **sampling: Any) -> Reply:
    """The reply to a request that was sent streamed and not: one text, one end."""
    whole, streamed = generate(server, prompt, **sampling), stream(server, prompt, **sampling)
    for key in ("text", "output_ids"):
        assert whole[key] == streamed[key], key
    for key in ("finish_reason", "completion_tokens", "prompt_tokens"):
        assert whole["meta_info"][key] == streamed["meta_info"][key], key
    return whole


def check_counts(reply: Reply, sampling: dict[str, Any]) -> None:
    """Ids, usage and speculation counts of a finished reply agree with each other."""
    meta, ids = reply["meta_info"], reply["output_ids"]
    assert meta["completion_tokens"] == len(ids) <= sampling.get("max_new_tokens", 128)
    finish = meta["finish_reason"]
    assert finish is not None
    if finish["type"] == "length":
        assert finish["length"] == len(ids)
    if "spec_verify_ct" in meta:
        histogram = meta["spec_correct_drafts_histogram"]
        verified = meta["spec_verify_ct"]
        assert 1 <= verified <= len(ids) - 1
        assert sum(histogram) == verified
        assert sum(i * n for i, n in enumerate(histogram)) == meta["spec_num_correct_drafts"]
        assert meta["spec_num_correct_drafts"] <= meta["spec_num_proposed_drafts"]
        # Each prefill draws a token that is no round's: the first, and those after retractions.
        emitted = round(meta["spec_accept_length"] * verified)
        assert len(ids) - 1 - meta["num_retractions"] <= emitted <= len(ids) - 1


def accepted(reply: Reply) -> int:
    """Draft tokens that a reply owes its tokens to."""
    return int(reply["meta_info"].get("spec_num_correct_drafts", 0))


def speculated(replies: Iterable[Reply]) -> bool:
    """Whether rounds gave out at least 1.5 tokens on average, so that blocks were exercised."""
    metas = [reply["meta_info"] for reply in replies]
    rounds = sum(meta.get("spec_verify_ct", 0) for meta in metas)
    emitted = sum(meta["completion_tokens"] - 1 for meta in metas)
    return rounds > 0 and emitted >= 1.5 * rounds


def send(server: Server, request: dict[str, Any]) -> socket.socket:
    """A connection on which a /generate request was just sent; closing it is hanging up."""
    data = json.dumps(request).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    url = httpx.URL(server.url)
    connection = socket.create_connection((url.host, url.port), timeout=60)
    connection.sendall(head.encode() + data)
    return connection


def together(calls: Sequence[Callable[[], T]], clients: int = 16) -> list[T]:
    """Results of `calls`, run by so many clients at once, in the order given."""
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(lambda call: call(), calls))


def state(server: Server) -> dict[str, Any]:
    """The engine's counts as of now."""
    answer = server.client.get("/server_info")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["internal_states"][0]
    return found


def wait_for(holds: Callable[[], bool], seconds: float, what: str) -> None:
    """Until `holds()`; fails with `what` when the time is up."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what} after {seconds} s"
        time.sleep(0.02)


def busy(server: Server) -> int:
    """Requests that run or wait."""
    now = state(server)
    return int(now["running"] + now["queued"])


def flush(server: Server) -> None:
    """Empty the prefix cache and the drafter's memory."""
    answer = server.client.post("/flush_cache")
    assert answer.status_code == 200, answer.text


def drained(server: Server, seconds: float = DRAIN_S) -> None:
    """Nothing runs, and after a flush every slot of the pool is free: none leaked, to the token."""
    wait_for(lambda: busy(server) == 0, seconds, "requests are still there")
    flush(server)
    now = state(server)
    assert now["held_tokens"] == now["cached_tokens"] == 0, now
    assert now["free_tokens"] == now["memory_usage"]["token_capacity"], now


class Canary:
    """A stored greedy request whose ids must never change while the server lives."""

    def __init__(self, server: Server, prompt: Prompt, tokens: int = 12) -> None:
        self._server, self._prompt, self._tokens = server, prompt, tokens
        self._ids = self._run()

    def _run(self) -> list[int]:
        reply = generate(
            self._server, self._prompt, temperature=0, max_new_tokens=self._tokens, ignore_eos=True
        )
        ids: list[int] = reply["output_ids"]
        return ids

    def alive(self) -> None:
        """The server is healthy and still gives the stored answer."""
        assert self._server.client.get("/health").status_code == 200
        assert self._run() == self._ids
