"""The tables of `bench accept`, and the best shape for what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sgl_spec.bench.acceptance import Best, best_shape, fit_cost
from sgl_spec.bench.report import table

LEGEND = """\
accept, measured: tokens of a whole round, the bonus token included. drafted: draft tokens of a
round. a: acceptance at depth 1. expected: tokens if it were a at every depth. cost: a round over
one of plain decoding. expected x, measured x: those tokens over cost. child r: chance that the r-th
child of an accepted node is accepted."""


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group of questions under one shape. accept_length: tokens of whole rounds, over these
    rounds. proposed: draft tokens verified per round. looping: share of output tokens in repeating
    text. stopped: share of answers that ended by themselves. depths: share of rounds that kept a
    draft at depth 1, 2, ... of those that kept all above it."""

    shape: str
    group: str
    questions: int
    tokens: int
    rounds: int
    accept_length: float
    proposed: float
    looping: float
    stopped: float
    depths: list[float]


@dataclass(frozen=True, slots=True)
class ShapeRow:
    """A shape over all groups. a: acceptance at depth 1. expected: tokens of a round if it were a
    at every depth. measured: tokens of a round. cost: time of a round over that of plain decoding
    with as many requests, None if not timed. expected_speedup, speedup: expected and measured over
    cost. ranks: chance that the r-th child of an accepted node is accepted, [] where rounds run
    without the host."""

    shape: str
    a: float
    expected: float
    measured: float
    cost: float | None
    expected_speedup: float | None
    speedup: float | None
    ranks: list[float]
    topk: int
    steps: int
    nodes: int


def group_table(rows: Sequence[GroupRow]) -> str:
    header = ["shape", "group", "questions", "tokens", "rounds", "accept", "drafted", "looping"]
    values: list[list[Any]] = [list(asdict(row).values())[:-1] for row in rows]
    return table([*header, "stopped"], values)


def depth_table(rows: Sequence[GroupRow]) -> str:
    """Acceptance at each depth, given that all above it were accepted."""
    deepest = max(len(row.depths) for row in rows)
    cells = [
        [f"{row.shape} {row.group}", *row.depths, *["-"] * (deepest - len(row.depths))]
        for row in rows
    ]
    return table(["accepted at depth", *range(1, deepest + 1)], cells)


def shape_table(shapes: Sequence[ShapeRow]) -> str:
    """Expected beside measured, and the chances of siblings."""
    ranked = max(len(row.ranks) for row in shapes)
    header = ["shape", "a", "expected", "measured", "cost", "expected x", "measured x"]
    cells = []
    for row in shapes:
        ranks = [*row.ranks, *[None] * (ranked - len(row.ranks))]
        figures = [row.a, row.expected, row.measured, row.cost, row.expected_speedup, row.speedup]
        cells.append([row.shape, *("-" if v is None else v for v in (*figures, *ranks))])
    return table([*header, *(f"child {rank + 1}" for rank in range(ranked))], cells)


def best_of(shapes: Sequence[ShapeRow]) -> Best | None:
    """The fastest shape for the chances of siblings, those of the widest tree, and the costs; None
    where one or the other is not known."""
    costs = [row.cost for row in shapes if row.cost is not None]
    chains = [[row.a] for row in shapes if row.topk == 1]
    known = [row.ranks for row in shapes if row.ranks] or chains
    if not costs or not known:
        return None
    cost = fit_cost([(row.steps, row.nodes) for row in shapes], costs)
    steps, nodes = max(row.steps for row in shapes), max(row.nodes for row in shapes)
    return best_shape(max(known, key=len), cost, steps, nodes)


def told(best: Best | None) -> str:
    if best is None:
        return "No best shape: that takes --costs, and a chain where rounds run without the host."
    return (
        f"{LEGEND}\n\n"
        f"Within these sizes the best shape is {best.steps},{best.topk},{best.nodes}: "
        f"{best.tokens:.2f} tokens a round, {best.speedup:.2f} times plain decoding."
    )
