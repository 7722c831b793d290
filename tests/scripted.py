"""Starts the real server around `scripted_engine`, for tests of the API process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil
from serving import ROOT, Server, free_port
from tiny import make_tokenizer, write_tokenizer
from tokenizers import Tokenizer

VOCAB = 512
READY_TIMEOUT_S = 60.0
MODEL = "scripted"


@dataclass
class Scripted(Server):
    """A server around the scripted engine. scratch: its TMPDIR, which must be empty afterwards."""

    scratch: Path = Path()

    @property
    def engine(self) -> psutil.Process:
        """The engine process."""
        (engine,) = [p for p in self.family() if p.pid != self.process.pid]
        return engine

    def generate(self, prompt: Any, **sampling: Any) -> dict[str, Any]:
        """A /generate reply of text or ids; other fields go in as `body=`."""
        reply = self.client.post("/generate", json=body(prompt, **sampling))
        assert reply.status_code == 200, reply.text
        return reply.json()

    def state(self) -> dict[str, Any]:
        """The engine's counters."""
        return self.client.get("/server_info").json()["internal_states"][0]

    def remove_scratch(self) -> None:
        """Remove the TMPDIR, which the server must have left empty."""
        left = [path.name for path in self.scratch.iterdir()]
        assert not left, self.report(f"left {left} in the temporary directory")
        self.scratch.rmdir()


Start = Callable[..., Scripted]


def body(prompt: Any, *, extra: dict[str, Any] | None = None, **sampling: Any) -> dict[str, Any]:
    """A /generate body. extra: fields beside the prompt and `sampling_params`."""
    ids = isinstance(prompt, list) and not isinstance(prompt[0], str)
    where = "input_ids" if ids else "text"
    return {where: prompt, "sampling_params": sampling, **(extra or {})}


def tokenizer() -> Tokenizer:
    """The tokenizer of every scripted server."""
    return make_tokenizer(VOCAB)


def spawn(directory: Path, *flags: str, port: int | None = None, **script: Any) -> Scripted:
    """Start a server without waiting for it. script: see `scripted_engine.Script`."""
    port = port or free_port()
    model = directory / f"model-{port}"
    model.mkdir(exist_ok=True)
    write_tokenizer(model, VOCAB)
    (model / "script.json").write_bytes(orjson.dumps(script))
    scratch = Path(tempfile.mkdtemp(prefix="api-"))
    command = [sys.executable, "tests/scripted_engine.py", "--model-path", str(model)]
    command += ["--port", str(port), "--served-model-name", MODEL, *flags]
    stdout, stderr = directory / f"{port}.out", directory / f"{port}.err"
    with stdout.open("wb") as out, stderr.open("wb") as err:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=os.environ | {"TMPDIR": str(scratch)},
            start_new_session=True,
        )
    return Scripted(process, f"http://127.0.0.1:{port}", stdout, stderr, scratch=scratch)


@contextmanager
def starter(directory: Path) -> Iterator[Start]:
    """`start(*flags, wait=True, **script)`; what the test has not ended is ended, and checked."""
    with ExitStack() as stack:

        def start(*flags: str, wait: bool = True, **how: Any) -> Scripted:
            server = spawn(directory, *flags, **how)
            stack.callback(server.remove_scratch)
            stack.callback(server.kill)
            stack.callback(_stop, server)
            if wait:
                server.wait_until_ready(READY_TIMEOUT_S)
            return server

        yield start


def _stop(server: Scripted) -> None:
    if not server.stopped:
        server.stop()
