"""For `--speculative-drafter-module` beside NGRAM: drafts cost nothing in this server, so that a
test's speculation does not hang on how fast the machine is."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fixed_costs import FLAT, Eager, FixedCosts

from sgl_spec.engine import engine

engine.forward_costs = lambda *_, **__: FLAT  # type: ignore[assignment]
engine.Costs = lambda _: FixedCosts(FLAT)  # type: ignore[assignment,misc]
engine.AskedDrafts = Eager  # type: ignore[misc]
