"""When a draft model rests on a GPU: by times of rounds and what they brought, no device."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from sgl_spec.engine.cuda.model_rounds import Resting
from sgl_spec.speculative.draft_economy import DraftEconomy


def drafted(resting: Resting, rounds: int, tokens: int, ms: float, requests: int = 6) -> int:
    """How many rounds of so many requests, run as 8, draft; each brings `tokens` in `ms`."""
    count = 0
    for _ in range(rounds):
        drafts = resting.drafts(8)
        brought = tokens if drafts else requests
        resting.note(8, requests, brought, ms if drafts else 5.0, drafted=drafts)
        count += drafts
    return count


def known() -> Resting:
    resting = Resting(DraftEconomy())
    resting.know(8, 5.0)
    return resting


def test_without_a_time_at_rest_it_always_drafts() -> None:
    assert drafted(Resting(DraftEconomy()), 100, tokens=6, ms=50.0) == 100


def test_what_pays_is_drafted_and_what_does_not_rests() -> None:
    assert drafted(known(), 200, tokens=12, ms=7.0) == 200
    assert drafted(known(), 400, tokens=12, ms=14.0) < 120


def test_padding_does_not_count_against_a_round() -> None:
    # 6 requests run as 8: 10 tokens of theirs in 7 ms beat 6 in 5 ms.
    assert drafted(known(), 200, tokens=10, ms=7.0) == 200


def test_times_at_rest_are_kept_true() -> None:
    """Rounds at rest that take longer than they took without requests make drafting pay again."""
    resting = known()
    assert drafted(resting, 100, tokens=12, ms=14.0) < 60
    for _ in range(200):
        resting.note(8, 6, 6, 12.0, drafted=False)
    assert drafted(resting, 600, tokens=12, ms=14.0) > 300
