"""The cost table: measured on a real model, and corrected by the rounds."""

from __future__ import annotations

import itertools

import pytest
from fakes import SumModel

from sgl_spec.engine import calibrate
from sgl_spec.engine.calibrate import RECENT, REFRESH_ROUNDS, CostMeter, measure_costs, rising
from sgl_spec.layers.context import KVCache
from sgl_spec.speculative.prune import CostTable

TABLE = CostTable((1, 2, 4, 8), (10.0, 11.0, 12.0, 40.0))


def _kv(slots: int) -> KVCache:
    kv = SumModel().new_kv_cache(slots)
    return KVCache(kv.k.zero_(), kv.v.zero_())  # a fresh real cache reads as zeros too


def test_the_table_covers_the_rows_and_rises() -> None:
    table = measure_costs(SumModel(), _kv(300), max_rows=70)  # type: ignore[arg-type]
    assert table.rows[0] == 1
    assert table.rows[-1] == 64
    assert list(table.ms) == sorted(table.ms)


def test_a_pool_smaller_than_the_largest_batch_is_no_problem() -> None:
    table = measure_costs(SumModel(), _kv(30), max_rows=12)  # type: ignore[arg-type]
    assert table.rows[-1] == 12


def test_noise_in_one_pass_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.cycle([0.01] * 7 + [5.0])
    monkeypatch.setattr(calibrate, "_time_forward", lambda *_: next(times))
    monkeypatch.setattr(calibrate, "SLOW_S", 10.0)
    table = measure_costs(SumModel(), _kv(30), max_rows=12)  # type: ignore[arg-type]
    assert set(table.ms) == {10.0}


def test_more_rows_never_cost_less() -> None:
    assert rising([3.0, 9.0, 5.0, 7.0]) == (3.0, 5.0, 5.0, 7.0)


def test_rounds_replace_a_measurement_that_was_spoilt() -> None:
    meter = CostMeter(TABLE)
    for _ in range(max(RECENT, REFRESH_ROUNDS)):
        meter.add(8, 0.014)
    assert meter.table.cost(8) == pytest.approx(14.0)
    assert meter.table.cost(4) == 12.0


def test_a_single_fast_round_changes_nothing() -> None:
    meter = CostMeter(TABLE)
    for _ in range(REFRESH_ROUNDS - 1):
        meter.add(1, 0.010)
    meter.add(8, 0.001)
    assert meter.table.ms == TABLE.ms


def test_counts_between_are_scaled_to_the_nearest() -> None:
    meter = CostMeter(TABLE)
    for _ in range(REFRESH_ROUNDS):
        meter.add(7, TABLE.cost(7) / 2e3)
    assert meter.table.cost(8) == pytest.approx(20.0)
