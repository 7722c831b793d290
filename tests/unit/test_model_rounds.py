"""Which shapes a draft model's rounds have, and that the controller hears of them: no device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("triton")

from simulated import SHAPES_MS

from sgl_spec.engine.batch import DecodeBatch
from sgl_spec.engine.cuda import model_rounds
from sgl_spec.engine.cuda.graphs import Rounds
from sgl_spec.engine.cuda.model_rounds import ModelRounds, tree_shapes
from sgl_spec.engine.cuda.model_trees import GrownTrees, kept_by
from sgl_spec.engine.cuda.round import Round, RoundKind
from sgl_spec.layers.parallel import ALONE
from sgl_spec.speculative.model_drafter import TreeShape

SIZES = (1, 8, 48)
GREEDY = RoundKind()


@pytest.mark.parametrize(
    ("flags", "shapes"),
    [
        ((7, 4, 32), [(3, 1, 4), (5, 4, 8), (7, 4, 32)]),
        ((5, 4, 8), [(3, 1, 4), (5, 4, 8)]),
        ((2, 2, 4), [(2, 1, 3), (2, 2, 4)]),
        ((7, 1, 8), [(3, 1, 4), (5, 1, 6), (7, 1, 8)]),
        ((3, 1, 4), [(3, 1, 4)]),
        ((1, 1, 2), [(1, 1, 2)]),
    ],
)
def test_the_flags_bound_every_shape(
    flags: tuple[int, int, int], shapes: list[tuple[int, int, int]]
) -> None:
    found = tree_shapes(TreeShape(*flags))
    assert [(s.steps, s.topk, s.draft_tokens) for s in found] == shapes


class Key(tuple[Any, ...]):
    """A round that is its own key and tells nothing."""

    program = object.__new__(Round)
    program.source = object.__new__(GrownTrees)
    program.source.facts = None


class Made(Rounds):
    """Rounds that are their own keys."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__(sizes, captures=False)
        self.sizes = sizes

    def get(self, key: Any, make: Any, batch: int | None = None) -> Any:
        return self._made.setdefault(key, Key(key))


def rounds(monkeypatch: pytest.MonkeyPatch, *, weighs: bool = True) -> ModelRounds:
    """Of the flags (7, 4, 32); a round takes what the simulated server says."""

    def ms(key: tuple[Any, ...]) -> float:
        return SHAPES_MS[key[1]][key[3] if key[0] == "tree" else 0]

    monkeypatch.setattr(model_rounds, "timed", ms)
    parts = SimpleNamespace(draft=object(), agree=ALONE.agree)
    drafter = SimpleNamespace(shape=TreeShape(7, 4, 32))
    source = ModelRounds(cast(Any, parts), Made(SIZES), cast(Any, drafter), weighs=weighs)
    source.prepare(GREEDY)
    return source


def batch(size: int, nodes: int = 32) -> DecodeBatch:
    rows = np.arange(size)
    return DecodeBatch(rows, rows + 10, np.full(size, nodes), np.full(size, 99))


def run(source: ModelRounds, size: int, gains: tuple[float, ...], count: int) -> list[int]:
    """The options of so many rounds, each of which gains what it does."""
    options = []
    for _ in range(count):
        planned = source.plan(batch(size), GREEDY, behind=True)
        assert planned.decision is not None
        option = planned.decision.option
        options.append(option)
        ms = SHAPES_MS[size][option]
        launched = SimpleNamespace(
            planned=planned,
            size=size,
            proposed=[],
            facts=None,
            watch=SimpleNamespace(ms=lambda ms=ms: ms),
        )
        given = np.full((size, 1), 1 + gains[option])
        source.collected(cast(Any, launched), np.zeros(size), cast(Any, given))
    return options


def test_each_load_has_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    source = rounds(monkeypatch)
    for size, best in ((1, 3), (8, 3), (48, 1)):
        options = run(source, size, (0, 1, 2, 4), 300)
        assert np.bincount(options).argmax() == best, size
    assert source.stats()["draft_option"] == 1


def test_rows_that_never_pay_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    source = rounds(monkeypatch)
    assert source.options(8) == [0, 1, 2, 3]
    assert source.options(48) == [0, 1, 2]
    assert source.options(256) == [0, 1]
    assert len(source.rounds) == 4 + 4 + 3
    assert len(source.every_round(RoundKind(sampled=True))) == 4 + 4 + 3


def test_a_draft_that_is_never_right_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    options = run(rounds(monkeypatch), 48, (0, 0, 0, 0), 400)
    assert options[200:].count(0) > 190


def test_a_kind_runs_what_is_made_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would have to be captured while requests wait."""
    source, sampled = rounds(monkeypatch), RoundKind(sampled=True)
    first = source.plan(batch(48), sampled, behind=True)
    assert first.decision is not None, "something has to be made"
    source.round_of(8, sampled, 2)
    for _ in range(30):
        planned = source.plan(batch(8), sampled, behind=True)
        assert planned.decision is not None
        assert planned.decision.option in (0, 2)
    for make in source.every_round(sampled):
        make()
    planned = source.plan(batch(8), sampled, behind=True)
    assert planned.decision is not None
    assert planned.decision.option == 3


def test_a_request_without_drafts_and_a_server_that_weighs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = rounds(monkeypatch)
    plain = source.plan(batch(8, nodes=1), GREEDY, behind=True)
    assert plain.decision is None
    assert source.proposed(batch(8, nodes=1), plain) == [0] * 8
    whole = rounds(monkeypatch, weighs=False)
    planned = whole.plan(batch(48), GREEDY, behind=True)
    assert planned.decision is None
    assert not planned.timed
    assert planned.nodes == 32
    assert whole.proposed(batch(48, nodes=5), planned) == [4] * 48
    assert whole.stats() == {}


def test_what_smaller_shapes_would_have_brought() -> None:
    """A root with children 1 (0.6) and 2 (0.3), of which 2 has 3 (0.25), and 1 has 4 (0.2), 5 (0.4)
    and 5 has 6 (0.1)."""
    parents, depths = [-1, 0, 0, 2, 1, 1, 5, 0], [0, 1, 1, 2, 2, 2, 3, 0]
    scores = [1.0, 0.6, 0.3, 0.25, 0.2, 0.4, 0.1, 0.9]  # the last node is none

    def kept(shape: tuple[int, int, int], *path: int) -> int:
        told = [*path, *[0] * (8 - len(path)), *parents, *depths, *scores]
        facts = np.array([told, told], np.float32)
        return kept_by(TreeShape(*shape), facts, np.array([len(path), 1])) - 2

    for path, chain, pair, deep in (
        ((0, 1, 5, 6), 3, 2, 2),
        ((0, 1, 4), 1, 1, 1),
        ((0, 2, 3), 0, 1, 2),
        ((0,), 0, 0, 0),
    ):
        assert kept((3, 1, 4), *path) == chain
        assert kept((2, 1, 3), *path) == min(chain, 2)
        assert kept((3, 2, 4), *path) == pair, "nodes 1, 5 and 2"
        assert kept((2, 4, 5), *path) == deep, "and 3"
