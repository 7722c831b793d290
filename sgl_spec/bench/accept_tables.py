"""The rows and tables of `bench accept`, and the best shape for what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from sgl_spec.bench.acceptance import Best, best_shape, by_depth, fit_cost
from sgl_spec.bench.report import table
from sgl_spec.errors import ConfigError

LEGEND = """\
accept, measured: tokens of a whole round, the bonus token included. drafted: draft tokens of a
round. a: acceptance at depth 1. expected: tokens if it were a at every depth. cost: a round over
one of plain decoding. expected x, measured x: those tokens over cost. child r: chance that the r-th
child of an accepted node is accepted."""


LONGEST_PERIOD = 64
FEWEST_LOOPING = 16  # tokens that repeat, for text to count as looping


@dataclass(slots=True)
class Answer:
    """What became of a question. chunks: the tokens of the prompt's own draw, then of each round.
    verified: rounds, the one that the end cut included; proposed: draft tokens of all of them."""

    group: str
    chunks: list[list[int]] = field(default_factory=list)
    finish: str = ""
    verified: int = 0
    proposed: int = 0

    @property
    def ids(self) -> list[int]:
        """All tokens."""
        return [token for chunk in self.chunks for token in chunk]

    @property
    def whole_rounds(self) -> list[list[int]]:
        """Tokens of the rounds that the end did not cut."""
        return self.chunks[1:-1]


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


def looping(ids: Sequence[int]) -> int:
    """Tokens that continue a repetition: those in a stretch where each token equals the one `p`
    before it, for some p up to 64, that is at least 2 p and 16 tokens long (so the block of p
    stands there at least three times)."""
    text = np.asarray(ids)
    marked = np.zeros(len(text), dtype=bool)
    for period in range(1, min(LONGEST_PERIOD, len(text) - 1) + 1):
        same = np.concatenate(([False], text[period:] == text[:-period], [False]))
        (edges,) = np.nonzero(same[1:] != same[:-1])
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            if end - start >= max(2 * period, FEWEST_LOOPING):
                marked[period + start : period + end] = True
    return int(marked.sum())


def group_row(shape: str, group: str, answers: Sequence[Answer]) -> GroupRow:
    tokens = sum(len(a.ids) for a in answers)
    rounds = sum(len(a.whole_rounds) for a in answers)
    emitted = sum(len(ids) for a in answers for ids in a.whole_rounds)
    return GroupRow(
        shape=shape,
        group=group,
        questions=len(answers),
        tokens=tokens,
        rounds=rounds,
        accept_length=_ratio(emitted, rounds),
        proposed=_ratio(sum(a.proposed for a in answers), sum(a.verified for a in answers)),
        looping=_ratio(sum(looping(a.ids) for a in answers), tokens),
        stopped=_ratio(sum(a.finish == "stop" for a in answers), len(answers)),
        depths=by_depth([len(ids) for a in answers for ids in a.whole_rounds]),
    )


def mean_row(rows: Sequence[GroupRow]) -> GroupRow:
    """The groups' mean, of those that have a whole round; counts are summed."""
    rows = [row for row in rows if row.rounds]
    if not rows:
        raise ConfigError("No group has a whole round; raise --max-new-tokens.")

    def mean(name: str) -> float:
        return _ratio(sum(getattr(row, name) for row in rows), len(rows))

    return GroupRow(
        shape=rows[0].shape,
        group="mean",
        questions=sum(row.questions for row in rows),
        tokens=sum(row.tokens for row in rows),
        rounds=sum(row.rounds for row in rows),
        accept_length=mean("accept_length"),
        proposed=mean("proposed"),
        looping=mean("looping"),
        stopped=mean("stopped"),
        depths=[
            _ratio(sum(known), len(known))
            for depth in range(max(len(row.depths) for row in rows))
            if (known := [row.depths[depth] for row in rows if depth < len(row.depths)])
        ],
    )


def _ratio(total: float, count: int) -> float:
    return total / count if count else float("nan")


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
