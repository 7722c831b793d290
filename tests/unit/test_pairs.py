"""Every two settings that can meet do, in fewer runs."""

from __future__ import annotations

import itertools

from pairs import Row, every, paired, pairs_of

AXES = {"a": (1, 2, 3), "b": "xyz", "c": (True, False), "d": (0, 5)}


def fits(row: Row) -> bool:
    return row["a"] != 3 or row["b"] == "x"


def test_every_two_meet() -> None:
    held = set().union(*map(pairs_of, paired(AXES)))
    for one, other in itertools.combinations(AXES.items(), 2):
        for a, b in itertools.product(one[1], other[1]):
            assert ((one[0], a), (other[0], b)) in held
    assert 9 <= len(paired(AXES)) < len(every(AXES)) / 2


def test_what_does_not_fit_is_left_out() -> None:
    rows = paired(AXES, fits)
    assert all(map(fits, rows))
    wanted = set().union(*map(pairs_of, every(AXES, fits)))
    assert set().union(*map(pairs_of, rows)) == wanted


def test_the_runs_are_the_same_each_time() -> None:
    assert paired(AXES) == paired(AXES)
    assert paired(AXES) != paired(AXES, seed=2)
