"""Two replicas on a real Ray; `make ray` installs it. One deployment serves the tests in order."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from serving import ROOT, Server, free_port, start_command

PYTHON = Path(os.environ.get("RAY_PYTHON", ROOT / ".venv-ray" / "bin" / "python"))
PROMPT = "The harbour master kept a ledger of every boat that came in before the winter storms."
SETTINGS: dict[str, Any] = {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True}
LONG = {"temperature": 1, "max_new_tokens": 1800, "ignore_eos": True}  # nothing is guessed right
HEAL_S = 120.0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="make ray installs Ray"),
]


def command(model: Path, port: int, *flags: str) -> list[str]:
    own = [str(PYTHON), "-m", "sgl_spec", "deploy", "--replicas", "2", "--port", str(port)]
    return [*own, "--model-path", str(model), "--speculative-algorithm", "NGRAM", *flags]


def test_the_example_serves_under_a_path_of_its_own(tiny_model_dir: Path) -> None:
    """Before the others, so that one Ray runs at a time."""
    words = [str(PYTHON), "examples/ray_serve.py", "--port", str(free_port())]
    done = subprocess.run(
        [*words, "--model-path", str(tiny_model_dir)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert str(tiny_model_dir) in done.stdout


@pytest.fixture(scope="module")
def app(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    server = start_command(
        tmp_path_factory.mktemp("ray"),
        command(tiny_model_dir, port),
        port,
        PYTHONPATH=paths,
        RAY_USAGE_STATS_ENABLED="0",
    )
    try:
        server.wait_until_ready(300)
        yield server
        server.stop(traceback=True)  # Ray's, of the replicas that were killed
        assert not servers()
    finally:
        server.kill()


def servers() -> dict[int, psutil.Process]:
    """The replicas' server processes by port."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ValueError):
            line = process.cmdline()
            if "sgl_spec.deploy.child" in line:
                found[int(line[line.index("--port") + 1])] = process
    return found


def running(port: int) -> int:
    """Requests that a replica's server has in hand."""
    state = httpx.get(f"http://127.0.0.1:{port}/server_info", timeout=30).json()
    return int(state["internal_states"][0]["running"])


def until(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not after {seconds} s"
        time.sleep(0.2)


def generate(app: Server, text: str) -> httpx.Response:
    body = {"text": text, "sampling_params": SETTINGS}
    return app.client.post("/generate", json=body)


def test_the_openai_client_streams(app: Server) -> None:
    client = openai.OpenAI(base_url=f"{app.url}/v1", api_key="none")
    said: Any = {"model": "default", "messages": [{"role": "user", "content": PROMPT}]}
    whole = client.chat.completions.create(**said, temperature=0, max_tokens=40)
    parts = list(client.chat.completions.create(**said, temperature=0, max_tokens=40, stream=True))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    assert len(parts) > 3
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(**said | {"temperature": -1})


def test_a_client_that_leaves_aborts(app: Server) -> None:
    body = {"text": PROMPT, "stream": True, "sampling_params": LONG}
    with app.client.stream("POST", "/generate", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        assert sum(map(running, servers())) == 1
    until(lambda: not sum(map(running, servers())), 10)


def test_aborts_reach_every_replica(app: Server) -> None:
    body = {"text": PROMPT, "sampling_params": LONG}
    with ThreadPoolExecutor(8) as pool:
        texts = [f"{number} {PROMPT}" for number in range(8)]
        open_calls = [
            pool.submit(app.client.post, "/generate", json=body | {"text": text}) for text in texts
        ]
        until(lambda: all(map(running, servers())), 30)
        assert app.client.post("/abort_request", json={"abort_all": True}).status_code == 200
        ends = [call.result().json()["meta_info"]["finish_reason"]["type"] for call in open_calls]
    assert "abort" in ends
    assert not sum(map(running, servers()))


def streamed(app: Server, text: str) -> list[str]:
    body = {"text": text, "stream": True, "sampling_params": SETTINGS}
    with app.client.stream("POST", "/generate", json=body) as reply:
        assert reply.status_code == 200
        return [line for line in reply.iter_lines() if line]


@pytest.mark.parametrize("victim", ["replica", "server"])
def test_a_killed_replica_loses_no_request_and_comes_back(app: Server, victim: str) -> None:
    texts = [f"{number} {PROMPT}" for number in range(8)]
    expected = [generate(app, text).json()["output_ids"] for text in texts]
    before = servers()
    with ThreadPoolExecutor(16) as pool:
        wholes = [pool.submit(generate, app, text) for text in texts]
        streams = [pool.submit(streamed, app, text) for text in texts]
        until(lambda: all(map(running, before)), 30)
        lost = next(iter(before.values()))
        (lost.parent() if victim == "replica" else lost).kill()
        replies = [call.result() for call in wholes]
        ends = [call.result()[-2:] for call in streams]
    assert [reply.status_code for reply in replies] == [200] * 8
    assert [reply.json()["output_ids"] for reply in replies] == expected
    assert {last for _, last in ends} == {"data: [DONE]"}
    whole = ['"finish_reason":{"type":"length"' in end for end, _ in ends]
    assert any(whole)  # the other replica's
    assert all(one or '"error"' in end for one, (end, _) in zip(whole, ends, strict=True))
    until(lambda: not lost.is_running() or lost.status() == psutil.STATUS_ZOMBIE, 5)
    until(lambda: len(servers()) == 2 and set(servers()) != set(before), HEAL_S)
    until(lambda: app.client.get("/health").status_code == 200, HEAL_S)


def test_an_update_loses_no_request(app: Server, tiny_model_dir: Path) -> None:
    done = threading.Event()
    seen: list[int] = []

    def ask() -> None:
        while not done.is_set():
            seen.append(generate(app, PROMPT).status_code)

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        flags = ["--address", "auto", "--served-model-name", "second"]
        port = int(app.url.rpartition(":")[2])
        update = subprocess.run(
            command(tiny_model_dir, port, *flags),
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        done.set()
        for call in asking:
            call.result()
    assert update.returncode == 0, update.stderr[-4000:]
    assert set(seen) == {200}
    assert app.client.get("/v1/models").json()["data"][0]["id"] == "second"
