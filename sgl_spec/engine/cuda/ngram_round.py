"""Rounds whose drafts are n-grams that the device finds by itself; see
`sgl_spec_kernels.ngram_index`, `ngram_chains` and `ngram_rows`.

Nothing waits for the host: such rounds run ahead of it as plain decoding does. The host chooses how
many rows a round verifies; the device shares them among the requests by the scores of their drafts.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sgl_spec.engine.batch import DecodeBatch
from sgl_spec.engine.cuda.costs import DeviceCosts, TreeShapes
from sgl_spec.engine.cuda.graphs import Replayed, Rounds
from sgl_spec.engine.cuda.ngram import DeviceNgram, RoundSizes
from sgl_spec.engine.cuda.round import ChainTrees, IntArray, Parts, Requests, Round, RoundKind
from sgl_spec.engine.cuda.running import Planned, RunningRound
from sgl_spec.engine.cuda.sources import ShapedRounds
from sgl_spec.layers.context import ForwardBatch
from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec_kernels.ngram_chains import Chains, chains, propose
from sgl_spec_kernels.ngram_index import TokenIndex, keep, learn
from sgl_spec_kernels.ngram_rows import ChainRows, chain_rows, chain_rows_buffers, share_rows
from sgl_spec_kernels.sample import Walked


class NgramTrees:
    """Chains of `total` rows in all, and at most `nodes` a request. See `round.TreeSource`.

    depths: what `ngram_rows.share_rows` reads. facts: [batch, 3] int32, see `ngram_chains.Chains`.
    """

    def __init__(
        self,
        parts: Parts,
        requests: Requests,
        total: int,
        nodes: int,
        index: TokenIndex,
        depths: Tensor,
    ) -> None:
        device, batch = parts.table.device, len(requests.rows)
        self.parts, self.requests, self.index, self.depths = parts, requests, index, depths
        self.chains: Chains = chains(batch, nodes, device)
        self.facts = self.chains.facts
        self.rows: ChainRows = chain_rows_buffers(batch, total, device)
        self.total = total
        self.nodes = nodes if total > batch else 1
        self.levels = self.nodes - 1
        self.offsets = self.rows.starts[:-1]
        tokens = self.chains.tokens if self.nodes > 1 else requests.at.last[:, None]
        self.tree = ChainTrees.of(tokens, self.rows.nodes)
        self._places = torch.zeros(batch * self.nodes, dtype=torch.int64, device=device)
        self._known = torch.zeros_like(self._places)

    def load(self, rows: IntArray, tree: ArrayTree | None) -> None:
        """See `round.Program`."""
        assert tree is None, "the trees are the round's own"
        self.requests.load(rows)

    def propose(self) -> None:
        """See `round.TreeSource`."""
        at, rows, table = self.requests.at, self.requests.rows, self.parts.table
        propose(self.index, rows, at.committed, at.last, at.max_nodes, self.chains)
        share_rows(self.chains, self.depths, self.rows)
        chain_rows(self.chains, at.committed, rows, table, self.rows)

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
        """Take the accepted tokens in; the next round may copy them."""
        places, known = self._places, self._known
        filler, committed = self.parts.rows.filler, self.requests.at.committed
        keep(self.index, self.requests.rows, committed, walked, filler, places, known)
        learn(self.index, places, known)


class NgramRounds(ShapedRounds):
    """Rounds with the index of `drafter`."""

    def __init__(
        self,
        parts: Parts,
        rounds: Rounds,
        shapes: TreeShapes,
        costs: DeviceCosts | None,
        drafter: DeviceNgram,
    ) -> None:
        super().__init__(parts, rounds, shapes, costs)
        self.drafter = drafter
        self.sizes = RoundSizes(shapes, drafter.scores, costs)

    def open(self, row: int, most: int) -> None:
        """See `RoundSource`."""
        self.drafter.expect(row, most)

    def plan(self, batch: DecodeBatch, kind: RoundKind, *, behind: bool) -> Planned:
        """See `RoundSource`."""
        self.drafter.sync()
        requests = len(batch.rows)
        padded = self.rounds.padded(requests, masked=kind.masked)
        size, rows = self.sizes.choose(requests, padded)
        replayed = self.round_of(size, rows, kind)
        program = replayed.program
        assert isinstance(program, Round)
        trees = program.source
        assert isinstance(trees, NgramTrees)
        return Planned(replayed, facts=trees.facts[:requests])

    def round_of(self, size: int, rows: int, kind: RoundKind) -> Replayed:
        """See `ShapedRounds`."""
        mine = self.drafter

        def trees(parts: Parts, requests: Requests) -> NgramTrees:
            return NgramTrees(parts, requests, rows, mine.nodes, mine.index, mine.depths)

        def make() -> Round:
            return Round(self.parts, size, kind, trees)

        return self.rounds.get(("ngram", size, rows, kind), make, size)

    def collected(self, launched: RunningRound, lengths: IntArray, given: IntArray) -> list[int]:
        """See `RoundSource`."""
        assert launched.facts is not None
        facts = launched.facts.wait().numpy().astype(np.int64)
        self.sizes.note(facts)
        if not launched.forced:
            self.drafter.learn(facts, given[:, 0].astype(np.int64) - 1)
        counts: list[int] = (facts[:, 2] - 1).tolist()
        return counts
