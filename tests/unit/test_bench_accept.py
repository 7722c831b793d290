"""`bench accept`: what it counts, and a run whose answer is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sgl_spec.bench.__main__ import main
from sgl_spec.bench.accept import Answer, looping
from sgl_spec.bench.offline import CHAT, TASKS, questions


@pytest.mark.parametrize(
    ("ids", "count"),
    [
        ([], 0),
        ([5], 0),
        (list(range(40)), 0),
        ([7] * 17, 16),
        ([7] * 16, 0),
        ([1, 2, 3] + [8, 9] * 10 + [4], 18),
        (list(range(20)) * 3, 40),
        (list(range(20)) * 2, 0),
        (list(range(64)) * 4, 192),
        (list(range(65)) * 4, 0),
    ],
)
def test_looping_text_is_a_block_that_stands_three_times(ids: list[int], count: int) -> None:
    assert looping(ids) == count


def test_questions_are_first_turns_spread_over_each_group() -> None:
    every = questions((*TASKS, CHAT), None)
    sizes = {group: sum(q.group == group for q in every) for group in (*TASKS, CHAT)}
    assert sizes == {**dict.fromkeys(TASKS, 40), CHAT: 80}
    few = questions(("rag", CHAT), 4)
    assert [q.group for q in few] == ["rag"] * 4 + [CHAT] * 4
    assert {q.text for q in few} < {q.text for q in every}
    chats = [q.text for q in every if q.group == CHAT]
    assert [q.text for q in few[4:]] == [chats[0], chats[20], chats[40], chats[60]]


def test_the_first_token_and_the_last_round_do_not_count() -> None:
    answer = Answer("qa", chunks=[[1], [2, 3], [4, 5, 6], [7]])
    assert answer.whole_rounds == [[2, 3], [4, 5, 6]]
    assert answer.ids == [1, 2, 3, 4, 5, 6, 7]
    assert Answer("qa", chunks=[[1]]).whole_rounds == []


def run(tiny_model_dir: Path, file: Path, *flags: str) -> dict[str, Any]:
    model = ["--model-path", str(tiny_model_dir), "--speculative-algorithm", "STANDALONE"]
    draft = ["--speculative-draft-model-path", str(tiny_model_dir)]
    sizes = ["--groups", "qa", CHAT, "--limit", "2", "--max-new-tokens", "24", "--batch", "3"]
    assert main(["accept", *model, *draft, *sizes, "--json", str(file), *flags]) == 0
    (line,) = file.read_text(encoding="utf-8").splitlines()
    return dict(json.loads(line))


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_a_target_that_drafts_for_itself_accepts_whole_chains(
    tiny_model_dir: Path, tmp_path: Path, temperature: str
) -> None:
    file = tmp_path / "accept.json"
    row = run(tiny_model_dir, file, "--shapes", "3,1,4", "2,1,3", "--temperature", temperature)
    assert (row["algorithm"], row["draft_sampling"]) == ("STANDALONE", "shared-noise")
    assert row["argv"][:4] == ["python", "-m", "sgl_spec.bench", "accept"]
    figures = [(r["shape"], r["group"], r["accept_length"], r["questions"]) for r in row["rows"]]
    assert figures == [
        (shape, group, accept, count)
        for shape, accept in (("3,1,4", 4.0), ("2,1,3", 3.0))
        for group, count in (("qa", 2), (CHAT, 2), ("mean", 4))
    ]


def test_what_it_cannot_measure_is_an_error(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["accept", "--model-path", str(tiny_model_dir)]
    assert main(model) == 2
    assert "--speculative-algorithm is required" in capsys.readouterr().err
    assert main([*model, "--speculative-algorithm", "NGRAM", "--shapes", "3"]) == 2
    assert "--shapes must be STEPS,TOPK,NODES each, got '3'" in capsys.readouterr().err
    assert main([*model, "--speculative-algorithm", "NGRAM", "--max-new-tokens", "9999"]) == 2
    assert "serves at most" in capsys.readouterr().err
