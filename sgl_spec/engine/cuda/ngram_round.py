"""Rounds whose drafts are n-grams that the device finds; see `sgl_spec_kernels.ngram_ref`.

Nothing waits for the host: such rounds run ahead of it as plain decoding does. The host chooses how
many rows a round verifies; the device shares them among the requests by the scores of their drafts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from sgl_spec.engine.batch import DecodeBatch
from sgl_spec.engine.control import Controller, Decision, Load
from sgl_spec.engine.cuda.costs import DeviceCosts, TreeShapes
from sgl_spec.engine.cuda.graphs import Replayed, Rounds
from sgl_spec.engine.cuda.round import (
    ChainTrees,
    IntArray,
    Parts,
    Requests,
    Round,
    RoundKind,
    WalkedTree,
)
from sgl_spec.engine.cuda.running import Planned, RunningRound
from sgl_spec.engine.cuda.sources import ShapedRounds
from sgl_spec.layers.context import ForwardBatch
from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec.speculative.ngram import NgramDrafter
from sgl_spec.speculative.ngram_scores import scores
from sgl_spec_kernels.ngram import enter, judge, keep, propose
from sgl_spec_kernels.ngram_ref import BARRED, TokenIndex, ngram_drafts
from sgl_spec_kernels.ngram_rows import TreeRows, share_rows, tree_rows, tree_rows_buffers
from sgl_spec_kernels.sample import Walked

FloatArray = npt.NDArray[np.floating]

_BLEND = 0.25  # weight of the newest round in what drafts are expected to give
_FIRST, _NEXT = 0.35, 0.75  # chances of drafts before anything is known


class NgramTrees:
    """Trees of `total` rows in all, and at most `nodes` a request. See `round.TreeSource`.

    drafts: with what the host is to know, `NgramDrafts.facts`, scores among it.
    """

    scores = None

    def __init__(
        self, parts: Parts, requests: Requests, total: int, nodes: int, index: TokenIndex
    ) -> None:
        device, batch = parts.table.device, len(requests.rows)
        self.parts, self.requests, self.index = parts, requests, index
        self.drafts = ngram_drafts(batch, nodes, device)
        self.rows: TreeRows = tree_rows_buffers(batch, total, device)
        self.total = total
        self.nodes = nodes if total > batch else 1
        self.levels = self.nodes - 1
        self.offsets = self.rows.starts[:-1]
        self.tree: WalkedTree = self.drafts
        if self.nodes == 1:
            self.tree = ChainTrees.of(requests.at.last[:, None], self.drafts.num_nodes)
        self._places = torch.zeros(batch * self.nodes, dtype=torch.int64, device=device)
        self._starts = torch.zeros_like(self._places)

    def load(self, rows: IntArray, tree: ArrayTree | None) -> None:
        """See `round.Program`."""
        assert tree is None, "the trees are the round's own"
        self.requests.load(rows)

    def propose(self) -> None:
        """See `round.TreeSource`."""
        at, rows, table = self.requests.at, self.requests.rows, self.parts.table
        propose(self.index, rows, at.committed, at.last, at.max_nodes, self.drafts)
        share_rows(self.drafts, self.rows)
        tree_rows(self.drafts, at.committed, rows, table, self.rows)

    def forward(self) -> ForwardBatch:
        """See `round.TreeSource`."""
        rows = self.rows
        return ForwardBatch(
            tokens=rows.tokens,
            positions=rows.positions,
            slots=rows.slots,
            req_to_token=self.parts.table,
            rows=self.requests.rows,
            prefix_lens=self.requests.at.committed,
            q_starts=rows.starts,
            mask_words=rows.words,
            max_q_len=self.nodes,
        )

    def learn(self, walked: Walked) -> None:
        """Take the accepted tokens in; the next round may copy them. Given lengths teach
        nothing."""
        rows, filler = self.requests.rows, self.parts.rows.filler
        committed, tokens, counts = self.requests.at.committed, walked.tokens, walked.counts
        if not self.requests.kind.forced:
            judge(self.index, self.drafts, rows, tokens, counts, filler)
        keep(self.index, rows, committed, tokens, counts, self._places, self._starts, filler)
        enter(self.index, self._places, self._starts)


class NgramRounds(ShapedRounds):
    """Rounds with the index of `drafter`."""

    def __init__(
        self,
        parts: Parts,
        rounds: Rounds,
        shapes: TreeShapes,
        costs: DeviceCosts | None,
        drafter: NgramDrafter,
    ) -> None:
        super().__init__(parts, rounds, shapes, costs)
        self.drafter = drafter
        self.sizes = RoundSizes(shapes, costs)

    def open(self, row: int, most: int) -> None:
        """See `RoundSource`."""
        self.drafter.expect(row, most)

    def plan(self, batch: DecodeBatch, kind: RoundKind, *, behind: bool) -> Planned:
        """See `RoundSource`."""
        self.drafter.sync()
        requests = len(batch.rows)
        padded = self.rounds.padded(requests, masked=kind.masked)
        size, rows, decision = self.sizes.choose(requests, padded, kind.unseen)
        replayed = self.round_of(size, rows, kind)
        program = replayed.program
        assert isinstance(program, Round)
        trees = program.source
        assert isinstance(trees, NgramTrees)
        facts, timed = trees.drafts.facts[:requests], decision is not None
        return Planned(replayed, facts=facts, timed=timed, decision=decision)

    def round_of(self, size: int, rows: int, kind: RoundKind) -> Replayed:
        """See `ShapedRounds`."""
        mine = self.drafter

        def trees(parts: Parts, requests: Requests) -> NgramTrees:
            return NgramTrees(parts, requests, rows, mine.nodes, mine.index)

        def make() -> Round:
            return Round(self.parts, size, kind, trees)

        return self.rounds.get(("ngram", size, rows, kind), make, size)

    def collected(self, launched: RunningRound, lengths: IntArray, given: IntArray) -> list[int]:
        """See `RoundSource`."""
        assert launched.facts is not None
        facts = launched.facts.wait()
        emitted, decision = int(given[:, 0].sum()), launched.planned.decision
        self.sizes.found(scores(facts)[:, 1:].numpy())
        if decision is not None and launched.watch is not None:
            ms = self.parts.agree(launched.watch.ms())
            self.sizes.controller.note(decision, len(facts), emitted, ms)
        verified, found = facts[:, 0] - 1, int((facts[:, 1:2] < BARRED).sum())
        if not launched.forced:
            self.drafter.note(int(verified.sum()), emitted, len(facts), found)
        counts: list[int] = verified.tolist()
        return counts

    def flush(self) -> None:
        """See `RoundSource`."""
        self.sizes.controller.clear()

    def stats(self) -> dict[str, float]:
        """See `Controller.stats`: option 0 drafts nothing, the others verify more and more rows."""
        return self.sizes.controller.stats()


class RoundSizes:
    """How many rows rounds verify: as many as the controller finds best, by what the drafts of the
    rounds before promised. costs: None verifies every draft."""

    def __init__(self, shapes: TreeShapes, costs: DeviceCosts | None) -> None:
        self.shapes, self.costs = shapes, costs
        self._most = max((len(shapes.rows(size)) for size in shapes.sizes), default=0)
        self.controller = Controller((0.0, *[1.0] * self._most))
        self._gains: dict[int, FloatArray] = {}

    def choose(self, batch: int, padded: int, kind: RoundKind) -> tuple[int, int, Decision | None]:
        """Batch size and rows of the round for so many requests. padded: the size of a round
        without drafts."""
        size = next((size for size in self.shapes.sizes if size >= batch), None)
        if size is None:
            return padded, padded * self.shapes.most_nodes, None
        rows = self.shapes.rows(size)
        if self.costs is None:
            return size, rows[-1], None
        load = Load(padded, (size, kind))
        self.controller.know(load, 0, self.costs.ms(padded, padded))
        for option, count in enumerate(rows, 1):
            self.controller.know(load, option, self.costs.ms(size, count))
        expected = [0.0, *self._expected(size), *[0.0] * (self._most - len(rows))]
        decision = self.controller.choose(load, range(len(rows) + 1), expected)
        if not decision.option:
            return padded, padded, decision
        return size, rows[decision.option - 1], decision

    def _expected(self, size: int) -> list[float]:
        """[counts of rows] tokens that drafts are expected to give a request."""
        if size not in self._gains:
            chain = _FIRST * _NEXT ** np.arange(self.shapes.most_nodes - 1)
            self._gains[size] = self._gains_of(size, np.tile(chain, (size, 1)))
        gains: list[float] = self._gains[size].tolist()
        return gains

    def _gains_of(self, size: int, chances: FloatArray) -> FloatArray:
        """[counts of rows] tokens that drafts are expected to give a request: those of the best
        nodes of the batch. chances: [B, N - 1], of the path to each node."""
        budgets = (np.array(self.shapes.rows(size)) - size) * len(chances) // size
        falling = np.sort(chances, axis=None)[::-1]
        total = np.concatenate([[0.0], np.cumsum(falling, dtype=np.float64)])
        gains: FloatArray = total[np.minimum(budgets, falling.size)] / max(1, len(chances))
        return gains

    def found(self, chances: FloatArray) -> None:
        """What the trees of a round were like; see `_gains_of`."""
        size = next((size for size in self.shapes.sizes if size >= len(chances)), None)
        if size is None or self.costs is None:
            return
        gains = self._gains_of(size, chances)
        before = self._gains.get(size)
        self._gains[size] = gains if before is None else before + _BLEND * (gains - before)
