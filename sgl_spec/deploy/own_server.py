"""A replica's server: its own process, asked over HTTP, so that routes, streams, aborts and last
replies are the server's own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Self

import aiohttp
from yarl import URL

READY_POLL_S = 0.2
STOP_TIMEOUT_S = 40.0  # running requests have --drain-timeout to end
# Of one connection alone, which ends here (RFC 9110, 7.6.1), or are said anew.
_HOP = {
    "connection",
    "keep-alive",
    "transfer-encoding",
    "upgrade",
    "host",
    "content-length",
    "date",
}


class ReplicaLost(Exception):
    """The server of a replica has ended, or ended while it answered."""


@dataclass(frozen=True)
class Call:
    """An HTTP request. target: path and query as they came. attempt: 0 at first; one that is sent
    again goes wherever there is least to do."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    chain: tuple[int, ...] = ()
    attempt: int = 0


@dataclass(frozen=True)
class Head:
    """How a reply begins."""

    status: int
    headers: tuple[tuple[str, str], ...]

    @property
    def is_stream(self) -> bool:
        """Whether events follow."""
        kinds = [value for name, value in self.headers if name.lower() == "content-type"]
        return any(kind.startswith("text/event-stream") for kind in kinds)


def passed_on(headers: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """The headers that go through."""
    return tuple((name, value) for name, value in headers if name.lower() not in _HOP)


class OwnServer:
    """A started server process and a client for it."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self._url = f"http://127.0.0.1:{port}"
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )

    @classmethod
    async def start(cls, flags: Sequence[str]) -> Self:
        """Start it and wait until it is ready; `ReplicaLost` if it ends before."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        module = [sys.executable, "-P", "-m", "sgl_spec.deploy.child", str(os.getpid())]
        process = await asyncio.create_subprocess_exec(
            *module, *flags, "--host", "127.0.0.1", "--port", str(port), start_new_session=True
        )
        server = cls(process, port)
        while not await server.healthy():
            if process.returncode is not None:
                raise ReplicaLost(f"The server ended with exit code {process.returncode}.")
            await asyncio.sleep(READY_POLL_S)
        return server

    async def healthy(self) -> bool:
        """Whether /health answers 200."""
        with contextlib.suppress(aiohttp.ClientError):
            async with self._client.get(f"{self._url}/health") as reply:
                return reply.status == 200
        return False

    async def forward(self, call: Call) -> AsyncIterator[Head | bytes]:
        """The reply: its head, then its body as it comes. Closing this aborts the request."""
        url = URL(self._url + call.target, encoded=True)
        try:
            async with self._client.request(
                call.method, url, headers=call.headers, data=call.body or None
            ) as reply:
                yield Head(reply.status, passed_on(list(reply.headers.items())))
                async for part in reply.content.iter_any():
                    yield part
        except aiohttp.ClientError as error:
            raise ReplicaLost(f"The replica's server is gone: {error!r}.") from None

    async def stop(self) -> None:
        """End it in order: requests that run may end."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), STOP_TIMEOUT_S)
            if self.process.returncode is None:
                self.process.kill()
        await self._client.close()
