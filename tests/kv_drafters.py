"""A drafter from outside that keeps its KV in the target's slots: the target drafts for itself,
through a second cache, one chain at a time, in batches of one."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sgl_spec import register_drafter
from sgl_spec.layers.context import ForwardBatch
from sgl_spec.speculative.base import DraftBatch, DrafterContext
from sgl_spec.speculative.sampling import draw
from sgl_spec.speculative.tree import AcceptResult, TokenTree


class Twin:
    """See `KVDrafter`. It writes what it needs when it proposes."""

    follows_kv = True
    capture = ()
    reads_ahead = False

    def __init__(self, context: DrafterContext) -> None:
        assert context.target is not None
        assert context.req_to_token is not None
        self.model = context.target
        self.table = context.req_to_token
        self.kv = self.model.new_kv_cache(context.num_slots)
        self.nodes = context.draft_tokens
        self.written = np.zeros(context.num_rows, dtype=np.int64)

    def open(self, row: int, cached: int) -> None:
        """What the cache holds of the prompt is written."""
        self.written[row] = cached

    def prefilled(self, forward: ForwardBatch, following: Tensor, features: Tensor | None) -> None:
        """Run the same rows."""
        assert features is None
        self.model.forward(forward, self.kv)
        self.written[forward.rows] += forward.q_starts.diff().numpy()

    def begin(self, row: int, tokens: np.ndarray, known: int) -> None:
        """The prompt is in the KV."""
        assert self.written[row] == len(tokens) - 1

    def propose(self, batch: DraftBatch) -> TokenTree:
        """The text that the target would write, with the target's noise."""
        assert batch.sampling is not None
        chains = []
        for i, row in enumerate(batch.rows.tolist()):
            length = int(batch.lengths[i])
            chain = [int(batch.roots()[i])]
            feed = batch.tokens[row, self.written[row] : length].tolist()
            at = int(self.written[row])
            self.written[row] = length
            rows = batch.sampling.select(slice(i, i + 1))
            while len(chain) < min(self.nodes, batch.max_nodes[i]):
                logits = self._run(row, at, feed)
                at += len(feed)
                feed = [int(draw(logits, rows, torch.tensor([at])))]
                chain += feed
            chains.append(chain)
        return self._trees(chains)

    def _run(self, row: int, start: int, tokens: list[int]) -> Tensor:
        positions = torch.arange(start, start + len(tokens))
        batch = ForwardBatch(
            tokens=torch.tensor(tokens),
            positions=positions,
            slots=self.table[row, positions].long(),
            req_to_token=self.table,
            rows=torch.tensor([row]),
            prefix_lens=torch.tensor([start]),
            q_starts=torch.tensor([0, len(tokens)]),
            mask_words=None,
        )
        return self.model.logits(self.model.forward(batch, self.kv)[-1:])

    def _trees(self, chains: list[list[int]]) -> TokenTree:
        tokens = torch.zeros(len(chains), self.nodes, dtype=torch.int64)
        for row, chain in zip(tokens, chains, strict=True):
            row[: len(chain)] = torch.tensor(chain)
        parents = torch.arange(-1, self.nodes - 1).expand_as(tokens).clone()
        return TokenTree(tokens, parents, torch.tensor([len(chain) for chain in chains]))

    def verified(self, batch: DraftBatch, counts: Tensor, features: Tensor | None) -> None:
        """What was accepted is run again with the next proposal."""

    def observe(self, batch: DraftBatch, tree: TokenTree, accepted: AcceptResult) -> None:
        """Nothing to learn."""

    def written_len(self, row: int) -> int:
        """See `propose`."""
        return int(self.written[row])

    def finish(self, row: int) -> None:
        """See `open`."""

    def flush(self) -> None:
        """No memory of requests."""

    def stats(self) -> dict[str, float]:
        """Nothing to report."""
        return {}


register_drafter("TWIN", Twin)
