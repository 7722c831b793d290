"""When a draft model drafts, and how deep: pure policy over measured times."""

from __future__ import annotations

import pytest
import torch

from sgl_spec.speculative.draft_economy import MAX_REST, REST, TRIAL, ChanceScale, DraftEconomy
from sgl_spec.speculative.tree import TokenTree

PLAIN_MS = 20.0


def run(economy: DraftEconomy, rounds: int, tokens: int, ms: float, requests: int = 1) -> int:
    """How many of `rounds` are drafted, each bringing `tokens` in `ms`."""
    drafted = 0
    for _ in range(rounds):
        if economy.drafts(requests, PLAIN_MS):
            drafted += 1
            economy.note_round(requests, tokens, ms)
    return drafted


def test_what_pays_is_always_drafted() -> None:
    assert run(DraftEconomy(), 500, tokens=2, ms=30.0) == 500


def test_what_costs_more_than_it_brings_rests_longer_and_longer() -> None:
    economy = DraftEconomy()
    assert run(economy, TRIAL + REST, tokens=1, ms=30.0) == TRIAL
    assert run(economy, TRIAL + 2 * REST, tokens=1, ms=30.0) == TRIAL
    drafted = run(economy, 10 * MAX_REST, tokens=1, ms=30.0)
    assert TRIAL * 8 <= drafted <= TRIAL * 14


def test_a_drafter_that_comes_to_pay_is_found_again() -> None:
    economy = DraftEconomy()
    run(economy, 1000, tokens=1, ms=30.0)
    drafted = run(economy, 2000, tokens=4, ms=30.0)
    assert drafted > 2000 - 2 * MAX_REST
    assert run(economy, 100, tokens=4, ms=30.0) == 100
    # It has earned a short first rest again.
    assert run(economy, 100, tokens=1, ms=90.0) > 3 * TRIAL


def test_batch_sizes_are_judged_apart() -> None:
    economy = DraftEconomy()
    run(economy, 100, tokens=1, ms=30.0)
    assert run(economy, 100, tokens=32, ms=30.0, requests=16) == 100


def test_at_any_price_everything_is_drafted_to_its_full_depth() -> None:
    economy = DraftEconomy()
    for _ in range(100):
        assert economy.drafts(4, None)
        economy.note_round(4, 4, 1000.0)
        economy.note_step(4, 1000.0)
        assert economy.deeper(4, 0.0, None)


@pytest.mark.parametrize(("chance", "goes_on"), [(0.9, True), (0.5, True), (0.1, False)])
def test_a_level_is_grown_while_its_chance_pays_for_its_forward(
    chance: float, goes_on: bool
) -> None:
    economy = DraftEconomy()
    assert economy.deeper(1, chance, PLAIN_MS)  # a first step is measured whatever it promises
    economy.note_step(1, 3.0)  # 0.15 tokens' worth of plain decoding
    assert economy.deeper(1, chance, PLAIN_MS) is goes_on


def test_a_forward_that_seemed_too_dear_is_tried_again() -> None:
    economy = DraftEconomy()
    economy.note_step(1, 100.0)  # the machine was busy
    assert not economy.deeper(1, 0.9, PLAIN_MS)
    assert any(economy.deeper(1, 0.9, PLAIN_MS) for _ in range(200))


def test_the_better_the_rounds_the_more_a_level_must_promise() -> None:
    economy = DraftEconomy()
    economy.note_step(1, 3.0)
    assert economy.deeper(1, 0.3, PLAIN_MS)
    economy.note_round(1, 3, 30.0)  # 0.1 tokens per ms, twice plain decoding
    assert not economy.deeper(1, 0.3, PLAIN_MS)
    assert economy.deeper(1, 0.6, PLAIN_MS)


def test_a_flush_forgets_acceptance_but_not_times() -> None:
    economy = DraftEconomy()
    economy.note_step(1, 3.0)
    run(economy, TRIAL + 1, tokens=1, ms=30.0)
    economy.clear()
    assert economy.drafts(1, PLAIN_MS)
    assert not economy.deeper(1, 0.1, PLAIN_MS)


def tree(scores: list[list[float]]) -> TokenTree:
    batch, width = len(scores), len(scores[0])
    return TokenTree(
        tokens=torch.arange(width).repeat(batch, 1),
        parents=torch.arange(-1, width - 1).repeat(batch, 1),
        num_nodes=torch.full((batch,), width),
        scores=torch.tensor(scores),
    )


def test_scores_come_to_promise_what_is_kept() -> None:
    """Greedy texts keep twice what the draft promises, sampled ones half of it."""
    scale, sampled = ChanceScale(), torch.tensor([False, True])
    raw = tree([[1.0, 0.4, 0.1], [1.0, 0.8, 0.2]])
    kept = torch.tensor([1 + 1.0, 1 + 0.5])  # on average
    for _ in range(400):
        scale.learn(scale.apply(raw, sampled), kept, sampled)
    assert scale.of(sampled).tolist() == pytest.approx([2.0, 0.5], rel=0.02)
    scores = scale.apply(raw, sampled).scores
    assert scores is not None
    assert scores[0].tolist() == pytest.approx([1, 0.8, 0.2], abs=0.02)
    assert scores[1].tolist() == pytest.approx([1, 0.4, 0.1], abs=0.02)
    scale.apply(tree([[1.0, 0.9, 0.3], [1.0, 0.9, 0.3]]), sampled).validate(vocab_size=10)


def test_trees_without_drafts_teach_nothing() -> None:
    scale, sampled = ChanceScale(), torch.tensor([False])
    scale.learn(tree([[1.0]]), torch.tensor([1]), sampled)
    assert scale.of(sampled).tolist() == [1.0]
