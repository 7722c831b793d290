"""How many rows rounds with n-grams of the device verify: a policy of counts and times."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_runs import INTERPRETED

from sgl_spec.engine.cuda.costs import DeviceCosts, TreeShapes
from sgl_spec.engine.cuda.ngram_round import RoundSizes

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
    return RoundSizes(shapes, costs)


def told(mine: RoundSizes, sure: int) -> tuple[int, int]:
    """What is chosen after many rounds in which every text found so many drafts that are surely
    right, and no other."""
    chances = np.tile(np.arange(NODES - 1) < sure, (BATCH, 1)).astype(np.float32)
    for _ in range(40):
        mine.note(chances)
    return mine.choose(BATCH, BATCH)


@INTERPRETED
def test_where_nothing_is_found_nothing_is_verified_and_it_comes_back() -> None:
    mine = sizes()
    assert told(mine, 0) == (BATCH, BATCH)
    assert told(mine, 7)[1] > BATCH


@INTERPRETED
@pytest.mark.parametrize(("sure", "rows"), [(1, 128), (3, 192), (7, 384)])
def test_rounds_are_as_large_as_pays(sure: int, rows: int) -> None:
    assert told(sizes(), sure) == (BATCH, rows)


@INTERPRETED
def test_rows_go_to_the_best_nodes_of_the_batch() -> None:
    """Half of the texts have much and half have nothing: 144 rows of drafts bring as many tokens
    as if all texts had three."""
    mine = sizes()
    chances = np.zeros((BATCH, NODES - 1), dtype=np.float32)
    chances[: BATCH // 2] = 1.0
    for _ in range(40):
        mine.note(chances)
    assert mine.choose(BATCH, BATCH) == (BATCH, 192)


@INTERPRETED
def test_dear_rows_are_left_out() -> None:
    mine = sizes({64: 5.6, 128: 20.0, 192: 30.0, 256: 40.0, 384: 50.0})
    assert told(mine, 7) == (BATCH, 64)


@INTERPRETED
def test_sizes_are_judged_by_themselves_and_filled_up() -> None:
    mine = sizes()
    told(mine, 0)
    assert mine.choose(5, 8) == (8, 64), "of such a batch nothing is known yet"
    assert mine.choose(60, 60) == (60, 60 * NODES), "larger than all that are captured"


@INTERPRETED
def test_without_costs_every_draft_is_verified() -> None:
    mine = sizes()
    mine.costs = None
    assert told(mine, 0) == (BATCH, 384)
