"""A real server process under test: started, watched, and made to prove that it ends cleanly."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[1]
READY_TIMEOUT_S = 300.0  # the embedded model may have to be converted first
STOP_TIMEOUT_S = 30.0
POLL_S = 0.2


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """A running `launch_server.py`. `client` talks to `url`; the process leads its own session, so
    whatever it leaves behind can be found."""

    process: subprocess.Popen[bytes]
    url: str
    stdout: Path
    stderr: Path
    client: httpx.Client = field(init=False)
    stopped: bool = False

    def __post_init__(self) -> None:
        # With a bound the pool closes idle connections, now and then one that another thread was
        # given just then (httpcore issue 1110).
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self.client = httpx.Client(base_url=self.url, timeout=120, trust_env=False, limits=limits)

    def family(self) -> list[psutil.Process]:
        """All live processes of the server's session, the engine among them."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and os.getsid(process.pid) == self.process.pid:
                    found.append(process)
        return found

    def wait_until_ready(self, timeout: float) -> None:
        """Until /health answers 200; fails with the server's last words if it ends before."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.report("ended before it was ready")
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/health").status_code == 200:
                    return
            time.sleep(POLL_S)
        raise AssertionError(self.report(f"not ready after {timeout} s"))

    def stop(self, code: int = 0, *, traceback: bool = False) -> None:
        """SIGTERM, then: the exit code is `code`, no process is left, and stderr shows a traceback
        only if the test says that one belongs there."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.expect_end(code, traceback=traceback)

    def expect_end(self, code: int, *, traceback: bool = False) -> None:
        """The same checks for a server that ends by itself."""
        self.stopped = True
        self.client.close()
        try:
            seen = self.process.wait(STOP_TIMEOUT_S)
            assert seen == code, self.report(f"exit code {seen}, expected {code}")
            assert not self.family(), self.report(f"left {self.family()} behind")
            shown = "Traceback (most recent call last)" in self.stderr.read_text()
            assert shown <= traceback, self.report("traceback in stderr")
        except subprocess.TimeoutExpired:
            raise AssertionError(self.report(f"alive {STOP_TIMEOUT_S} s after SIGTERM")) from None
        finally:
            self.kill()

    def kill(self) -> None:
        """End whatever is left of this server's session; for tests that fail."""
        self.client.close()
        family = self.family()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        psutil.wait_procs(family, timeout=5)

    def report(self, problem: str) -> str:
        """`problem` with the command line and the end of stderr."""
        return f"{problem}: {self.process.args!r}\n{self.stderr.read_text()[-4000:]}"


Launch = Callable[..., Server]


def start(directory: Path, model: str | Path, *flags: str, **env: str) -> Server:
    """Start a server for `model` on a free port; its output goes to files in `directory`."""
    port = free_port()
    command = [sys.executable, "launch_server.py", "--model-path", str(model)]
    return start_command(directory, [*command, "--port", str(port), *flags], port, **env)


def start_command(
    directory: Path, command: list[str], port: int, *, cwd: Path = ROOT, **env: str
) -> Server:
    """Start `command`, which serves on `port`."""
    stdout, stderr = directory / f"{port}.out", directory / f"{port}.err"
    with stdout.open("wb") as out, stderr.open("wb") as err:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=os.environ | env,
            start_new_session=True,
        )
    return Server(process, f"http://127.0.0.1:{port}", stdout, stderr)


@contextlib.contextmanager
def launcher(directory: Path, model: Path) -> Iterator[Launch]:
    """`launch(*flags, model=..., ready_timeout=..., **env)`; at the end every server that the test
    did not stop itself is stopped and checked, also when another one fails its checks."""
    servers: list[Server] = []

    def launch(
        *flags: str,
        model: str | Path = model,
        ready_timeout: float = READY_TIMEOUT_S,
        **env: str,
    ) -> Server:
        server = start(directory, model, *flags, **env)
        servers.append(server)
        server.wait_until_ready(ready_timeout)
        return server

    yield launch
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.kill)
            if not server.stopped:
                stack.callback(server.stop)
