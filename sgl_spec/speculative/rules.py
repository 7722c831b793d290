"""Acceptance rules: how a verified tree becomes tokens. One is chosen at start-up.

| rule | drafts | text |
|---|---|---|
| follow (default) | any | the target's; a seed gives the same tokens with any drafts, or none |
| rejection | sampled, chain or tree | the target's distribution; a seed repeats for a fixed shape |
| block | sampled, chain | the same |
| thresholds | any | NOT the target's distribution: drafted tokens come out too often |
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sgl_spec.speculative.block import BlockRule
from sgl_spec.speculative.rejection import RejectionRule
from sgl_spec.speculative.sampling import SamplingRows, TokenMasks
from sgl_spec.speculative.tree import AcceptResult, TokenTree
from sgl_spec.speculative.verify import sample_and_follow
from sgl_spec.speculative.walk import Level, Verified, walk

_LEAST_DIVISOR = 1e-9


class AcceptanceRule(Protocol):
    """A rule under the name that /server_info shows.

    samples: the drafts must be drawn from a q that the tree carries (`TokenTree.draft`), in a shape
    that was fixed before: nothing may drop or reorder a node because of its token or its score.
    Otherwise the engine may prune.
    """

    @property
    def name(self) -> str: ...

    @property
    def samples(self) -> bool: ...

    def __call__(
        self,
        tree: TokenTree,
        logits: Tensor,
        row_offsets: Tensor,
        rows: SamplingRows,
        committed_lens: Tensor,
        *,
        masks: TokenMasks | None = None,
    ) -> AcceptResult:
        """See `verify.sample_and_follow`, which is one."""


class FollowRule:
    """Draw the target's token and follow it while it was drafted: `verify.sample_and_follow`."""

    name = "follow"
    samples = False

    def __call__(
        self,
        tree: TokenTree,
        logits: Tensor,
        row_offsets: Tensor,
        rows: SamplingRows,
        committed_lens: Tensor,
        *,
        masks: TokenMasks | None = None,
    ) -> AcceptResult:
        """Delegates."""
        return sample_and_follow(tree, logits, row_offsets, rows, committed_lens, masks=masks)


class ThresholdRule:
    """Relaxed acceptance with SGLang's meaning of the two thresholds. Lossy unless both are 1.

    A node has one coin. Its children are tried in sibling order, adding up their target
    probabilities; the first is accepted whose sum exceeds coin * acc, or whose own probability is
    at least `single`. If none is, the token is drawn from the target without the children. A
    token that the target's filters exclude is never accepted.
    """

    samples = False

    def __init__(self, single: float, acc: float) -> None:
        self.single = single
        self.acc = acc
        self.name = f"thresholds (single {single:g}, acc {acc:g})"

    def __call__(
        self,
        tree: TokenTree,
        logits: Tensor,
        row_offsets: Tensor,
        rows: SamplingRows,
        committed_lens: Tensor,
        *,
        masks: TokenMasks | None = None,
    ) -> AcceptResult:
        """As `verify.sample_and_follow`, but coins judge the drafts."""
        batch = Verified(tree, logits, row_offsets, rows, committed_lens, masks)
        return walk(batch, self._judge)

    def _judge(self, level: Level) -> tuple[Tensor, Tensor]:
        p, tokens = level.probs, level.kid_tokens
        own = p.gather(1, tokens).double().masked_fill(level.kids < 0, 0)
        coin = level.coins(torch.zeros_like(level.node))[:, None]
        drawn = coin < own.cumsum(1) / max(self.acc, _LEAST_DIVISOR)
        passes = (own > 0) & (drawn | (own >= self.single))
        first = passes.to(torch.int8).argmax(1, keepdim=True)
        child = torch.where(passes.any(1), level.kids.gather(1, first)[:, 0], -1)
        rest = p.scatter(1, torch.where(level.kids < 0, tokens[:, :1], tokens), 0)
        rest = torch.where(rest.sum(1, keepdim=True) > 0, rest, p)
        return child, rest


def make_rule(
    *,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    rejection: bool = False,
    block: bool = False,
) -> AcceptanceRule:
    """The rule that the flags ask for; block implies rejection. At thresholds 1 the relaxed rule
    accepts as the default one does, and the default one it is."""
    if block:
        return BlockRule()
    if rejection:
        return RejectionRule()
    if threshold_single < 1 or threshold_acc < 1:
        return ThresholdRule(threshold_single, threshold_acc)
    return FollowRule()
