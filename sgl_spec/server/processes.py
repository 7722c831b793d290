"""The engine process as the API process sees it: start, messages both ways, death watch, end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading

import msgspec
import zmq
import zmq.asyncio

from sgl_spec.args import ResolvedArgs
from sgl_spec.errors import ConfigError
from sgl_spec.messages import FromEngine, ToEngine, decode_from_engine, encode
from sgl_spec.server.child import STACKS_SIGNAL, Boot

logger = logging.getLogger(__name__)

ENGINE_ENTRY = "sgl_spec.engine.process:main"
KILL_AFTER_TERM_S = 2.0
# A unix socket's path holds 107 characters; the longest name in the directory is "/from_engine".
LONGEST_DIRECTORY = 107 - len("/from_engine")


class Engine:
    """One engine process with a pair of ZMQ sockets in a private directory.

    Made inside a running event loop, in the main thread (the kernel ties the child's life to the
    thread that made it). `exited` resolves to the exit code.
    """

    def __init__(self, args: ResolvedArgs, entry: str = ENGINE_ENTRY) -> None:
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self._directory = private_directory()
        self._context = zmq.asyncio.Context()
        self._push = self._bind(zmq.PUSH, "to_engine")
        self._pull = self._bind(zmq.PULL, "from_engine")
        self._push_now: zmq.Socket[bytes] = zmq.Socket.shadow(self._push)
        self._process = self._start(args, entry)
        threading.Thread(target=self._wait, name="engine-watch", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    def _address(self, name: str) -> str:
        return f"ipc://{self._directory}/{name}"

    def _bind(self, kind: int, name: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.LINGER, 0)
        socket.bind(self._address(name))
        return socket

    def _start(self, args: ResolvedArgs, entry: str) -> subprocess.Popen[bytes]:
        boot = Boot(
            entry=entry,
            args={item.name: getattr(args, item.name) for item in dataclasses.fields(args)},
            to_engine=self._address("to_engine"),
            from_engine=self._address("from_engine"),
        )
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "sgl_spec.server.child", str(os.getpid())],
            stdin=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            process_group=0,  # Ctrl-C in a terminal is for the API process to handle
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # `exited` will tell
            pipe.write(msgspec.json.encode(boot))
        return process

    def _wait(self) -> None:
        code = self._process.wait()
        try:
            self._loop.call_soon_threadsafe(self._on_exit, code)
        except RuntimeError:
            logger.debug("The engine ended with code %d after the event loop.", code)

    def _on_exit(self, code: int) -> None:
        if not self.exited.done():
            self.exited.set_result(code)

    async def receive(self) -> FromEngine:
        """The next message from the engine."""
        return decode_from_engine(await self._pull.recv())

    async def connected(self, timeout_s: float) -> bool:
        """Wait until the engine can be sent to."""
        poller = zmq.asyncio.Poller()
        poller.register(self._push, zmq.POLLOUT)
        return bool(await poller.poll(int(timeout_s * 1000)))

    def send(self, message: ToEngine) -> None:
        """Hand one message over, without waiting. Only after `connected`.

        The queue has no bound, so this fails only when the peer has gone, which `exited` tells.
        """
        try:
            self._push_now.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            logger.debug("The engine has gone; dropped %s.", type(message).__name__)

    async def wait(self, timeout_s: float) -> int | None:
        """The exit code, or None when the engine is still alive after `timeout_s`."""
        done, _ = await asyncio.wait([self.exited], timeout=timeout_s)
        return self.exited.result() if done else None

    async def stop(self) -> None:
        """End the process: ask, then force. Does nothing when it has ended."""
        if self._process.poll() is None:
            self._process.terminate()
            if await self.wait(KILL_AFTER_TERM_S) is None:
                self.kill()
                await self.wait(KILL_AFTER_TERM_S)

    def show_stacks(self) -> None:
        """Have the process write where its threads are to stderr."""
        if self._process.poll() is None:
            self._process.send_signal(STACKS_SIGNAL)

    def kill(self) -> None:
        """End the process at once."""
        if self._process.poll() is None:
            self._process.kill()

    def close(self) -> None:
        """Kill what is left, close the sockets and remove the directory."""
        self.kill()
        self._push.close()
        self._pull.close()
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)


def private_directory() -> str:
    """A fresh directory (mode 0700) for sockets; refuses a path too long for them."""
    directory = tempfile.mkdtemp(prefix="sgl-spec-")
    if len(directory) > LONGEST_DIRECTORY:
        os.rmdir(directory)
        raise ConfigError(
            f"The temporary directory {directory!r} has {len(directory)} characters, too many for "
            f"the path of a socket (at most {LONGEST_DIRECTORY}); set TMPDIR to a shorter one."
        )
    return directory
