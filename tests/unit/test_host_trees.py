"""Rounds with trees of a drafter on the host: their shapes, and what the drafter hears. No
device."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from sgl_spec.engine.asked import ASK
from sgl_spec.engine.batch import DecodeBatch
from sgl_spec.engine.costs import Costs
from sgl_spec.engine.cuda.costs import DeviceCosts, TreeShapes
from sgl_spec.engine.cuda.drafting import HostTreeRounds
from sgl_spec.engine.cuda.graphs import Rounds
from sgl_spec.engine.cuda.round import RoundKind
from sgl_spec.engine.cuda.running import Planned
from sgl_spec.layers.parallel import ALONE
from sgl_spec.speculative.base import DraftBatch
from sgl_spec.speculative.tree import AcceptResult, TokenTree

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48)


def known(nodes: int = 8) -> DeviceCosts:
    """A round takes 4 ms, and 1 ms more for every 64 rows behind the first 64."""
    costs = DeviceCosts(TreeShapes(SIZES, nodes))
    for size, rows in [*costs.shapes, *((size, size) for size in SIZES)]:
        costs.know(size, rows, 4.0 + max(0, rows - 64) / 64)
    return costs


def test_rounds_with_trees_come_in_few_shapes() -> None:
    shapes = TreeShapes(SIZES, 8)
    assert shapes.sizes == (1, 2, 4, 8, 16, 32, 48)
    assert shapes.rows(1) == (8,)
    assert shapes.rows(48) == (64, 128, 192, 256, 384)
    assert len(shapes) == len(list(shapes)) == 15
    most = TreeShapes((256,), 64)
    assert most.rows(256)[-1] == 256 * 64
    assert len(most) < 12


@pytest.mark.parametrize(
    ("batch", "drafts"), [(1, 1), (1, 7), (3, 5), (20, 140), (48, 16), (48, 17)]
)
def test_a_batch_fits_the_shape_that_it_is_filled_up_to(batch: int, drafts: int) -> None:
    shapes = TreeShapes(SIZES, 8)
    size, rows = shapes.fit(batch, drafts)
    assert (size, rows) in list(shapes)
    assert size >= batch
    assert rows >= size + drafts, "a request that fills a batch up has a row too"


def test_what_no_size_holds_is_run_as_it_is() -> None:
    assert TreeShapes(SIZES, 8).fit(60, 31) == (60, 91)
    assert TreeShapes((), 8).fit(3, 5) == (3, 8)


def test_rows_up_to_the_next_shape_cost_nothing() -> None:
    table = Costs(known()).table(48)
    assert [table.cost(n) for n in (48, 49, 64, 65, 128, 192, 384)] == [4, 4, 4, 5, 5, 6, 9]
    # 40 requests are run as 48, whose filler has rows of its own.
    assert Costs(known()).table(40).cost(56) == 4
    assert Costs(known()).table(40).cost(57) == 5


def test_rounds_that_run_teach_what_requests_add() -> None:
    costs = Costs(known())
    for _ in range(32):
        costs.add(48, 80, 6.5)  # 128 rows, which take 5 ms without requests
    assert costs.plain_ms(48) == pytest.approx(4 * 1.3)
    assert costs.table(48).cost(48 + 80) == pytest.approx(6.5)


class Fixed:
    """Drafts one node a request, of the given score."""

    def __init__(self) -> None:
        self.score = 0.9
        self.proposals = 0
        self.observed: list[tuple[list[int], int]] = []

    def propose(self, batch: DraftBatch) -> TokenTree:
        self.proposals += 1
        size = len(batch.rows)
        return TokenTree(
            torch.tensor([[5, 6]]).repeat(size, 1),
            torch.tensor([[-1, 0]]).repeat(size, 1),
            torch.full((size,), 2),
            torch.tensor([[1.0, self.score]]).repeat(size, 1),
        )

    def observe(self, batch: DraftBatch, tree: TokenTree, accepted: AcceptResult) -> None:
        self.observed.append((batch.lengths.tolist(), tree.width))


class Made(Rounds):
    """Rounds that are their own keys."""

    def __init__(self) -> None:
        super().__init__(SIZES, captures=False)
        self.sizes = SIZES

    def get(self, key: Any, make: Any, batch: int | None = None) -> Any:
        return key


def source(costs: DeviceCosts | None) -> tuple[HostTreeRounds, Fixed]:
    drafter = Fixed()
    tokens = np.full((8, 64), 5, np.int32)
    parts = SimpleNamespace(model=SimpleNamespace(clock=time.perf_counter), agree=ALONE.agree)
    return HostTreeRounds(
        cast(Any, parts), Made(), TreeShapes(SIZES, 8), costs, cast(Any, drafter),
        draft_of=lambda b: DraftBatch(b.rows, b.committed + 1, b.max_nodes, tokens),
    ), drafter  # fmt: skip


def batch_of(lengths: list[int], *, nodes: int = 8, remaining: int = 30) -> DecodeBatch:
    size = len(lengths)
    rows, most = np.arange(size), np.full(size, nodes)
    return DecodeBatch(rows, np.array(lengths) - 1, most, np.full(size, remaining))


def ran(
    rounds: HostTreeRounds, planned: Planned, lengths: list[int], taken: list[int], gap: float
) -> None:
    """A round of 4 ms gave each request a token. gap: in which the device had nothing to do."""
    watch = SimpleNamespace(ms=lambda: 4.0)
    before = SimpleNamespace(ms_until=lambda later: gap)
    given = np.tile(np.array([1, 5], np.int32), (len(taken), 1))
    launched = SimpleNamespace(
        planned=planned, size=len(taken), proposed=[], watch=watch, before=before
    )
    rounds.collected(cast(Any, launched), np.array(lengths), given)
    rounds.observe(taken, behind=False)


def test_trees_that_bring_nothing_are_left_and_rounds_run_ahead() -> None:
    rounds, drafter = source(known())
    ahead = 0
    for _ in range(200):
        waits = rounds.waits()
        planned = rounds.plan(batch_of([10]), RoundKind(), behind=not waits)
        assert planned.decision is not None
        assert (planned.decision.option == ASK) == (planned.tree is not None)
        assert planned.timed
        ahead += not waits
        ran(rounds, planned, [10], [1], 0.0 if planned.tree is None else 2.0)
    assert ahead > 150
    assert 0 < drafter.proposals < 50
    assert rounds.stats()["draft_option"] == 0
    rounds.flush()


def test_without_costs_whole_trees_are_verified_and_nothing_runs_ahead() -> None:
    rounds, drafter = source(None)
    drafter.score = 0.01
    planned = rounds.plan(batch_of([10, 12]), RoundKind(), behind=False)
    assert planned.tree is not None
    assert planned.tree.drafts == 2
    assert rounds.proposed(batch_of([10, 12]), planned) == [1, 1]
    assert rounds.waits()
    last = rounds.plan(batch_of([10, 12], remaining=1), RoundKind(), behind=False)
    assert last.tree is None, "nobody can keep a draft"


def test_requests_that_are_not_drafted_for_run_ahead_until_another_comes() -> None:
    rounds, drafter = source(known())
    planned = rounds.plan(batch_of([10], nodes=1), RoundKind(), behind=False)
    assert planned.tree is None
    assert planned.decision is None
    assert not rounds.waits()
    rounds.begin()
    assert rounds.waits()
    assert drafter.proposals == 0


def test_who_ended_in_the_round_before_is_not_told_of() -> None:
    rounds, drafter = source(known())
    lengths = [10, 20, 30]
    planned = rounds.plan(batch_of(lengths), RoundKind(), behind=True)
    assert planned.tree is None, "it was launched before the host had read"
    ran(rounds, planned, lengths, [1, 0, 1], 0.0)
    assert drafter.observed == [([10, 30], 1)]
    planned = rounds.plan(batch_of([10]), RoundKind(), behind=True)
    ran(rounds, planned, [10], [0], 0.0)
    assert len(drafter.observed) == 1
