"""Each document is run from top to bottom as a reader would; see `docs_commands`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from docs_commands import DEFAULT_PORT, ROOT, Command, Kind, commands, documents
from serving import READY_TIMEOUT_S, Server, free_port, start_command

VENV_BIN = Path(sys.executable).parent
RUN_TIMEOUT_S = 300
SLOW_TIMEOUT_S = 3600
# Commands with one of these talk to no server.
ALONE = (
    "bench",
    "--help",
    "widen.py",
    "quick.py",
    "offline.py",
    "choices.py",
    "sgl_spec.args",
    "sgl_spec.deploy",
    "pytest",
)


class Reader:
    """Types a document's commands, with at most one server running at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._server: Server | None = None
        # Without this, curl is content with an answer of 400.
        (directory / ".curlrc").write_text("fail-with-body\n")
        self.made = directory / "made"
        self.made.mkdir()
        self._env = {"CURL_HOME": str(directory), "TMPDIR": str(self.made)}
        if shutil.which("curl") is None:
            shim = directory / "curl"
            shim.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/curl_shim.py "$@"\n')
            shim.chmod(0o755)
            self._env["PATH"] = f"{directory}{os.pathsep}{os.environ['PATH']}"

    def type(self, command: Command) -> None:
        if command.kind is Kind.SERVE:
            self.serve(command.text)
        elif command.kind in (Kind.CLIENT, Kind.SLOW):
            self.run(command)

    def serve(self, text: str) -> None:
        """Start the server that `text` starts, but on a free port and in the tests' environment."""
        self.leave()
        port = free_port()
        # The set-up is what the tests run in: make must not repeat it.
        done = "-o .venv/.server -o .venv/.installed"
        flag = f"PORT={port} {done}" if text.startswith("make") else f"--port {port}"
        shell = f"exec {self.here(text, port)} {flag}"
        self._server = start_command(self._directory, ["bash", "-c", shell], port)
        self._server.wait_until_ready(READY_TIMEOUT_S)

    def run(self, command: Command) -> None:
        if self._server is None and not any(word in command.text for word in ALONE):
            self.serve("make serve")
        url = self._server.url if self._server else ""
        port = int(url.rpartition(":")[2] or DEFAULT_PORT)
        done = subprocess.run(
            ["bash", "-c", self.here(command.text, port)],
            cwd=ROOT,
            env=os.environ | self._env | {"SGL_SPEC_URL": url},
            capture_output=True,
            text=True,
            timeout=SLOW_TIMEOUT_S if command.kind is Kind.SLOW else RUN_TIMEOUT_S,
        )
        assert done.returncode == 0, f"{command.fence}: {command.text}\n{done.stdout}{done.stderr}"
        assert done.stdout.strip(), f"{command.fence}: {command.text} printed nothing"

    def here(self, text: str, port: int) -> str:
        """`text` with this environment's Python and port."""
        text = re.sub("^sgl-spec ", ".venv/bin/sgl-spec ", text)
        return text.replace(".venv/bin/", f"{VENV_BIN}/").replace(DEFAULT_PORT, str(port))

    def leave(self) -> None:
        """Stop the server as its terminal would; make passes its exit code on."""
        if self._server is None:
            return
        server, self._server = self._server, None
        root = psutil.Process(server.process.pid)
        below = [p for p in root.children() if "launch_server.py" in p.cmdline()]
        (below[0] if below else root).send_signal(signal.SIGTERM)
        server.expect_end(0)

    def kill(self) -> None:
        if self._server is not None:
            self._server.kill()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    reader.kill()
    shutil.rmtree(reader.made)  # it may hold a whole checkpoint


def documents_with(*kinds: Kind) -> list[object]:
    return [
        pytest.param(path, id=path.name)
        for path in documents()
        if path.exists() and any(command.kind in kinds for command in commands(path))
    ]


@pytest.mark.parametrize("path", documents_with(Kind.SERVE, Kind.CLIENT))
def test_document(path: Path, reader: Reader) -> None:
    for command in commands(path):
        if command.kind in (Kind.SERVE, Kind.CLIENT):
            reader.type(command)
    reader.leave()


@pytest.mark.slow
@pytest.mark.parametrize("path", documents_with(Kind.SLOW))
def test_slow_commands(path: Path, reader: Reader) -> None:
    for command in commands(path):
        if command.kind is Kind.SLOW and command.text != "make slow":  # which is running this test
            reader.type(command)
    reader.leave()
