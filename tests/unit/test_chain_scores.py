"""Scores of copied chains: what they learn, and the sums by which rounds are made larger."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_spec.speculative.chain_scores import ChainScores


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_scores_fall_along_a_chain_and_nothing_matched_scores_nothing() -> None:
    scores = ChainScores(6, 16, 64).scores()
    assert scores.shape == (17, 5)
    assert (scores[0] == 0).all()
    assert (np.diff(scores[1:], axis=1) < 0).all()


def test_learns_per_match_length() -> None:
    mine = ChainScores(4, 16, 64)
    for _ in range(200):
        mine.learn(ints(2, 9, 9), ints(3, 3, 2), ints(0, 3, 2))
    scores = mine.scores()
    assert scores[2, 0] < 0.01
    assert scores[9, 2] > 0.97
    assert scores[5, 0] == pytest.approx(0.35), "never seen: as at the beginning"


def test_drafts_behind_the_first_miss_were_not_tried() -> None:
    mine, before = ChainScores(4, 4, 8), ChainScores(4, 4, 8).scores()
    mine.learn(ints(3), ints(3), ints(1))
    after = mine.scores()
    assert after[3, 0] > before[3, 0]
    assert after[3, 1] / after[3, 0] < before[3, 1] / before[3, 0]
    assert after[3, 2] / after[3, 1] == pytest.approx(before[3, 2] / before[3, 1])


def test_accepted_beyond_what_was_drafted_counts_as_drafted() -> None:
    one, other = ChainScores(4, 4, 8), ChainScores(4, 4, 8)
    one.learn(ints(3), ints(2), ints(2))
    other.learn(ints(3), ints(2), ints(5))
    assert np.array_equal(one.scores(), other.scores())


def test_old_trials_fade() -> None:
    mine = ChainScores(2, 4, 8)
    for _ in range(20_000):
        mine.learn(ints(1), ints(1), ints(1))
    for _ in range(10_000):
        mine.learn(ints(1), ints(1), ints(0))
    assert mine.scores()[1, 0] < 0.15, "of all trials two thirds were won"


def test_depths_say_how_far_each_chain_reaches_a_cutoff() -> None:
    mine = ChainScores(5, 3, 16)
    depths, scores = mine.depths(), mine.scores()
    assert (depths[0] == 0).all(), "at the first cutoff nothing is verified"
    assert (depths[-1, 1:] == 4).all(), "at the last everything is"
    for i, cutoff in enumerate(mine.cutoffs):
        for matched in range(4):
            assert depths[i, matched] == (scores[matched] >= cutoff).sum()


def test_gains_are_sums_of_the_best_nodes() -> None:
    mine = ChainScores(4, 4, 8)
    scores = mine.scores()
    matched, available = ints(2, 3, 0), ints(3, 1, 3)
    nodes = sorted([*scores[2], scores[3, 0]], reverse=True)
    gains = mine.gains(matched, available, ints(0, 1, 3, 100))
    assert gains == pytest.approx([0, nodes[0], sum(nodes[:3]), sum(nodes)])


def test_cleared_knows_nothing() -> None:
    mine, fresh = ChainScores(4, 4, 8), ChainScores(4, 4, 8)
    mine.learn(ints(2), ints(3), ints(3))
    assert not np.array_equal(mine.scores(), fresh.scores())
    mine.clear()
    assert np.array_equal(mine.scores(), fresh.scores())
