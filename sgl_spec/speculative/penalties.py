"""Settings that move single logits: repetition, frequency and presence penalties, and logit_bias.

For a token that occurs c times in the output, and at all in the prompt or the output (the path
from the root of the tree to the node that is drawn counts as output):

1. repetition r: a positive logit is divided by r, any other multiplied by it, if the token occurs
   at all (Keskar et al. 2019, arXiv 1909.05858, as transformers has it: a logit of either sign
   becomes less likely for r > 1)
2. minus c * frequency, and minus presence if c > 0 (OpenAI's definition; the prompt is no output)
3. plus the token's bias

Biases of -100 and 100 are absolute: see `hold_extremes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sgl_spec.request import MAX_BIAS, SamplingParams
from sgl_spec.speculative.entries import true_entries


class TokenCounts:
    """How often each token occurs in the text of each request row that has penalties.

    output: [rows, V] float32, occurrences in the output (whole numbers, exact up to 2^24).
    text: [rows, V] bool, whether prompt or output hold the token. Zeroed memory costs nothing on
    the CPU until a row is used.
    """

    def __init__(self, num_rows: int, vocab: int, device: torch.device | str = "cpu") -> None:
        self.output = torch.zeros(num_rows, vocab, device=device)
        self.text = torch.zeros(num_rows, vocab, dtype=torch.bool, device=device)

    def start(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """A request begins or resumes in `row` with this text."""
        self.output[row].zero_()
        self.text[row].zero_()
        device = self.output.device
        self.text[row, torch.tensor(prompt, dtype=torch.int64, device=device)] = True
        ids = torch.tensor(output, dtype=torch.int64, device=device)
        self.add(torch.full_like(ids, row), ids)

    def add(self, rows: Tensor, tokens: Tensor) -> None:
        """New output: token tokens[i] in row rows[i], both [n] int64."""
        ones = torch.ones(tokens.shape, device=tokens.device)
        self.output.index_put_((rows, tokens), ones, accumulate=True)
        self.text[rows, tokens] = True


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """Penalties of R rows.

    counts: of all request rows. row: [R] int64, the request row, -1 for a row without penalties.
    frequency, presence, repetition: [R] float32. any_repetition: False if all are 1.
    """

    counts: TokenCounts
    row: Tensor
    frequency: Tensor
    presence: Tensor
    repetition: Tensor
    any_repetition: bool

    def select(self, index: Tensor | slice) -> PenaltyRows:
        """Rows at `index` (ids, a bool mask or a slice)."""
        return replace(
            self,
            row=self.row[index],
            frequency=self.frequency[index],
            presence=self.presence[index],
            repetition=self.repetition[index],
        )


@dataclass(frozen=True, slots=True)
class BiasRows:
    """logit_bias of R rows.

    ids, values: [R, K] int64 and float32, the biases between the extremes, filled up with zeros.
    banned, forced: [R, B] and [R, F] int64, tokens at the extremes; a row that has fewer repeats
    one of its own, a row that has none holds 0. has_banned, has_forced: [R] bool.
    """

    ids: Tensor
    values: Tensor
    banned: Tensor
    forced: Tensor
    has_banned: Tensor
    has_forced: Tensor

    def select(self, index: Tensor | slice) -> BiasRows:
        """Rows at `index` (ids, a bool mask or a slice)."""
        return BiasRows(
            ids=self.ids[index],
            values=self.values[index],
            banned=self.banned[index],
            forced=self.forced[index],
            has_banned=self.has_banned[index],
            has_forced=self.has_forced[index],
        )


def penalty_rows(
    params: Sequence[SamplingParams],
    counts: TokenCounts | None,
    request_rows: Sequence[int] | None,
    device: torch.device | str,
) -> PenaltyRows | None:
    """None if no request has a penalty. request_rows: rows of `counts`; None means 0, 1, ..."""
    if not any(p.penalised for p in params):
        return None
    assert counts is not None, "penalties need counts"
    numbers = range(len(params)) if request_rows is None else request_rows
    rows = [r if p.penalised else -1 for r, p in zip(numbers, params, strict=True)]
    values = [(p.frequency_penalty, p.presence_penalty, p.repetition_penalty) for p in params]
    frequency, presence, repetition = torch.tensor(values, dtype=torch.float32, device=device).T
    return PenaltyRows(
        counts=counts,
        row=torch.tensor(rows, dtype=torch.int64, device=device),
        frequency=frequency,
        presence=presence,
        repetition=repetition,
        any_repetition=any(p.repetition_penalty != 1 for p in params),
    )


def bias_rows(params: Sequence[SamplingParams], device: torch.device | str) -> BiasRows | None:
    """None if no request has a bias."""
    if not any(p.logit_bias for p in params):
        return None
    each = [sorted(p.logit_bias.items()) for p in params]
    between = [[(t, v) for t, v in items if abs(v) < MAX_BIAS] for items in each]
    banned = [[t for t, v in items if v == -MAX_BIAS] for items in each]
    forced = [[t for t, v in items if v == MAX_BIAS] for items in each]
    width = max(map(len, between))
    values = [[v for _, v in items] + [0.0] * (width - len(items)) for items in between]
    return BiasRows(
        ids=padded_ids([[t for t, _ in items] for items in between], device),
        values=torch.tensor(values, dtype=torch.float32, device=device).view(len(params), width),
        banned=padded_ids(banned, device),
        forced=padded_ids(forced, device),
        has_banned=torch.tensor(list(map(bool, banned)), device=device),
        has_forced=torch.tensor(list(map(bool, forced)), device=device),
    )


def padded_ids(lists: Sequence[Sequence[int]], device: torch.device | str) -> Tensor:
    """[R, K] int64: short rows repeat their first id, empty ones hold 0."""
    width = max(map(len, lists), default=0)
    rows = [[*ids, *(list(ids[:1]) or [0]) * (width - len(ids))] for ids in lists]
    return torch.tensor(rows, dtype=torch.int64, device=device).view(len(lists), width)


def penalise(x: Tensor, rows: PenaltyRows, path: Tensor | None) -> None:
    """Apply the penalties to logits [r, V] in place. path: [r, D] int64, output that the counts do
    not hold yet."""
    (used,) = torch.nonzero(rows.row >= 0, as_tuple=True)
    if used.numel() == 0:
        return
    held = rows.counts.text[rows.row[used]]
    if path is not None:
        held.scatter_(1, path[used], True)
    at, token = true_entries(held)  # only these tokens' logits move
    at = used[at]
    count = rows.counts.output[rows.row[at], token]
    if path is not None:
        count = count + (path[at] == token[:, None]).sum(1)
    x[at, token] = _penalised(x[at, token], count, rows.select(at))


def _penalised(x: Tensor, count: Tensor, rows: PenaltyRows) -> Tensor:
    """[n] logits of tokens that occur, `count` times in the output. rows: theirs, n of them."""
    if rows.any_repetition:
        x = torch.where(x > 0, x / rows.repetition, x * rows.repetition)
    return x - rows.frequency * count - rows.presence * (count > 0)


def add_bias(x: Tensor, rows: BiasRows) -> None:
    """Add the biases between the extremes to logits [r, V], in place."""
    x.scatter_add_(1, rows.ids, rows.values)


def hold_extremes(x: Tensor, rows: BiasRows) -> None:
    """Biases of -100 and 100, after all other masks, on logits [r, V] in place.

    A bias of -100 keeps a token from being drawn as long as any other can be. A bias of 100 lets no
    token be drawn but those that have it, as long as one of them can be. So neither can lead out of
    a grammar or end a request before its minimum length, and no temperature or penalty outweighs
    them.
    """
    if rows.banned.shape[1]:
        _ban(x, rows)
    if rows.forced.shape[1]:
        _force(x, rows)


def _ban(x: Tensor, rows: BiasRows) -> None:
    before = x.gather(1, rows.banned)
    x.scatter_(1, rows.banned, before.masked_fill(rows.has_banned[:, None], -torch.inf))
    nothing = x.amax(1, keepdim=True) == -torch.inf
    x.scatter_(1, rows.banned, torch.where(nothing, before, x.gather(1, rows.banned)))


def _force(x: Tensor, rows: BiasRows) -> None:
    before = x.gather(1, rows.forced)
    possible = (before > -torch.inf).any(1) & rows.has_forced
    x.masked_fill_(possible[:, None], -torch.inf)
    x.scatter_(1, rows.forced, before)
