"""The one sampler: a token per row, from the row's own distribution, by counter-based Gumbel-max.

The draw of a row is a function of its logits, its parameters and (seed, absolute position) alone.
It never depends on the other rows, on how many there are, or on anything a drafter did; this is
what makes speculation invisible in the text. Filters act in a fixed order: penalties and
logit_bias, the grammar's mask and minimum length, temperature, top_k, top_p, min_p.

All arithmetic is what a GPU kernel does as well: 32-bit wrapping integers for the noise, integer
masses for top_p (integer sums do not depend on their order), fp32 for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sgl_spec.speculative.filters import falling as falling
from sgl_spec.speculative.filters import survivors, weights_of
from sgl_spec.speculative.noise import exponential, noise_bits, row_keys
from sgl_spec.speculative.penalties import add_bias, hold_extremes, penalise
from sgl_spec.speculative.rows import ALL_TOKENS
from sgl_spec.speculative.rows import SamplingRows as SamplingRows
from sgl_spec.speculative.rows import build_rows as build_rows

DEVICE_ELEMENTS = 1 << 24  # logits of rows that are drawn together on a GPU
_BLOCK_ELEMENTS = 1 << 19  # the same on the CPU
_CACHE_ELEMENTS = 1 << 16  # part of a block whose temporaries stay in the cache


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Tokens that a grammar allows, for the logits rows it constrains.

    words: [M, ceil(V / 32)] int32, bit t % 32 of word t // 32 is set iff token t is allowed.
    row_of: [T] int64, the row of `words` that restricts each logits row; -1 leaves it free.
    """

    words: Tensor
    row_of: Tensor


@dataclass(frozen=True, slots=True)
class _Asked:
    """R draws: see `draw` for the fields."""

    rows: SamplingRows
    positions: Tensor
    index: Tensor
    path: Tensor | None
    masks: TokenMasks | None
    keys: Tensor  # of the noise

    def select(self, part: Tensor) -> _Asked:
        path = None if self.path is None else self.path[part]
        return replace(
            self,
            rows=self.rows.select(part),
            positions=self.positions[part],
            index=self.index[part],
            path=path,
            keys=self.keys[part],
        )


def draw(
    logits: Tensor,
    rows: SamplingRows,
    positions: Tensor,
    index: Tensor | None = None,
    *,
    path: Tensor | None = None,
    masks: TokenMasks | None = None,
) -> Tensor:
    """Draw one token per row: [R] int64.

    logits: [T, V] float32, left unchanged. positions: [R] int64, absolute position (prompt
    included, from 0) of the token to be drawn. index: [R] int64, the logits row each draw reads;
    None means row r reads logits row r. path: [R, D] int64, tokens drawn for the row since its
    counts were last brought up to date; None is D = 0. Greedy rows take the lowest id among the
    largest logits. A row where everything is masked draws token 0; NaN or +inf give some id of the
    vocabulary.
    """
    tokens = torch.empty_like(positions)
    with one_thread(logits):
        for part, rule, x, asked in _blocks(logits, rows, positions, index, path, masks):
            tokens[part] = rule.draw(x, asked)
    return tokens


def final_probs(
    logits: Tensor,
    rows: SamplingRows,
    positions: Tensor,
    index: Tensor | None = None,
    *,
    path: Tensor | None = None,
    masks: TokenMasks | None = None,
) -> Tensor:
    """The distributions that `draw` draws from: [R, V] float32, each row's sum is 1.

    Tokens that a filter drops have 0; a greedy row has all its mass on one token, a row where
    everything is masked on token 0.
    """
    probs = torch.empty(rows.count, logits.shape[1], device=logits.device)
    with one_thread(logits):
        for part, rule, x, asked in _blocks(logits, rows, positions, index, path, masks):
            weights = rule.weigh(x, asked)
            total = weights.sum(1, keepdim=True)
            empty = ~(total > 0)
            weights.div_(total).masked_fill_(empty, 0)
            weights[:, :1].masked_fill_(empty, 1)
            probs[part] = weights
    return probs


@contextmanager
def one_thread(logits: Tensor) -> Iterator[None]:
    """On the CPU, one thread: two gain a tenth on an idle machine and lose tenfold on a busy
    one."""
    if logits.device.type != "cpu":
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


_Block = tuple[Tensor, "_Rule", Tensor, _Asked]


def _blocks(
    logits: Tensor,
    rows: SamplingRows,
    positions: Tensor,
    index: Tensor | None,
    path: Tensor | None,
    masks: TokenMasks | None,
) -> Iterator[_Block]:
    """Rows [r] that need the same work, that work, their logits [r, V] as adjusted and masked
    (a copy, to work on in place), and what is asked for them."""
    assert logits.dtype == torch.float32, logits.dtype
    if index is None:
        index = torch.arange(rows.count, device=logits.device)
    asked = _Asked(rows, positions, index, path, masks, row_keys(rows.seed, positions))
    elements = _BLOCK_ELEMENTS if logits.device.type == "cpu" else DEVICE_ELEMENTS
    step = max(1, elements // logits.shape[1])
    for members, rule in _groups(rows, logits.shape[1]):
        for part in torch.split(members, step):
            block = asked.select(part)
            x = logits.index_select(0, block.index)
            adjust(x, block.rows, block.positions, path=block.path, index=block.index, masks=masks)
            yield part, rule, x, block


def _groups(rows: SamplingRows, vocab: int) -> list[tuple[Tensor, _Rule]]:
    """Rows by the work they need."""
    everyone = torch.arange(rows.count, device=rows.seed.device)
    if not rows.any_sampled:
        return [(everyone, _GREEDY)]
    if not rows.any_greedy and not rows.any_filtered:
        return [(everyone, _SAMPLED)]
    greedy = rows.temperature == 0
    filtered = (rows.top_k < vocab) | (rows.top_p < 1) | (rows.min_p > 0)
    groups = ((greedy, _GREEDY), (~greedy & ~filtered, _SAMPLED), (~greedy & filtered, _FILTERED))
    return [(everyone[mask], rule) for mask, rule in groups if bool(mask.any())]


def adjust(
    x: Tensor,
    rows: SamplingRows,
    positions: Tensor,
    *,
    path: Tensor | None = None,
    index: Tensor | None = None,
    masks: TokenMasks | None = None,
) -> None:
    """What comes before temperature: penalties, biases, the grammar's mask, the minimum length; in
    place. x: [R, V], one row per draw; for the rest see `draw`."""
    if rows.penalties is not None:
        penalise(x, rows.penalties, path)
    if rows.bias is not None:
        add_bias(x, rows.bias)
    if masks is not None:
        assert index is not None
        _mask_tokens(x, masks, index)
    _mask_enders(x, rows, positions)
    if rows.bias is not None:
        hold_extremes(x, rows.bias)


def _mask_tokens(x: Tensor, masks: TokenMasks, index: Tensor) -> None:
    """Tokens outside the grammar's mask cannot be drawn. In place."""
    row_of = masks.row_of[index]
    (masked,) = torch.nonzero(row_of >= 0, as_tuple=True)
    if masked.numel():
        allowed = allowed_tokens(masks.words[row_of[masked]], x.shape[1])
        x[masked] = x[masked].masked_fill(~allowed, -torch.inf)


def allowed_tokens(words: Tensor, vocab: int) -> Tensor:
    """[M, V] bool: the bits of `TokenMasks.words`."""
    if words.device.type == "cpu":
        octets = words.contiguous().numpy().view(np.uint8)
        bits = np.unpackbits(octets, axis=1, bitorder="little", count=vocab)
        return torch.from_numpy(bits).view(torch.bool)
    return shifted_bits(words, vocab)


def shifted_bits(words: Tensor, vocab: int) -> Tensor:
    """`allowed_tokens` in operations that every device has."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    bits = (words[:, :, None] >> shifts) & 1
    return bits.flatten(1)[:, :vocab].to(torch.bool)


def _mask_enders(x: Tensor, rows: SamplingRows, positions: Tensor) -> None:
    """Before the minimum length no token may end the request, as long as any other can be drawn. In
    place."""
    if not rows.any_minimum:
        return
    (early,) = torch.nonzero(positions < rows.end_from, as_tuple=True)
    if early.numel() == 0:
        return
    ids, at = rows.end_ids[early], early[:, None]
    before = x[at, ids]
    x[at, ids] = -torch.inf
    nothing = x[early].amax(1, keepdim=True) == -torch.inf
    x[at, ids] = torch.where(nothing, before, -torch.inf)


def _draw_greedy(x: Tensor, asked: _Asked) -> Tensor:
    return x.argmax(1)  # the first of equal values


def _weigh_greedy(x: Tensor, asked: _Asked) -> Tensor:
    best = x.argmax(1, keepdim=True)
    return torch.zeros_like(x).scatter_(1, best, 1)


def _draw_sampled(x: Tensor, asked: _Asked) -> Tensor:
    """Argmin of E / p over the whole vocabulary."""
    tokens = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
    drawn = torch.empty_like(asked.positions)
    step = max(1, _CACHE_ELEMENTS // x.shape[1]) if x.device.type == "cpu" else x.shape[0]
    for start in range(0, x.shape[0], step):
        part = slice(start, start + step)
        noise = exponential(noise_bits(asked.keys[part], tokens))
        weights = weights_of(x[part], asked.rows.temperature[part])
        drawn[part] = noise.div_(weights).argmin(1)
    return drawn


def _weigh_sampled(x: Tensor, asked: _Asked) -> Tensor:
    return weights_of(x, asked.rows.temperature)


def _draw_filtered(x: Tensor, asked: _Asked) -> Tensor:
    """Argmin of E / p over the tokens that top_k, top_p and min_p leave."""
    ids, weights = survivors(x, asked.rows)
    scores = exponential(noise_bits(asked.keys, ids.to(torch.int32))).div_(weights)
    beaten = scores > scores.amin(1, keepdim=True)  # false for NaN: some id is always returned
    return ids.masked_fill(beaten, ALL_TOKENS).amin(1)  # equal scores: the lower id, as elsewhere


def _weigh_filtered(x: Tensor, asked: _Asked) -> Tensor:
    ids, weights = survivors(x, asked.rows)
    return torch.zeros_like(x).scatter_add_(1, ids, weights)  # what stands behind a row adds 0


@dataclass(frozen=True, slots=True)
class _Rule:
    """How rows are drawn, and how much each token weighs in that draw; both may overwrite the
    logits."""

    draw: Callable[[Tensor, _Asked], Tensor]
    weigh: Callable[[Tensor, _Asked], Tensor]


_GREEDY = _Rule(_draw_greedy, _weigh_greedy)
_SAMPLED = _Rule(_draw_sampled, _weigh_sampled)
_FILTERED = _Rule(_draw_filtered, _weigh_filtered)
