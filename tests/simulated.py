"""A server in which nothing takes time: rounds cost what a table says, drafts are accepted by
chance.

Every source of drafts is run in it by the same controller, and its tokens are compared with those
of the best fixed choice, which only the simulation knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from sgl_spec.engine.asked import ASK, AskedDrafts
from sgl_spec.engine.control import Controller, Load, guessed_gain
from sgl_spec.engine.costs import Costs
from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec.speculative.prune import CostTable
from sgl_spec.speculative.tree import AcceptResult

SHAPES = ((3, 1, 4), (5, 4, 8), (7, 4, 32))
# Of a round without drafts and of one of each shape, ms, as on an H200 (docs/measured.md).
SHAPES_MS = {
    1: (4.13, 4.47, 4.5, 6.05),
    4: (4.31, 5.5, 5.9, 8.0),
    8: (4.68, 6.5, 7.3, 10.9),
    16: (4.95, 7.3, 9.4, 17.5),
    48: (6.5, 11.2, 16.6, 45.0),
    96: (8.8, 18.5, 29.1, 90.0),
}
ROWS = CostTable((48, 64, 128, 192, 256, 384), (5.9, 6.2, 6.4, 6.6, 7.5, 9.6), steps=True)


@dataclass
class Clock:
    """Of a machine: how much times vary, and how often one is five times as long."""

    noise: float = 0.03
    spikes: float = 0.01
    seed: int = 0
    ms: float = 0.0
    tokens: float = 0.0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def passed(self, ms: float, tokens: float) -> float:
        """A round took so long and is worth so many tokens. Returns what a clock shows of it."""
        self.ms += ms
        self.tokens += tokens
        spiked = 5.0 if self.rng.random() < self.spikes else 1.0
        return ms * spiked * (1 + self.noise * float(self.rng.standard_normal()))

    def rate(self, step: Callable[[], object], ms: float) -> float:
        """Tokens per millisecond while `step` is run for so long."""
        start, tokens = self.ms, self.tokens
        while self.ms < start + ms:
            step()
        return (self.tokens - tokens) / (self.ms - start)


def level_chance(shape: tuple[int, int, int], chance: float) -> float:
    """That a level of the tree holds the next token, if a chain's does with `chance`."""
    steps, topk, nodes = shape
    width = (nodes - 1) / steps if topk > 1 else 1.0
    return chance ** (width**-0.5)


def chances_of(chance: float) -> tuple[float, ...]:
    """Of the levels of each shape."""
    return tuple(level_chance(shape, chance) for shape in SHAPES)


def expected_gain(steps: int, chance: float) -> float:
    return float(np.cumprod(np.full(steps, chance)).sum())


@dataclass
class ShapedServer:
    """A draft model on a device that has a few shapes, of which the next round is chosen before the
    last is known. chances: that a level of each shape holds the next token; what a shape holds, a
    larger one holds too. idle: times without requests over real ones, by option."""

    size: int
    chances: tuple[float, ...]
    clock: Clock
    controller: Controller = field(
        default_factory=lambda: Controller((0.0, *(guessed_gain(*shape) for shape in SHAPES)))
    )
    idle: tuple[float, ...] = (0.95, 0.95, 0.95, 0.95)

    def __post_init__(self) -> None:
        for option, ms in enumerate(self.times):
            self.controller.know(Load(self.size), option, self.idle[option] * ms)
        self._late: list[Callable[[], None]] = []

    @property
    def times(self) -> tuple[float, ...]:
        return SHAPES_MS[self.size]

    def gain(self, option: int) -> float:
        """Expected, of a request."""
        return expected_gain(SHAPES[option - 1][0], self.chances[option - 1]) if option else 0.0

    @property
    def fixed(self) -> list[float]:
        """Tokens per millisecond of each option, if it alone is run."""
        return [self.size * (1 + self.gain(o)) / ms for o, ms in enumerate(self.times)]

    def step(self) -> None:
        decision = self.controller.choose(Load(self.size), range(len(self.times)))
        option, given = decision.option, [self.size]
        where = self.clock.rng.random((self.size, SHAPES[-1][0]))
        for (steps, _, _), chance in list(zip(SHAPES, self.chances, strict=True))[:option]:
            given.append(self.size + int((where[:, :steps] < chance).cumprod(1).sum()))
        ms = self.clock.passed(self.times[option], self.size * (1 + self.gain(option)))
        self._late.append(
            lambda: self.controller.note(
                decision, self.size, given[-1], ms, dict(enumerate(given[:-1]))
            )
        )
        if len(self._late) > 1:
            self._late.pop(0)()

    def run(self, ms: float) -> float:
        """Tokens over those of the best fixed option."""
        return self.clock.rate(self.step, ms) / max(self.fixed)

    def answer(self, prompts: int) -> float:
        """The same while so many prompts are answered with 256 tokens each."""
        start, end = self.clock.ms, self.clock.tokens + 256 * prompts
        while self.clock.tokens < end:
            self.step()
        return 256 * prompts / (self.clock.ms - start) / max(self.fixed)


@dataclass(frozen=True)
class FilledRounds:
    """`costs.CostModel` of rounds that are filled up to the counts of ROWS. more: ms of each."""

    more: float = 0.0
    filled: bool = True

    def size_of(self, requests: int) -> int:
        return 48

    def extras(self, size: int) -> list[int]:
        return [rows - 48 for rows in ROWS.rows]

    def modelled(self, size: int, extra: int) -> float:
        return ROWS.cost(48 + extra) + self.more


@dataclass
class AskedServer:
    """A drafter that is asked for chains. said, true: chance of a token, promised and real.
    propose_ms: what asking takes."""

    said: float
    true: float
    clock: Clock
    depth: int = 3
    propose_ms: float = 1.3
    size: int = 48
    more: float = 0.3  # ms that rounds take longer than was measured beforehand

    def __post_init__(self) -> None:
        self.asked = AskedDrafts(Costs(FilledRounds()))
        self.sampled = np.zeros(self.size, np.bool_)
        self.asks = 0

    def step(self) -> None:
        decision = self.asked.decide(self.size)
        if decision.option == ASK:
            tree, ms = self.pruned(decision.trial), self.propose_ms
            self.asks += 1
        else:
            tree, ms = ArrayTree.roots(np.zeros(self.size, np.int64)), 0.0
        forward_ms = ROWS.cost(48 + tree.drafts) + self.more
        right = self.clock.rng.random((self.size, self.depth)) < self.true
        drafted = np.arange(self.depth) < (tree.num_nodes - 1)[:, None]
        counts = 1 + (right.cumprod(1) * drafted).sum(1)
        worth = self.size + float((self.true ** np.arange(1, self.depth + 1) * drafted).sum())
        shown = self.clock.passed(ms + forward_ms, worth)
        self.asked.costs.add(self.size, tree.drafts, forward_ms)
        path = np.tile(np.arange(self.depth + 1), (self.size, 1))
        result = AcceptResult(*(torch.from_numpy(each) for each in (path, path, counts)))
        self.asked.learn(tree, result, self.sampled)
        self.asked.note(decision, self.size, int(counts.sum()), shown)

    def pruned(self, trial: bool) -> ArrayTree:
        tree, ms = self.tree(), self.propose_ms
        return tree.keep(self.asked.worthwhile(tree, self.sampled, ms, 0.0, trial=trial))

    def tree(self) -> ArrayTree:
        """Chains, of which some are said to be better."""
        nodes = self.depth + 1
        wild = self.clock.rng.uniform(0.7, 1.3, (self.size, 1))
        scores = np.minimum(self.said * wild, 1.0) ** np.arange(nodes)
        steps = np.tile(np.arange(nodes), (self.size, 1))
        return ArrayTree(steps, steps - 1, np.full(self.size, nodes), steps, scores)

    @property
    def plain(self) -> float:
        """Tokens per millisecond without drafts."""
        return self.size / (ROWS.cost(48) + self.more)

    @property
    def best(self) -> float:
        """Of the best number of drafts, the same in every round."""
        chances = np.sort(np.tile(self.true ** np.arange(1.0, self.depth + 1), self.size))[::-1]
        return max(
            self.plain,
            *(
                (self.size + chances[: rows - 48].sum())
                / (ROWS.cost(rows) + self.more + self.propose_ms)
                for rows in ROWS.rows
            ),
        )

    def run(self, ms: float) -> float:
        """Tokens over those of the best fixed number of drafts."""
        return self.clock.rate(self.step, ms) / self.best
