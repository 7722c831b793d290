"""The dispatcher of benchmarks, and the engine beside transformers in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_spec.bench.__main__ import main


def test_unknown_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["servin"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(
        "servin is no command of sgl_spec.bench (did you mean serving?).\nusage:"
    )
    assert "  kernels " in shown


def test_contestants_in_turns(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "row.json"
    argv = ["offline", "--model-path", str(tiny_model_dir), "--prompts", "2", "--turns", "2"]
    argv += ["--max-new-tokens", "6", "--cases", "free:2", "qa", "translation:1", "--device", "cpu"]
    assert main([*argv, "--against", "transformers", "--json", str(out)]) == 0
    row = json.loads(out.read_text())
    names = ["transformers", "plain", "NGRAM"]
    cases = ["free, batch 2", "qa, batch 1", "translation, batch 1", "mean of groups"]
    found = [(one["case"], one["name"]) for one in row["rows"]]
    assert found == [(case, name) for case in cases for name in names]
    assert [one["baseline"] for one in row["rows"][:3]] == ["transformers", "transformers", "plain"]
    assert all(one["same_text"] and one["whole_tokens_per_s"] > 0 for one in row["rows"])
    assert row["rows"][0]["ratio"] == 1
    assert (row["dtype"], row["device"]) == ("float32", "cpu")
    assert "mean of groups" in capsys.readouterr().out


@pytest.mark.parametrize("case", ["free:x", "poems", "qa:0"])
def test_cases_that_there_are_not(
    case: str, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["offline", "--model-path", str(tiny_model_dir), "--cases", case]) == 2
    assert f"--cases must be KIND:BATCH, got {case!r}; KIND: free," in capsys.readouterr().err
