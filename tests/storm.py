"""What clients do at their worst, and what a server must be like afterwards.

A round of the storm has well-behaved requests of every kind, clients that vanish, that never read,
that send half a request, and aborts. Whoever waits for an answer must get one end of it.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import httpx
import msgspec
import psutil
from serving import Server
from talk import body, drained, send, together

WORDS = ("river", "bridge", "stone", "and", "light", "one", "two", "three", "four", "under")
DRAIN_S = 60.0
ABORTS = 24


class Usage(msgspec.Struct):
    """What a process holds: resident memory in MB, descriptors, threads."""

    memory_mb: float
    descriptors: int
    threads: int


class Calm(msgspec.Struct):
    """A server after a round. ends: of the requests, by kind. free_tokens: of its KV pool."""

    seconds: float
    ends: dict[str, int]
    free_tokens: int
    api: Usage
    engine: Usage


class Storm:
    """Rounds of requests against one server. streams, mixed: requests of a round; a third of the
    streams vanish. new: most tokens of a request."""

    def __init__(
        self, server: Server, *, streams: int = 48, mixed: int = 100, new: int = 32, seed: int = 0
    ) -> None:
        self._server = server
        self._streams, self._mixed, self._new = streams, mixed, new
        self._rng = random.Random(seed)
        self._serial = itertools.count()

    def round(self) -> Calm:
        """One round; fails unless every request ended once and every slot is free again."""
        began = time.monotonic()
        ends: Counter[str] = Counter()
        with ExitStack() as stack:
            for connection in self._burdens():
                stack.callback(connection.close)
            ends.update(together([self._stream(i) for i in range(self._streams)], self._streams))
            ends.update(together([self._mixed_call(i) for i in range(self._mixed)], 24))
            ends.update(self._abort_storm())
        drained(self._server, DRAIN_S)
        return self._calm(time.monotonic() - began, ends)

    def _calm(self, seconds: float, ends: Counter[str]) -> Calm:
        time.sleep(1.2)  # an idle engine gives memory back, and closed connections are taken down
        client = self._server.client
        state = client.get("/server_info").json()["internal_states"][0]
        (engine,) = [p for p in self._server.family() if p.pid != self._server.process.pid]
        api = psutil.Process(self._server.process.pid)
        return Calm(seconds, dict(ends), state["free_tokens"], usage(api), usage(engine))

    def _request(self, *, stream: bool, **extra: Any) -> dict[str, Any]:
        rng = self._rng
        text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 60)))
        sampling = {
            "max_new_tokens": rng.randint(4, self._new),
            "temperature": rng.choice([0, 0.8]),
            "ignore_eos": True,
        }
        return body(text, stream=stream, **sampling | extra)

    def _stream(self, index: int) -> Callable[[], str]:
        request, patience = self._request(stream=True), self._rng.uniform(0, 1)
        call = self._vanish if index % 3 == 0 else self._follow
        return functools.partial(call, request, patience)

    def _vanish(self, request: dict[str, Any], patience: float) -> str:
        connection = send(self._server, request)
        time.sleep(patience)
        connection.close()
        return "vanished"

    def _follow(self, request: dict[str, Any], patience: float = 0) -> str:
        """A stream to its end, which comes once."""
        with self._server.client.stream("POST", "/generate", json=request) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line for line in answer.iter_lines() if line]
        assert lines.count("data: [DONE]") == 1
        assert lines[-1] == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        ended = [e["meta_info"]["finish_reason"] for e in events if e["meta_info"]["finish_reason"]]
        assert len(ended) == 1, events[-1]
        return str(ended[0]["type"])

    def _mixed_call(self, index: int) -> Callable[[], str]:
        serial = next(self._serial)
        kinds: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            ("schema", {"json_schema": schema(serial), "ignore_eos": False}, {}),
            ("logprobs", {}, {"return_logprob": True, "top_logprobs_num": 5}),
            ("penalties", {"frequency_penalty": 0.5, "logit_bias": {"11": 2.0}}, {}),
            ("cancelled", {}, {"rid": f"storm-{serial}"}),
            ("several", {"n": 2}, {}),
        ]
        name, sampling, fields = kinds[index % len(kinds)]
        request = self._request(stream=False, **sampling) | fields
        return functools.partial(self._whole, name, request, self._rng.uniform(0, 0.5))

    def _whole(self, name: str, request: dict[str, Any], patience: float) -> str:
        client = self._server.client
        if name == "cancelled":
            abort = functools.partial(client.post, "/abort_request", json={"rid": request["rid"]})
            threading.Timer(patience, abort).start()
        answer = client.post("/generate", json=request)
        assert answer.status_code == 200, answer.text
        replies = answer.json() if name == "several" else [answer.json()]
        assert len(replies) == request["sampling_params"].get("n", 1)
        assert all(reply["meta_info"]["finish_reason"] is not None for reply in replies)
        return name

    def _abort_storm(self) -> list[str]:
        """Streams that are all aborted, several times over."""
        stop = threading.Event()

        def abort() -> None:
            while not stop.wait(0.02):
                self._server.client.post("/abort_request", json={"abort_all": True})

        thread = threading.Thread(target=abort)
        thread.start()
        try:
            requests = [
                self._request(stream=True, max_new_tokens=self._new * 4) for _ in range(ABORTS)
            ]
            return together([functools.partial(self._follow, one) for one in requests], ABORTS)
        finally:
            stop.set()
            thread.join()

    def _burdens(self) -> list[socket.socket]:
        """Connections that say nothing, half of something, or ask and never read."""
        url = httpx.URL(self._server.url)
        connections = [socket.create_connection((url.host, url.port)) for _ in range(6)]
        for connection in connections[:2]:
            connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\n")
        for connection in connections[2:4]:
            connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        deaf = [send(self._server, self._request(stream=True)) for _ in range(2)]
        return connections + deaf


def schema(serial: int) -> str:
    """One that was never asked for before."""
    properties = {f"k{serial}": {"type": "integer"}, "name": {"type": "string", "maxLength": 12}}
    return json.dumps({"type": "object", "properties": properties, "required": ["name"]})


def usage(process: psutil.Process) -> Usage:
    """What a process holds now."""
    memory = process.memory_full_info().uss / 2**20
    return Usage(round(memory, 1), process.num_fds(), process.num_threads())
