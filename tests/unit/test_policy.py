"""Policy: counts in, decisions out."""

from __future__ import annotations

import pytest

from sgl_spec.engine.policy import (
    GROWTH_TOKENS,
    PATIENCE,
    Need,
    PoolCounts,
    admission_order,
    can_admit,
    prefill_next,
    prefill_order,
    prefill_tokens,
    retract_order,
    split_prefill,
    tree_reserve,
    waits_for_prefix,
)


def test_reserve_covers_two_rounds() -> None:
    assert tree_reserve(12) == 24


@pytest.mark.parametrize(
    ("unfilled", "budget", "chunked", "takes"),
    [
        ([10, 10], 32, True, [10, 10]),
        ([10, 30], 32, True, [10, 22]),
        ([100], 32, True, [32]),
        ([100, 5], 32, False, [100]),
        ([5, 100], 32, False, [5]),
        ([5, 27, 1], 32, False, [5, 27]),
        ([32, 4], 32, True, [32]),
        ([16, 17], 32, True, [16]),
        ([15, 18, 1], 32, True, [15, 17]),
        ([20, 40], 32, True, [20]),
        ([5, 40], 32, False, [5]),
        ([], 32, True, []),
    ],
)
def test_split_prefill(unfilled: list[int], budget: int, chunked: bool, takes: list[int]) -> None:
    assert split_prefill(unfilled, budget, chunked=chunked) == takes


def test_the_shortest_prompts_go_first_and_a_long_one_not_last_for_ever() -> None:
    assert prefill_order([300, 20, 800, 20], [0, 0, 0, 0]) == [1, 3, 0, 2]
    late = PATIENCE
    assert prefill_order([300, 20, 800, 20], [0, 0, late - 1, 0]) == [1, 3, 0, 2]
    assert prefill_order([300, 20, 800, 20], [0, 0, late, 0]) == [2, 1, 3, 0]
    assert prefill_order([900, 20, 800, 20], [late + 3, 0, late + 5, 0]) == [0, 2, 1, 3]
    assert prefill_order([], []) == []


def test_a_lone_request_needs_only_its_own_slots() -> None:
    pool = PoolCounts(free=40, evictable=10, page_size=1)
    assert can_admit(Need(have=0, tokens=50, remaining=1000), [], pool)
    assert not can_admit(Need(have=0, tokens=51, remaining=1000), [], pool)


def test_cached_slots_count_as_held() -> None:
    pool = PoolCounts(free=10, evictable=0, page_size=1)
    assert can_admit(Need(have=40, tokens=50, remaining=0), [], pool)


def test_admission_keeps_room_for_running_requests_to_grow() -> None:
    running = [Need(have=100, tokens=100, remaining=500)]
    fits = 50 + 2 * GROWTH_TOKENS
    newcomer = Need(have=0, tokens=50, remaining=500)
    assert can_admit(newcomer, running, PoolCounts(free=fits, evictable=0, page_size=1))
    assert not can_admit(newcomer, running, PoolCounts(free=fits - 1, evictable=0, page_size=1))


def test_growth_is_bounded_by_what_may_still_be_generated() -> None:
    running = [Need(have=100, tokens=100, remaining=3)]
    newcomer = Need(have=0, tokens=50, remaining=2)
    assert can_admit(newcomer, running, PoolCounts(free=55, evictable=0, page_size=1))


def test_slots_that_a_request_holds_beyond_its_growth_are_nobody_elses() -> None:
    """Room for its last token, which it will not use."""
    running = [Need(have=48, tokens=32, remaining=0)]
    newcomer = Need(have=0, tokens=16, remaining=0)
    assert not can_admit(newcomer, running, PoolCounts(free=0, evictable=0, page_size=16))
    assert can_admit(newcomer, running, PoolCounts(free=16, evictable=0, page_size=16))


def test_admission_counts_whole_pages() -> None:
    newcomer = Need(have=0, tokens=17, remaining=0)
    assert not can_admit(newcomer, [], PoolCounts(free=16, evictable=0, page_size=16))
    assert can_admit(newcomer, [], PoolCounts(free=32, evictable=0, page_size=16))


def test_retraction_takes_least_output_then_longest_prompt_then_latest() -> None:
    assert retract_order([5, 2, 2, 2], [10, 10, 30, 10]) == [2, 3, 1, 0]


@pytest.mark.parametrize(
    ("prefilling", "decoding", "in_a_row", "most", "expect"),
    [
        (0, 3, 1, 1, False),
        (2, 0, 9, 1, True),
        (2, 3, 1, 1, False),
        (2, 3, 0, 1, True),
        (0, 0, 0, 1, False),
        (30, 3, 1, 1, False),
        (30, 3, 2, 3, True),  # more wait for their prompts than for a round
        (30, 3, 3, 3, False),
        (3, 3, 1, 3, False),
    ],
)
def test_chunks_and_rounds_alternate(
    prefilling: int, decoding: int, in_a_row: int, most: int, expect: bool
) -> None:
    found = prefill_next(
        prefilling=prefilling, decoding=decoding, prefills_in_a_row=in_a_row, most_in_a_row=most
    )
    assert found is expect


def test_a_prompt_waits_for_a_shared_prefix_being_prefilled() -> None:
    shared = list(range(50))
    assert waits_for_prefix([*shared, 1], 0, [[*shared, 2]])
    assert waits_for_prefix([*shared, 1], 10, [[7], [*shared, 2]])
    assert not waits_for_prefix([*shared, 1], 40, [[*shared, 2]])
    assert not waits_for_prefix([*shared[:20], 1], 0, [[*shared, 2]])
    assert not waits_for_prefix([*shared, 1], 0, [])


def test_admission_order() -> None:
    assert admission_order([0, 5, 5, 9], "fcfs") == [0, 1, 2, 3]
    assert admission_order([0, 5, 5, 9], "lpm") == [3, 1, 2, 0]


def test_chunks_are_small_where_as_many_stream_as_wait() -> None:
    assert prefill_tokens(2048, None, prefilling=1, decoding=40) == 2048
    assert prefill_tokens(2048, 640, prefilling=1, decoding=0) == 2048
    assert prefill_tokens(2048, 640, prefilling=9, decoding=8) == 2048
    assert prefill_tokens(2048, 640, prefilling=8, decoding=8) == 640
    assert prefill_tokens(256, 640, prefilling=1, decoding=40) == 256
