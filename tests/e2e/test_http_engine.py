"""The API process and the real engine together, on the tiny model: what crosses the sockets."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from serving import Launch, Server

CONTEXT = 512
PROMPT = "The harbour master kept a ledger of every boat that came in"
LONG = {"ignore_eos": True, "max_new_tokens": 450}
GONE_S = 1.0


@pytest.fixture(scope="module")
def server(launch_shared: Launch) -> Server:
    flags = ("--speculative-algorithm", "NGRAM", "--context-length", str(CONTEXT))
    return launch_shared(*flags, "--max-running-requests", "4", "--chunked-prefill-size", "64")


def post(server: Server, text: str, **sampling: Any) -> httpx.Response:
    request = {"text": text, "sampling_params": {"temperature": 0, "ignore_eos": True} | sampling}
    return server.client.post("/generate", json=request)


def state(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.client.get("/server_info").json()["internal_states"][0]
    return found


def drained(server: Server) -> bool:
    now = state(server)
    return now["running"] == now["queued"] == now["used_tokens"] == 0


def wait_for(condition: Any, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def send(server: Server, request: dict[str, Any]) -> socket.socket:
    data = json.dumps(request).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    url = httpx.URL(server.url)
    client = socket.create_connection((url.host, url.port))
    client.sendall(head.encode() + data)
    return client


def test_streams_and_wholes_agree(server: Server) -> None:
    whole = post(server, PROMPT, max_new_tokens=100).json()
    assert whole["meta_info"]["spec_accept_length"] > 1, (
        "drafts were accepted, or this shows nothing"
    )
    request = {
        "text": PROMPT,
        "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": 100},
        "stream": True,
    }
    with server.client.stream("POST", "/generate", json=request) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    parts = [json.loads(line) for line in lines[:-1]]
    assert len(parts) > 5
    assert parts[-1]["text"] == whole["text"]
    assert parts[-1]["output_ids"] == whole["output_ids"]


def test_choices_are_the_requests_of_their_seeds(server: Server) -> None:
    choices = post(server, PROMPT, n=4, temperature=1, seed=5, max_new_tokens=24).json()
    assert len({tuple(choice["output_ids"]) for choice in choices}) == 4
    for choice in choices:
        seed = choice["meta_info"]["seed"]
        alone = post(server, PROMPT, temperature=1, seed=seed, max_new_tokens=24).json()
        assert alone["output_ids"] == choice["output_ids"]


def test_a_reported_seed_repeats_the_answer(server: Server) -> None:
    first = post(server, PROMPT, temperature=1, max_new_tokens=24).json()
    other = post(server, PROMPT, temperature=1, max_new_tokens=24).json()
    assert first["output_ids"] != other["output_ids"]
    seed = first["meta_info"]["seed"]
    again = post(server, PROMPT, temperature=1, max_new_tokens=24, seed=seed).json()
    assert again["output_ids"] == first["output_ids"]


def test_stops_cut_the_same_in_any_order(server: Server) -> None:
    ids = post(server, PROMPT, max_new_tokens=64).json()["output_ids"]
    text = post(server, PROMPT, max_new_tokens=64).json()["text"]
    for at in range(2, len(text) - 12, 7):
        first, later = text[at : at + 4], text[at + 6 : at + 12]
        for stop in ([first, later], [later, first]):
            reply = post(server, PROMPT, max_new_tokens=64, stop=stop).json()
            cut = min(text.find(first) + len(first), text.find(later) + len(later))
            matched = reply["meta_info"]["finish_reason"]["matched"]
            assert text.find(matched) + len(matched) == cut
            assert reply["text"] == text[: cut - len(matched)]
            assert reply["output_ids"] == ids[: len(reply["output_ids"])]
            assert reply["meta_info"]["completion_tokens"] == len(reply["output_ids"])


def test_the_last_tokens_of_the_context(server: Server) -> None:
    """A prompt one token short of the context is served beside others, a longer one refused."""
    short = post(server, PROMPT, max_new_tokens=8).json()["output_ids"]

    def fill(prompt: int) -> httpx.Response:
        sampling = {"temperature": 0, "ignore_eos": True}
        sampling["max_new_tokens"] = max(1, CONTEXT - prompt)
        ids = [100 + i % 300 for i in range(prompt)]
        request = {"input_ids": ids, "sampling_params": sampling}
        return server.client.post("/generate", json=request)

    lengths = [CONTEXT - k for k in (1, 2, 3, 12, 13, 25)]
    with ThreadPoolExecutor(16) as pool:
        fits = [pool.submit(fill, n) for n in lengths]
        too_long = [pool.submit(fill, CONTEXT + k) for k in (0, 1, 12, 20)]
        others = [pool.submit(post, server, PROMPT, max_new_tokens=8) for _ in range(4)]
        for length, reply in zip(lengths, fits, strict=True):
            meta = reply.result().json()["meta_info"]
            assert meta["completion_tokens"] == CONTEXT - length
            assert meta["finish_reason"]["type"] == "length"
        for refused in too_long:
            assert refused.result().status_code == 400
            assert "the model's context" in refused.result().text
        assert all(other.result().json()["output_ids"] == short for other in others)
    wait_for(lambda: drained(server), GONE_S, "slots are still held")


@pytest.mark.parametrize("count", [0, 1, 2])
def test_tiny_budgets(server: Server, count: int) -> None:
    reply = post(server, PROMPT, max_new_tokens=count).json()
    assert len(reply["output_ids"]) == reply["meta_info"]["completion_tokens"] == count
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": count}


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_at_any_moment_free_everything(server: Server, stream: bool) -> None:
    server.client.post("/flush_cache").raise_for_status()
    free = state(server)["free_tokens"]
    request = {"text": [PROMPT] * 3, "sampling_params": LONG, "stream": stream}
    for moment in (0, 0.005, 0.02, 0.05, 0.1, 0.3):
        clients = [send(server, request) for _ in range(3)]  # 9 requests, 4 of which run
        time.sleep(moment)
        for client in clients:
            client.close()
        time.sleep(0.05)
        wait_for(lambda: drained(server), GONE_S, f"left after {moment} s, still running")
    server.client.post("/flush_cache").raise_for_status()
    assert state(server)["free_tokens"] == free
    assert post(server, PROMPT, max_new_tokens=4).status_code == 200


def test_bad_bodies_do_not_touch_others(server: Server) -> None:
    expected = post(server, PROMPT, max_new_tokens=200).json()["output_ids"]
    bad: list[dict[str, Any]] = [
        {"text": "a", "sampling_params": {"stop_token_ids": [None]}},
        {"text": "a", "sampling_params": {"stop_token_ids": [-5]}},
        {"text": ""},
        {"input_ids": [10**6]},
        {"text": "a", "sampling_params": {"top_p": 0}},
        {"text": "a", "sampling_params": {"regex": "("}},
    ]
    with ThreadPoolExecutor(8) as pool:
        good = [pool.submit(post, server, PROMPT, max_new_tokens=200) for _ in range(4)]
        for body in bad * 3:
            assert server.client.post("/generate", json=body).status_code == 400
        assert all(reply.result().json()["output_ids"] == expected for reply in good)


def test_the_engines_death_is_a_503_for_those_who_wait(launch: Launch) -> None:
    server = launch("--context-length", str(CONTEXT))
    (engine,) = [p for p in server.family() if p.pid != server.process.pid]
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(post, server, PROMPT, **LONG) for _ in range(3)]
        wait_for(lambda: state(server)["running"] == 3, 5, "the requests do not run")
        engine.kill()
        assert [reply.result().status_code for reply in waiting] == [503] * 3
    server.expect_end(1)
