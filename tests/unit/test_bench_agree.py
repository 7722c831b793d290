"""Greedy texts of drafters against plain ones, and the baseline of transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_spec.bench.__main__ import main
from sgl_spec.bench.agree import AgreeBench
from sgl_spec.llm import LLM, Completion

PROMPTS = 4


def agree(tiny: Path, out: Path, *more: str) -> int:
    flags = ["--prompts", str(PROMPTS), "--max-new-tokens", "20", "--drafters", "NGRAM"]
    flags += ["--batch", "4", "--json", str(out), "--model-path", str(tiny)]
    return main(["agree", *flags, *more])


def test_exact_arithmetic_agrees(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "row.json"
    assert agree(tiny_model_dir, out, "--log-requests") == 0  # a flag that changes nothing
    row = json.loads(out.read_text())
    (ngram,) = row["rows"]
    assert (ngram["drafter"], ngram["prompts"], ngram["agree"]) == ("NGRAM", PROMPTS, PROMPTS)
    assert ngram["differences"] == []
    assert ngram["accept_length"] > 1
    assert row["dtype"] == "float32"
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_the_first_difference_and_its_gap(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another token in one text, the end of another: plain decoding says what it thought there."""
    answers = AgreeBench._answers
    found: list[list[Completion]] = []
    prompts: list[list[int]] = []

    def changed(self: AgreeBench, flags: dict[str, Any]) -> tuple[list[Completion], float]:
        texts, seconds = answers(self, flags)
        prompts[:] = self.prompts
        if found:
            ids = list(texts[1].output_ids)
            ids[5:] = [(ids[5] + 1) % 512, *ids[6:]]
            texts[1] = replace(texts[1], output_ids=ids)
            texts[3] = replace(texts[3], output_ids=texts[3].output_ids[:-2])
        found.append(texts)
        return texts, seconds

    monkeypatch.setattr(AgreeBench, "_answers", changed)
    out = tmp_path / "row.json"
    assert agree(tiny_model_dir, out) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["agree"] == PROMPTS - 2
    one, ended = row["differences"]
    plain = found[0][1].output_ids
    assert (one["prompt"], one["position"], one["plain"]) == (1, 5, plain[5])
    assert one["drafted"] == (plain[5] + 1) % 512
    logits = LLM(str(tiny_model_dir)).generate([prompts[1] + plain[:5]], {"temperature": 0.0})
    assert logits[0].output_ids[0] == plain[5]
    assert 0 < one["gap"] <= one["apart"] + 1e-6
    last = len(found[0][3].output_ids) - 2
    assert (ended["prompt"], ended["position"], ended["drafted"]) == (3, last, None)
    assert ended["apart"] is None


def test_refusals(tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "row.json"
    assert agree(tiny_model_dir, out, "--speculative-algorithm", "NGRAM") == 2
    assert "takes drafters from --drafters" in capsys.readouterr().err
    assert agree(tiny_model_dir, out, "--prompts", "999") == 2
    assert "--prompts must be at most 280, got 999" in capsys.readouterr().err


def test_unknown_drafters_are_refused_before_anything_is_decoded(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.delattr(AgreeBench, "_answers")
    assert agree(tiny_model_dir, tmp_path / "row.json", "--drafters", "NGRAM", "FOO") == 2
    assert "--drafters FOO: --speculative-algorithm must be one of" in capsys.readouterr().err


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
