"""From start to exit code: HTTP at once, the engine beside it, and an orderly end of both."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sgl_spec.args import ResolvedArgs
from sgl_spec.errors import ConfigError, SglSpecError
from sgl_spec.messages import Failed, Ready
from sgl_spec.server.app import ServerState, build_app
from sgl_spec.server.frontend import DRAINING, Frontend
from sgl_spec.server.logs import RequestLog
from sgl_spec.server.metrics import Metrics
from sgl_spec.server.model_info import ModelInfo, summary
from sgl_spec.server.processes import ENGINE_ENTRY, Engine
from sgl_spec.server.service import Service
from sgl_spec.server.spec_trace import SpecTrace
from sgl_spec.server.tokenizer import ServerTokenizer

logger = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 2.0
ENGINE_CONNECT_TIMEOUT_S = 10.0
HTTP_CLOSE_TIMEOUT_S = 2
LAST_WORDS_S = 0.2
STACKS_S = 1.0

EXIT_OK, EXIT_FAILED, EXIT_CONFIG = 0, 1, 2


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: the order of an end is decided in `Server`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(HttpToolsProtocol):
    """uvicorn's, which waits for ever for a request that a client has not begun or not sent the
    head of; here it has the time that an idle connection has."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._limit()

    def _limit(self) -> None:
        if self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )


class Server:
    """One run of the server on a bound socket. entry: the engine's entry, see `child.Boot`."""

    def __init__(
        self, args: ResolvedArgs, listener: socket.socket, entry: str = ENGINE_ENTRY
    ) -> None:
        self._args = args
        self._listener = listener
        self._entry = entry
        self._state = ServerState()
        self._failed: Failed | None = None
        self._last_words = ""

    async def run(self) -> int:
        """Serve until a signal or the engine's end; the exit code."""
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Ready] = loop.create_future()
        self._signal: asyncio.Future[int] = loop.create_future()
        self._hurry: asyncio.Future[int] = loop.create_future()
        self._engine = Engine(self._args, self._entry)
        speculating = self._args.speculative_algorithm is not None
        self._metrics = None
        if self._args.enable_metrics:
            self._metrics = Metrics(
                self._args.served_model_name,
                speculating=speculating,
                simulated=self._args.simulate_acc_len,
            )
        self._frontend = Frontend(self._engine.send, self._metrics)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        http = self._http()
        serving = asyncio.create_task(http.serve(sockets=[self._listener]))
        pump = asyncio.create_task(self._pump())
        try:
            return await self._supervise()
        finally:
            pump.cancel()
            http.should_exit = True
            await serving
            self._engine.close()
            sys.stderr.write(self._last_words)

    def _http(self) -> _HttpServer:
        config = uvicorn.Config(
            build_app(
                self._state,
                self._args.api_key,
                None if self._metrics is None else self._metrics.responded,
                self._args.max_requests_per_key,
            ),
            http=_Connection,
            lifespan="off",
            log_config=None,
            server_header=False,
            timeout_keep_alive=self._args.timeout_keep_alive,
            timeout_graceful_shutdown=HTTP_CLOSE_TIMEOUT_S,
            ssl_keyfile=self._args.ssl_keyfile,
            ssl_certfile=self._args.ssl_certfile,
            ssl_keyfile_password=self._args.ssl_keyfile_password,
        )
        return _HttpServer(config)

    async def _pump(self) -> None:
        while True:
            message = await self._engine.receive()
            if isinstance(message, Ready):
                self._ready.set_result(message)
            elif isinstance(message, Failed):
                self._failed = message
            else:
                self._frontend.on_message(message)

    def _on_signal(self, number: int) -> None:
        if not self._signal.done():
            self._signal.set_result(number)
        elif not self._hurry.done():
            logger.warning("Second signal: aborting at once.")
            self._hurry.set_result(number)
        else:
            self._engine.close()
            os._exit(128 + number)

    async def _supervise(self) -> int:
        """Wait for what ends the run, and end it in order."""
        boot = asyncio.create_task(self._boot())
        ends = [self._engine.exited, self._signal]
        await _first([boot, *ends])
        if boot.done() and boot.exception() is None:
            watchdog = asyncio.create_task(self._watchdog())
            await _first(ends)
            watchdog.cancel()
        elif not boot.cancel():
            return await self._boot_failed(boot)
        if self._engine.exited.done():
            return await self._engine_died()
        return await self._drain()

    async def _boot(self) -> None:
        """Wait for the engine, load the tokenizer, warm up, open for requests."""
        info = msgspec.convert((await self._ready).info, ModelInfo)
        if not await self._engine.connected(ENGINE_CONNECT_TIMEOUT_S):
            raise SglSpecError("The engine is ready but does not listen for requests.")
        tokenizer = await asyncio.to_thread(
            ServerTokenizer.from_dir, info.tokenizer_dir, self._args.chat_template
        )
        if self._args.log_requests:
            self._frontend.log = RequestLog(tokenizer.tokenizer, self._args.log_requests_level)
        trace = None
        if self._args.spec_trace is not None:
            source = info.speculative_algorithm
            trace = SpecTrace(self._args.spec_trace, tokenizer.tokenizer, source)
        for line in summary(self._args, info):
            logger.info(line)
        service = Service(self._args, info, tokenizer, self._frontend, self._metrics)
        if not self._args.skip_server_warmup:
            await service.warm_up()
        self._frontend.trace = trace
        self._state.service, self._state.problem = service, None
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if self._args.ssl_keyfile is None else "https"
        sys.stdout.write(f"Ready: {self._args.served_model_name} at {scheme}://{shown}:{port}\n")
        sys.stdout.flush()

    async def _watchdog(self) -> None:
        """Kill an engine that hangs; its end is then told as any other."""
        seconds = self._args.watchdog_timeout
        if not seconds:
            return
        await self._frontend.silent(seconds)
        hung = f"The engine showed no sign of life for {seconds} s (--watchdog-timeout)"
        logger.error("%s. Its stacks follow; then it is killed.", hung)
        self._engine.show_stacks()
        await asyncio.sleep(STACKS_S)
        self._failed = Failed(f"{hung} and was killed; stderr has its stacks.")
        self._engine.kill()

    async def _boot_failed(self, boot: asyncio.Task[None]) -> int:
        error = boot.exception()
        await self._engine.stop()
        if not isinstance(error, SglSpecError):
            assert error is not None
            raise error
        self._last_words = f"{error.message}\n"
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED

    async def _engine_died(self) -> int:
        """Give every open request its error; the exit code."""
        await asyncio.sleep(LAST_WORDS_S)
        code = self._engine.exited.result()
        message = f"The engine process ended with exit code {code}."
        if self._failed is not None:
            message = self._failed.message
        self._state.problem = message
        self._frontend.fail_all(message)
        self._last_words = f"{message}\n"
        config = self._failed is not None and self._failed.config_error
        return EXIT_CONFIG if config else EXIT_FAILED

    async def _drain(self) -> int:
        """Take nothing new, let running requests end, then end the engine."""
        name = signal.Signals(self._signal.result()).name
        self._state.problem = DRAINING
        self._frontend.refuse_new()
        if self._state.service is None:
            logger.info("%s while loading: stopping the engine.", name)
            await self._engine.stop()
            return EXIT_OK
        logger.info("%s: %s", name, self._until())
        if not await self._drained(self._args.drain_timeout, self._hurry):
            self._frontend.abort(None)
            await self._drained(ABORT_TIMEOUT_S)
        if self._engine.exited.done():
            return await self._engine_died()
        if self._hurry.done():
            await self._engine.stop()
            return 128 + self._hurry.result()
        self._frontend.shut_engine_down()
        if await self._engine.wait(self._args.stop_timeout) is None:
            logger.warning("The engine did not end by itself; stopping it.")
            await self._engine.stop()
        logger.info("Stopped.")
        return EXIT_OK

    def _until(self) -> str:
        """What an end waits for."""
        requests = self._frontend.open_requests
        if not requests:
            return "no request is running, stopping."
        some = "1 request" if requests == 1 else f"{requests} requests"
        seconds = self._args.drain_timeout
        return f"waiting up to {seconds} s for {some}; a second signal aborts."

    async def _drained(self, timeout_s: float, *ends: asyncio.Future[int]) -> bool:
        """Whether all requests ended; False when the time is up, the engine is dead, or one of
        `ends` has come."""
        idle = asyncio.create_task(self._frontend.drained(timeout_s))
        await _first([idle, self._engine.exited, *ends])
        return idle.done() and idle.result()


async def _first(futures: Sequence[asyncio.Future[Any]]) -> None:
    """Wait until one of them is done."""
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
