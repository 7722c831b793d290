"""Costs that a test chooses, where the engine would measure the machine's."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from sgl_spec.engine.asked import ASK, AskedDrafts
from sgl_spec.engine.control import Decision, Load
from sgl_spec.engine.costs import Costs
from sgl_spec.speculative.prune import CostTable

FLAT = CostTable(rows=(1,), ms=(1.0,))  # rows are free: whole trees are verified
STEEP = CostTable(rows=(1, 16), ms=(1.0, 2.0))


@dataclass(frozen=True)
class FixedModel:
    """A `costs.CostModel`: one table for every batch."""

    fixed: CostTable
    filled: bool = False

    def size_of(self, requests: int) -> int:
        return requests

    def extras(self, size: int) -> tuple[int, ...]:
        return (0, 1, 4, 16, 64, 512)

    def modelled(self, size: int, extra: int) -> float:
        return self.fixed.cost(size + extra)


class FixedCosts(Costs):
    """Whatever the rounds take."""

    def __init__(self, table: CostTable) -> None:
        super().__init__(FixedModel(table))

    def add(self, requests: int, drafts: int, ms: float) -> None:
        pass


class Eager(AskedDrafts):
    """Always asks, and for whole depths: what rounds take on this machine decides nothing."""

    def decide(self, requests: int) -> Decision:
        super().decide(requests)
        return Decision(Load(requests.bit_length(), requests.bit_length()), ASK, 1.0)

    def deeper(self, *_: object) -> bool:
        return True


def fix_costs(patch: pytest.MonkeyPatch, table: CostTable) -> None:
    """Engines made from now on ask in every round, and price drafts by `table`."""
    patch.setattr("sgl_spec.engine.engine.forward_costs", lambda *_, **__: None)
    patch.setattr("sgl_spec.engine.engine.Costs", lambda _: FixedCosts(table))
    patch.setattr("sgl_spec.engine.engine.AskedDrafts", Eager)
