"""Whether a draft model's work pays: how deep to draft, and whether to draft at all.

A further level of a tree costs one forward of the draft. It is worth that if the tokens it may add,
per millisecond, are more than the rounds bring anyway. And rounds that bring fewer tokens per
millisecond than plain decoding would are not drafted for: the drafter rests, and tries again now
and then. All of it is measured while serving. No model, no clock: times come from the caller.

What a draft says of its tokens' chances is right only for text that is sampled as the draft would:
the best token of a greedy text comes up more often than its probability says, that of another
temperature or filter more or less so. `ChanceScale` learns by how much.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import torch
from torch import Tensor

from sgl_spec.layers.transfer import on_device
from sgl_spec.speculative.tree import TokenTree

DEEPER = 0.8  # share of its parent's chance that a level's best node is taken to have
MIN_GAIN = 0.95  # of plain decoding: its time is a best case, which drafted rounds' is not
TRIAL = 12  # rounds that are drafted before they are judged
REST = 8  # rounds of a first rest; every further one is twice as long
MAX_REST = 128
_BLEND = 1 / 12  # weight of the newest round
_STEP_BLEND = 0.25  # of the newest draft forward
_MOST_SCALE = 4.0
_SCALE_BLEND = 1 / 24  # of the newest round's trees
_FORGET = 0.98  # a forward that seemed too dear is tried again before long


class DraftEconomy:
    """Running figures by batch size; one per drafter."""

    def __init__(self) -> None:
        self._step_ms: dict[int, float] = {}  # of a draft forward, by power of two of its requests
        self._rounds: dict[int, tuple[float, float]] = {}  # tokens and ms of a drafted one
        self._drafted: dict[int, int] = defaultdict(int)  # rounds of this trial
        self._resting: dict[int, int] = defaultdict(int)  # rounds to go
        self._rest: dict[int, int] = defaultdict(lambda: REST)  # length of the next rest

    def drafts(self, requests: int, plain_ms: float | None) -> bool:
        """Whether to draft for a round of `requests`, which takes `plain_ms` without drafts; None
        stands for 'at any price'."""
        size = requests.bit_length()
        if plain_ms is None:
            return True
        if self._resting[size]:
            self._resting[size] -= 1
            return False
        if self._drafted[size] < TRIAL:
            return True
        if self._rate(size) >= MIN_GAIN * requests / plain_ms:
            self._rest[size] = REST
            return True
        self._drafted[size] = 0
        self._resting[size] = self._rest[size] - 1
        self._rest[size] = min(2 * self._rest[size], MAX_REST)
        return False

    def deeper(self, requests: int, chances: float, plain_ms: float | None) -> bool:
        """Whether a tree batch should grow another level. chances: summed over the requests, that
        their best node so far is accepted."""
        size = requests.bit_length()
        step = self._step_ms.get(size)
        if plain_ms is None or step is None:
            return True
        rate = max(requests / plain_ms, self._rate(size))
        if chances * DEEPER >= step * rate:
            return True
        self._step_ms[size] = step * _FORGET
        return False

    def note_step(self, requests: int, ms: float) -> None:
        """A further level took `ms`."""
        size = requests.bit_length()
        known = self._step_ms.get(size, ms)
        self._step_ms[size] = known + _STEP_BLEND * (ms - known)

    def note_round(self, requests: int, tokens: int, ms: float) -> None:
        """A drafted round of `requests` brought `tokens` in `ms`, drafting and verifying."""
        size = requests.bit_length()
        had, took = self._rounds.get(size, (tokens, ms))
        self._rounds[size] = (had + _BLEND * (tokens - had), took + _BLEND * (ms - took))
        self._drafted[size] += 1

    def clear(self) -> None:
        """Forget what was learned of acceptance; times stay."""
        self._rounds.clear()
        for counts in (self._drafted, self._resting, self._rest):
            counts.clear()

    def _rate(self, size: int) -> float:
        """Tokens per ms of drafted rounds, 0 where none is known."""
        tokens, ms = self._rounds.get(size, (0.0, 1.0))
        return tokens / ms


class ChanceScale:
    """How many of the nodes that were verified were accepted, over how many their scores promised:
    one figure for greedy texts, one for sampled ones."""

    def __init__(self) -> None:
        self.scales = torch.ones(2)

    def of(self, sampled: Tensor) -> Tensor:
        """[B] factors, where `sampled` [B] bool lies."""
        return on_device(self.scales, sampled.device)[sampled.long()]

    def apply(self, tree: TokenTree, sampled: Tensor) -> TokenTree:
        """The trees with scores that keep what they promise."""
        if tree.scores is None:
            return tree
        scores = (tree.scores * self.of(sampled)[:, None]).clamp_(max=1.0)
        scores[:, 0] = 1.0
        return replace(tree, scores=scores)

    def learn(self, tree: TokenTree, counts: Tensor, sampled: Tensor) -> None:
        """What became of trees that `apply` gave out. counts: [B], tokens they emitted, on the
        CPU."""
        if tree.scores is None:
            return
        promised = ((tree.scores * tree.used()).sum(1) - 1).cpu()
        kinds = sampled.long().cpu()
        for kind in (0, 1):
            of_kind = kinds == kind
            total = float(promised[of_kind].sum())
            if total > 0:
                kept = float((counts[of_kind] - 1).sum()) / total
                moved = float(self.scales[kind]) * (1 + _SCALE_BLEND * (min(kept, 4.0) - 1))
                self.scales[kind] = min(max(moved, 1 / _MOST_SCALE), _MOST_SCALE)
