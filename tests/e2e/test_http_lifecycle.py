"""How the server starts and ends: ports, loading, faults of the engine, signals, orphans, cost."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import httpx
import psutil
import pytest
from fastapi import Request
from scripted import Scripted, Start, body, starter
from serving import free_port

from sgl_spec.errors import RequestTimeoutError
from sgl_spec.server import http, launch

LONG = {"max_new_tokens": 1500, "ignore_eos": True}
STREAM = body("x", extra={"stream": True}, **LONG)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starter(tmp_path) as begin:
        yield begin


def status(server: Scripted) -> int | None:
    try:
        return server.client.get("/health").status_code
    except httpx.TransportError:
        return None


def read_stream(server: Scripted, started: threading.Event, request: object = STREAM) -> list[str]:
    """Lines of a stream until it ends."""
    lines = []
    with server.client.stream("POST", "/generate", json=request) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            started.set()
            lines += [line] if line else []
    return lines


def test_health_is_503_while_loading(start: Start) -> None:
    server = start(wait=False, load_s=1.5)
    seen = set()
    while server.process.poll() is None and 200 not in seen:
        seen.add(status(server))
        if 503 in seen and 200 not in seen:
            reply = server.client.post("/generate", json=body("x"))
            loading = "The server is loading the model."
            assert reply.status_code == 200 or reply.json()["error"]["message"] == loading
        time.sleep(0.05)
    assert {503, 200} <= seen
    assert "Ready: scripted at http://127.0.0.1:" in server.stdout.read_text()


def test_a_port_in_use_is_one_sentence_before_anything_is_loaded(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = start(wait=False, port=port, load_s=60)
        server.expect_end(2)
    lines = server.stderr.read_text().splitlines()
    assert lines[-1] == f"Cannot listen on --host 127.0.0.1 --port {port}: Address already in use."


@pytest.mark.parametrize(("config", "code"), [(True, 2), (False, 1)])
def test_an_engine_that_cannot_start(start: Start, config: bool, code: int) -> None:
    server = start(wait=False, fail="The pool is too small.", config_error=config)
    server.expect_end(code)
    assert server.stderr.read_text().splitlines()[-1] == "The pool is too small."


def test_a_bad_flag_is_one_sentence(start: Start) -> None:
    server = start("--page-size", "none", wait=False)
    server.expect_end(2)
    (line,) = server.stderr.read_text().splitlines()
    assert "--page-size" in line


@pytest.mark.parametrize("n", [1, 2])
def test_engine_death_answers_all_and_ends_the_server(start: Start, n: int) -> None:
    server = start("--max-running-requests", "3")
    started = threading.Event()
    whole = body("x", n=n, **LONG)
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(read_stream, server, started)
        replies = [pool.submit(server.client.post, "/generate", json=whole) for _ in range(3)]
        assert started.wait(5)
        server.engine.kill()
        died = time.monotonic()
        for reply in replies:
            assert reply.result().status_code == 503
            assert "engine process ended" in reply.result().json()["error"]["message"]
        *_, error, done = stream.result()
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503
        assert done == "data: [DONE]"
    server.expect_end(1)
    assert time.monotonic() - died < 3


def ends_in_503(server: Scripted, asks: int, hang: object) -> None:
    """Open requests, and those that come while the engine hangs, each get their one 503."""
    started = threading.Event()
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(read_stream, server, started)
        assert started.wait(5)
        replies = [pool.submit(server.client.post, "/generate", json=hang) for _ in range(asks)]
        for reply in replies:
            assert reply.result(20).status_code == 503
            assert "no sign of life for 1 s" in reply.result().json()["error"]["message"]
        *_, error, done = stream.result(20)
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503
    assert done == "data: [DONE]"
    server.expect_end(1)


def test_a_hung_engine_shows_its_stacks_and_ends(start: Start) -> None:
    server = start("--watchdog-timeout", "1", hangs=7)
    ends_in_503(server, 3, body([5] * 7, **LONG))
    log = server.stderr.read_text()
    assert "Its stacks follow" in log
    assert re.search(r'File ".*scripted_engine.py", line \d+ in hang$', log, re.MULTILINE)


def test_a_stopped_engine_ends(start: Start) -> None:
    server = start("--watchdog-timeout", "1")
    server.generate("before", max_new_tokens=4)
    engine = server.engine
    threading.Timer(0.5, engine.suspend).start()
    ends_in_503(server, 3, body("x", **LONG))


def test_a_quiet_engine_is_left_alone(start: Start) -> None:
    server = start("--watchdog-timeout", "1")
    time.sleep(2.5)  # idle
    server.process.send_signal(signal.SIGSTOP)  # it cannot hear the engine meanwhile
    time.sleep(2)
    server.process.send_signal(signal.SIGCONT)
    time.sleep(1)
    server.generate("after", max_new_tokens=4)


def test_no_request_hangs_around_the_engines_death(start: Start) -> None:
    server = start()
    server.engine.kill()
    died = time.monotonic()
    with contextlib.suppress(httpx.TransportError):
        while time.monotonic() - died < 3:
            reply = server.client.post("/generate", json=body("x", **LONG), timeout=2)
            assert reply.status_code == 503
            assert server.client.get("/health").status_code == 503
    server.expect_end(1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_end(start: Start, number: int) -> None:
    server = start()
    started = threading.Event()
    request = body("x", extra={"stream": True}, max_new_tokens=300)
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(read_stream, server, started, request)
        assert started.wait(5)
        server.process.send_signal(number)
        time.sleep(0.2)
        refused = server.client.post("/generate", json=body("y"))
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert "shutting down" in refused.json()["error"]["message"]
        assert status(server) == 503
        *_, last, done = stream.result()
    assert json.loads(last.removeprefix("data: "))["meta_info"]["completion_tokens"] == 300
    assert done == "data: [DONE]"
    server.expect_end(0)
    log = server.stderr.read_text()
    assert "waiting up to 30 s for 1 request; a second signal aborts." in log
    assert log.endswith("INFO Stopped.\n")


def test_a_signal_with_nothing_running(start: Start) -> None:
    server = start()
    server.stop()
    *_, first, last = server.stderr.read_text().splitlines()
    assert first.endswith("INFO SIGTERM: no request is running, stopping.")
    assert last.endswith("INFO Stopped.")


def test_a_second_signal_aborts_at_once(start: Start) -> None:
    server = start()
    started = threading.Event()
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(read_stream, server, started)
        assert started.wait(5)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        sent = time.monotonic()
        *_, last, done = stream.result()
    assert json.loads(last.removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "abort"
    assert done == "data: [DONE]"
    server.expect_end(128 + signal.SIGTERM)
    assert time.monotonic() - sent < 2


def test_a_signal_while_loading(start: Start) -> None:
    server = start(wait=False, load_s=60)
    while status(server) != 503:
        time.sleep(0.05)
    server.stop()


def test_running_requests_have_the_time_that_the_flag_says(start: Start) -> None:
    server = start("--drain-timeout", "1")
    started = threading.Event()
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(read_stream, server, started)
        assert started.wait(5)
        server.process.send_signal(signal.SIGTERM)
        *_, last, done = stream.result(10)
    assert json.loads(last.removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "abort"
    assert done == "data: [DONE]"
    server.expect_end(0)
    assert "waiting up to 1 s for 1 request" in server.stderr.read_text()


def test_an_idle_connection_is_closed_when_the_flag_says(start: Start) -> None:
    server = start("--timeout-keep-alive", "1")
    port = int(server.url.rpartition(":")[2])
    with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=10)) as idle:
        idle.request("GET", "/health")
        idle.getresponse().read()
        began = time.monotonic()
        assert idle.sock.recv(1) == b""
    assert 0.5 < time.monotonic() - began < 5


@pytest.mark.parametrize("said", [b"", b"POST /generate HTTP/1.1\r\nHost: x\r\n"])
def test_a_connection_without_a_request_is_closed(start: Start, said: bytes) -> None:
    server = start("--timeout-keep-alive", "1")
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as silent:
        silent.sendall(said)
        began = time.monotonic()
        assert silent.recv(1) == b""
    assert 0.5 < time.monotonic() - began < 5


def test_half_a_body_is_waited_for_no_longer_than_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_TIMEOUT_S", 0.1)

    async def half() -> dict[str, object]:
        if not sent:
            sent.append(part)
            return part
        await asyncio.Event().wait()
        raise AssertionError

    part = {"type": "http.request", "body": b"{", "more_body": True}
    sent: list[object] = []
    request = Request({"type": "http", "path": "/generate", "headers": []}, half)
    with pytest.raises(RequestTimeoutError, match="did not come within"):
        asyncio.run(http.read_json(request))


@pytest.mark.skipif(sys.platform != "linux", reason="the option is Linux's")
def test_a_client_that_never_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel, which then fails what is sent to it."""
    monkeypatch.setattr(launch, "GONE_S", 1)
    with contextlib.closing(launch.listen("127.0.0.1", free_port())) as listener:
        address = listener.getsockname()
        with socket.create_connection(address):
            accepted, _ = listener.accept()
            began = time.monotonic()
            accepted.settimeout(20)
            with accepted, pytest.raises(OSError) as gone:
                accepted.sendall(bytes(1 << 28))
    assert gone.value.errno == errno.ETIMEDOUT, gone.value
    assert time.monotonic() - began < 19


def test_an_engine_deaf_to_shutdown_is_killed(start: Start) -> None:
    server = start("--stop-timeout", "1", deaf=True)
    server.stop()
    assert "did not end by itself" in server.stderr.read_text()


def test_no_orphan_after_sigkill(start: Start) -> None:
    server = start()
    engine = server.engine
    server.process.kill()
    server.process.wait()
    server.stopped = True
    assert psutil.wait_procs([engine], timeout=2)[1] == []
    # Nobody is left to remove the sockets' directory.
    for directory in server.scratch.iterdir():
        assert directory.stat().st_mode & 0o777 == 0o700
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()


def test_too_long_a_temporary_directory(tmp_path: Path) -> None:
    code = (
        "import tempfile; from sgl_spec.server.processes import private_directory\n"
        f"tempfile.tempdir = {str(tmp_path)!r} + '/' + 'd' * 90\n"
        "import os; os.mkdir(tempfile.tempdir); private_directory()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "too many for the path of a socket" in done.stderr
    assert not list((tmp_path / ("d" * 90)).iterdir())


def test_the_api_process_never_loads_torch(start: Start) -> None:
    server = start()
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "tokenizers" in maps, "the maps do show compiled modules"
    assert "libtorch" not in maps
    heavy = "{'torch', 'transformers', 'numpy'} & set(sys.modules)"
    code = f"import sys; import sgl_spec.server.launch; sys.exit(bool({heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("route", ["/generate", "/v1/chat/completions"])
def test_48_streams_cost_less_than_a_fifth_of_a_core(start: Start, route: str) -> None:
    """48 streams of one token each 100 ms."""
    server = start("--enable-metrics", step_s=0.1, tokens=1)
    if route == "/generate":
        request = body("The harbour master kept", extra={"stream": True}, **LONG)
    else:
        message = {"role": "user", "content": "The harbour master kept"}
        request = {"messages": [message], "stream": True, "ignore_eos": True}
    process = psutil.Process(server.process.pid)
    with contextlib.ExitStack() as stack:
        for _ in range(48):
            stack.enter_context(open_stream(server, route, request))
        time.sleep(1)
        shares = [cpu_share(process, 1.5) for _ in range(2)]
        assert server.state()["running"] == 48
    assert min(shares) < 0.2, shares


@contextlib.contextmanager
def open_stream(server: Scripted, route: str, request: object) -> Iterator[socket.socket]:
    """A stream that is read by nobody: the kernel's buffers take it."""
    data = json.dumps(request).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port)) as client:
        client.sendall(head.encode() + data)
        yield client


def cpu_share(process: psutil.Process, seconds: float) -> float:
    """Share of one core that a process used."""
    before, began = process.cpu_times(), time.monotonic()
    time.sleep(seconds)
    after = process.cpu_times()
    used = after.user + after.system - before.user - before.system
    return used / (time.monotonic() - began)
