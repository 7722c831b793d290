"""The heads of rows, in which `filters` looks for its cuts.

Programs of chunks of a row find the highest logit of each group of tokens; from these comes a
floor, at or above which the prefix that the filters keep surely lies (for top_p: almost surely; the
masses tell); and the chunks write the keys from there up to the row's head, in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sgl_spec_kernels.chain import chain
from sgl_spec_kernels.noise import falling_key, key_value, place

_UNIT = tl.constexpr(1099511627776.0)  # 2^40
LOWEST = tl.constexpr(-3.4028234663852886e38)  # what is below is never drawn
_REACH = tl.constexpr(12.5)  # in temperatures below the top: a floor for top_p, w down to 2^-18


@triton.jit
def mass_of(x, top, t):
    return (tl.exp((x - top) / t) * _UNIT).to(tl.int64)


@triton.jit
def asked(slot, num_nodes, temperature, top_ks, top_ps, min_ps, vocab, WIDTH: tl.constexpr):
    """(whether there is such a node, whether anything is filtered, t, top_k, top_p, min_p)."""
    request = slot // WIDTH
    there = slot % WIDTH < tl.load(num_nodes + request)
    t = tl.load(temperature + request)
    top_k, top_p = tl.load(top_ks + request), tl.load(top_ps + request)
    min_p = tl.load(min_ps + request)
    narrows = (t != 0) & ((top_k < vocab) | (top_p < 1) | (min_p > 0))
    return there, narrows, t, top_k, top_p, min_p


@triton.jit
def row_of(logits, row_offsets, slot, row_stride, WIDTH: tl.constexpr):
    """(logits of a node, their row). A branch that depends on the row being at least 0, which it
    is, has it loaded with all else that the branch depends on, not behind that."""
    at = tl.load(row_offsets + slot // WIDTH) + slot % WIDTH
    return logits + at.to(tl.int64) * row_stride, at


@triton.jit
def group_tops(
    logits,
    row_offsets,
    num_nodes,
    temperature,
    top_ks,
    top_ps,
    min_ps,
    tops,
    vocab,
    row_stride,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """The highest logit of each group, -inf for one behind the vocabulary."""
    chain(CHAINED)
    slot, chunk = tl.program_id(0), tl.program_id(1)
    row, at = row_of(logits, row_offsets, slot, row_stride, WIDTH)
    there, narrows, _, _, _, _ = asked(
        slot, num_nodes, temperature, top_ks, top_ps, min_ps, vocab, WIDTH
    )
    if there & narrows & (at >= 0):
        SIZE: tl.constexpr = CHUNK // GROUPS
        group = tl.arange(0, GROUPS)
        token = chunk * CHUNK + group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        x = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        tl.store(tops + (slot * CHUNKS + chunk) * GROUPS + group, tl.max(x, 1))


@triton.jit
def _kth_bound(tops, top_k, LANES: tl.constexpr):
    """A logit at or above which top_k tokens lie, not many more: the groups' tops are tokens."""
    places = place(tops)
    good = tl.min(places, 0) - 1  # fewer than top_k tops lie at or before it
    bad = tl.max(places, 0)
    number = top_k * 0 + LANES  # at or before `bad`
    while (bad - good > 1) & (number > top_k + top_k // 4 + 8):
        middle = good + (bad - good) // 2
        here = tl.sum((places <= middle).to(tl.int32), 0)
        enough = here >= top_k
        number = tl.where(enough, here.to(tl.int64), number)
        bad = tl.where(enough, middle, bad)
        good = tl.where(enough, good, middle)
    return key_value(bad << 32)


@triton.jit
def find_floors(
    num_nodes,
    temperature,
    top_ks,
    top_ps,
    min_ps,
    tops,
    marks,
    sizes,
    vocab,
    WIDTH: tl.constexpr,
    TOPS: tl.constexpr,
    LANES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """marks: the highest logit of a row, and a floor for its head, which is empty yet."""
    chain(CHAINED)
    slot = tl.program_id(0)
    there, narrows, t, top_k, top_p, min_p = asked(
        slot, num_nodes, temperature, top_ks, top_ps, min_ps, vocab, WIDTH
    )
    lane = tl.arange(0, LANES)
    best = tl.load(tops + slot * TOPS + lane, mask=lane < TOPS, other=float("-inf"))
    if there & narrows:
        top = tl.max(best, 0)
        floor = tl.full([], LOWEST, tl.float32)
        counted = top_k < vocab
        if counted & (top_k <= TOPS):
            floor = tl.maximum(_kth_bound(best, top_k, LANES), floor)
        # Where top_p shares out what top_k leaves, the head holds all of that.
        if (min_p > 0) & ((counted == 0) | (top_p >= 1)):
            floor = tl.maximum(floor, top + t * tl.log(min_p * 0.5))
        if (top_p < 1) & (counted == 0):
            floor = tl.maximum(floor, top - t * _REACH)
        tl.store(marks + slot * 2, top)
        tl.store(marks + slot * 2 + 1, floor)
        tl.store(sizes + slot, 0)


@triton.jit(do_not_specialize=["step"])
def write_heads(
    logits,
    row_offsets,
    num_nodes,
    temperature,
    top_ks,
    top_ps,
    min_ps,
    marks,
    sizes,
    masses,
    keys,
    vocab,
    row_stride,
    step,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    HEAD: tl.constexpr,
    FEW: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """keys, sizes: the head; a size beyond HEAD where it has no room. masses: of a chunk, where
    top_p needs the row's, and of its part of the head. step: 1, which the compiler is not told, so
    that lanes hold single tokens: keys are stored one by one, and moving them between lanes for
    that would cost more than all else here."""
    chain(CHAINED)
    slot, chunk = tl.program_id(0), tl.program_id(1)
    row, at = row_of(logits, row_offsets, slot, row_stride, WIDTH)
    there, narrows, t, top_k, top_p, _ = asked(
        slot, num_nodes, temperature, top_ks, top_ps, min_ps, vocab, WIDTH
    )
    top, floor = tl.load(marks + slot * 2), tl.load(marks + slot * 2 + 1)
    if there & narrows & (at >= 0):
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = token < vocab
        x = tl.load(row + token * step, mask=inside, other=float("-inf")).to(tl.float32)
        mine = inside & (x >= floor)
        number = tl.sum(mine.to(tl.int32), 0)
        if (top_p < 1) & (top_k >= vocab):
            mass = mass_of(x, top, t)
            both = masses + (slot * CHUNKS + chunk) * 2
            tl.store(both, tl.sum(mass, 0))
            tl.store(both + 1, tl.sum(tl.where(mine, mass, 0), 0))
        if number > HEAD // 2:
            tl.atomic_add(sizes + slot, HEAD + 1, sem="relaxed")
        else:
            to = tl.atomic_add(sizes + slot + token * 0, 1, mask=mine, sem="relaxed")
            head = keys + slot.to(tl.int64) * (HEAD + FEW)
            tl.store(head + to, falling_key(x, token), mask=mine & (to < HEAD))
