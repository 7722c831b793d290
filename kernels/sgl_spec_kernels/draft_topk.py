"""The best tokens of a draft model's rows, with their log-probabilities.

    z = x / e                                  greedy
    z = x / T                                  sampled, plain
    z = (x + T g) / e,  g = -log E             sampled, by the target's own noise at that position
    z = x / T + g                              sampled, by noise of the drafts' own: the tokens are
                                               drawn from softmax(x / T) without replacement
    value, column = top K of z - log sum exp z,  equal ones by rising column

x: the draft's logits [R, W], T: the temperature, e: the typical error of the draft's logits. It is
`sgl_spec.speculative.ranking` on the device, and for noise of its own `propose.draw_siblings`,
which are its twins; the target's noise only ranks here, and is good to 1e-5. Programs take chunks
of a row; the last of a row to finish merges their best.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chain, chained
from sgl_spec_kernels.noise import (
    PROPOSAL,
    falling_key,
    gumbel,
    key_index,
    key_value,
    noise_bits,
    place,
    row_keys,
    stream_keys,
)

BLOCK, WARPS = 1024, 4  # columns and warps of a program
MANY = 32  # rows whose programs fill the device with twice the columns each
MOST_TOPK = 16
NOISES = (None, "shared", "proposal")
_NONE = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_NOWHERE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _warm(x, token, t, seed, position, depth, error, NOISE: tl.constexpr, PROPOSAL: tl.constexpr):
    """z of a row with temperature."""
    z = x / t
    if NOISE == 1:
        first, second = row_keys(seed, position)
        z = (x + t * gumbel(noise_bits(first, second, token), ROUGH=True)) / error
    if NOISE == 2:
        first, second = stream_keys(seed, position, PROPOSAL, depth + 1)
        z += gumbel(noise_bits(first, second, token))
    return z


@triton.jit
def partial_sums(z, inside):
    """(m, sum of exp(z - m)), m their maximum."""
    highest = tl.max(z, 0)
    level = tl.where(highest == float("-inf"), 0.0, highest)
    return highest, tl.sum(tl.where(inside, tl.exp(z - level), 0.0), 0)


@triton.jit
def merged_log_sum(stats, there):
    """log sum exp z from the sums of all parts, which other multiprocessors wrote: past the L1
    cache."""
    m = tl.load(stats, mask=there, other=float("-inf"), cache_modifier=".cg")
    s = tl.load(stats + 1, mask=there, other=0.0, cache_modifier=".cg")
    highest = tl.max(m, 0)
    level = tl.where(highest == float("-inf"), 0.0, highest)
    return tl.log(tl.sum(s * tl.exp(m - level), 0)) + level


@triton.jit
def _leave_best(part_keys, at, places, column, TOPK: tl.constexpr):
    """Write the best keys of chunk `at`. places: int32 that rise as z falls."""
    for rank in range(TOPK):
        # The logit, then the column: a warp has single instructions for reductions of 32 bits.
        best = tl.min(places, 0)
        first = tl.min(tl.where(places == best, column, _NOWHERE), 0)
        key = (best.to(tl.int64) << 32) | first.to(tl.int64)
        tl.store(part_keys + at * TOPK + rank, tl.where(best == _NOWHERE, _NONE, key))
        places = tl.where(column == first, _NOWHERE, places)


@triton.jit
def _write_best(keys, log_sum, ids, values, tokens, row, TOPK: tl.constexpr, HAS_IDS: tl.constexpr):
    """The best of a row's keys, by falling value."""
    for rank in range(TOPK):
        best = tl.min(keys, 0)
        keys = tl.where(keys == best, _NONE, keys)
        value = tl.minimum(key_value(best) - log_sum, 0.0)
        # NaN and +inf: the row means nothing. (A comparison with NaN is false.)
        value = tl.where(key_value(best) - log_sum > float("-inf"), value, float("-inf"))
        token = tl.where(best == _NONE, 0, key_index(best))
        if HAS_IDS:
            token = tl.load(ids + token)
        tl.store(values + row * TOPK + rank, value)
        tl.store(tokens + row * TOPK + rank, token)


@triton.jit(do_not_specialize=["depth", "rows_per_request"])
def _draft_topk(
    logits,
    ids,
    cuts,
    lengths,
    seed,
    temperature,
    values,
    tokens,
    part_keys,
    part_stats,
    arrived,
    width,
    rows_per_request,
    depth,
    error,
    row_stride,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    MERGED: tl.constexpr,
    SAMPLED: tl.constexpr,
    NOISE: tl.constexpr,
    PROPOSAL: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    row, chunk = tl.program_id(0), tl.program_id(1)
    request = row // rows_per_request
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(logits + row.to(tl.int64) * row_stride + column, mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    z = x / error
    if SAMPLED:
        t = tl.load(temperature + request)
        if t > 0:
            position, token = tl.load(lengths + request) + depth, column
            if HAS_IDS & (NOISE > 0):
                token = tl.load(ids + column, mask=inside, other=0).to(tl.int32)
            its_seed = tl.load(seed + request)
            z = _warm(x, token, t, its_seed, position, depth, error, NOISE, PROPOSAL)
    if HAS_CUTS:
        kept = falling_key(x, column) <= tl.load(cuts + row)
        z = tl.where(kept, z, float("-inf"))
    highest, total = partial_sums(z, inside)
    places = tl.where(inside, place(z).to(tl.int32), _NOWHERE)
    at = row * CHUNKS + chunk
    tl.store(part_stats + at * 2, highest)
    tl.store(part_stats + at * 2 + 1, total)
    _leave_best(part_keys, at, places, column, TOPK)
    tl.debug_barrier()  # every thread's part is written before one thread says so
    if tl.atomic_add(arrived + row, 1) < CHUNKS - 1:
        return

    tl.store(arrived + row, 0)  # as the next launch needs it
    one = tl.arange(0, MERGED)
    log_sum = merged_log_sum(part_stats + (row * CHUNKS + one) * 2, one < CHUNKS)
    there = one < CHUNKS * TOPK
    keys = tl.load(
        part_keys + row * CHUNKS * TOPK + one, mask=there, other=_NONE, cache_modifier=".cg"
    )
    _write_best(keys, log_sum, ids, values, tokens, row, TOPK, HAS_IDS)


@dataclass(frozen=True, slots=True)
class TopkWork:
    """Where chunks leave their best. One launch at a time may use it.

    keys: [rows, chunks, topk] int64. stats: [rows, chunks, 2] float32. arrived: [rows] int32, zero
    between launches. block: columns of a chunk.
    """

    keys: Tensor
    stats: Tensor
    arrived: Tensor
    block: int


def topk_work(rows: int, width: int, topk: int, device: torch.device | str) -> TopkWork:
    """Work space for up to this many rows."""
    block = BLOCK if rows < MANY else 2 * BLOCK
    chunks = triton.cdiv(width, block)
    return TopkWork(
        keys=torch.empty(rows, chunks, topk, dtype=torch.int64, device=device),
        stats=torch.empty(rows, chunks, 2, device=device),
        arrived=torch.zeros(rows, dtype=torch.int32, device=device),
        block=block,
    )


def draft_topk(
    logits: Tensor,
    values: Tensor,
    tokens: Tensor,
    work: TopkWork,
    *,
    error: float,
    depth: int,
    lengths: Tensor,
    seed: Tensor,
    temperature: Tensor | None,
    noise: str | None = "shared",
    ids: Tensor | None = None,
    cuts: Tensor | None = None,
) -> None:
    """Fill values [R, K] float32, -inf behind a row's last token, and tokens [R, K] int64.

    logits: [R, W], R / B rows of each of the B requests in order. lengths, seed: [B] int64; the
    tokens proposed have position lengths + depth. temperature: [B] float32, None where all are 0.
    noise: "shared" ranks by the target's, "proposal" draws, None ranks without. ids: [W] int64, the
    token of each column, None where the columns are the vocabulary. cuts: [R] int64 of
    `token_cuts`, the last key that filters keep.
    """
    rows, width = logits.shape
    topk = values.shape[1]
    assert noise in NOISES, f"noise {noise!r} is none of {NOISES}"
    assert 1 <= topk <= MOST_TOPK, f"top {topk}, this kernel takes 1 to {MOST_TOPK}"
    assert logits.stride(1) == 1, "a row of logits must be contiguous"
    assert rows % lengths.shape[0] == 0
    assert values.is_contiguous(), "values must be contiguous"
    assert tokens.is_contiguous(), "tokens must be contiguous"
    assert values.dtype == torch.float32
    assert tokens.dtype == torch.int64
    chunks = triton.cdiv(width, work.block)
    assert work.keys.shape[1:] == (chunks, topk), "the work space is of another width"
    assert work.arrived.shape[0] >= rows, "the work space is too small"
    _draft_topk[(rows, chunks)](
        logits,
        ids,
        cuts,
        lengths,
        seed,
        temperature,
        values,
        tokens,
        work.keys,
        work.stats,
        work.arrived,
        width,
        rows // lengths.shape[0],
        depth,
        error,
        logits.stride(0),
        TOPK=topk,
        BLOCK=work.block,
        CHUNKS=chunks,
        MERGED=triton.next_power_of_2(chunks * topk),
        SAMPLED=temperature is not None,
        NOISE=NOISES.index(noise),
        PROPOSAL=PROPOSAL,
        HAS_IDS=ids is not None,
        HAS_CUTS=cuts is not None,
        num_warps=WARPS,
        **chained(logits.device),
    )
