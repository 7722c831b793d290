"""Routers of SGLang and vLLM in front of two servers; `make clients` installs them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import ROOT, Server, free_port, launcher, start_command

PYTHON = Path(os.environ.get("CLIENTS_PYTHON", ROOT / ".venv-clients" / "bin" / "python"))
MODULES = ("sglang_router", "vllm_router")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (PYTHON.parent / "sglang-router").exists(), reason="make clients installs the routers"
    ),
]
GREEDY = {"temperature": 0, "max_new_tokens": 8}
OPENAI = {"model": "default", "temperature": 0, "max_tokens": 8}
CALLS: dict[str, dict[str, Any]] = {
    "/generate": {"text": "one two three", "sampling_params": GREEDY},
    "/v1/completions": OPENAI | {"prompt": "one two three"},
    "/v1/chat/completions": OPENAI | {"messages": [{"role": "user", "content": "one two"}]},
    "/v1/responses": {"model": "default", "input": "one two", "max_output_tokens": 8},
}
# What a router adds to a body, and the server refuses so far.
REFUSED = {
    ("sglang_router", "/generate"): "model: null",
    ("sglang_router", "/v1/responses"): "store: true, priority, top_k, min_p, repetition_penalty",
    ("vllm_router", "/v1/chat/completions"): "include_reasoning: true",
}


@pytest.fixture(scope="module")
def servers(
    tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Server]]:
    with launcher(tmp_path_factory.mktemp("servers"), tiny_model_dir) as launch:
        yield [launch("--speculative-algorithm", "NGRAM") for _ in range(2)]


@pytest.fixture(scope="module")
def routers(
    servers: list[Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    with contextlib.ExitStack() as stack:
        found = {}
        for module in MODULES:
            port = free_port()
            listen = ["--host", "127.0.0.1", "--port", str(port)]
            urls = ["--worker-urls", *(server.url for server in servers)]
            command = [str(PYTHON), "-m", f"{module}.launch_router", *listen, *urls]
            found[module] = start_command(
                tmp_path_factory.mktemp(module),
                [*command, "--prometheus-port", str(free_port())],
                port,
                PYTHONPATH="",  # its own packages, not those of the tests
            )
            stack.callback(found[module].kill)
        for router in found.values():
            router.wait_until_ready(120)
        yield found


@pytest.mark.parametrize(
    ("module", "path"),
    [
        pytest.param(
            *case,
            marks=[pytest.mark.xfail(reason=REFUSED[case], raises=AssertionError)]
            if case in REFUSED
            else [],
        )
        for case in ((module, path) for module in MODULES for path in CALLS)
    ],
)
def test_requests_pass(
    routers: dict[str, Server], servers: list[Server], module: str, path: str
) -> None:
    expected = servers[0].client.post(path, json=CALLS[path])
    assert expected.status_code == 200
    for _ in range(3):
        reply = routers[module].client.post(path, json=CALLS[path])
        assert reply.status_code == 200, reply.text
        assert set(reply.json()) == set(expected.json())


@pytest.mark.parametrize("module", MODULES)
def test_both_servers_are_found(
    routers: dict[str, Server], servers: list[Server], module: str
) -> None:
    loads = routers[module].client.get("/get_loads").json()["workers"]
    assert {one["worker"] for one in loads} == {server.url for server in servers}


@pytest.mark.parametrize("module", MODULES)
def test_streams_pass(routers: dict[str, Server], module: str) -> None:
    body = CALLS["/v1/completions"] | {"stream": True}
    with routers[module].client.stream("POST", "/v1/completions", json=body) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert len(lines) > 2
    assert lines[-1] == "data: [DONE]"
