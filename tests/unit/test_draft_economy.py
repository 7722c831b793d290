"""When a draft model drafts: pure policy over measured times."""

from __future__ import annotations

from sgl_spec.speculative.draft_economy import MAX_REST, REST, TRIAL, DraftEconomy

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


def test_at_any_price_everything_is_drafted() -> None:
    economy = DraftEconomy()
    for _ in range(100):
        assert economy.drafts(4, None)
        economy.note_round(4, 4, 1000.0)


def test_a_flush_forgets_acceptance() -> None:
    economy = DraftEconomy()
    run(economy, TRIAL + 1, tokens=1, ms=30.0)
    economy.clear()
    assert economy.drafts(1, PLAIN_MS)
