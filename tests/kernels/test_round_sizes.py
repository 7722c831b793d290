"""How many rows rounds with n-grams of the device verify: a policy of counts and times."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_runs import INTERPRETED

from sgl_spec.engine.cuda.costs import DeviceCosts, TreeShapes
from sgl_spec.engine.cuda.ngram import RoundSizes
from sgl_spec.speculative.chain_scores import ChainScores

NODES, BATCH = 8, 48
TIMES = {64: 5.6, 128: 5.9, 192: 6.9, 256: 8.0, 384: 9.0}  # ms by rows


def sizes(times: dict[int, float] | None = None) -> RoundSizes:
    shapes = TreeShapes((8, BATCH), NODES)
    assert shapes.rows(BATCH) == tuple(TIMES)
    costs = DeviceCosts(shapes)
    for size, plain in ((8, 4.2), (BATCH, 5.4)):
        costs.know(size, size, plain)
    costs.know(8, 64, 4.5)
    for rows, ms in (times or TIMES).items():
        costs.know(BATCH, rows, ms)
    return RoundSizes(shapes, ChainScores(NODES, 16, 64), costs)


def told(mine: RoundSizes, matched: int, available: int) -> tuple[int, int]:
    """What is chosen after many rounds in which every text found such a chain."""
    facts = np.tile([matched, available, 1], (BATCH, 1))
    for _ in range(40):
        mine.note(facts)
    return mine.choose(BATCH, BATCH)


@INTERPRETED
def test_where_nothing_is_found_nothing_is_verified_and_it_comes_back() -> None:
    mine = sizes()
    assert told(mine, 0, 0) == (BATCH, BATCH)
    assert told(mine, 16, 7)[1] > BATCH


@INTERPRETED
@pytest.mark.parametrize(("available", "rows"), [(1, 128), (3, 192), (7, 384)])
def test_rounds_are_as_large_as_pays(available: int, rows: int) -> None:
    mine = sizes()
    for _ in range(300):  # what is matched here is always right
        full = np.full(BATCH, 16)
        mine.scores.learn(full, np.full(BATCH, 7), np.full(BATCH, 7))
    assert told(mine, 16, available) == (BATCH, rows)


@INTERPRETED
def test_dear_rows_are_left_out() -> None:
    mine = sizes({64: 5.6, 128: 20.0, 192: 30.0, 256: 40.0, 384: 50.0})
    assert told(mine, 16, 7) == (BATCH, 64)


@INTERPRETED
def test_sizes_are_judged_by_themselves_and_filled_up() -> None:
    mine = sizes()
    told(mine, 0, 0)
    assert mine.choose(5, 8) == (8, 64), "of such a batch nothing is known yet"
    assert mine.choose(60, 60) == (60, 60 * NODES), "larger than all that are captured"


@INTERPRETED
def test_without_costs_every_draft_is_verified() -> None:
    mine = sizes()
    mine.costs = None
    assert told(mine, 0, 0) == (BATCH, 384)
