"""A closed loop of HTTP requests with little work per byte: pieces of a reply are only stamped and
kept while the load runs; what they say is read afterwards."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools
import orjson

from sgl_spec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Call:
    """A request to send: `body` as JSON to `path`."""

    path: str
    body: dict[str, object]


@dataclass(slots=True)
class Reply:
    """What came back. Times are in seconds of one clock. pieces: when the bytes of one read were
    there, and these bytes. problem: why there is no whole reply, "" if there is one."""

    sent: float = 0.0
    done: float = 0.0
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    problem: str = ""

    @property
    def content(self) -> bytes:
        """All of it."""
        return b"".join(piece for _, piece in self.pieces)


class Target:
    """A server's address. Raises `ConfigError` for a URL that is none of HTTP."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url must be http://HOST:PORT or https://..., got {url!r}.")
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.host = parts.hostname
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.port = parts.port or (443 if self.tls else 80)
        self._base = parts.path.rstrip("/")
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\n{key}"

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request."""
        head = f"{method} {self._base}{path} HTTP/1.1\r\n{self._headers}"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Connection(asyncio.Protocol):
    """One connection, made at the first request, one request at a time; the parser calls the `on_`
    methods. broken: it can be used no more."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.broken = False
        self._transport: asyncio.Transport | None = None
        self._reply = Reply()
        self._ended: asyncio.Future[str] | None = None  # with what went wrong, "" for nothing
        self._parser = httptools.HttpResponseParser(self)

    async def send(self, message: bytes) -> Reply:
        """The reply, after it has ended or broken off; never raises for what the server does."""
        loop = asyncio.get_running_loop()
        self._reply, self._ended = reply, ended = Reply(), loop.create_future()
        self._parser = httptools.HttpResponseParser(self)
        try:
            async with asyncio.timeout(self._target.timeout_s):
                if self._transport is None:
                    await loop.create_connection(
                        lambda: self, self._target.host, self._target.port, ssl=self._target.tls
                    )
                assert self._transport is not None
                reply.sent = time.perf_counter()
                self._transport.write(message)
                reply.problem = await ended
        except TimeoutError:
            reply.problem = f"no whole reply within {self._target.timeout_s:g} s"
            self.close()
        except OSError as error:
            self.broken = True
            reply.problem = f"{type(error).__name__}: {error}"
        reply.done = time.perf_counter()
        if reply.status != 200 and not reply.problem:
            reply.problem = f"HTTP {reply.status}: {reply.content[:300].decode(errors='replace')}"
        return reply

    def close(self) -> None:
        """Let go of the connection."""
        self.broken = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"no HTTP: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.broken = True
        self._end(f"the connection broke: {error or 'closed by the server'}")

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._reply.pieces.append((time.perf_counter(), body))

    def on_message_complete(self) -> None:
        self._end("")

    def _end(self, problem: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(problem)


async def ask(target: Target, method: str, path: str, body: object = None) -> Reply:
    """One request on a connection of its own."""
    connection = Connection(target)
    message = target.request(method, path, b"" if body is None else orjson.dumps(body))
    try:
        return await connection.send(message)
    finally:
        connection.close()


async def closed_loop(target: Target, calls: Sequence[Call], concurrency: int) -> list[Reply]:
    """Send all calls, `concurrency` at a time, each next one when another has ended; replies in the
    order of the calls."""
    messages = [target.request("POST", call.path, orjson.dumps(call.body)) for call in calls]
    replies: list[Reply] = [Reply()] * len(calls)
    todo = iter(range(len(calls)))
    workers = [_work(target, messages, todo, replies) for _ in range(min(concurrency, len(calls)))]
    await asyncio.gather(*workers)
    return replies


async def _work(
    target: Target, messages: list[bytes], todo: Iterator[int], replies: list[Reply]
) -> None:
    connection = Connection(target)
    try:
        for index in todo:
            if connection.broken:
                connection = Connection(target)
            replies[index] = await connection.send(messages[index])
    finally:
        connection.close()
