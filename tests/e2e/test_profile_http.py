"""/start_profile and /stop_profile of a real server: a trace that a browser can open."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from serving import Launch, Server

BODY = {"text": "the boats", "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}

NO_GPU = {"activities": ["CPU", "GPU"]}


@pytest.fixture(scope="module")
def server(launch_shared: Launch) -> Server:
    return launch_shared("--max-total-tokens", "4096")


def names(trace: str) -> list[str]:
    events = json.loads(gzip.decompress(Path(trace).read_bytes()))["traceEvents"]
    return [event.get("name", "") for event in events]


def post(server: Server, path: str, body: Any = None) -> tuple[int, Any]:
    reply = server.client.post(path, json=body) if body is not None else server.client.post(path)
    return reply.status_code, reply.json()


def test_a_trace_from_start_to_stop(server: Server, tmp_path: Path) -> None:
    where = tmp_path / "made" / "here"
    status, started = post(server, "/start_profile", {"output_dir": str(where)})
    assert (status, started["message"]) == (200, "Profiling started.")
    assert Path(started["trace"]).parent == where
    again = post(server, "/start_profile")
    assert again[0] == 400
    assert started["trace"] in str(again[1])
    post(server, "/generate", BODY)
    status, stopped = post(server, "/stop_profile")
    assert (status, stopped["trace"]) == (200, started["trace"])
    found = names(stopped["trace"])
    assert found.count("engine step") == 8
    assert any(name.startswith(("aten::", "mkldnn::")) for name in found)
    assert post(server, "/stop_profile")[0] == 400


def test_a_trace_of_so_many_steps(server: Server, tmp_path: Path) -> None:
    """It ends by itself, and the next one is another file."""
    asked = {"output_dir": str(tmp_path), "num_steps": 3, "activities": ["CPU"]}
    started = post(server, "/start_profile", asked)[1]
    assert post(server, "/generate", BODY)[1]["meta_info"]["completion_tokens"] == 8
    assert names(started["trace"]).count("engine step") == 3
    status, answer = post(server, "/stop_profile")
    assert status == 400
    assert "No trace is being taken" in str(answer)
    reply = server.client.get("/start_profile")
    assert reply.status_code == 200
    other = server.client.get("/stop_profile").json()["trace"]
    assert other == reply.json()["trace"] != started["trace"]
    Path(other).unlink()


def test_a_trace_that_cannot_be_written_ends_nothing(server: Server, tmp_path: Path) -> None:
    where = tmp_path / "gone"
    for asked in ({}, {"num_steps": 2}):
        post(server, "/start_profile", {"output_dir": str(where), **asked})
        where.rmdir()
        assert post(server, "/generate", BODY)[0] == 200
        assert post(server, "/stop_profile")[0] == 400
    assert server.stderr.read_text().count("Cannot write") == 1
    assert post(server, "/generate", BODY)[0] == 200


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"num_steps": 0}, "num_steps must be an integer >= 1, got 0"),
        (
            {"activities": ["CPU", "TPU"]},
            'activities must be a list of "CPU" and "GPU", got ["CPU"',
        ),
        ({"activities": "CPU"}, 'activities must be a list of "CPU" and "GPU", got "CPU"'),
        (NO_GPU, 'activities must be ["CPU"] without a GPU, got ["CPU","GPU"]'),
        ({"output_dir": "/proc/nowhere"}, "output_dir /proc/nowhere cannot be made"),
        ({"profile_by_stage": True}, "profile_by_stage is not supported"),
        ({"steps": 3}, "Unknown field"),
        ([], "must be an object"),
    ],
)
def test_refusals(server: Server, body: Any, said: str) -> None:
    if body is NO_GPU and server.client.get("/model_info").json()["device"] != "cpu":
        pytest.skip("this server has a GPU")
    status, answer = post(server, "/start_profile", body)
    assert status == 400
    assert said in answer["error"]["message"]
    assert answer["error"]["param"] == next(iter(body), None)
    assert post(server, "/stop_profile")[0] == 400
