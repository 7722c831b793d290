"""Log-probabilities of the tokens that a round emits, for the rows that ask for them.

    l(t) = x(t) - log sum exp x

x: the target's logits as they are, at the node where the token was drawn. A row asks for the
emitted token's own l, for the largest ones with their tokens (equal logits by rising id), and for
those of given ids. Programs take chunks of a row; the last of a row to finish merges what they
found. Rows that ask for nothing cost a launch. `sgl_spec.speculative.logprobs` is the twin.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chain, chained
from sgl_spec_kernels.draft_topk import merged_log_sum, partial_sums
from sgl_spec_kernels.noise import key_index, key_value, place
from sgl_spec_kernels.sample import Walked

BLOCK = 4096
_IDS = tl.constexpr(128)  # ids read at once
_NONE = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_NOWHERE = tl.constexpr(0x7FFFFFFF)


@dataclass(frozen=True, slots=True)
class Asked:
    """What R table rows ask for. top: [R] int64, how many of the largest, -1 for rows that ask for
    no log-probability at all. count: [R] int64, how many of ids: [R, M] int32."""

    top: Tensor
    count: Tensor
    ids: Tensor


@dataclass(frozen=True, slots=True)
class Found:
    """What R rows give: row i * levels + j is the j-th emitted token of request i.

    values: [R]. top_ids: [R, K] int64, top_values: [R, K]. id_values: [R, M]; float32. keys: [R,
    chunks, K] int64, sums: [R, chunks, 2] and arrived: [R] int32, zero between launches, are work
    space of one launch at a time.
    """

    values: Tensor
    top_ids: Tensor
    top_values: Tensor
    id_values: Tensor
    keys: Tensor
    sums: Tensor
    arrived: Tensor


def found_space(rows: int, vocab: int, top: int, ids: int, device: torch.device | str) -> Found:
    """For at most `top` of the largest and `ids` ids of each row."""
    chunks = triton.cdiv(vocab, BLOCK)
    return Found(
        values=torch.zeros(rows, device=device),
        top_ids=torch.zeros(rows, top, dtype=torch.int64, device=device),
        top_values=torch.zeros(rows, top, device=device),
        id_values=torch.zeros(rows, ids, device=device),
        keys=torch.empty(rows, chunks, top, dtype=torch.int64, device=device),
        sums=torch.empty(rows, chunks, 2, device=device),
        arrived=torch.zeros(rows, dtype=torch.int32, device=device),
    )


@triton.jit
def _leave_largest(keys, x, token, inside, top):
    """Write the `top` best keys of a chunk, best first."""
    places = tl.where(inside, place(x).to(tl.int32), _NOWHERE)
    for rank in range(top):
        best = tl.min(places, 0)
        first = tl.min(tl.where(places == best, token, _NOWHERE), 0)
        key = (best.to(tl.int64) << 32) | first.to(tl.int64)
        tl.store(keys + rank, tl.where(best == _NOWHERE, _NONE, key))
        places = tl.where(token == first, _NOWHERE, places)


@triton.jit
def _write_largest(keys, log_sum, ids, values, top, TOP: tl.constexpr, CHUNKS: tl.constexpr,
                   LANES: tl.constexpr):  # fmt: skip
    """Merge the chunks' keys, which rise within a chunk."""
    lane = tl.arange(0, LANES)
    spot = tl.zeros([LANES], tl.int32)
    for rank in range(top):
        left = (lane < CHUNKS) & (spot < top)
        # Other multiprocessors wrote these: past the L1 cache.
        key = tl.load(keys + lane * TOP + spot, mask=left, other=_NONE, cache_modifier=".cg")
        best = tl.min(key, 0)
        spot += (key == best).to(tl.int32)
        there = best != _NONE
        tl.store(ids + rank, tl.where(there, key_index(best), 0))
        tl.store(values + rank, tl.where(there, key_value(best) - log_sum, float("-inf")))


@triton.jit
def _read_logprobs(
    logits,
    row_offsets,
    rows,
    tops,
    id_counts,
    ids,
    path,
    tokens,
    counts,
    values,
    top_ids,
    top_values,
    id_values,
    keys,
    sums,
    arrived,
    vocab,
    row_stride,
    WIDTH: tl.constexpr,
    LEVELS: tl.constexpr,
    TOP: tl.constexpr,
    IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    slot, chunk = tl.program_id(0), tl.program_id(1)
    request, level = slot // LEVELS, slot % LEVELS
    row = tl.load(rows + request)
    top = tl.load(tops + row).to(tl.int32)
    if (top < 0) | (level >= tl.load(counts + request)):
        return
    spot = request * WIDTH + level
    at = (tl.load(row_offsets + request) + tl.load(path + spot)).to(tl.int64)
    mine = logits + at * row_stride
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    x = tl.load(mine + token, mask=inside, other=float("-inf")).to(tl.float32)
    highest, total = partial_sums(x, inside)
    part = slot.to(tl.int64) * CHUNKS
    tl.store(sums + (part + chunk) * 2, highest)
    tl.store(sums + (part + chunk) * 2 + 1, total)
    _leave_largest(keys + (part + chunk) * TOP, x, token, inside, top)
    tl.debug_barrier()  # every thread's part is written before one thread says so
    if tl.atomic_add(arrived + slot, 1) < CHUNKS - 1:
        return

    tl.store(arrived + slot, 0)  # as the next launch needs it
    one = tl.arange(0, LANES)
    log_sum = merged_log_sum(sums + (part + one) * 2, one < CHUNKS)
    tl.store(values + slot, tl.load(mine + tl.load(tokens + spot)).to(tl.float32) - log_sum)
    to = slot.to(tl.int64) * TOP
    _write_largest(keys + part * TOP, log_sum, top_ids + to, top_values + to, top, TOP, CHUNKS,
                   LANES)  # fmt: skip
    lane, asked = tl.arange(0, _IDS), tl.load(id_counts + row).to(tl.int32)
    for start in range(0, asked, _IDS):
        wanted = start + lane < asked
        its = tl.load(ids + row * IDS + start + lane, mask=wanted, other=0)
        value = tl.load(mine + its, mask=wanted, other=0.0).to(tl.float32) - log_sum
        tl.store(id_values + slot.to(tl.int64) * IDS + start + lane, value, mask=wanted)


def emitted_logprobs(
    logits: Tensor,
    row_offsets: Tensor,
    rows: Tensor,
    asked: Asked,
    walked: Walked,
    found: Found,
    levels: int,
) -> None:
    """Fill `found` for the emitted tokens of the requests that ask.

    logits: [T, V], as the model gave them; node j of request i is row row_offsets[i] + j.
    row_offsets, rows: [B] int64. walked: of `sample`, at most `levels` tokens a request.
    """
    (batch, width), vocab = walked.tokens.shape, logits.shape[1]
    chunks, count = triton.cdiv(vocab, BLOCK), batch * levels
    assert logits.stride(1) == 1, "a row of logits must be contiguous"
    assert found.keys.shape[0] >= count, "there is no room for so many rows"
    assert found.keys.shape[1] == chunks, "the work space is of another vocabulary"
    assert 1 <= levels <= width
    _read_logprobs[(count, chunks)](
        logits, row_offsets, rows, asked.top, asked.count, asked.ids, walked.path, walked.tokens,
        walked.counts, found.values, found.top_ids, found.top_values, found.id_values, found.keys,
        found.sums, found.arrived, vocab, logits.stride(0), WIDTH=width, LEVELS=levels,
        TOP=found.top_ids.shape[1], IDS=asked.ids.shape[1], BLOCK=BLOCK, CHUNKS=chunks,
        LANES=triton.next_power_of_2(chunks), num_warps=8, **chained(logits.device),
    )  # fmt: skip
