"""The HTTP interface, against a scripted engine that repeats the prompt."""

from __future__ import annotations

import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted import MODEL, Scripted, Start, body, starter, tokenizer

PROMPT = "The harbour master kept a ledger"
SCRIPTS = "船 🚢 Où est le bateau? где лодка 👩‍👩‍👧 ไทย"
LONG = {"max_new_tokens": 1500, "ignore_eos": True}
DRAIN_S = 1.0  # a request whose client has gone is off the engine in this time


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    with starter(tmp_path_factory.mktemp("api")) as begin:
        yield begin


@pytest.fixture(scope="module")
def server(start: Start) -> Scripted:
    return start("--speculative-algorithm", "NGRAM")


@pytest.fixture(scope="module")
def other(start: Start) -> Scripted:
    """Another set of flags, and room for two requests that run and one that waits."""
    return start(
        *("--incremental-streaming-output", "--enable-cache-report", "--enable-metrics"),
        *("--max-running-requests", "2", "--max-queued-requests", "1"),
    )


def repeated(prompt: str, tokens: int) -> str:
    """What the scripted engine answers."""
    tok = tokenizer()
    ids = tok.encode(prompt).ids
    return tok.decode((ids * (tokens // len(ids) + 1))[:tokens])


def events(server: Scripted, route: str, request: dict[str, Any]) -> list[Any]:
    """The events of a stream, [DONE] checked and left out."""
    with server.client.stream("POST", route, json={"stream": True, **request}) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def wait_for(condition: Any, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def idle(server: Scripted) -> bool:
    state = server.state()
    return state["running"] == state["queued"] == 0


class TestGenerate:
    def test_a_reply(self, server: Scripted) -> None:
        reply = server.generate(PROMPT, max_new_tokens=20, seed=7)
        meta = reply["meta_info"]
        assert reply["text"] == repeated(PROMPT, 20)
        assert len(reply["output_ids"]) == meta["completion_tokens"] == 20
        assert meta["finish_reason"] == {"type": "length", "length": 20}
        assert meta["prompt_tokens"] == len(tokenizer().encode(PROMPT).ids)
        assert (meta["seed"], meta["cached_tokens"], meta["num_retractions"]) == (7, 2, 0)
        assert meta["e2e_latency"] > 0
        # One token of the prefill, then rounds of 3, and 1 in the last.
        assert meta["spec_verify_ct"] == 7
        assert meta["spec_num_correct_drafts"] == 12
        assert meta["spec_correct_drafts_histogram"] == [1, 0, 6]
        assert meta["spec_accept_length"] == pytest.approx(19 / 7)
        assert meta["spec_accept_rate"] == 12 / meta["spec_num_proposed_drafts"]

    def test_ids_put_and_no_speculation(self, server: Scripted, other: Scripted) -> None:
        reply = server.client.put("/generate", json=body([40, 41, 42], max_new_tokens=5))
        assert reply.json()["output_ids"] == [40, 41, 42, 40, 41]
        plain = other.generate([40, 41, 42], max_new_tokens=5)
        assert not [key for key in plain["meta_info"] if key.startswith("spec_")]

    def test_batches_and_n(self, server: Scripted) -> None:
        replies = server.generate(["one boat", "two boats"], max_new_tokens=6, n=2, seed=3)
        assert [r["text"] for r in replies] == [
            *[repeated("one boat", 6)] * 2,
            *[repeated("two boats", 6)] * 2,
        ]
        seeds = [r["meta_info"]["seed"] for r in replies]
        assert seeds[0] == seeds[2] == 3
        assert seeds[1] == seeds[3] != 3
        assert len({r["meta_info"]["id"] for r in replies}) == 4
        one = server.generate([[40], [41]], max_new_tokens=2)
        assert [r["output_ids"] for r in one] == [[40, 40], [41, 41]]

    def test_prompt_ids_are_returned_on_request(self, server: Scripted) -> None:
        request = body(PROMPT, extra={"return_prompt_token_ids": True}, max_new_tokens=1)
        reply = server.client.post("/generate", json=request).json()
        assert reply["prompt_token_ids"] == tokenizer().encode(PROMPT).ids

    def test_streams_are_cumulative(self, server: Scripted) -> None:
        whole = server.generate(SCRIPTS, max_new_tokens=60, seed=1)
        parts = events(server, "/generate", body(SCRIPTS, max_new_tokens=60, seed=1))
        assert 2 < len(parts) <= 21, "steps that come while a client is slow are merged"
        for before, after in itertools.pairwise(parts):
            assert after["text"].startswith(before["text"])
            assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
            assert before["meta_info"]["finish_reason"] is None
        for key in ("text", "output_ids"):
            assert parts[-1][key] == whole[key]
        assert "\ufffd" not in "".join(part["text"] for part in parts[:-1])
        last = parts[-1]["meta_info"]
        assert last["spec_verify_ct"] == whole["meta_info"]["spec_verify_ct"]

    def test_incremental_streams_add_up(self, other: Scripted) -> None:
        whole = other.generate(SCRIPTS, max_new_tokens=50)
        parts = events(other, "/generate", body(SCRIPTS, max_new_tokens=50))
        assert "".join(part["text"] for part in parts) == whole["text"]
        assert [i for part in parts for i in part["output_ids"]] == whole["output_ids"]

    def test_batch_streams_carry_an_index(self, server: Scripted) -> None:
        parts = events(server, "/generate", body(["one boat", "two"], max_new_tokens=8))
        for index, prompt in enumerate(("one boat", "two")):
            mine = [part for part in parts if part["index"] == index]
            assert mine[-1]["text"] == repeated(prompt, 8)
            assert mine[-1]["meta_info"]["finish_reason"]["type"] == "length"

    @pytest.mark.parametrize("stream", [False, True])
    def test_stop_strings_are_cut_wherever_they_fall(self, server: Scripted, stream: bool) -> None:
        text = repeated(PROMPT, 12)
        for at in range(2, len(text) - 3):
            stop = text[at : at + 3]
            expected = text[: text.find(stop)]
            request = body(PROMPT, max_new_tokens=40, stop=[stop, "never"])
            if stream:
                parts = events(server, "/generate", request)
                assert all(expected.startswith(part["text"]) for part in parts)
                reply = parts[-1]
            else:
                reply = server.client.post("/generate", json=request).json()
            assert reply["text"] == expected
            assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}

    def test_stop_ids_and_no_stop_trim(self, server: Scripted) -> None:
        reply = server.generate([40, 41, 42], max_new_tokens=9, stop_token_ids=[42])
        assert reply["output_ids"] == [40, 41, 42]
        assert reply["text"] == tokenizer().decode([40, 41])
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": 42}
        kept = server.generate([40, 41, 42], stop_token_ids=[42], no_stop_trim=True)
        assert kept["text"] == tokenizer().decode([40, 41, 42])


class TestRequestNames:
    def test_rid_is_the_id_and_in_use_until_the_end(self, server: Scripted) -> None:
        assert (
            server.client.post(
                "/generate", json=body("x", extra={"rid": "mine"}, max_new_tokens=1)
            ).json()["meta_info"]["id"]
            == "mine"
        )
        with server.client.stream(
            "POST", "/generate", json=body("x", extra={"rid": "mine", "stream": True}, **LONG)
        ) as reply:
            lines = reply.iter_lines()  # kept: dropping it would close the connection
            next(lines)
            again = server.client.post("/generate", json=body("x", extra={"rid": "mine"}))
            assert again.status_code == 400
            assert 'rid "mine" is already in use' in again.json()["error"]["message"]
        wait_for(lambda: idle(server), DRAIN_S, "the first request still runs")

    @pytest.mark.parametrize("target", [{"rid": "job"}, {"abort_all": True}])
    @pytest.mark.parametrize("n", [1, 3])
    def test_abort(self, server: Scripted, target: dict[str, Any], n: int) -> None:
        request = body("x", extra={"rid": "job"}, n=n, **LONG)
        with ThreadPoolExecutor() as pool:
            reply = pool.submit(server.client.post, "/generate", json=request)
            wait_for(lambda: server.state()["running"] == n, 2, "the request does not run")
            assert server.client.post("/abort_request", json=target).status_code == 200
            replies = reply.result(timeout=2).json()
        for one in replies if n > 1 else [replies]:
            assert one["meta_info"]["finish_reason"] == {"type": "abort", "message": "Aborted"}

    def test_abort_of_nobody_and_of_nothing(self, server: Scripted) -> None:
        assert server.client.post("/abort_request", json={"rid": "nobody"}).status_code == 200
        assert server.client.post("/abort_request", json={}).status_code == 400


BAD: list[tuple[str, bytes | dict[str, Any], int]] = [
    ("/generate", {}, 400),
    ("/generate", {"text": ""}, 400),
    ("/generate", {"input_ids": []}, 400),
    ("/generate", {"text": "a", "input_ids": [1]}, 400),
    ("/generate", {"input_ids": [99999]}, 400),
    ("/generate", {"text": "a", "sampling_params": {"stop_token_ids": [None]}}, 400),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": "ten"}}, 400),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2048}}, 400),
    ("/generate", b'{"text": "a", "sampling_params": {"temperature": NaN}}', 400),
    ("/generate", b'{"text": "a", "sampling_params": {"seed": 18446744073709551616}}', 400),
    ("/generate", {"text": "a", "priority": 5}, 400),
    ("/generate", b'{"text": "a"', 400),
    ("/generate", b'{"text": "\xff"}', 400),
    ("/generate", b"[" * 5000, 400),
    ("/generate", b"", 400),
    ("/generate", b'{"text": "' + b"a" * (10 * 2**20) + b'"}', 413),
    ("/v1/completions", {"model": MODEL}, 400),
    ("/v1/completions", {"model": "gpt", "prompt": "a"}, 404),
    ("/v1/completions", {"model": MODEL, "prompt": "a", "top_p": 2}, 400),
    ("/v1/completions", {"prompt": "a " * 4000}, 400),
    ("/v1/chat/completions", {"messages": []}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}], "n": 0}, 400),
    ("/v1/chat/completions", b"null", 400),
    ("/tokenize", {}, 400),
    ("/tokenize", {"prompt": 3}, 400),
    ("/detokenize", {"tokens": [99999]}, 400),
    ("/tokenize", {"prompt": "a", "model": "gpt"}, 404),
    ("/v1/detokenize", {"tokens": [9], "model": "gpt"}, 404),
    ("/nowhere", {}, 404),
    ("/v1/nowhere", {}, 404),
    ("/health", {}, 405),
]


class TestBadInput:
    def test_every_bad_body_gets_a_4xx_and_others_run_on(self, server: Scripted) -> None:
        replies = []
        with ThreadPoolExecutor() as pool:
            good = [pool.submit(server.generate, PROMPT, max_new_tokens=300) for _ in range(4)]
            for path, content, status in BAD:
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                headers = {"Content-Type": "application/json"}
                reply = server.client.post(path, content=data, headers=headers)
                replies.append((path, content, reply))
                assert reply.status_code == status, (path, str(content)[:100], reply.text)
            assert all(f.result()["text"] == repeated(PROMPT, 300) for f in good)
        for path, content, reply in replies:
            error = reply.json() if path.startswith("/v1/") else reply.json()["error"]
            assert error["object"] == "error", (path, content)
            assert error["message"]
            assert error["code"] == reply.status_code
        assert server.client.get("/health").status_code == 200
        wait_for(lambda: idle(server), DRAIN_S, "something leaked")

    def test_errors_name_the_field(self, server: Scripted) -> None:
        reply = server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": -1})
        assert reply.json() == {
            "object": "error",
            "message": "max_tokens must be greater than or equal to 0, got -1.",
            "type": "BadRequestError",
            "param": "max_tokens",
            "code": 400,
        }

    def test_content_type_matters_on_openai_routes_only(self, server: Scripted) -> None:
        for headers in ({"Content-Type": "text/plain"}, {}):
            reply = server.client.post("/v1/completions", content=b"{}", headers=headers)
            assert reply.status_code == 415
        headers = {"Content-Type": "application/json; charset=utf-8"}
        assert (
            server.client.post("/v1/completions", content=b"{}", headers=headers).json()["param"]
            == "prompt"
        )
        data = json.dumps(body("x", max_new_tokens=1)).encode()
        assert server.client.post("/generate", content=data).status_code == 200

    def test_wrong_method(self, server: Scripted) -> None:
        reply = server.client.get("/generate")
        assert reply.status_code == 405
        assert reply.json()["error"]["type"] == "BadRequestError"
        assert "POST" in reply.headers["allow"]

    def test_the_root_names_routes_that_exist(self, server: Scripted) -> None:
        text = server.client.get("/").text
        known = server.client.get("/openapi.json").json()["paths"]
        named = set(re.findall(r"/[a-z][\w/]+(?![\w.])", text)) - {"/openapi"}
        assert {"/generate", "/v1/chat/completions", "/health"} <= named
        assert named - {"/docs"} <= known.keys()

    def test_a_key_that_is_given_twice_is_refused(self, server: Scripted) -> None:
        for text, name in (
            (b'{"text": "a", "text": "b"}', "text"),
            (b'{"text": "a", "sampling_params": {"n": 1, "top_p": 1, "n": 1}}', "n"),
        ):
            reply = server.client.post("/generate", content=text)
            assert reply.status_code == 400
            error = reply.json()["error"]
            assert error["message"] == f'The field "{name}" is given twice.'
            assert error["param"] == name

    def test_a_trailing_slash_is_none(self, server: Scripted) -> None:
        for path in ("/v1/models", f"/v1/models/{MODEL}", "/health", "/model_info"):
            with_slash = server.client.get(f"{path}/")
            assert (with_slash.status_code, with_slash.content) == (
                200,
                server.client.get(path).content,
            )
        reply = server.client.post("/generate/", json=body("x", max_new_tokens=1))
        assert reply.status_code == 200

    def test_the_page_of_the_routes_needs_no_network(self, server: Scripted) -> None:
        for page in ("/docs", "/redoc"):
            text = server.client.get(page).text
            assert "/openapi.json" in text
            sources = re.findall(r'(?:src|href)="([^"]+)"', text)
            assert sources
            for source in sources:
                assert source.startswith("/"), source
                asset = server.client.get(source)
                assert asset.status_code == 200
                assert asset.content

    def test_unknown_paths_are_not_found_by_type(self, server: Scripted) -> None:
        error = {"object": "error", "type": "NotFoundError", "param": None, "code": 404}
        reply = server.client.get("/nowhere")
        assert reply.json() == {"error": error | {"message": "GET /nowhere: Not Found."}}
        reply = server.client.get("/v1/nowhere")
        assert reply.json() == error | {"message": "GET /v1/nowhere: Not Found."}

    def test_the_log_shows_accesses_but_no_polls(self, server: Scripted) -> None:
        server.client.get("/health?why=poll")
        server.client.get("/model_info?why=asked")
        log = server.stderr.read_text()
        assert '"GET /model_info?why=asked HTTP/1.1" 200' in log
        assert "GET /health" not in log


class TestDisconnect:
    """A client that goes away takes its request with it, wherever the request is."""

    def send(self, server: Scripted, request: dict[str, Any]) -> socket.socket:
        data = json.dumps(request).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        url = httpx.URL(server.url)
        client = socket.create_connection((url.host, url.port))
        client.sendall(head.encode() + data)
        return client

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("n", [1, 3])
    def test_while_running(self, server: Scripted, stream: bool, n: int) -> None:
        client = self.send(server, body("x", extra={"stream": stream}, n=n, **LONG))
        wait_for(lambda: server.state()["running"] == n, 2, "the request does not run")
        client.close()
        wait_for(lambda: idle(server), DRAIN_S, "the request runs on")

    @pytest.mark.parametrize("stream", [False, True])
    def test_while_queued(self, other: Scripted, stream: bool) -> None:
        full = self.send(other, body("x", n=2, **LONG))
        wait_for(lambda: other.state()["running"] == 2, 2, "the requests do not run")
        waiting = self.send(other, body("y", extra={"stream": stream}, **LONG))
        wait_for(lambda: other.state()["queued"] == 1, 2, "the request does not wait")
        waiting.close()
        wait_for(lambda: other.state()["queued"] == 0, DRAIN_S, "the request waits on")
        assert other.state()["running"] == 2
        full.close()
        wait_for(lambda: idle(other), DRAIN_S, "the requests run on")

    def test_half_a_body(self, server: Scripted) -> None:
        url = httpx.URL(server.url)
        client = socket.create_connection((url.host, url.port))
        client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        client.close()
        assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_a_503_for_the_one_too_many(other: Scripted, stream: bool) -> None:
    done = threading.Event()

    def hold() -> Any:
        reply = other.client.post("/generate", json=body("x", n=2, max_new_tokens=200))
        done.set()
        return reply

    with ThreadPoolExecutor() as pool:
        running = pool.submit(hold)
        wait_for(lambda: other.state()["running"] == 2, 2, "the requests do not run")
        waiting = pool.submit(other.generate, "y", max_new_tokens=1)
        wait_for(lambda: other.state()["queued"] == 1, 2, "the request does not wait")
        (load,) = other.client.get("/get_load").json()
        full = other.client.post(
            "/generate", json=body("z", extra={"stream": stream}, max_new_tokens=1)
        )
        assert not done.is_set()
        assert (load["num_reqs"], load["num_waiting_reqs"]) == (3, 1)
        assert load["num_tokens"] > 0
        assert full.status_code == 503
        assert full.json()["error"]["message"] == "The request queue is full."
        assert running.result().status_code == 200
        assert waiting.result()["meta_info"]["completion_tokens"] == 1
    wait_for(lambda: idle(other), DRAIN_S, "something leaked")
    assert Path(other.stderr).read_text().count("Traceback") == 0
