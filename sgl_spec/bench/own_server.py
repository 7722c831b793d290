"""A server, started for a measurement and stopped behind it."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from sgl_spec.args import ServerArgs
from sgl_spec.errors import ConfigError
from sgl_spec.options import convert, declared

HOST = "127.0.0.1"
_POLL_S = 0.02
_STOP_S = 45.0  # the server gives running requests 30
_LAST_WORDS = 3000


@dataclass(frozen=True, slots=True)
class Started:
    """How a server came up. seconds: from the command to /health's 200. triton_cache_entries: what
    was compiled already before (None: no such directory) and is now."""

    flags: list[str]
    seconds: float
    triton_cache: str
    triton_cache_entries: tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class OwnServer:
    """A ready server. pid: of the API process, which leads the session that the engine is in."""

    url: str
    pid: int
    log: Path
    started: Started


@contextlib.contextmanager
def own_server(flags: Sequence[str], timeout_s: float = 600.0) -> Iterator[OwnServer]:
    """Serve with `flags` (those of the command line; the port is found unless given).

    Raises `ConfigError` for a port that cannot be had, and with the end of its log if it ends or is
    not ready within `timeout_s`. A SIGTERM meanwhile ends it too, at once.
    """
    command, port = _command(flags)
    with _running(command, flags, port, timeout_s, "/health") as server:
        yield server


@contextlib.contextmanager
def other_server(
    command: Sequence[str], timeout_s: float = 600.0, health: str = "/health"
) -> Iterator[OwnServer]:
    """Any server that a command starts, in which {port} stands for the port it shall listen on. It
    is ready when `health` answers 200; errors as of `own_server`."""
    port = free_port()
    words = [word.replace("{port}", str(port)) for word in command]
    with _running(words, words, port, timeout_s, health) as server:
        yield server


@contextlib.contextmanager
def _running(
    command: Sequence[str], told: Sequence[str], port: int, timeout_s: float, health: str
) -> Iterator[OwnServer]:
    before_signal = signal.signal(signal.SIGTERM, _leave)
    with tempfile.TemporaryDirectory(prefix="sgl-spec-bench-") as directory:
        log = Path(directory) / "server.log"
        before, start = _cache_entries(), time.perf_counter()
        process = None
        try:
            with log.open("wb") as out:
                process = _start(command, out)
            _wait(process, port, timeout_s, log, health)
            seconds = time.perf_counter() - start
            entries = (before, _cache_entries())
            started = Started(list(told), seconds, str(triton_cache()), entries)
            yield OwnServer(f"http://{HOST}:{port}", process.pid, log, started)
        finally:
            stopped = isinstance(sys.exception(), SystemExit)
            if process is not None:
                _stop(process, 0.0 if stopped else _STOP_S)
            signal.signal(signal.SIGTERM, before_signal)


def _start(command: Sequence[str], out: IO[bytes]) -> subprocess.Popen[Any]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"Cannot start {command[0]}: {error.strerror}.") from error


def _leave(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def triton_cache() -> Path:
    """Where triton keeps what it compiled."""
    home = Path(os.environ.get("TRITON_HOME", Path.home()))
    return Path(os.environ.get("TRITON_CACHE_DIR", home / ".triton" / "cache"))


def _cache_entries() -> int | None:
    cache = triton_cache()
    return sum(1 for _ in cache.iterdir()) if cache.is_dir() else None


def _command(flags: Sequence[str]) -> tuple[list[str], int]:
    given = [i for i, flag in enumerate(flags) if flag == "--port" or flag.startswith("--port=")]
    command = [sys.executable, "-m", "sgl_spec", "serve", *flags]
    if given:
        last = flags[given[-1]]
        text = last.partition("=")[2] if "=" in last else " ".join(flags[given[-1] + 1 :][:1])
        port = convert(declared(ServerArgs)["port"], text)
        _require_silence(port)
        return command, port
    port = free_port()
    return [*command, "--port", str(port)], port


def free_port() -> int:
    """A port on which nobody listened a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _require_silence(port: int) -> None:
    """Nobody listens there: another server's answers would be taken for ours."""
    with socket.socket() as probe:
        probe.settimeout(5)
        if probe.connect_ex((HOST, port)) == 0:
            raise ConfigError(f"Cannot start a server on --port {port}: another listens there.")


def _wait(
    process: subprocess.Popen[Any], port: int, timeout_s: float, log: Path, health: str
) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ConfigError(f"The server ended with code {process.returncode}:\n{end_of(log)}")
        if _healthy(port, health):
            return
        time.sleep(_POLL_S)
    raise ConfigError(f"The server was not ready within {timeout_s:g} s:\n{end_of(log)}")


def _healthy(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def end_of(log: Path) -> str:
    """The last words in a log."""
    return log.read_text(encoding="utf-8", errors="replace")[-_LAST_WORDS:]


def _stop(process: subprocess.Popen[Any], patience_s: float) -> None:
    """As a terminal would; then, for whatever is left of its session, without asking."""
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
