"""The dispatcher of benchmarks, and the baseline of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sgl_spec.bench.__main__ import main


def test_unknown_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["servin"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("servin is no benchmark (did you mean serving?).\nusage:")
    assert "  kernels " in shown


def test_transformers(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "row.json"
    argv = ["peer", "--model-path", str(tiny_model_dir), "--prompts", "2", "--max-tokens", "6"]
    assert main([*argv, "--json", str(out)]) == 0
    row = json.loads(out.read_text())
    assert len(row["tokens_per_s"]) == 2
    assert min(row["whole_tokens_per_s"]) > 0
    assert (row["dtype"], row["device"]) == ("float32", "cpu")
    assert main([*argv, "--prompts", "97"]) == 2
    assert "--prompts must be from 1 to 96" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main([*argv, "--device", "cuda"]) == 2
        assert "--device must be cpu or auto, got cuda" in capsys.readouterr().err
