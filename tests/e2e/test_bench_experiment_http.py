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
from serving import ROOT

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
