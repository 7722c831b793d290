"""Costs that a test chooses, where the engine would measure the machine's."""

from __future__ import annotations

import pytest

from sgl_spec.speculative.prune import CostTable

FLAT = CostTable(rows=(1,), ms=(1.0,))  # rows are free: whole trees are verified
STEEP = CostTable(rows=(1, 16), ms=(1.0, 2.0))


class FixedCosts:
    """`calibrate.CostMeter` with one table for every batch, whatever the rounds take."""

    def __init__(self, table: CostTable) -> None:
        self._table = table

    def table(self, requests: int) -> CostTable:
        return self._table

    def add(self, requests: int, rows: int, seconds: float) -> None:
        pass


def fix_costs(patch: pytest.MonkeyPatch, table: CostTable) -> None:
    """Engines made from now on price drafts by `table`."""
    patch.setattr("sgl_spec.engine.engine.measure_costs", lambda *_, **__: None)
    patch.setattr("sgl_spec.engine.engine.CostMeter", lambda _: FixedCosts(table))
