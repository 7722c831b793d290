"""The cost table: measured on a real model, and corrected by the rounds."""

from __future__ import annotations

import itertools

import pytest
from fakes import SumModel

from sgl_spec.engine import calibrate
from sgl_spec.engine.calibrate import (
    RECENT,
    REFRESH_ROUNDS,
    CostMeter,
    CostModel,
    measure_costs,
    rising,
)
from sgl_spec.layers.context import ForwardBatch, KVCache
from sgl_spec.speculative.prune import CostTable

MODEL = CostModel(
    rows=CostTable((1, 2, 4, 8), (10.0, 11.0, 12.0, 40.0)),
    together=CostTable((1, 4), (10.0, 20.0)),
    uneven=(0.0, 3.0),
)


def _kv(slots: int) -> KVCache:
    kv = SumModel().new_kv_cache(slots)
    return KVCache(kv.k.zero_(), kv.v.zero_())  # a fresh real cache reads as zeros too


def _measure(slots: int, requests: int, rows: int) -> CostModel:
    return measure_costs(SumModel(), _kv(slots), max_requests=requests, max_rows=rows)  # type: ignore[arg-type]


def test_the_model_covers_rows_and_requests_and_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    # Requests of a dummy batch share slots, which the fake model would refuse.
    monkeypatch.setattr(SumModel, "forward", lambda self, batch, kv: batch.tokens[:, None])
    model = _measure(300, requests=20, rows=70)
    assert model.rows.rows[-1] == 64
    assert model.together.rows == (1, 2, 4, 8, 16)
    assert len(model.uneven) == 5
    assert list(model.rows.ms) == sorted(model.rows.ms)


def test_one_request_in_a_pool_smaller_than_its_largest_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibrate, "REQUEST_COUNTS", (1,))
    assert _measure(30, requests=1, rows=12).rows.rows[-1] == 12


def test_noise_in_one_pass_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.cycle([0.01] * 10 + [5.0])
    monkeypatch.setattr(calibrate, "_time_forward", lambda *_: next(times))
    monkeypatch.setattr(calibrate, "SLOW_S", 10.0)
    model = _measure(30, requests=4, rows=12)
    assert set(model.rows.ms) == set(model.together.ms) == {10.0}
    assert set(model.uneven) == {0.0}


def test_a_slow_forward_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(calibrate, "_time_forward", lambda *_: calls.append(1) or 1.0)
    _measure(30, requests=2, rows=2)
    assert len(calls) == 1 + len([[1], [2], [1, 1], [1, 2]])


def test_a_shape_is_timed_until_its_best_time_came_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {1: [0.01, 9.0, 0.05, 0.04, 0.041], 2: [0.05, 0.05], 3: [0.05, 0.05]}
    calls: list[int] = []

    def take(_model: object, _kv: object, batch: ForwardBatch) -> float:
        rows = len(batch.tokens) if len(batch.rows) == 1 else 3
        calls.append(rows)
        return times[rows][min(calls.count(rows), len(times[rows])) - 1]

    monkeypatch.setattr(calibrate, "_time_forward", take)
    monkeypatch.setattr(calibrate, "REQUEST_COUNTS", (1,))
    monkeypatch.setattr(calibrate, "SLOW_S", 10.0)
    model = _measure(30, requests=1, rows=2)
    assert (calls.count(1), calls.count(2)) == (1 + 4, 2)
    assert model.rows.ms[0] == pytest.approx(40)


def test_no_pass_begins_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.count(0.010, -0.0005)
    monkeypatch.setattr(calibrate, "_time_forward", lambda *_: next(times))
    monkeypatch.setattr(calibrate, "BUDGET_S", 0.0)
    _measure(30, requests=2, rows=2)
    assert next(times) == pytest.approx(0.010 - 5 * 0.0005)


def test_the_wait_is_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calibrate, "_time_forward", lambda *_: 1.0)
    with caplog.at_level("INFO"):
        _measure(30, requests=2, rows=2)
    # Four shapes with 1, 2, 2 and 3 rows.
    assert "Measuring what a verify costs on this machine, about 8 s." in caplog.text


def test_more_rows_never_cost_less() -> None:
    assert rising([3.0, 9.0, 5.0, 7.0]) == (3.0, 5.0, 5.0, 7.0)


def test_cost_of_a_shape_follows_the_formula() -> None:
    meter = CostMeter(MODEL)
    assert meter.table(1).cost(1) == 10.0
    assert meter.table(1).cost(4) == 12.0
    assert meter.table(4).cost(4) == 20.0
    assert meter.table(4).cost(8) == 20.0 + (40.0 - 12.0) + 3.0


def test_rounds_replace_a_measurement_that_was_spoilt() -> None:
    meter = CostMeter(MODEL)
    for _ in range(max(RECENT, REFRESH_ROUNDS)):
        meter.add(1, 4, 0.016)
    assert meter.table(1).cost(4) == pytest.approx(16.0)
    assert meter.table(1).cost(1) == 10.0
    assert meter.table(4).cost(4) == 20.0, "another batch size is another shape"


def test_more_rows_cost_at_least_what_fewer_were_seen_to_cost() -> None:
    meter = CostMeter(MODEL)
    for _ in range(REFRESH_ROUNDS):
        meter.add(1, 2, 0.030)
    assert meter.table(1).cost(4) == pytest.approx(30.0)


def test_a_single_fast_round_changes_nothing() -> None:
    meter = CostMeter(MODEL)
    before = meter.table(1)
    for _ in range(REFRESH_ROUNDS - 1):
        meter.add(1, 1, 0.010)
    meter.add(1, 8, 0.001)
    assert meter.table(1).cost(8) == before.cost(8)
