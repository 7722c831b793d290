"""Which tokens a draft model's row proposes, and how likely the target is to draw each.

An estimate is the softmax of scores over the row's columns:

    greedy                     x / e
    sampled, plain             x / T
    sampled, shared noise      (x + T g) / e,    g = -log E, the target's own Gumbel noise

x: the draft's logits, T the temperature, e the typical error of the draft's logits as the target
sees them. The target draws argmax (x + error + T g), so the best perturbed score is its token
unless errors say otherwise; at T = 0 that is the greedy line. Tokens that top_k, top_p or min_p
would drop, were the draft the target, are not proposed. Penalties, biases and a minimum length move
the draft's logits as they move the target's; only grammars are left to the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_spec.speculative.filters import survivors
from sgl_spec.speculative.noise import exponential, noise_bits, row_keys
from sgl_spec.speculative.sampling import DEVICE_ELEMENTS, SamplingRows, adjust, one_thread

DRAFT_ERROR = 0.8
"""e where nothing better is known. Where the target's logits are a draft's plus independent normal
noise, accepted length is flat around, and scores are calibrated at, 0.7 of its standard deviation.
The shipped EAGLE3 head, (5, 4, 8) trees, 30 questions of Spec-Bench: 3.18, 3.23, 3.23, 3.20 tokens
a round for e = 0.5, 0.7, 0.8, 0.9 when greedy (scores sum to 1.38, 1.05, 0.93, 0.82 of what is
accepted), and 2.26, 2.27, 2.28, 2.26 for 0.7, 0.8, 0.9, 1.1 at temperature 1 (1.49, 1.25, 1.05,
0.75)."""
_CACHE_ELEMENTS = 1 << 18  # rows whose temporaries stay in the cache


@dataclass(frozen=True, slots=True)
class Ranking:
    """How the rows of B requests are ranked.

    sampling: the requests' parameters, None if all are greedy. topk: tokens per row. shared_noise:
    rank sampled requests with the target's noise. error: e above, > 0.
    """

    sampling: SamplingRows | None
    topk: int
    shared_noise: bool
    error: float

    def best(
        self,
        logits: Tensor,
        request: Tensor,
        positions: Tensor,
        ids: Tensor | None = None,
        path: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The `topk` best tokens of each row, best first: [R, K] float32 log-probabilities, -inf
        behind a row's last, and [R, K] int64 tokens, distinct where the former are finite.

        logits: [R, W] float32. request: [R] int64, the request of each row. positions: [R] int64,
        absolute, of the tokens proposed. ids: [W] int64, the token of each column; None where the
        columns are the vocabulary. path: [R, D] int64, the draft tokens that lead to each row.
        """
        scores = logits.new_full((logits.shape[0], self.topk), -torch.inf)
        tokens = torch.zeros(scores.shape, dtype=torch.int64, device=logits.device)
        rows = None if self.sampling is None else self.sampling.select(request)
        with one_thread(logits):
            if rows is not None and _is_adjusted(rows):
                logits, ids = _adjusted(logits, rows, positions, ids, path), None
            for part, z, columns in self._scored(logits, rows, positions, ids):
                value, at = _best(z, self.topk)
                if columns is not None:
                    at = columns.gather(1, at)
                scores[part, : at.shape[1]] = value
                tokens[part, : at.shape[1]] = at if ids is None else ids[at]
        return scores, tokens

    def _scored(
        self, logits: Tensor, every: SamplingRows | None, positions: Tensor, ids: Tensor | None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Row numbers [r], their scores [r, n], and the columns these belong to (None: all)."""
        everyone = torch.arange(len(logits), device=logits.device)
        greedy = None if every is None or not every.any_sampled else every.temperature == 0
        for part in _blocks(everyone if greedy is None else everyone[greedy], logits):
            yield part, logits[part].div_(self.error), None
        if every is None or greedy is None:
            return
        filtered = (every.top_k < logits.shape[1]) | (every.top_p < 1) | (every.min_p > 0)
        for group, narrowed in ((~greedy & ~filtered, False), (~greedy & filtered, True)):
            for part in _blocks(everyone[group], logits):
                mine = every.select(part)
                if narrowed:
                    columns, weights = survivors(logits[part], mine)
                    z = weights.log_().mul_(mine.temperature[:, None])
                else:
                    columns, z = None, logits[part]
                yield part, self._perturbed(z, mine, positions[part], columns, ids), columns

    def _perturbed(
        self,
        x: Tensor,
        rows: SamplingRows,
        positions: Tensor,
        columns: Tensor | None,
        ids: Tensor | None,
    ) -> Tensor:
        """[r, n] scores of sampled rows. In place of their logits [r, n]."""
        temperature = rows.temperature[:, None]
        if not self.shared_noise:
            return x.div_(temperature)
        if columns is None:
            columns = torch.arange(x.shape[1], device=x.device)
        tokens = (columns if ids is None else ids[columns]).to(torch.int32)
        noise = exponential(noise_bits(row_keys(rows.seed, positions), tokens)).log_()
        return x.sub_(noise.mul_(temperature)).div_(self.error)


def _is_adjusted(rows: SamplingRows) -> bool:
    return rows.penalties is not None or rows.bias is not None or rows.any_minimum


def _adjusted(
    logits: Tensor,
    rows: SamplingRows,
    positions: Tensor,
    ids: Tensor | None,
    path: Tensor | None,
) -> Tensor:
    """[R, V] logits by token, -inf for tokens without a column, as the target's are adjusted."""
    named = [rows.end_ids]
    if rows.bias is not None:
        named += [rows.bias.ids, rows.bias.banned, rows.bias.forced]
    vocab = max([logits.shape[1], *(int(t.max()) + 1 for t in named if t.numel())])
    if ids is not None:
        vocab = max(vocab, int(ids.max()) + 1)
    if rows.penalties is not None:
        vocab = max(vocab, rows.penalties.counts.text.shape[1])
    x = logits.new_full((logits.shape[0], vocab), -torch.inf)
    if ids is None:
        x[:, : logits.shape[1]] = logits
    else:
        x[:, ids] = logits
    adjust(x, rows, positions, path=path)
    return x


def _blocks(members: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    if not members.numel():
        return ()
    elements = _CACHE_ELEMENTS if logits.device.type == "cpu" else DEVICE_ELEMENTS
    return torch.split(members, max(1, elements // logits.shape[1]))


def _best(z: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """[r, k <= topk] the largest log-softmaxes of rows [r, n], falling, and where they are; equal
    ones by rising index. A row with NaN or +inf, or of nothing but -inf, has none: -inf."""
    if topk == 1:
        at = z.argmax(1, keepdim=True)
    else:
        at = z.topk(min(topk, z.shape[1]), dim=1).indices.sort(dim=1).values
        order = z.gather(1, at).sort(dim=1, descending=True, stable=True).indices
        at = at.gather(1, order)
    value = z.gather(1, at) - z.logsumexp(1, keepdim=True)
    return value.clamp_(max=0).nan_to_num_(nan=-torch.inf, neginf=-torch.inf), at
