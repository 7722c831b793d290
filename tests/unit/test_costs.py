"""What rounds cost: measured on a model, kept on disk, and corrected by the rounds that run."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import SumModel

from sgl_spec.engine import costs
from sgl_spec.engine.costs import (
    BELIEVED,
    REFRESH_ROUNDS,
    Costs,
    ForwardCosts,
    forward_costs,
    measure_forwards,
    rising,
)
from sgl_spec.layers.context import ForwardBatch, KVCache
from sgl_spec.speculative.prune import CostTable

MODEL = ForwardCosts(
    rows=CostTable((1, 2, 4, 8), (10.0, 11.0, 12.0, 40.0)),
    together=CostTable((1, 4), (10.0, 20.0)),
    uneven=CostTable((2, 4), (1.0, 3.0)),
)


def _kv(slots: int) -> KVCache:
    kv = SumModel().new_kv_cache(slots)
    return KVCache(kv.k.zero_(), kv.v.zero_())  # a fresh real cache reads as zeros too


def _model() -> SumModel:
    model = SumModel()
    model.dtype = torch.float32  # type: ignore[attr-defined]
    model.backend = SimpleNamespace(name="none")  # type: ignore[attr-defined]
    return model


def _measure(slots: int, requests: int, rows: int) -> dict[tuple[int, ...], float]:
    return measure_forwards(SumModel(), _kv(slots), max_requests=requests, max_rows=rows)  # type: ignore[arg-type]


def _machine(monkeypatch: pytest.MonkeyPatch, slow: object) -> None:
    """A forward takes 10 ms and 1 ms for each row. slow: factors of the machine's own, in turn."""

    def take(_model: object, _kv: object, batch: ForwardBatch) -> float:
        return (0.010 + 0.001 * len(batch.tokens)) * next(slow)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(costs, "_time_forward", take)


def test_a_real_forward_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    # Requests of a dummy batch share slots, which the fake model would refuse.
    monkeypatch.setattr(SumModel, "forward", lambda self, batch, kv: batch.tokens[:, None])
    model = ForwardCosts.fitted(_measure(300, requests=20, rows=70))
    assert model.rows.rows[-1] == 64
    assert model.together.rows == (1, 2, 4, 8, 16)
    assert list(model.rows.ms) == sorted(model.rows.ms)


def test_one_request_in_a_pool_smaller_than_its_largest_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(costs, "REQUEST_COUNTS", (1,))
    assert (12,) in _measure(30, requests=1, rows=12)


def test_a_machine_that_is_slow_for_a_while_spoils_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is three times as slow for a third of the time, and now and then a forward stands still:
    24 rows are still seen to cost more than one."""
    rng = np.random.default_rng(3)
    phases = ([1.0] * 40 + [3.0] * 20) * 100
    _machine(monkeypatch, (f * (8.0 if rng.random() < 0.03 else 1.0) for f in phases))
    model = ForwardCosts.fitted(_measure(300, requests=16, rows=64))
    for rows in (2, 8, 24, 64):
        assert model.rows.cost(rows) / model.rows.cost(1) == pytest.approx(
            (10 + rows) / 11, rel=0.1
        )
    assert model.together.cost(16) / model.rows.cost(1) == pytest.approx(26 / 11, rel=0.1)
    assert model.modelled(4, 2) / model.rows.cost(1) == pytest.approx(16 / 11, rel=0.1)


def test_measuring_ends_in_time_and_what_is_missing_is_extrapolated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = itertools.count()
    _machine(monkeypatch, itertools.repeat(1.0))
    monkeypatch.setattr("time.perf_counter", lambda: 0.5 * next(calls))
    model = ForwardCosts.fitted(_measure(300, requests=16, rows=64))
    assert model.rows.rows[-1] < 16
    assert model.rows.cost(64) == pytest.approx(74, rel=0.2)


def test_more_rows_never_cost_less_and_noise_is_shared() -> None:
    assert rising([3.0, 9.0, 5.0, 7.0, 8.0]) == [3.0, 7.0, 7.0, 7.0, 8.0]


def test_a_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _machine(monkeypatch, itertools.repeat(1.0))
    model = _model()

    def start(requests: int = 4) -> ForwardCosts:
        return forward_costs(model, _kv(300), max_requests=requests, max_rows=8)  # type: ignore[arg-type]

    first = start()
    _machine(monkeypatch, itertools.repeat(2.0))
    assert start() == first
    assert start(requests=8) != first, "another server"
    (path, _) = sorted((tmp_path / "sgl-spec" / "costs").iterdir())
    for file in path.parent.iterdir():
        file.write_text("{")
    assert start().rows.cost(1) == pytest.approx(2 * first.rows.cost(1)), "measured again"


def test_a_cache_that_cannot_be_written_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sgl-spec").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _machine(monkeypatch, itertools.repeat(1.0))
    forward_costs(_model(), _kv(300), max_requests=2, max_rows=2)  # type: ignore[arg-type]
    assert "the next start measures again" in caplog.text


def test_cost_of_a_shape_follows_the_formula() -> None:
    meter = Costs(MODEL)
    assert meter.table(1).cost(1) == 10.0
    assert meter.table(1).cost(4) == 12.0
    assert meter.plain_ms(4) == 20.0
    assert meter.table(4).cost(8) == 20.0 + (40.0 - 12.0) + 3.0


def test_rounds_correct_a_shape_and_move_the_others_of_the_batch_size() -> None:
    meter = Costs(MODEL)
    for _ in range(REFRESH_ROUNDS):
        meter.add(1, 3, 18.0)  # half as much again as was thought
    assert meter.table(1).cost(4) == pytest.approx(18.0)
    assert meter.table(1).cost(1) == pytest.approx(15.0)
    assert meter.plain_ms(4) == 30.0, "the machine may be another one by now"
    for _ in range(REFRESH_ROUNDS):
        meter.add(1, 0, 10.5)
    assert meter.table(1).cost(1) == pytest.approx(10.5)


def test_single_rounds_change_nothing() -> None:
    meter = Costs(MODEL)
    for ms in (1.0, 500.0, *[10.0] * (REFRESH_ROUNDS - 2)):
        meter.add(1, 0, ms)
    assert meter.plain_ms(1) == 10.0
    few = Costs(MODEL)
    for _ in range(BELIEVED - 1):
        few.add(1, 0, 90.0)
    assert few.plain_ms(1) == 10.0


def test_a_time_between_two_counts_is_scaled_to_the_nearest() -> None:
    meter = Costs(MODEL)
    for _ in range(REFRESH_ROUNDS):
        meter.add(1, 5, 2 * MODEL.rows.cost(6))
    assert meter.table(1).cost(5) == pytest.approx(2 * MODEL.rows.cost(5), rel=0.01)
