"""`bench accept`: what it counts, and a run whose answer is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sgl_spec.bench.__main__ import main
from sgl_spec.bench.accept_tables import Answer, looping
from sgl_spec.bench.acceptance import (
    Cost,
    RankTally,
    best_shape,
    by_depth,
    expected_tokens,
    fit_cost,
    tree_tokens,
)
from sgl_spec.bench.offline import CHAT, TASKS, questions
from sgl_spec.request import DraftRound, RoundTimes


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


def test_expected_tokens_of_chains_and_trees() -> None:
    """The published formula; a tree of one branch is a chain; siblings add their chances."""
    for a in (0.0, 0.3, 0.9):
        assert expected_tokens(a, 5) == pytest.approx((1 - a**6) / (1 - a))
        assert tree_tokens([a], 5, 64) == pytest.approx(expected_tokens(a, 5))
    assert tree_tokens([0.5, 0.25], 1, 3) == 1.75
    # The best four nodes below the root: 0.5, 0.25 (child of it), 0.25 (its sibling), 0.125.
    assert tree_tokens([0.5, 0.25], 3, 5) == 2.125
    assert tree_tokens([0.5, 0.25], 3, 2) == 1.5


def test_acceptance_by_depth_is_of_rounds_that_got_there() -> None:
    assert by_depth([1, 1, 2, 3]) == [0.5, 0.5]
    assert by_depth([]) == []
    assert by_depth([4, 4]) == [1, 1, 1]


def test_costs_and_the_best_shape() -> None:
    """Costs made from a step and a node are found again; free nodes make wide trees best, dear ones
    chains, and dear steps none of more than one."""
    made = Cost(0.2, 0.05)
    shapes = [(1, 2), (3, 4), (4, 16)]
    found = fit_cost(shapes, [made.of(*shape) for shape in shapes])
    assert (found.step, found.node) == pytest.approx((0.2, 0.05))
    assert fit_cost([(4, 8)], [1.8]).step == pytest.approx(0.2)
    ranks = [0.6, 0.3]
    free = best_shape(ranks, Cost(0.1, 0.0), 4, 16)
    assert (free.topk, free.nodes) == (2, 16)
    dear = best_shape([0.6, 0.1], Cost(0.0, 0.2), 4, 16)
    assert dear.topk == 1
    assert best_shape(ranks, Cost(2.0, 0.0), 4, 16).steps == 1
    assert free.speedup == pytest.approx(free.tokens / (1 + 0.1 * free.steps))


def test_siblings_are_ranked_by_score() -> None:
    """Root 0 with children 1 and 2, the second scored higher, and 3 below it."""
    tally = RankTally()
    for path in ([2, 3], [1], []):
        tally.add(
            DraftRound(
                tokens=[9, 1, 2, 3], parents=[-1, 0, 0, 2], scores=[1.0, 0.3, 0.6, 0.5],
                probs=[1.0] * 4, path=path, emitted=[0] * (len(path) + 1), emitted_probs=[],
                requests=1, option=None, times=RoundTimes(),
            )
        )  # fmt: skip
    # Rank 0 was offered at the root three times and below node 2 once; rank 1 at the root alone.
    assert tally.ranks() == [2 / 4, 1 / 3]


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
    for shape, depth in zip(row["shapes"], (3, 2), strict=True):
        assert shape["ranks"] == [1.0]
        assert (shape["a"], shape["expected"], shape["measured"]) == (1, depth + 1, depth + 1)
        assert shape["speedup"] == shape["expected_speedup"] == (depth + 1) / shape["cost"]
    assert row["best"]["topk"] == 1
    assert row["rows"][0]["depths"] == [1.0] * 3
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
    assert "no prompt leaves room" in capsys.readouterr().err
