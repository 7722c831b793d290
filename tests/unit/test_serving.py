"""The `launch` fixture's checks catch what they are there for, on servers that misbehave."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serving import Server, free_port, start_command

SERVER = """
import http.server, signal, subprocess, sys

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass

def leave(*_):
    {leave}

signal.signal(signal.SIGTERM, leave)
{start}
http.server.HTTPServer(("127.0.0.1", {port}), Health).serve_forever()
"""

Serve = Callable[..., Server]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    servers: list[Server] = []

    def start(leave: str = "sys.exit(0)", start: str = "") -> Server:
        port = free_port()
        script = SERVER.format(port=port, leave=leave, start=start)
        servers.append(start_command(tmp_path, [sys.executable, "-c", script], port))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


def test_clean_end(serve: Serve) -> None:
    server = serve()
    server.wait_until_ready(30)
    assert [process.pid for process in server.family()] == [server.process.pid]
    server.stop()
    assert server.process.returncode == 0


def test_exit_code_is_checked(serve: Serve) -> None:
    server = serve(leave="sys.exit(3)")
    server.wait_until_ready(30)
    with pytest.raises(AssertionError, match="exit code 3, expected 0"):
        server.stop()


def test_expected_exit_code(serve: Serve) -> None:
    server = serve(leave="sys.exit(3)")
    server.wait_until_ready(30)
    server.stop(3)


def test_orphan_is_found_and_ended(serve: Serve) -> None:
    server = serve(start="subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])")
    server.wait_until_ready(30)
    with pytest.raises(AssertionError, match="behind"):
        server.stop()
    assert not server.family()


def test_traceback_is_found(serve: Serve) -> None:
    server = serve(
        start="import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()"
    )
    server.wait_until_ready(30)
    with pytest.raises(AssertionError, match="traceback in stderr"):
        server.stop()


def test_hang_is_found(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.STOP_TIMEOUT_S", 0.3)
    server = serve(leave="pass")
    server.wait_until_ready(30)
    with pytest.raises(AssertionError, match=r"alive 0\.3 s after SIGTERM"):
        server.stop()
    assert server.process.returncode == -signal.SIGKILL


def test_early_end_shows_the_last_words(serve: Serve) -> None:
    server = serve(start="sys.exit('no such model')")
    with pytest.raises(AssertionError, match="no such model"):
        server.wait_until_ready(30)
