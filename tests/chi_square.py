"""The statistic that every distribution test here uses."""

from __future__ import annotations

import torch
from torch import Tensor


def p_value(observed: Tensor, probability: Tensor) -> float:
    """Pearson's chi-square: the chance that counts drawn from `probability` lie as far from it.

    observed: counts of each outcome. probability: the exact distribution over the same outcomes.
    An outcome of probability 0 that was seen gives 0. Each possible outcome must be expected at
    least 5 times, else the statistic has no chi-square distribution.
    """
    observed, probability = observed.flatten().double(), probability.flatten().double()
    possible = probability > 0
    if observed[~possible].sum() > 0:
        return 0.0
    expected = (probability / probability.sum() * observed.sum())[possible]
    assert expected.min() >= 5, "too few draws for this many outcomes"
    distance = ((observed[possible] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((expected.numel() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, distance / 2))
