"""A round's time over its floor, and the marks and operations in it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from torch.profiler import record_function

from sgl_spec.bench.__main__ import main
from sgl_spec.bench.machine import parts_of, read_bandwidth
from sgl_spec.llm import LLM

CPU = torch.device("cpu")


def test_marks_hold_what_they_hold_and_operations_come_by_name() -> None:
    def work() -> None:
        for _ in range(4):
            with record_function("draft"):
                time.sleep(0.01)
                torch.ones(64, 64) @ torch.ones(64, 64)

    parts = parts_of(work, 2, CPU)
    (mark,) = parts.marks
    assert (mark.name, mark.calls) == ("draft", 2)
    assert 20 <= mark.ms < 200
    calls = {row.name: row.calls for row in parts.operations}
    assert calls["aten::mm"] == 2
    assert "draft" not in calls
    assert 1e8 < read_bandwidth(CPU) < 1e13


@pytest.mark.parametrize("algorithm", [None, "NGRAM"])
def test_a_run(
    algorithm: str | None, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "row.json"
    argv = ["round", "--model-path", str(tiny_model_dir), "--batch", "3", "--rounds", "6"]
    argv += ["--prompt-tokens", "40", "--json", str(out)]
    argv += ["--speculative-algorithm", algorithm] if algorithm else []
    assert main(argv) == 0
    row = json.loads(out.read_text())
    model = LLM(str(tiny_model_dir)).engine.model
    weights = model.weight_bytes - model.embedding.nbytes
    held = (row["read_mb"] * 1e6 - weights) / model.kv_bytes_per_token
    assert 3 * 40 < held < 3 * 40 * 3
    assert row["over_floor"] == pytest.approx(row["round_ms"] / row["floor_ms"])
    assert row["over_floor"] > 1
    assert row["operations"][0]["ms"] > 0
    shown = capsys.readouterr().out
    assert shown.startswith("A round takes ")
    assert row["operations"][0]["name"] in shown


def test_refusals(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["round", "--model-path", str(tiny_model_dir)]
    assert main([*argv, "--rounds", "4000"]) == 2
    assert "lower --rounds or --prompt-tokens" in capsys.readouterr().err
    assert main([*argv, "--batch", "2", "--max-total-tokens", "32"]) == 2
    assert "a request may have" in capsys.readouterr().err
