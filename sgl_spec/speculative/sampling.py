"""The one sampler: a token per row, from the row's own distribution, by counter-based Gumbel-max.

The draw of a row is a function of its logits, its parameters and (seed, absolute position) alone.
It never depends on the other rows, on how many there are, or on anything a drafter did; this is
what makes speculation invisible in the text. Filters act in a fixed order: minimum length,
temperature, top_k, top_p, min_p.

All arithmetic is what a GPU kernel does as well: 32-bit wrapping integers for the noise, integer
masses for top_p (integer sums do not depend on their order), fp32 for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sgl_spec.request import SamplingParams

ALL_TOKENS = 1 << 31  # top_k that keeps every token
_BLOCK_ELEMENTS = 1 << 16  # a block of rows on the CPU: its temporaries stay in the cache
_MASS_BITS = 40  # top_p counts probability in units of 2^-40 of the most likely token
_WORD = 0xFFFFFFFF
_LARGEST_UNIFORM = 1.0 - 2.0**-24  # the largest fp32 below 1: keeps -log1p(-u) finite


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of R rows, on the device of the logits.

    temperature: [R] float32, 0 is greedy. top_k: [R] int64, `ALL_TOKENS` keeps all.
    top_p: [R] float64, 1 keeps all. min_p: [R] float32, 0 keeps all. seed: [R] int64.
    end_from: [R] int64, the first absolute position where a token may end the request.
    end_ids: [R, K] int64, tokens masked before that position; a row with fewer than K repeats one
    of its ids, a row with none holds 0 and an `end_from` of 0.

    The flags are known on the host, so that a batch skips work without reading the device. False
    means that no row needs the work; True that some row may.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    end_from: Tensor
    end_ids: Tensor
    any_greedy: bool
    any_sampled: bool
    any_filtered: bool
    any_minimum: bool

    @property
    def count(self) -> int:
        """Number of rows (R)."""
        return self.seed.shape[0]

    def select(self, index: Tensor | slice) -> SamplingRows:
        """Rows at `index` (ids, a bool mask or a slice)."""
        return replace(
            self,
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            min_p=self.min_p[index],
            seed=self.seed[index],
            end_from=self.end_from[index],
            end_ids=self.end_ids[index],
        )


def build_rows(
    params: Sequence[SamplingParams],
    prompt_lens: Sequence[int],
    eos_ids: Sequence[int],
    device: torch.device | str = "cpu",
) -> SamplingRows:
    """Rows of running requests; every seed must be set.

    A request that gives a minimum length cannot draw `eos_ids` (unless it ignores them) or its stop
    token ids as any of its first `min_new_tokens` tokens. prompt_lens: tokens of the prompt as
    first submitted, also after a retraction.
    """
    seeds = [p.seed for p in params if p.seed is not None]
    assert len(seeds) == len(params), (
        "a request without a seed gets one before it reaches the engine"
    )
    enders = [_enders(p, eos_ids) for p in params]
    width = max(map(len, enders), default=0)
    minimum = [
        n + p.min_new_tokens if e else 0
        for p, n, e in zip(params, prompt_lens, enders, strict=True)
    ]
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32)
    greedy = temperature == 0  # after rounding to float32, as the draw sees it

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return SamplingRows(
        temperature=temperature.to(device),
        top_k=column([p.top_k if p.top_k > 0 else ALL_TOKENS for p in params], torch.int64),
        top_p=column([p.top_p for p in params], torch.float64),
        min_p=column([p.min_p for p in params], torch.float32),
        seed=column(seeds, torch.int64),
        end_from=column(minimum, torch.int64),
        end_ids=torch.tensor(
            [e + (e or [0])[:1] * (width - len(e)) for e in enders],
            dtype=torch.int64,
            device=device,
        ).view(len(params), width),
        any_greedy=bool(greedy.any()),
        any_sampled=not bool(greedy.all()),
        any_filtered=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params),
        any_minimum=any(map(bool, enders)),
    )


def _enders(params: SamplingParams, eos_ids: Sequence[int]) -> list[int]:
    if params.min_new_tokens == 0:
        return []
    return [*(() if params.ignore_eos else eos_ids), *params.stop_token_ids]


def draw(
    logits: Tensor, rows: SamplingRows, positions: Tensor, index: Tensor | None = None
) -> Tensor:
    """Draw one token per row: [R] int64.

    logits: [T, V] float32, left unchanged. positions: [R] int64, absolute position (prompt
    included, from 0) of the token to be drawn. index: [R] int64, the logits row each draw reads;
    None means row r reads logits row r. Greedy rows take the lowest id among the largest logits. A
    row where everything is masked draws token 0; NaN or +inf give some id of the vocabulary.
    """
    assert logits.dtype == torch.float32, logits.dtype
    if index is None:
        index = torch.arange(rows.count, device=logits.device)
    if logits.device.type != "cpu":
        return _draw_blocks(logits, rows, positions, index, max(1, rows.count))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two gain a tenth on an idle machine and lose tenfold on a busy one
    try:
        step = max(1, _BLOCK_ELEMENTS // logits.shape[1])
        return _draw_blocks(logits, rows, positions, index, step)
    finally:
        torch.set_num_threads(threads)


def _draw_blocks(
    logits: Tensor, rows: SamplingRows, positions: Tensor, index: Tensor, step: int
) -> Tensor:
    tokens = torch.empty_like(positions)
    for members, rule in _groups(rows, logits.shape[1]):
        for start in range(0, members.shape[0], step):
            part = members[start : start + step]
            block = rows.select(part)
            x = logits.index_select(0, index[part])  # [r, V], a copy: filters work in place
            _mask_enders(x, block, positions[part])
            tokens[part] = rule(x, block, positions[part])
    return tokens


_Rule = Callable[[Tensor, SamplingRows, Tensor], Tensor]


def _groups(rows: SamplingRows, vocab: int) -> list[tuple[Tensor, _Rule]]:
    """Rows by the work they need."""
    everyone = torch.arange(rows.count, device=rows.seed.device)
    if not rows.any_sampled:
        return [(everyone, _greedy)]
    if not rows.any_greedy and not rows.any_filtered:
        return [(everyone, _sampled)]
    greedy = rows.temperature == 0
    filtered = (rows.top_k < vocab) | (rows.top_p < 1) | (rows.min_p > 0)
    groups = ((greedy, _greedy), (~greedy & ~filtered, _sampled), (~greedy & filtered, _filtered))
    return [(everyone[mask], rule) for mask, rule in groups]


def _mask_enders(x: Tensor, rows: SamplingRows, positions: Tensor) -> None:
    """Before the minimum length, no token may end the request. In place."""
    if rows.any_minimum:
        early = positions < rows.end_from
        held = x.gather(1, rows.end_ids)
        x.scatter_(1, rows.end_ids, held.masked_fill(early[:, None], -torch.inf))


def _greedy(x: Tensor, rows: SamplingRows, positions: Tensor) -> Tensor:
    return x.argmax(1)  # the first of equal values


def _sampled(x: Tensor, rows: SamplingRows, positions: Tensor) -> Tensor:
    """Argmin of E / p over the whole vocabulary."""
    tokens = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
    noise = exponential(noise_bits(row_keys(rows.seed, positions), tokens))
    return noise.div_(_weights(x, rows)).argmin(1)


def _filtered(x: Tensor, rows: SamplingRows, positions: Tensor) -> Tensor:
    """Argmin of E / p over the tokens that top_k, top_p and min_p leave.

    In the order of falling logit, then rising id, each filter keeps a prefix.
    """
    ids = _falling(x)
    weights = _weights(x, rows).gather(1, ids)
    counts = _kept_counts(weights, rows)
    longest = max(1, int(counts.max()))
    ids, weights = ids[:, :longest], weights[:, :longest]
    rank = torch.arange(longest, device=x.device)
    noise = exponential(noise_bits(row_keys(rows.seed, positions), ids.to(torch.int32)))
    scores = noise.div_(weights.masked_fill(rank >= counts[:, None], 0))
    beaten = scores > scores.amin(1, keepdim=True)  # false for NaN: some id is always returned
    return ids.masked_fill(beaten, ALL_TOKENS).amin(1)  # equal scores: the lower id, as elsewhere


def _falling(x: Tensor) -> Tensor:
    """[r, V] token ids by falling logit, equal logits by rising id.

    One integer key holds both, so any sort will do, and the fastest one is used.
    """
    bits = (x + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: the two are equal logits
    place = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))  # rises as the logit falls
    ids = torch.arange(x.shape[1], device=x.device)
    keys = (place.to(torch.int64) << 32) | ids
    if keys.device.type == "cpu":
        keys = torch.from_numpy(np.sort(keys.numpy(), axis=1))  # vectorised, 15 times torch's
    else:
        keys = keys.sort(dim=1).values
    return keys & _WORD


def _kept_counts(weights: Tensor, rows: SamplingRows) -> Tensor:
    """[r] int64: how many of the falling weights [r, V] survive top_k, then top_p, then min_p.

    top_p keeps the tokens before which less than p of the mass lies that top_k left.
    """
    vocab = weights.shape[1]
    mass = (weights * 2.0**_MASS_BITS).to(torch.int64)
    upto = mass.cumsum(1)  # exact in any order of summation
    top_k = rows.top_k.clamp(max=vocab)
    limit = upto.gather(1, top_k[:, None] - 1) * rows.top_p[:, None]
    top_p = torch.where(rows.top_p < 1, (upto - mass < limit).sum(1), vocab)
    min_p = (weights >= rows.min_p[:, None]).sum(1)
    return torch.minimum(torch.minimum(top_k, top_p), min_p)


def _weights(x: Tensor, rows: SamplingRows) -> Tensor:
    """[r, V] probability relative to the most likely token, in place of the logits."""
    x.sub_(x.amax(1, keepdim=True))
    return x.div_(rows.temperature[:, None]).exp_()


def exponential(bits: Tensor) -> Tensor:
    """Standard exponential variates from 32 random bits k: -log1p(-(k + 1/2) 2^-32), float32.

    The midpoint keeps the small values exact, and small values are the ones that win an argmin; the
    clamp keeps the largest finite (16.6). bits: int32, read as unsigned.
    """
    uniform = bits.view(torch.uint32).to(torch.float32).add_(0.5).mul_(2.0**-32)
    return uniform.clamp_(max=_LARGEST_UNIFORM).neg_().log1p_().neg_()


def row_keys(seed: Tensor, positions: Tensor) -> Tensor:
    """[R, 2] int32: two independent hash words of (seed, position) for each row."""
    key = seed.to(torch.int32)[:, None] + _LANES.to(seed.device)
    _mix(key)
    _mix(key.add_((seed >> 32).to(torch.int32)[:, None]))
    return _mix(key.add_(positions.to(torch.int32)[:, None]))


def noise_bits(keys: Tensor, tokens: Tensor) -> Tensor:
    """[R, n] int32: 32 random bits of (row key, token).

    The first key word offsets the token before the first round, the second enters after it, so that
    rows whose counters happen to overlap still differ by two full rounds. For one key, distinct
    tokens give distinct bits. tokens: [n] or [R, n] int32.
    """
    x = tokens + keys[:, :1]
    return _mix(x, keys[:, 1:])


def _mix(x: Tensor, key: Tensor | None = None) -> Tensor:
    """Three rounds of xor-shift and multiply, in place: a bijection of words that avalanches.

    Shifts and constants: the "triple32" search result of C. Wellons, hash-prospector.
    """
    _xor_shift(x, 17)
    _xor_shift(x.mul_(_signed(0xED5AD4BB)), 11)
    if key is not None:
        x.add_(key)
    _xor_shift(x.mul_(_signed(0xAC4C1B51)), 15)
    return _xor_shift(x.mul_(_signed(0x31848BAB)), 14)


def _xor_shift(x: Tensor, bits: int) -> Tensor:
    return x.bitwise_xor_((x >> bits).bitwise_and_(_WORD >> bits))  # masked: the shift is unsigned


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


_LANES = torch.tensor([_signed(0x9E3779B9), 0x243F6A88], dtype=torch.int32)
