"""What the load client makes of streams: chunks, latencies, errors. Times are made up."""

from __future__ import annotations

import json
import signal
import socket
from typing import Any

import pytest

from sgl_spec.bench.client import Reply, Target
from sgl_spec.bench.own_server import own_server
from sgl_spec.bench.serving import Backend, Workload, main, read_levels, read_more, read_prompts
from sgl_spec.bench.streams import level_of, read_answer, spread
from sgl_spec.errors import ConfigError


def event(**content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def native(tokens: int, **meta: Any) -> bytes:
    return event(
        text="x" * tokens, meta_info={"completion_tokens": tokens, "prompt_tokens": 5} | meta
    )


def reply(*pieces: tuple[float, bytes], sent: float = 10.0) -> Reply:
    return Reply(sent, pieces[-1][0], 200, list(pieces))


def test_chunks_of_several_tokens() -> None:
    """One event in two reads, two events in one, and the end."""
    last = native(8, spec_verify_ct=3, spec_accept_length=7 / 3)
    one = native(1)
    answer = read_answer(
        reply(
            (10.5, one[:20]),
            (10.6, one[20:]),
            (10.9, native(4)),
            (11.0, native(5) + native(6)),
            (11.4, last + b"data: [DONE]\n\n"),
        )
    )
    assert answer.problem == ""
    assert answer.arrivals == [(10.6, 1), (10.9, 3), (11.0, 2), (11.4, 2)]
    level = level_of([answer], 1, 8)
    assert (level.errors, level.short, level.output_tokens, level.prompt_tokens) == (0, 0, 8, 5)
    assert level.seconds == pytest.approx(1.4)
    assert level.tokens_per_s == pytest.approx(8 / 1.4)
    assert level.ttft_ms is not None
    assert level.ttft_ms.p50 == pytest.approx(600)
    assert level.tpot_ms is not None
    assert level.tpot_ms.mean == pytest.approx(800 / 7)
    assert level.itl_ms is not None  # 3 of 100, 2 of 50, 2 of 200
    assert [level.itl_ms.p50, level.itl_ms.max] == pytest.approx([100, 200])
    assert level.itl_ms.mean == pytest.approx(level.tpot_ms.mean)
    assert level.chunk_gap_ms is not None
    assert level.chunk_gap_ms.max == pytest.approx(400)
    assert level.tokens_per_chunk == 2
    assert level.accept_length == pytest.approx(7 / 3)
    assert level.simulated is None


def openai(text: str, usage: int | None = None, **more: Any) -> bytes:
    counts = None if usage is None else {"prompt_tokens": 7, "completion_tokens": usage}
    return event(choices=[{"index": 0, "delta": {"content": text}}], usage=counts, **more)


def test_usage_with_every_event_or_only_at_the_end() -> None:
    role = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    counted = read_answer(
        reply(
            (10.1, role),
            (10.2, openai("a", 2)),
            (10.4, openai("b", 5)),
            (10.4, b"data: [DONE]\n\n"),
        )
    )
    assert counted.arrivals == [(10.2, 2), (10.4, 3)]
    end = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 5})
    uncounted = read_answer(
        reply((10.1, role), (10.2, openai("a")), (10.4, openai("b")), (10.5, end))
    )
    assert uncounted.arrivals == [(10.2, 0), (10.4, 0)]
    level = level_of([uncounted], 1, 9)
    assert (level.itl_ms, level.tokens_per_chunk, level.short) == (None, None, 1)
    assert level.tpot_ms is not None
    assert level.tpot_ms.p50 == pytest.approx(50)


def test_simulated_and_spec_details_of_openai() -> None:
    details = {"spec_verify_ct": 4, "spec_accept_length": 2.5}
    last = openai("b", 3, sglext={"spec_tokens_details": details}, simulated_accept_length=2.5)
    answer = read_answer(reply((10.1, openai("a", 1)), (10.2, last)))
    level = level_of([answer], 1, 3)
    assert (level.accept_length, level.simulated) == (2.5, 2.5)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (Reply(10, 11, 503, [], "HTTP 503: busy"), "HTTP 503"),
        (reply((10.2, native(1)), (10.3, event(error={"message": "gone"}))), "gone"),
        (reply((10.2, b"data: {oops\n\n")), "no JSON"),
        (reply((10.2, b"data: [DONE]\n\n")), "no tokens in the reply"),
        (reply((10.2, openai("text, and no usage at all"))), "no count of them"),
    ],
)
def test_errors_are_counted(broken: Reply, said: str) -> None:
    good = read_answer(reply((10.5, native(1)), (11.0, native(2))))
    bad = read_answer(broken)
    level = level_of([good, bad], 2, 2)
    assert (level.requests, level.errors, level.output_tokens) == (2, 1, 2)
    assert said in level.problems[0]
    assert level_of([bad], 1, 2).ttft_ms is None


def test_percentiles() -> None:
    assert spread([]) is None
    found = spread([i / 1e3 for i in range(1, 101)])
    assert found is not None
    assert [found.p50, found.p90, found.p99, found.max] == pytest.approx([50, 90, 99, 100])


def test_bodies() -> None:
    target, workload = Target("http://host:1/base/", "key"), Workload(9, 0.5, True)
    line = {"prompt": "p", "cat": "c"}
    call = Backend("sglang", target, workload, "m").call(line)
    params = {"max_new_tokens": 9, "temperature": 0.5, "ignore_eos": True}
    assert (call.path, call.body["text"]) == ("/generate", "p")
    assert (call.body["sampling_params"], call.body["stream"]) == (params, True)
    call = Backend("openai", target, workload, "m").call(line)
    assert (call.path, call.body["prompt"], call.body["ignore_eos"]) == (
        "/v1/completions",
        "p",
        True,
    )
    assert "return_spec_tokens_details" not in call.body
    chat = Backend("sgl-spec", target, workload, "m").call({"messages": [1]})
    assert (chat.path, chat.body["messages"]) == ("/v1/chat/completions", [1])


def test_more_is_laid_over_every_body() -> None:
    more = read_more('{"rid": "r", "sampling_params": {"regex": "[a-z]+", "ignore_eos": false}}')
    target = Target("http://host:1", None)
    own = Backend("sgl-spec", target, Workload(9, 0.5, True, more), "m")
    body = own.call({"prompt": "x"}).body
    assert body == {
        "text": "x",
        "rid": "r",
        "stream": True,
        "sampling_params": {
            "max_new_tokens": 9,
            "temperature": 0.5,
            "ignore_eos": False,
            "regex": "[a-z]+",
        },
    }
    one = own.call({"prompt": "x", "more": {"rid": "s", "sampling_params": {"top_k": 3}}}).body
    assert (one["rid"], one["sampling_params"]) == ("s", body["sampling_params"] | {"top_k": 3})
    openai = Backend("openai", target, Workload(9, 0.5, True, {"seed": 3, "stop": ["."]}), "m")
    body = openai.call({"messages": []}).body
    assert (body["seed"], body["stop"], body["messages"]) == (3, ["."], [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "must be JSON, got '{'"),
        ("[1]", "JSON object, got '\\[1\\]'"),
        ('{"a": NaN}', "must be JSON"),
        ('{"stop": "\\ud800"}', "must be JSON"),
        ("[" * 20000, "must be JSON"),
    ],
)
def test_more_that_is_no_object_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        main(["--extra-request-body", text, "--url", "http://127.0.0.1:9"])


def test_a_port_that_answers_is_not_ours() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"--port {port}: another listens there"),
            own_server(["--model-path", "smollm2", "--port", str(port)]),
        ):
            pass


@pytest.mark.parametrize("given", [["--port", "70000"], ["--port=0"], ["--port", "x"], ["--port"]])
def test_a_port_that_there_is_not(given: list[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(ConfigError, match="--port must be an integer from 1 to 65535, got "),
        own_server(["--model-path", "smollm2", *given]),
    ):
        pass
    assert signal.getsignal(signal.SIGTERM) is before


def test_prompts_and_levels(tmp_path: Any) -> None:
    assert (len(read_prompts("bench96")), len(read_prompts("warm36"))) == (96, 36)
    assert read_levels(["1:6", "48"], 96) == [(1, 6), (48, 96)]
    for wrong in (["0:3"], ["3:"], ["1:97"], ["x"]):
        with pytest.raises(ConfigError, match="--levels"):
            read_levels(wrong, 96)
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(ConfigError, match=r"own.jsonl, line 2: must have `prompt` or `messages`"):
        read_prompts(str(file))
    with pytest.raises(ConfigError, match="Cannot read the prompts"):
        read_prompts(str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match="--url must be"):
        Target("localhost:30000")
