"""A tiny experiment with the embedded model: interrupted, gone on with, one server that fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from serving import ROOT, Launch

PLAN = """
name = "tiny"
requests = 2
max_tokens = 8
warmup = 1

[[server]]
flags = ["--model-path", "smollm2", "--max-total-tokens", "4096"]

[[server]]
label = "broken"
command = ["{python}", "-c", "print('no device found'); raise SystemExit(3)"]

[grid]
algorithm = ["none", "NGRAM"]
group = ["qa"]
"""
LIMIT_S = 240


def start(plan: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sgl_spec.bench", "experiment", str(plan), "--out", str(out)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def rows(out: Path) -> list[dict[str, Any]]:
    file = out / "cells.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped after its first cell, then run to its end."""
    directory = tmp_path_factory.mktemp("experiment")
    plan, out = directory / "plan.toml", directory / "results"
    plan.write_text(PLAN.replace("{python}", sys.executable))
    process = start(plan, out)
    deadline = time.monotonic() + LIMIT_S
    while not rows(out):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "the same command goes on" in said
    assert len(rows(out)) == 1
    assert (out / "table.md").exists()
    process = start(plan, out)
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    assert "3 cells, 1 of them done, 4 requests to go" in said
    assert "failed: broken, concurrency 1: The server ended with code 3:" in said
    return out


def test_every_cell_is_measured_once(results: Path) -> None:
    found = rows(results)
    assert [row["speculation"] for row in found] == ["none", "NGRAM", "none"]
    assert [row["status"] for row in found] == ["ok", "ok", "failed"]
    for row in found[:2]:
        assert row["level"]["output_tokens"] == 2 * 8
        assert row["server"]["model_path"].endswith("smollm2")
        assert row["memory_mb"]["server"] > 100
        answers = json.loads((results / "answers" / f"{row['id']}.json").read_text())
        assert [len(ids) for ids in answers] == [8, 8]


def test_the_table_compares_and_tells_of_the_failure(results: Path) -> None:
    plain, ngram, broken = json.loads((results / "table.json").read_text())["rows"]
    assert plain["speedup"] == 1
    assert ngram["speedup"] == pytest.approx(ngram["tokens_per_s"] / plain["tokens_per_s"])
    assert (ngram["agreement"], ngram["errors"]) == (1, 0)
    assert broken["tokens_per_s"] is None
    assert "no device found" in broken["log"]
    page = (results / "table.md").read_text()
    assert "smollm2 in float32" in page
    assert "no device found" in page
    assert (results / "plots" / "latency.png").exists()


OTHERS = """
name = "other servers"
requests = 3
max_tokens = 6
prompts = "{prompts}"

[[server]]
label = "by url"
url = "{url}"

[[server]]
label = "by command"
backend = "openai"
speculation = "NGRAM"
command = {command}

[grid]
concurrency = [2]
request_rate = [50]
trace = ["{trace}"]
temperature = [1.0]
seed = [0, 1]
"""


def test_other_servers_and_open_loops(
    launch_shared: Launch, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """One that runs and one that a command starts, of which only OpenAI's interface is used; three
    kinds of arrivals, sampled with two seeds that make one row."""
    server = launch_shared("--max-total-tokens", "8192")
    prompts, trace = tmp_path / "prompts.jsonl", tmp_path / "trace"
    prompts.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(3)))
    trace.write_text("0\n0.1\n0.3\n")
    command = [sys.executable, "-m", "sgl_spec", "serve", "--model-path", str(tiny_model_dir)]
    command += ["--speculative-algorithm", "NGRAM", "--port", "{port}"]
    plan, out = tmp_path / "plan.toml", tmp_path / "out"
    given = {"prompts": prompts, "trace": trace, "url": server.url}
    plan.write_text(OTHERS.format(**given, command=json.dumps(command)))
    said, _ = start(plan, out).communicate(timeout=LIMIT_S)
    found = json.loads((out / "table.json").read_text())["rows"]
    assert [(row["load"], row["runs"], row["errors"]) for row in found] == [
        (load, 2, 0) for _ in range(2) for load in ("2", "50/s", str(trace))
    ], said
    assert all(row["tokens_per_s"] > 0 and row["ttft_ms"] > 0 for row in found)
    open_loop = [row for row in rows(out) if row["load"]["trace"]]
    assert all(row["level"]["seconds"] >= 0.3 for row in open_loop)
    texts = [json.loads((out / "answers" / f"{row['id']}.json").read_text()) for row in open_loop]
    assert texts[0] != texts[1], "another seed"
