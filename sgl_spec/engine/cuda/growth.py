"""Trees of a draft model for batches that the host judges: all levels in one graph, as in a round
on the device, and read once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from sgl_spec.engine.cuda.costs import TreeShapes
from sgl_spec.engine.cuda.graphs import Replayed, Rounds
from sgl_spec.engine.cuda.rounds import IntArray, Parts, Requests, RoundKind
from sgl_spec.engine.cuda.seam import SeamClock
from sgl_spec.engine.cuda.tree_round import Drafting
from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec.speculative.base import DraftBatch
from sgl_spec.speculative.tree import TokenTree
from sgl_spec_kernels.tree_build import build_tree, device_tree

SMALL_BATCH = 8  # requests of the graphs that are made before they are needed


class Growth:
    """The drafting of a round and nothing else. See `rounds.Round`.

    out: [batch, 2 * nodes + 1] int64: tokens, parents, and how many of them there are.
    """

    lengths: Tensor | None = None

    def __init__(self, parts: Parts, batch: int, kind: RoundKind) -> None:
        draft, device = parts.draft, parts.table.device
        assert draft is not None
        self.parts, self.draft = parts, draft
        self.requests = Requests(parts, batch, kind)
        self.rows = self.requests.rows
        self.drafting = Drafting(parts, draft, self.requests)
        self.tree = device_tree(batch, draft.nodes, device)
        self.out = torch.zeros(batch, 2 * draft.nodes + 1, dtype=torch.int64, device=device)

    def load(self, rows: IntArray, tree: ArrayTree | None) -> None:
        """Give it its requests; those behind them fill the batch up."""
        assert tree is None, "the trees are what it gives"
        self.requests.load(rows)

    def __call__(self) -> None:
        mine, tree = self.requests, self.tree
        mine.begin(texts=True)
        self.drafting.grow()
        build_tree(
            tree, self.drafting.grown, mine.at.last, self.draft.steps,
            committed_lens=mine.at.committed, rows=self.rows, req_to_token=self.parts.table,
            max_nodes=mine.at.max_nodes,
        )  # fmt: skip
        torch.cat((tree.tokens, tree.parents, tree.num_nodes[:, None]), dim=1, out=self.out)


class TreeGrower:
    """Stands in for a drafter's own growing, which launches hundreds of kernels a tree.

    Penalties and biases do not move the draft's logits here, as they do where a drafter grows its
    trees itself: with EAGLE3 on SmolLM2 a frequency penalty of 0.3 leaves the accept length as it
    is (3.05, trees of 8), one of 1.0 takes 5 % of it.
    """

    def __init__(self, parts: Parts, rounds: Rounds, clock: SeamClock | None) -> None:
        self.parts, self.rounds, self.clock = parts, rounds, clock

    def _sizes(self) -> tuple[int, ...]:
        """Few, as each is captured at its first use."""
        return TreeShapes(self.rounds.sizes, 1).sizes

    def _made(self, size: int, kind: RoundKind) -> Replayed:
        key = ("growth", size, kind)
        if key not in self.rounds and self.clock is not None:
            self.clock.restart()  # a capture takes longer than what is to be timed
        return self.rounds.get(key, lambda: Growth(self.parts, size, kind), size)

    def later(self) -> list[Callable[[], object]]:
        """What makes the graphs that small batches need, in moments without work."""
        return [
            partial(self._made, size, RoundKind(sampled=sampled, filtered=filtered))
            for sampled, filtered in ((False, False), (True, False), (True, True))
            for size in self._sizes()
            if size <= SMALL_BATCH
        ]

    def grow(self, batch: DraftBatch) -> TokenTree:
        """Trees for requests whose text the draft model has read; they lie on the host."""
        sampling, size = batch.sampling, len(batch.rows)
        assert sampling is not None
        rows, roots = self.parts.rows, torch.from_numpy(batch.roots())
        rows.sync()
        rows.place(batch.rows, torch.from_numpy(batch.lengths - 1), roots)
        sampled = sampling.any_sampled
        kind = RoundKind(sampled=sampled, filtered=sampled and sampling.any_filtered)
        replayed = self._made(next((each for each in self._sizes() if each >= size), size), kind)
        replayed.program.load(batch.rows, None)
        with nullcontext() if self.clock is None else self.clock.forward():
            replayed.run()
        given = replayed.program.out[:size].cpu()
        nodes = given.shape[1] // 2
        tokens, parents, counts = given[:, :nodes], given[:, nodes:-1], given[:, -1]
        return TokenTree(tokens.contiguous(), parents.contiguous(), counts.contiguous())
