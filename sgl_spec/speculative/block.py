"""Block verification: judge a sampled chain as a whole (Sun et al., arXiv 2403.10444, algorithm 2).

With X_1 .. X_n drawn in turn from q, and p the target's final distributions along the chain, let
w_0 = 1 and w_i = min(1, w_(i-1) p(X_i) / q(X_i)). The first i drafts are kept with chance h_i = s /
(s + 1 - w_i), where s is the mass of max(0, w_i p - q) over the token after X_i, and h_n = w_n; the
largest i whose coin falls below h_i counts. Then a token is drawn from that max(0, w_i p - q), or
from p after the whole chain. Lossless, and it keeps at least as many drafts as judging them one by
one: a draft that fails alone may pass with its successors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_spec.speculative.sampling import SamplingRows, TokenMasks, one_thread
from sgl_spec.speculative.tree import AcceptResult, TokenTree
from sgl_spec.speculative.walk import Verified, acceptance_coins, residual_draw


class BlockRule:
    """Chains of sampled drafts. Lossless; the text depends on the drafts' shape."""

    name = "block"
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
        """As `verify.sample_and_follow`, for chains; `tree.draft` says what the tokens were drawn
        from."""
        block = _Block(Verified(tree, logits, row_offsets, rows, committed_lens, masks))
        with one_thread(logits):
            node = 0
            while block.judge(node):
                node += 1
            return block.result()


class _Block:
    """B chains, judged node by node, all requests at once.

    kept: [B] drafts kept if nothing further passes. weight: [B] w of the node to be judged next.
    left: [B, V] what the token after the kept drafts is drawn from, unless the whole chain is kept:
    emitted: [B] the token after it then.
    """

    def __init__(self, batch: Verified) -> None:
        self.batch = batch
        committed, logits = batch.committed_lens, batch.logits
        self.last = batch.tree.num_nodes - 1
        self.kept = torch.zeros_like(committed)
        self.emitted = torch.zeros_like(committed)
        self.weight = torch.ones_like(committed, dtype=torch.float64)
        self.left = logits.new_zeros(committed.shape[0], logits.shape[1])
        self.greedy = batch.rows.temperature == 0

    def judge(self, node: int) -> bool:
        """Judge node `node` of every chain that has it and may still keep it; False if there are
        none whose chain goes on."""
        reaches = (self.last >= node) & (self.weight > 0)
        (ends,) = torch.nonzero(reaches & (self.last == node), as_tuple=True)
        self._judge_end(ends, node)
        (goes_on,) = torch.nonzero(reaches & (self.last > node), as_tuple=True)
        if goes_on.numel():
            self._judge_inner(goes_on, node)
        return bool(goes_on.numel())

    def _judge_end(self, request: Tensor, node: int) -> None:
        whole = self._passing(request, node, self.weight[request])
        if whole.numel():
            path = self.batch.tree.tokens[whole, 1 : node + 1]
            self.emitted[whole] = self.batch.draw(whole, torch.full_like(whole, node), path)

    def _judge_inner(self, request: Tensor, node: int) -> None:
        tokens, nodes = self.batch.tree.tokens[request], torch.full_like(request, node)
        p = self.batch.probs(request, nodes, tokens[:, 1 : node + 1])
        draft = self.batch.tree.draft
        assert draft is not None
        q = draft.rows(request, nodes, p.shape[1])
        left, chance = self._residual(request, p, q)
        passed = torch.isin(request, self._passing(request, node, chance))
        self.left[request[passed]] = left[passed]
        px, qx = (x.gather(1, tokens[:, node + 1, None])[:, 0].double() for x in (p, q))
        ratio = torch.where(self.greedy[request], (px > 0).double(), px / qx)
        self.weight[request] = (self.weight[request] * ratio).clamp(max=1)

    def _residual(self, request: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """[R, V] max(0, w p - q), not normalised, and [R] the chance h.

        A greedy target gives one token all its mass, and a q has nothing to correct. Where nothing
        is left (w = 1 and p = q, up to rounding) the next draft passes anyway.
        """
        weight, greedy = self.weight[request], self.greedy[request]
        left = (p * weight.float()[:, None] - q).clamp_(min=0)
        mass = left.sum(1, dtype=torch.float64)
        chance = torch.where(mass > 0, mass / (mass + 1 - weight), 0)
        plain = greedy | ~(mass > 0)
        return torch.where(plain[:, None], p, left), torch.where(greedy, weight, chance)

    def _passing(self, request: Tensor, node: int, chance: Tensor) -> Tensor:
        """Those of `request` whose coin at this node is below its chance; the root passes."""
        if node > 0:
            seed, where = self.batch.rows.seed[request], self.batch.committed_lens[request] + node
            tokens = self.batch.tree.tokens[request, node]
            request = request[acceptance_coins(seed, where, node, tokens) < chance]
        self.kept[request] = node
        return request

    def result(self) -> AcceptResult:
        """The kept drafts, and the token after them."""
        tree, kept = self.batch.tree, self.kept
        (cut,) = torch.nonzero(kept < self.last, as_tuple=True)
        if cut.numel():
            depth = kept[cut] + 1
            seed, where = self.batch.rows.seed[cut], self.batch.committed_lens[cut] + depth
            self.emitted[cut] = residual_draw(seed, where, depth, self.left[cut])
        tokens = tree.tokens.roll(-1, dims=1).scatter_(1, kept[:, None], self.emitted[:, None])
        nodes = torch.arange(tree.width, device=kept.device).expand_as(tokens)
        return AcceptResult(tokens=tokens, path=nodes, counts=kept + 1)
