"""What /metrics and the log tell; and that examples/monitoring reads names that exist."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from test_protocol_requests import INFO
from tiny import make_tokenizer

from sgl_spec.args import ServerArgs
from sgl_spec.messages import EngineState, OutputChunk
from sgl_spec.request import FinishReason, SamplingParams, SpecStats, TokenizedRequest
from sgl_spec.server.logs import RequestLog
from sgl_spec.server.metrics import Metrics
from sgl_spec.server.model_info import summary

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "monitoring"


def told(metrics: Metrics) -> dict[str, dict[str, float]]:
    """Samples by name and by their labels but for the model's."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = [v for k, v in sample.labels.items() if k != "model_name"]
            found.setdefault(sample.name, {})[",".join(labels)] = sample.value
    return found


def busy() -> Metrics:
    metrics = Metrics("m", speculating=True)
    state = {"running": 1, "queued": 2, "used_tokens": 3, "cached_tokens": 4, "free_tokens": 5}
    metrics.engine.state = EngineState(**state, spec_histogram=[5, 3, 0, 2])
    return metrics


def ended(kind: Any, status: int = 200) -> OutputChunk:
    finish = FinishReason(kind=kind, status=status)
    return OutputChunk(
        rid="a", ids=[5], prompt_tokens=4, completion_tokens=1, finish=finish, queued_s=0.02
    )


def test_ends_are_counted_by_their_reason_and_refusals_apart() -> None:
    metrics = busy()
    for kind, status in (("stop", 200), ("length", 200), ("abort", 200), ("abort", 503)):
        metrics.finished(1.5, ended(kind, status))
    found = told(metrics)
    reasons = dict.fromkeys(("stop", "length", "abort", "refused"), 1)
    assert found["sglang:finished_requests_total"] == reasons
    assert found["sglang:e2e_request_latency_seconds_count"][""] == 3
    assert found["sglang:queue_time_seconds_sum"][""] == pytest.approx(0.08)


def test_accepted_drafts_by_position() -> None:
    positions = {"1": 5, "2": 2, "3": 2}
    assert told(busy())["sglang:spec_accepted_tokens_per_pos_total"] == positions


def test_replies_are_counted_by_status() -> None:
    metrics = busy()
    for status in (200, 200, 400):
        metrics.responded("/generate", "POST", status)
    assert told(metrics)["sglang:http_responses_total"] == {
        "/generate,POST,200": 2,
        "/generate,POST,400": 1,
    }


def test_the_board_reads_names_that_exist() -> None:
    metrics = busy()
    metrics.finished(1, ended("stop"))
    metrics.first_token(1)
    metrics.next_tokens(1, 2)
    metrics.responded("/generate", "POST", 200)
    known = told(metrics)
    board = json.loads((EXAMPLE / "grafana" / "sgl-spec.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    read = {name for one in expressions for name in re.findall(r"(?:sglang:|process_)\w+", one)}
    assert len(read) > 15
    assert read <= known.keys()
    for one in expressions:
        labels = [*re.findall(r"by \((\w+)\)", one)]
        assert set(labels) <= {"le", "finish_reason", "status_code", "position"}
        assert one.count("(") == one.count(")")


def test_the_files_of_the_example_fit_together() -> None:
    compose = yaml.safe_load((EXAMPLE / "compose.yaml").read_text())
    mounted = [
        volume.split(":")[0]
        for service in compose["services"].values()
        for volume in service["volumes"]
    ]
    files = {f"./{file.relative_to(EXAMPLE)}" for file in EXAMPLE.rglob("*") if file.is_file()}
    assert {*mounted} == files - {"./compose.yaml"}
    (source,) = yaml.safe_load((EXAMPLE / "grafana" / "datasource.yaml").read_text())["datasources"]
    board = (EXAMPLE / "grafana" / "sgl-spec.json").read_text()
    assert set(re.findall(r'"uid": "(\w+)"', board)) == {source["uid"]}
    scraped = yaml.safe_load((EXAMPLE / "prometheus.yaml").read_text())["scrape_configs"]
    port = ServerArgs.__dataclass_fields__["port"].default
    assert scraped[0]["static_configs"][0]["targets"] == [f"127.0.0.1:{port}"]


@pytest.mark.parametrize("level", range(4))
def test_what_the_log_tells_of_a_request(level: int, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = make_tokenizer(512)
    log = RequestLog(tokenizer, level)
    prompt = tokenizer.encode("boat " * 1000).ids
    request = TokenizedRequest(rid="r1", input_ids=prompt, sampling=SamplingParams(top_k=7))
    with caplog.at_level(logging.INFO, "sgl_spec.server.logs"):
        log.received(request)
        log.chunk(
            request, OutputChunk(rid="r1", ids=prompt[:3], prompt_tokens=9, completion_tokens=3)
        )
        spec = SpecStats(verify_ct=2, emitted=5)
        finish = FinishReason(kind="stop")
        log.chunk(
            request,
            OutputChunk(
                rid="r1", ids=[], prompt_tokens=9, completion_tokens=3, finish=finish, spec=spec
            ),
        )
    received, finished = (record.getMessage() for record in caplog.records)
    assert received.startswith(f"Receive: rid=r1, prompt_tokens={len(prompt)}")
    assert finished.startswith("Finish: rid=r1, finish_reason=stop, prompt_tokens=9, completion_to")
    assert "spec_accept_length=2.50" in finished
    assert ('"top_k":7' in received) == (level >= 1)
    assert ("prompt='boat " in received) == (level >= 2)
    assert ("output='boat" in finished) == (level >= 2)
    assert (len(received) > 4000) == (level == 3)


def test_the_summary_of_a_start() -> None:
    args = ServerArgs(model_path="smollm2").resolve()
    lines = list(summary(args, INFO))
    assert f"KV pool: {INFO.max_total_tokens} tokens, unknown." in lines[1]
    assert f"{INFO.max_running_requests} requests at once" in lines[1]
    assert lines[2] == "Speculation: off."
