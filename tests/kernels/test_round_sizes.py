"""How many rows rounds with n-grams of the device verify: a policy of counts and times."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_runs import INTERPRETED

from sgl_spec.engine.cuda.costs import DeviceCosts, TreeShapes
from sgl_spec.engine.cuda.ngram_round import RoundSizes
from sgl_spec.engine.cuda.round import RoundKind

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


def leading(mine: RoundSizes, batch: int = BATCH, padded: int = BATCH) -> tuple[int, int]:
    """Batch size and rows of the rounds that are run but for trials."""
    size = mine.choose(batch, padded, RoundKind())[0]
    option = int(mine.controller.stats()["draft_option"])
    return (size, mine.shapes.rows(size)[option - 1]) if option else (padded, padded)


def told(mine: RoundSizes, sure: int) -> tuple[int, int]:
    """What is chosen after many rounds in which every text found so many drafts that are surely
    right, and no other."""
    chances = np.tile(np.arange(NODES - 1) < sure, (BATCH, 1)).astype(np.float32)
    for _ in range(40):
        mine.found(chances)
    return leading(mine)


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
        mine.found(chances)
    assert leading(mine) == (BATCH, 192)


@INTERPRETED
def test_dear_rows_are_left_out() -> None:
    mine = sizes({64: 5.6, 128: 20.0, 192: 30.0, 256: 40.0, 384: 50.0})
    assert told(mine, 7) == (BATCH, 64)


@INTERPRETED
def test_sizes_are_judged_by_themselves_and_filled_up() -> None:
    mine = sizes()
    told(mine, 0)
    assert leading(mine, 5, 8) == (8, 64), "of such a batch nothing is known yet"
    whole = mine.choose(60, 60, RoundKind())
    assert whole == (60, 60 * NODES, None), "larger than all that are captured"


@INTERPRETED
def test_without_costs_every_draft_is_verified() -> None:
    mine = sizes()
    mine.costs = None
    assert mine.choose(BATCH, BATCH, RoundKind()) == (BATCH, 384, None)


@INTERPRETED
def test_what_becomes_of_the_drafts_counts() -> None:
    """All seven are surely right, as it seems, and none ever is: that costs next to nothing."""
    mine, verified = sizes(), []
    told(mine, 7)
    for _ in range(400):
        _, rows, decision = mine.choose(BATCH, BATCH, RoundKind())
        assert decision is not None
        verified.append(rows)
        mine.controller.note(decision, BATCH, BATCH, TIMES.get(rows, 5.4))
    assert 384 in verified[:3]
    assert np.mean([TIMES.get(rows, 5.4) for rows in verified[100:]]) < 5.4 / 0.98
