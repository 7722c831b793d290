"""Drafters at both ends of acceptance, as `--speculative-drafter-module` plugs them in.

SELF is the target itself (name it with --speculative-draft-model-path): greedily it is always
right, also beside the decoys that it adds as siblings. JUNK proposes random trees of every shape.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from fakes import RandomDrafter
from model_runs import Piece, Run

from sgl_spec import register_drafter
from sgl_spec.models.loader import load_model
from sgl_spec.speculative.base import DraftBatch, DrafterContext
from sgl_spec.speculative.tree import AcceptResult, TokenTree


class SelfDrafter:
    """The target's greedy continuation as a chain, each link beside the runner-up."""

    def __init__(self, context: DrafterContext) -> None:
        directory = Path(str(context.options["draft_model_path"]))
        model = load_model(
            directory, dtype="float32", device="cpu", load_format="auto", context_length=None
        )
        self.run = Run(model, context.num_rows, context.width)
        self.most = context.draft_tokens
        self.filled = np.zeros(context.num_rows, dtype=np.int64)  # tokens in our own KV cache

    def begin(self, row: int, tokens: np.ndarray, known: int) -> None:
        """The row's KV is another request's."""
        self.filled[row] = 0

    def propose(self, batch: DraftBatch) -> TokenTree:
        """All rows go down together, level by level."""
        size = len(batch.rows)
        tokens = np.zeros((size, self.most), dtype=np.int64)
        parents = np.full((size, self.most), -1, dtype=np.int64)
        counts = np.ones(size, dtype=np.int64)
        tokens[:, 0] = batch.tokens[batch.rows, batch.lengths - 1]
        growing = np.flatnonzero(batch.max_nodes > 1)
        tips = np.zeros(size, dtype=np.int64)
        prefix = self.filled[batch.rows]
        feed = [
            batch.tokens[r, f:n].tolist()
            for r, f, n in zip(batch.rows, prefix, batch.lengths, strict=True)
        ]
        while len(growing):
            pieces = [Piece(int(batch.rows[i]), int(prefix[i]), feed[i]) for i in growing]
            for i, logits in zip(growing, self.run.logits(*pieces), strict=True):
                prefix[i] += len(feed[i])
                best = logits[-1].topk(2).indices.tolist()
                for token in best[: batch.max_nodes[i] - counts[i]][::-1]:
                    tokens[i, counts[i]], parents[i, counts[i]] = token, tips[i]
                    counts[i] += 1
                tips[i] = counts[i] - 1
                feed[i] = [best[0]]
            growing = growing[counts[growing] < np.minimum(batch.max_nodes, self.most)[growing]]
        self.filled[batch.rows] = np.where(
            batch.max_nodes > 1, batch.lengths, self.filled[batch.rows]
        )
        return TokenTree(*(torch.from_numpy(a) for a in (tokens, parents, counts)))

    def observe(self, batch: DraftBatch, tree: TokenTree, accepted: AcceptResult) -> None:
        """What was verified is fed again as text."""

    def finish(self, row: int) -> None:
        """See `begin`."""

    def flush(self) -> None:
        """No memory of requests."""

    def stats(self) -> dict[str, float]:
        """Nothing to report."""
        return {}


register_drafter("SELF", SelfDrafter)
register_drafter("JUNK", lambda context: RandomDrafter(context.draft_tokens))
