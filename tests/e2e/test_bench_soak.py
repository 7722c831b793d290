"""The soak tool against a real server, and against servers that lose something."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_spec.bench import soak
from sgl_spec.bench.__main__ import main

REQUESTS = 45


@pytest.fixture
def argv(tmp_path: Path, tiny_model_dir: Path) -> list[str]:
    flags = ["--requests", str(REQUESTS), "--clients", "8", "--max-tokens", "16"]
    flags += ["--long-words", "60", "--json", str(tmp_path / "row.json"), "--launch"]
    flags += ["--model-path", str(tiny_model_dir), "--speculative-algorithm", "NGRAM"]
    return ["soak", *flags, "--max-running-requests", "8", "--allow-auto-truncate"]


def test_every_kind_of_request(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 0
    row = json.loads((tmp_path / "row.json").read_text())
    assert row["problems"] == []
    assert sum(row["ends"].values()) == REQUESTS
    assert {end.split(":")[0] for end in row["ends"]} == set(soak.KINDS)
    assert row["ends"]["leave: left"] == REQUESTS // len(soak.KINDS)
    assert row["tokens"] > REQUESTS
    assert len(row["memory_mb"]) == soak.QUARTERS
    assert all(quarter["server"] > 50 for quarter in row["memory_mb"])
    quarters = ", ".join(f"{quarter['server']:.0f}" for quarter in row["memory_mb"])
    assert f"memory of server after each quarter: {quarters} MB" in capsys.readouterr().out


def test_what_goes_wrong_is_found(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory that grows, an answer that changes, replies that are no answers."""
    grown = iter([100.0, 200.0, 300.0, 100.0 + soak.GROWTH_MB + 1])
    monkeypatch.setattr(soak, "_server_mb", lambda own: next(grown))
    stored = soak._stored_answer
    asked: list[int] = []

    async def another(target: soak.Target) -> list[int]:
        asked.append(1)
        return (await stored(target))[: 10 if len(asked) == 3 else None]

    monkeypatch.setattr(soak, "_stored_answer", another)
    settings = soak._settings
    wrong = {"top_p": 7.0}
    monkeypatch.setattr(
        soak, "_settings", lambda kind, rng: wrong if kind == "stop" else settings(kind, rng)
    )
    assert main(argv) == 2
    shown = capsys.readouterr().err
    assert "memory of server grew from 100 to 357 MB" in shown
    assert shown.count("the stored request was answered in another way") == 1
    assert shown.count("stop: SglSpecError: HTTP 400") == REQUESTS // len(soak.KINDS)
