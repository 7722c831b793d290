"""Few runs in which every two settings meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Axes = Mapping[str, Sequence[Any]]


def every(axes: Axes, fits: Callable[[Row], bool] = lambda _: True) -> list[Row]:
    """All combinations that fit."""
    rows = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return [row for row in rows if fits(row)]


def pairs_of(row: Row) -> set[Any]:
    """The two-way combinations that a row holds."""
    return set(itertools.combinations(row.items(), 2))


def paired(axes: Axes, fits: Callable[[Row], bool] = lambda _: True, seed: int = 1) -> list[Row]:
    """Rows that together hold every pair that some fitting row holds; greedily, so not the fewest,
    the same for the same seed."""
    rows = every(axes, fits)
    random.Random(seed).shuffle(rows)
    held = [pairs_of(row) for row in rows]
    missing, chosen = set().union(*held), []
    while missing:
        best = max(range(len(rows)), key=lambda i: len(held[i] & missing))
        chosen.append(rows[best])
        missing -= held[best]
    return chosen


def name_of(row: Row) -> str:
    """As a test's id."""
    return "-".join(map(str, row.values()))
