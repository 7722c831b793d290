"""The load client: streamed requests whose pieces are only stamped and kept while the load runs.

What the pieces say is read afterwards (`bench.streams`), so that one process follows 96 streams at
13,000 events per second and more, and a late stamp is not taken for a late token.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from sgl_spec.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp


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


@dataclass(frozen=True, slots=True)
class Target:
    """A server's address. Raises `ConfigError` for a URL that is none of HTTP."""

    url: str
    api_key: str | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url must be http://HOST:PORT or https://..., got {self.url!r}.")
        object.__setattr__(self, "url", self.url.rstrip("/"))


@asynccontextmanager
async def connected(target: Target) -> AsyncIterator[aiohttp.ClientSession]:
    """A session for `send` with as many connections as are asked for. Proxies are not used."""
    http = extra("aiohttp")
    headers = {"Content-Type": "application/json"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    trace = http.TraceConfig()
    trace.on_request_headers_sent.append(_note_sent)
    async with http.ClientSession(
        connector=http.TCPConnector(limit=0),
        timeout=http.ClientTimeout(total=target.timeout_s),
        headers=headers,
        trace_configs=[trace],
        auto_decompress=False,
    ) as session:
        yield session


async def _note_sent(_session: Any, context: SimpleNamespace, _params: Any) -> None:
    """A request counts from when it is sent, not from when its connection is asked for."""
    context.trace_request_ctx.sent = time.perf_counter()


async def send(
    session: aiohttp.ClientSession, target: Target, method: str, path: str, body: bytes = b""
) -> Reply:
    """The reply, after it has ended or broken off; never raises for what the server does."""
    reply = Reply(sent=time.perf_counter())
    try:
        async with session.request(
            method, target.url + path, data=body, trace_request_ctx=reply
        ) as response:
            reply.status = response.status
            async for piece in response.content.iter_any():
                reply.pieces.append((time.perf_counter(), piece))
    except TimeoutError:
        reply.problem = f"no whole reply within {target.timeout_s:g} s"
    except (extra("aiohttp").ClientError, OSError) as error:
        reply.problem = f"{type(error).__name__}: {error}"
    reply.done = time.perf_counter()
    if reply.status != 200 and not reply.problem:
        reply.problem = f"HTTP {reply.status}: {reply.content[:300].decode(errors='replace')}"
    return reply


async def ask(target: Target, method: str, path: str, body: object = None) -> Reply:
    """One request on a connection of its own."""
    async with connected(target) as session:
        data = b"" if body is None else orjson.dumps(body)
        return await send(session, target, method, path, data)


Done = Callable[[Reply], None]


async def closed_loop(
    target: Target, calls: Sequence[Call], concurrency: int, done: Done | None = None
) -> list[Reply]:
    """Send all calls, `concurrency` at a time, each next one when another has ended; replies in the
    order of the calls. done: is given each reply when it is there."""
    replies = [Reply() for _ in calls]
    bodies = [orjson.dumps(call.body) for call in calls]
    todo = iter(range(len(calls)))

    async def work(session: aiohttp.ClientSession, mine: Iterator[int]) -> None:
        for index in mine:
            replies[index] = await send(session, target, "POST", calls[index].path, bodies[index])
            if done is not None:
                done(replies[index])

    async with connected(target) as session:
        await asyncio.gather(*[work(session, todo) for _ in range(min(concurrency, len(calls)))])
    return replies


async def open_loop(
    target: Target, calls: Sequence[Call], at: Sequence[float], done: Done | None = None
) -> list[Reply]:
    """Send call i `at[i]` seconds after the start, whatever became of the others."""
    bodies = [orjson.dumps(call.body) for call in calls]
    start = time.perf_counter()

    async def one(session: aiohttp.ClientSession, index: int) -> Reply:
        await asyncio.sleep(max(0.0, start + at[index] - time.perf_counter()))
        reply = await send(session, target, "POST", calls[index].path, bodies[index])
        if done is not None:
            done(reply)
        return reply

    async with connected(target) as session:
        return list(await asyncio.gather(*[one(session, i) for i in range(len(calls))]))


def extra(name: str) -> Any:
    """A package of the `bench` extra; `ConfigError` tells how to install it where it is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"This needs {name}: pip install 'sgl-spec[bench]'.") from error
