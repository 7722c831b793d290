"""Drafters that sample: the target's own logits, disturbed, are what they draw from.

SAMPLER knows the whole vocabulary, HALF_SAMPLER every second token. They need the target's
directory as --speculative-draft-model-path.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from model_runs import Piece, Run

from sgl_spec import register_drafter
from sgl_spec.models.loader import load_model
from sgl_spec.speculative.base import DraftBatch, DrafterContext
from sgl_spec.speculative.propose import Level, SampledTrees
from sgl_spec.speculative.topology import topology
from sgl_spec.speculative.tree import AcceptResult, TokenTree

OFF = 0.7  # standard deviation of what is added to each logit
CONTEXTS = 32


class Sampler:
    """Trees drawn from a disturbed copy of the target, level by level."""

    samples = True

    def __init__(self, context: DrafterContext, stride: int) -> None:
        directory = Path(str(context.options["draft_model_path"]))
        model = load_model(
            directory, dtype="float32", device="cpu", load_format="auto", context_length=None
        )
        self.run = Run(model, context.num_rows, context.width)
        self.filled = np.zeros(context.num_rows, dtype=np.int64)  # tokens in our own KV cache
        self.topology = context.topology or topology(3, 2, context.draft_tokens)
        self.ids = torch.arange(0, context.vocab_size, stride)
        generator = torch.Generator().manual_seed(11)
        self.noise = OFF * torch.randn(CONTEXTS, context.vocab_size, generator=generator)

    def begin(self, row: int, tokens: np.ndarray, known: int) -> None:
        """The row's KV is another request's."""
        self.filled[row] = 0

    def propose(self, batch: DraftBatch) -> TokenTree:
        """Each level sees the tree drawn so far, through the model's own tree attention."""
        trees = SampledTrees(batch, self.topology, self.ids)
        for level in trees.levels():
            logits = torch.cat(list(self._logits(batch, trees, level)))
            logits += self.noise[trees.tokens[level.request, level.node] % CONTEXTS]
            trees.grow(level, logits[:, self.ids])
        return trees.finish()

    def _logits(self, batch: DraftBatch, trees: SampledTrees, level: Level) -> Iterator[Tensor]:
        """[nodes, V] of each request that grows at this level."""
        requests = level.request.unique().tolist()
        if level.depth == 0:
            self._fill(batch, requests)
        pieces, wanted, known = [], [], trees.tokens.tolist()
        for i in requests:
            nodes, parents, grows = self._grown(level.depth, int(batch.max_nodes[i]))
            tokens = [known[i][node] for node in nodes]
            pieces.append(Piece(int(batch.rows[i]), int(batch.lengths[i]) - 1, tokens, parents))
            wanted.append(grows)
        for rows, logits in zip(wanted, self.run.logits(*pieces), strict=True):
            yield logits[rows]

    @functools.cache  # noqa: B019 (one drafter a process)
    def _grown(self, depth: int, budget: int) -> tuple[list[int], list[int], list[int]]:
        """Nodes of a request down to a depth, their parents among these, and which of them get
        children."""
        shape = self.topology
        used = range(min(budget, shape.width))
        nodes = [node for node in used if shape.depths()[node] <= depth]
        place = {node: at for at, node in enumerate(nodes)}
        parents = [-1, *(place[shape.parents[node]] for node in nodes[1:])]
        fathers = {shape.parents[node] for node in used if shape.depths()[node] == depth + 1}
        return nodes, parents, [place[node] for node in sorted(fathers)]

    def _fill(self, batch: DraftBatch, requests: list[int]) -> None:
        """Bring our KV up to the token before each root."""
        pieces = []
        for i in requests:
            row, start, end = int(batch.rows[i]), self.filled[batch.rows[i]], batch.lengths[i] - 1
            if start < end:
                pieces.append(Piece(row, int(start), batch.tokens[row, start:end].tolist()))
                self.filled[row] = end
        if pieces:
            self.run.logits(*pieces)

    def observe(self, batch: DraftBatch, tree: TokenTree, accepted: AcceptResult) -> None:
        """What was verified is fed again as text."""

    def finish(self, row: int) -> None:
        """See `begin`."""

    def flush(self) -> None:
        """No memory of requests."""

    def stats(self) -> dict[str, float]:
        """Nothing to report."""
        return {}


class Broken(Sampler):
    """Says that it samples, and hands over trees of another shape."""

    def propose(self, batch: DraftBatch) -> TokenTree:
        """The last node moves to the root."""
        tree = super().propose(batch)
        tree.parents[:, -1] = 0
        return tree


register_drafter("SAMPLER", lambda context: Sampler(context, 1))
register_drafter("HALF_SAMPLER", lambda context: Sampler(context, 2))
register_drafter("BROKEN_SAMPLER", lambda context: Broken(context, 1))
