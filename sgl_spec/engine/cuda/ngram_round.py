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
from sgl_spec.engine.cuda.rounds import (
    Acceptance,
    ChainTrees,
    IntArray,
    Parts,
    Requests,
    RoundKind,
    verify,
)
from sgl_spec.engine.cuda.running import Planned, RunningRound
from sgl_spec.engine.cuda.sources import ShapedRounds
from sgl_spec.layers.context import ForwardBatch
from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec_kernels.ngram_chains import Chains, chains, propose
from sgl_spec_kernels.ngram_index import TokenIndex, keep, learn
from sgl_spec_kernels.ngram_rows import ChainRows, chain_rows, chain_rows_buffers, share_rows


class NgramRound:
    """A round of `total` rows in all, and at most `nodes` a request. See `rounds.Round`.

    depths: what `ngram_rows.share_rows` reads. facts: [batch, 3] int32, see `ngram_chains.Chains`.
    """

    def __init__(
        self,
        parts: Parts,
        batch: int,
        kind: RoundKind,
        total: int,
        nodes: int,
        index: TokenIndex,
        depths: Tensor,
    ) -> None:
        device = parts.table.device
        self.parts, self.index, self.depths = parts, index, depths
        self.requests = Requests(parts, batch, kind)
        self.rows = self.requests.rows
        self.chains: Chains = chains(batch, nodes, device)
        self.facts = self.chains.facts
        self.forward: ChainRows = chain_rows_buffers(batch, total, device)
        self.nodes = nodes if total > batch else 1
        tokens = self.chains.tokens if self.nodes > 1 else self.requests.at.last[:, None]
        self.tree = ChainTrees.of(tokens, self.forward.nodes)
        self.acceptance = Acceptance(parts, self.requests, self.nodes, self.nodes - 1)
        self.out, self.lengths = self.acceptance.out, self.acceptance.lengths
        self._places = torch.zeros(batch * self.nodes, dtype=torch.int64, device=device)
        self._known = torch.zeros_like(self._places)

    def load(self, rows: IntArray, tree: ArrayTree | None) -> None:
        """Give it its requests; those behind them fill the batch up."""
        assert tree is None, "the trees are the round's own"
        self.requests.load(rows)

    def __call__(self) -> None:
        mine = self.requests
        mine.begin()
        self._draft()
        logits = self._verify()
        self.acceptance.accept(self.tree, logits, self.forward.starts[:-1])
        self.acceptance.finish()
        self._learn()

    def _draft(self) -> None:
        at, rows, table = self.requests.at, self.rows, self.parts.table
        propose(self.index, rows, at.committed, at.last, at.max_nodes, self.chains)
        share_rows(self.chains, self.depths, self.forward)
        chain_rows(self.chains, at.committed, rows, table, self.forward)

    def _verify(self) -> Tensor:
        rows, parts = self.forward, self.parts
        batch = ForwardBatch(
            tokens=rows.tokens,
            positions=rows.positions,
            slots=rows.slots,
            req_to_token=parts.table,
            rows=self.rows,
            prefix_lens=self.requests.at.committed,
            q_starts=rows.starts,
            mask_words=rows.words,
            max_q_len=self.nodes,
        )
        logits, _ = verify(parts.model, batch, parts.kv, ())
        return logits

    def _learn(self) -> None:
        """Take the accepted tokens in; the next round may copy them."""
        places, known = self._places, self._known
        filler, committed = self.parts.rows.filler, self.requests.at.committed
        walked = self.acceptance.walked
        keep(self.index, self.rows, committed, walked, filler, places, known)
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
        size, rows = self.sizes.choose(requests, self.rounds.padded(requests))
        replayed = self.round_of(size, rows, kind)
        program = replayed.program
        assert isinstance(program, NgramRound)
        return Planned(replayed, facts=program.facts[:requests])

    def round_of(self, size: int, rows: int, kind: RoundKind) -> Replayed:
        """See `ShapedRounds`."""
        mine = self.drafter

        def make() -> NgramRound:
            index, depths = mine.index, mine.depths
            return NgramRound(self.parts, size, kind, rows, mine.nodes, index, depths)

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
