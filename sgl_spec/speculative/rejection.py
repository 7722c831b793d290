"""Rejection sampling on trees whose tokens were drawn from the drafter's distribution q.

At a node, its children x_1, x_2, ... were drawn from q one after the other without replacement.
With p the target's final distribution there, each is accepted with chance min(1, p(x) / q(x)).
After a rejection p becomes norm(max(0, p - q)), and q loses x and is renormalised; when no child is
left the token is drawn from the p that remains. Each step keeps the target's distribution, so the
outcome has it (Leviathan et al., arXiv 2211.17192, and Chen et al., arXiv 2302.01318, for one
child; Jeon et al., arXiv 2402.14160, for several). It needs children that nothing has selected by
their tokens: the shape of the tree is fixed before they are drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_spec.speculative.sampling import SamplingRows, TokenMasks
from sgl_spec.speculative.tree import AcceptResult, TokenTree
from sgl_spec.speculative.walk import Level, Verified, walk


class RejectionRule:
    """Chains and trees of sampled drafts. Lossless; the text depends on the drafts' shape."""

    name = "rejection"
    samples = True

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
        """As `verify.sample_and_follow`; `tree.draft` says what the tokens were drawn from."""
        return walk(Verified(tree, logits, row_offsets, rows, committed_lens, masks), _judge)


def _judge(level: Level) -> tuple[Tensor, Tensor]:
    p, tree = level.probs, level.batch.tree
    assert tree.draft is not None
    q = tree.draft.rows(level.request, level.node, p.shape[1])
    greedy = level.batch.rows.temperature[level.request] == 0
    accepted = torch.full_like(level.node, -1)
    for rank in range(level.kids.shape[1]):
        child, token = level.kids[:, rank], level.kid_tokens[:, rank]
        px, qx = (x.gather(1, token[:, None])[:, 0].double() for x in (p, q))
        # A greedy target gives some token all its mass, and knows it whatever the drafter's q is. A
        # sampled child without mass left in q was not drawn: the drafter had run out of tokens.
        judged = (child >= 0) & (accepted < 0) & (greedy | (qx > 0))
        passes = torch.where(greedy, px > 0, level.coins(token) * qx < px)
        accepted = torch.where(judged & passes, child, accepted)
        (rejected,) = torch.nonzero(judged & ~passes, as_tuple=True)
        if rejected.numel():
            p[rejected] = residual(p[rejected], q[rejected])
            q[rejected] = without(q[rejected], token[rejected])
    return accepted, p


def residual(p: Tensor, q: Tensor) -> Tensor:
    """[R, V] norm(max(0, p - q)); p where nothing is left, which is p = q up to rounding."""
    left = (p - q).clamp_(min=0)
    total = left.sum(1, keepdim=True)
    return torch.where(total > 0, left.div_(total), p)


def without(q: Tensor, token: Tensor) -> Tensor:
    """[R, V] q after token[r] was drawn from row r; zeros where that was the last one."""
    left = q.scatter(1, token[:, None], 0)
    total = left.sum(1, keepdim=True)
    return left.div_(total.masked_fill_(total == 0, 1))
