"""A drafter of your own: it copies what followed the last two tokens when they last occurred.

    python launch_server.py --model-path smollm2 \
        --speculative-drafter-module examples/custom_drafter.py \
        --speculative-algorithm PROMPT_LOOKUP

Whatever a drafter proposes, the text is the target's: the target draws its own token at every node
of the tree and follows it only where the drafter guessed it. A bad drafter is slow, never wrong.
"""

from __future__ import annotations

import numpy as np
import torch

from sgl_spec import register_drafter
from sgl_spec.speculative.base import DraftBatch, DrafterContext
from sgl_spec.speculative.tree import AcceptResult, TokenTree


class PromptLookup:
    """Proposes a chain per request, out of the request's own text."""

    def __init__(self, context: DrafterContext) -> None:
        self.most = context.draft_tokens

    def begin(self, row: int, tokens: np.ndarray, known: int) -> None:
        """Nothing to prepare: the text is in every `DraftBatch`."""

    def propose(self, batch: DraftBatch) -> TokenTree:
        """Node 0 is the request's last token; node i is drafted to follow node i - 1."""
        size = len(batch.rows)
        tokens = np.zeros((size, self.most), dtype=np.int64)
        counts = np.ones(size, dtype=np.int64)
        for i, (row, length) in enumerate(zip(batch.rows, batch.lengths, strict=True)):
            text = batch.tokens[row, :length]
            draft = _continuation(text)[: min(self.most, batch.max_nodes[i]) - 1]
            counts[i] += len(draft)
            tokens[i, : counts[i]] = [text[-1], *draft]
        parents = np.broadcast_to(np.arange(-1, self.most - 1), tokens.shape).copy()
        return TokenTree(*(torch.from_numpy(a) for a in (tokens, parents, counts)))

    def observe(self, batch: DraftBatch, tree: TokenTree, accepted: AcceptResult) -> None:
        """A drafter that learns would look at `accepted` here."""

    def finish(self, row: int) -> None:
        """No state per request."""

    def flush(self) -> None:
        """No state at all."""

    def stats(self) -> dict[str, float]:
        """Nothing to report."""
        return {}


def _continuation(text: np.ndarray) -> np.ndarray:
    """What followed the last earlier occurrence of the text's last two tokens."""
    pairs = (text[:-2] == text[-2]) & (text[1:-1] == text[-1])
    (found,) = np.nonzero(pairs)
    return text[found[-1] + 2 :] if len(found) else text[:0]


register_drafter("PROMPT_LOOKUP", PromptLookup)
