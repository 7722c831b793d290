"""What rounds with trees are taken to cost on a GPU, and when trees are made: no device."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from sgl_spec.engine.cuda.costs import DeviceCosts, TreeShapes
from sgl_spec.engine.cuda.drafting import HostDrafting
from sgl_spec.engine.cuda.graphs import Replayed
from sgl_spec.engine.cuda.running import Planned, RunningRound
from sgl_spec.speculative.array_tree import ArrayTree
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
    table = known().table(48)
    assert [table.cost(n) for n in (48, 49, 64, 65, 128, 192, 384)] == [4, 4, 4, 5, 5, 6, 9]
    # 40 requests are run as 48, whose filler has rows of its own.
    assert known().table(40).cost(56) == 4
    assert known().table(40).cost(57) == 5


def test_rounds_that_run_teach_what_requests_and_waiting_add() -> None:
    costs = known()
    for _ in range(200):
        costs.ran(48, 80, 6.5)  # 128 rows, which take 5 ms without requests
        costs.waited(48, 2.0)
    costs.waited(48, 500.0)  # nobody asked for anything
    assert costs.table(48).cost(48) == pytest.approx(4 + 1.5 + 2, abs=0.01)
    assert costs.plain_ahead(48) == pytest.approx(4 + 1.5, abs=0.01)
    assert costs.table(32).cost(32) == costs.table(48).cost(48), "until more is known"


class Fixed:
    """Drafts one node a request, of the given score."""

    def __init__(self) -> None:
        self.score = 0.9
        self.proposals = 0
        self.observed: list[tuple[list[int], int]] = []

    def look(self, batch: DraftBatch) -> TokenTree:
        size = len(batch.rows)
        return TokenTree(
            torch.tensor([[5, 6]]).repeat(size, 1),
            torch.tensor([[-1, 0]]).repeat(size, 1),
            torch.full((size,), 2),
            torch.tensor([[1.0, self.score]]).repeat(size, 1),
        )

    def propose(self, batch: DraftBatch) -> TokenTree:
        self.proposals += 1
        return self.look(batch)

    def observe(self, batch: DraftBatch, tree: TokenTree, accepted: AcceptResult) -> None:
        self.observed.append((batch.lengths.tolist(), tree.width))


def batch_of(lengths: list[int]) -> DraftBatch:
    size = len(lengths)
    tokens = np.full((size, 64), 5, np.int32)
    return DraftBatch(np.arange(size), np.array(lengths), np.full(size, 8), tokens)


def planned(drafting: HostDrafting, batch: DraftBatch, remaining: np.ndarray) -> ArrayTree:
    tree = drafting.plan(batch, remaining)
    assert tree is not None, "nobody was asked"
    return tree


def finished(drafting: HostDrafting, batch: DraftBatch, *, taken: list[int], look: bool) -> None:
    """A round without trees that gave a token each."""
    size = len(taken)
    ran = Planned(cast(Replayed, None), batch)
    running = RunningRound(
        rows=batch.rows, tenancy=batch.rows, final=batch.rows, size=size, results=None,
        proposed=[0] * size, planned=ran,
    )  # fmt: skip
    given = np.tile(np.array([1, 5], np.int32), (size, 1))
    drafting.tell(running, batch.lengths, given)
    drafting.observe(taken)
    drafting.learn(look=look)


def waiting(ms: float) -> DeviceCosts:
    costs = known()
    for _ in range(100):
        costs.waited(1, ms)
    return costs


def test_trees_that_bring_less_than_waiting_costs_are_left_until_a_look_finds_better() -> None:
    drafter = Fixed()
    drafting = HostDrafting(drafter, waiting(2.0))  # 6 ms for a round with a tree, 4 without
    batch, remaining = batch_of([10]), np.array([30])
    assert planned(drafting, batch, remaining).width == 2
    assert not drafting.idle
    drafter.score = 0.3
    assert planned(drafting, batch, remaining).width == 2, "now that the device has waited"
    assert drafting.idle
    finished(drafting, batch, taken=[1], look=True)
    assert drafting.idle
    drafter.score = 0.6
    finished(drafting, batch, taken=[1], look=False)
    assert drafting.idle
    finished(drafting, batch, taken=[1], look=True)
    assert not drafting.idle
    assert drafter.proposals == 2


def test_a_new_request_is_looked_at() -> None:
    drafting = HostDrafting(Fixed(), waiting(8.0))
    drafting.plan(batch_of([10]), np.array([30]))
    assert drafting.idle
    drafting.begin()
    assert not drafting.idle


def test_without_costs_whole_trees_are_verified_and_nothing_runs_ahead() -> None:
    drafter = Fixed()
    drafter.score = 0.01
    drafting = HostDrafting(drafter, None)
    batch = batch_of([10, 12])
    assert planned(drafting, batch, np.array([30, 30])).drafts == 2
    assert not drafting.idle
    assert planned(drafting, batch, np.array([30, 1])).num_nodes.tolist() == [2, 1]


def test_requests_that_are_not_drafted_for_run_ahead_until_another_comes() -> None:
    drafting, batch = HostDrafting(Fixed(), None), batch_of([10])
    alone = replace(batch, max_nodes=np.array([1]))
    assert drafting.plan(alone, np.array([30])) is None
    assert drafting.idle
    finished(drafting, alone, taken=[1], look=True)
    assert drafting.idle
    drafting.begin()
    assert planned(drafting, batch, np.array([30])).drafts == 1


def test_who_ended_in_the_round_before_is_not_told_of() -> None:
    drafter = Fixed()
    drafting = HostDrafting(drafter, waiting(0.1))
    finished(drafting, batch_of([10, 20, 30]), taken=[1, 0, 1], look=False)
    assert drafter.observed == [([10, 30], 1)]
    finished(drafting, batch_of([10]), taken=[0], look=True)
    assert len(drafter.observed) == 1
