"""What acceptance rules do, summed over all cases in Python floats, from their definitions alone.

p is the target's distribution and q the drafter's, the same at every position.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

Probs = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Expected:
    """One round of a rule.

    acceptance: chance that it keeps a draft. kept: drafts it keeps on average. first: distribution
    of the first token it emits.
    """

    acceptance: float
    kept: float
    first: Probs


def following(p: Probs, candidates: Sequence[int]) -> Expected:
    """The target's own token is followed if it is among the candidates."""
    chance = sum(p[token] for token in candidates)
    return Expected(chance, chance, p)


def siblings(p: Probs, q: Probs, count: int) -> Expected:
    """`count` drafts from q without replacement, each accepted with chance min(1, p / q); after a
    rejection p is norm(max(0, p - q)) and q is without the draft."""
    if count == 0:
        return Expected(0.0, 0.0, p)
    chance, first = 0.0, [0.0] * len(p)
    for token, share in enumerate(q):
        accept = min(1.0, p[token] / share) if share else 1.0
        chance += share * accept
        first[token] += share * accept
        if accept < 1:
            rest = [0.0 if i == token else b for i, b in enumerate(q)]
            later = siblings(left_over(p, q), normal(rest), count - 1 if any(rest) else 0)
            chance += share * (1 - accept) * later.acceptance
            first = [a + share * (1 - accept) * b for a, b in zip(first, later.first, strict=True)]
    return Expected(chance, chance, tuple(first))


def one_by_one(p: Probs, q: Probs, length: int) -> Expected:
    """A chain from q, each draft accepted with chance min(1, p / q) until one is not."""
    one = siblings(p, q, 1)
    return Expected(one.acceptance, sum(one.acceptance**i for i in range(1, length + 1)), one.first)


def as_block(p: Probs, q: Probs, length: int) -> Expected:
    """A chain from q, judged as a whole by block verification; every chain is looked at."""
    chance, kept, first = 0.0, 0.0, [0.0] * len(p)
    for chain in itertools.product([i for i, b in enumerate(q) if b], repeat=length):
        share = math.prod(q[token] for token in chain)
        stays = block_stays(p, q, chain)
        chance += share * (1 - stays[0])
        kept += share * sum(i * stay for i, stay in enumerate(stays))
        first[chain[0]] += share * (1 - stays[0])
        first = [a + share * stays[0] * b for a, b in zip(first, left_over(p, q), strict=True)]
    return Expected(chance, kept, tuple(first))


def block_stays(p: Probs, q: Probs, chain: Sequence[int]) -> list[float]:
    """Chance that block verification keeps exactly i drafts of a chain, i = 0 .. its length."""
    weight, passes = 1.0, [1.0]
    for i, token in enumerate(chain, 1):
        weight = min(1.0, weight * p[token] / q[token])
        mass = sum(max(0.0, weight * a - b) for a, b in zip(p, q, strict=True))
        passes.append(weight if i == len(chain) else mass / (mass + 1 - weight) if mass else 0.0)
    return [
        passed * math.prod(1 - later for later in passes[i + 1 :])
        for i, passed in enumerate(passes)
    ]


def relaxed(p: Probs, candidates: Sequence[int], single: float = 1.0, acc: float = 1.0) -> Expected:
    """One coin, candidates in order, each accepted up to where its bound stands above the last:
    everywhere if its own p reaches `single`, else up to the sum of p so far over `acc`."""
    reached, total, first = 0.0, 0.0, [0.0] * len(p)
    for token in candidates:
        total += p[token]
        bound = 1.0 if p[token] >= single or total >= acc else total / acc
        first[token] += max(0.0, bound - reached)
        reached = max(reached, bound)
    left = normal([0.0 if i in candidates else a for i, a in enumerate(p)])
    first = [a + (1 - reached) * b for a, b in zip(first, left, strict=True)]
    return Expected(reached, reached, tuple(first))


def left_over(p: Probs, q: Probs) -> Probs:
    """norm(max(0, p - q)); p where nothing is left."""
    left = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    return normal(left) if any(left) else p


def normal(values: Sequence[float]) -> Probs:
    """Scaled to sum to 1; zeros stay zeros."""
    total = sum(values) or 1.0
    return tuple(value / total for value in values)
