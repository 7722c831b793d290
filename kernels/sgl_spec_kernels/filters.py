"""top_k, top_p and min_p as one number per row: the last key that they keep.

In the order of `falling_key` (falling logit, then rising id) each filter keeps a prefix, so all
three together keep the tokens whose key is at most a cut: the last of their keys, or one up to
which no other token comes. A key q is kept if

    #(keys < q) < top_k    and    mass(keys < q) < top_p * total    and    w(q) >= min_p

w = exp((x - max) / T); mass = sum of floor(w 2^40), whole numbers whose sum has no order; total =
the mass of the tokens that top_k leaves. `sgl_spec.speculative.filters` is the twin.

`filter_heads` writes the keys of a row that may be kept to its head. One program for each row looks
for the cut there: it narrows a window until a few keys are left, and ranks those. Where the head is
too long or not enough the row itself takes its place, slowly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chain, chained
from sgl_spec_kernels.filter_heads import (
    LOWEST,
    asked,
    find_floors,
    group_tops,
    mass_of,
    row_of,
    write_heads,
)
from sgl_spec_kernels.noise import falling_key, key_value, place

CHUNK = 4096  # tokens of a program, more in a vocabulary of more than MOST_CHUNKS of these
MOST_CHUNKS = 64
GROUPS = 32  # of a chunk
HEAD = 4096  # keys of a row in the work space
BLOCK = 1024  # keys that the program of a row takes at a time
FEW = 128  # keys that are ranked, each against each
_EVERYTHING = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_NOTHING = tl.constexpr(0x7F800000FFFFFFFF)  # behind every token: -inf, an id that there is not
_WEIGHTLESS = tl.constexpr(28.5)  # so far below the top, in temperatures, a token's mass is 0
_SURE = tl.constexpr(1e-5)  # a min_p whose tokens all lie above a head's floor
_SOME = tl.constexpr(16)  # of the few, against which all are held at a time
_LINEAR = tl.constexpr(8)  # sweeps that divide a window by value; later ones by bits


@triton.jit
def _keys(row, head, start, size, listed, BLOCK: tl.constexpr):
    """Keys of a block of the head, or of the row. What there is not lies behind every token."""
    index = start + tl.arange(0, BLOCK)
    inside = index < size
    if listed:
        key = tl.load(head + index, mask=inside, other=_NOTHING)
    else:
        x = tl.load(row + index, mask=inside, other=float("-inf")).to(tl.float32)
        key = falling_key(x, index)
    return key


@triton.jit
def _before(row, head, size, listed, top, t, p, q, r, BLOCK: tl.constexpr):
    """Number and mass of the tokens whose key is below each of three."""
    number_p = tl.zeros([BLOCK], dtype=tl.int32)
    number_q = tl.zeros([BLOCK], dtype=tl.int32)
    number_r = tl.zeros([BLOCK], dtype=tl.int32)
    mass_p = tl.zeros([BLOCK], dtype=tl.int64)
    mass_q = tl.zeros([BLOCK], dtype=tl.int64)
    mass_r = tl.zeros([BLOCK], dtype=tl.int64)
    for start in range(0, size, BLOCK):
        key = _keys(row, head, start, size, listed, BLOCK)
        mass = mass_of(key_value(key), top, t)  # 0 of what there is not
        number_p += (key < p).to(tl.int32)
        number_q += (key < q).to(tl.int32)
        number_r += (key < r).to(tl.int32)
        mass_p += tl.where(key < p, mass, 0)
        mass_q += tl.where(key < q, mass, 0)
        mass_r += tl.where(key < r, mass, 0)
    return (
        tl.sum(number_p, 0),
        tl.sum(number_q, 0),
        tl.sum(number_r, 0),
        tl.sum(mass_p, 0),
        tl.sum(mass_q, 0),
        tl.sum(mass_r, 0),
    )


@triton.jit
def _tight(bad, vocab):
    """The same end of a window, behind no more than the ids that there are."""
    return tl.minimum(bad, (((bad - 1) >> 32) << 32) + vocab)


@triton.jit
def _between(good, bad, sweep, PART: tl.constexpr):
    """A key inside a window of more than one, about PART quarters from its begin: by logit, then,
    of one logit, by id."""
    first, last = good >> 32, (bad - 1) >> 32
    start, end = key_value(good), key_value(bad - 1)
    even = place(start + (end - start) * (PART * 0.25))
    bits = first + (last - first + 1) * PART // 4
    logit = tl.where(sweep < _LINEAR, even, bits)
    logit = tl.minimum(tl.maximum(logit, first + 1), last)
    least = good & 0xFFFFFFFF
    most = ((bad - 1) & 0xFFFFFFFF) + 1
    one = (first << 32) + least + (most - least) * PART // 4
    one = tl.minimum(tl.maximum(one, good + 1), bad - 1)
    return tl.where(last > first, logit << 32, one)


@triton.jit
def _keeps(number, mass, key, top, t, top_k, limit, min_p):
    w = tl.exp((key_value(key) - top) / t)
    return (number < top_k) & (mass.to(tl.float64) < limit) & (w >= min_p)


@triton.jit
def _collect(row, head, spot, size, listed, good, bad, FEW: tl.constexpr, BLOCK: tl.constexpr):
    """Write the keys of a window to `spot`; returns how many there are."""
    number = size * 0
    tl.debug_barrier()  # what was there is read
    for start in range(0, size, BLOCK):
        key = _keys(row, head, start, size, listed, BLOCK)
        mine = ((key >= good) & (key < bad)).to(tl.int32)
        here = tl.sum(mine, 0)
        if here > 0:
            at = number + tl.cumsum(mine, 0) - 1
            tl.store(spot + at, key, mask=(mine > 0) & (at < FEW))
        number += here
    tl.debug_barrier()  # it is written before it is read
    return number


@triton.jit
def _ranked(spot, count, number, mass, good, top, t, top_k, limit, min_p, FEW: tl.constexpr):
    """The last key that is kept, of `count` keys with this number and mass before them all."""
    lane = tl.arange(0, FEW)
    key = tl.load(spot + lane, mask=lane < count, other=_NOTHING)
    numbers = tl.zeros([FEW, _SOME], dtype=tl.int32)
    masses = tl.zeros([FEW, _SOME], dtype=tl.int64)
    for start in range(0, count, _SOME):
        other = start + tl.arange(0, _SOME)
        one = tl.load(spot + other, mask=other < count, other=_NOTHING)
        ahead = one[None, :] < key[:, None]
        numbers += ahead.to(tl.int32)
        masses += tl.where(ahead, mass_of(key_value(one), top, t)[None, :], 0)
    number += tl.sum(numbers, 1)
    mass += tl.sum(masses, 1)
    keeps = (lane < count) & _keeps(number, mass, key, top, t, top_k, limit, min_p)
    return tl.maximum(tl.max(tl.where(keeps, key, good), 0), good)


@triton.jit
def _last_kept(
    row, head, size, listed, vocab, top, t, top_k, limit, min_p, bad, number_bad,
    HEAD: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last key that is kept, which is before `bad`, as number_bad keys are at most."""
    good = place(top) << 32
    number, mass = size * 0, good * 0  # before `good`
    sweep = size * 0
    bad = _tight(bad, vocab)
    while (number_bad - number > FEW) & (bad > good + 1):
        p = _between(good, bad, sweep, 1)
        q = _between(good, bad, sweep, 2)
        r = _between(good, bad, sweep, 3)
        n_p, n_q, n_r, m_p, m_q, m_r = _before(row, head, size, listed, top, t, p, q, r, BLOCK)
        has_p = _keeps(n_p, m_p, p, top, t, top_k, limit, min_p)
        has_q = has_p & _keeps(n_q, m_q, q, top, t, top_k, limit, min_p)
        has_r = has_q & _keeps(n_r, m_r, r, top, t, top_k, limit, min_p)
        bad = _tight(tl.where(has_r, bad, tl.where(has_q, r, tl.where(has_p, q, p))), vocab)
        number_bad = tl.where(has_r, number_bad, tl.where(has_q, n_r, tl.where(has_p, n_q, n_p)))
        good = tl.where(has_r, r, tl.where(has_q, q, tl.where(has_p, p, good)))
        number = tl.where(has_r, n_r, tl.where(has_q, n_q, tl.where(has_p, n_p, number)))
        mass = tl.where(has_r, m_r, tl.where(has_q, m_q, tl.where(has_p, m_p, mass)))
        sweep += 1
    count = size
    spot = head
    if (size > FEW) | (listed == 0):
        spot = head + HEAD
        count = _collect(row, head, spot, size, listed, good, bad, FEW, BLOCK)
    return _ranked(spot, count, number, mass, good, top, t, top_k, limit, min_p, FEW)


@triton.jit
def _cut(
    row, head, total, size, enough, floor, vocab, top, t, top_k, top_p, min_p,
    HEAD: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The cut of a row, and the size of its head, -1 where the cut lies elsewhere. total: the row's
    mass. enough: the prefix surely ends above the floor."""
    listed = (size <= HEAD) & enough
    size = tl.where(listed, size, vocab)
    lowest = tl.maximum(tl.where(enough, floor, top - t * _WEIGHTLESS), LOWEST)
    bad, number_bad = (place(lowest) + 1) << 32, size
    cut = bad
    # Where top_p shares out what top_k leaves, that is found first.
    last = tl.where((top_k < vocab) & (top_p < 1), 1, 0)
    step = last * 0
    while step <= last:
        shares = step == last
        limit = tl.where(shares & (top_p < 1), total.to(tl.float64) * top_p, float("inf"))
        least = tl.where(shares, min_p, 0.0)
        cut = _last_kept(
            row, head, size, listed, vocab, top, t, top_k, limit, least, bad, number_bad,
            HEAD, FEW, BLOCK,
        )  # fmt: skip
        if step < last:
            bad = cut + 1
            number_bad, _, _, total, _, _ = _before(
                row, head, size, listed, top, t, bad, bad, bad, BLOCK
            )
        step += 1
    return cut, tl.where(listed, size, -1)


@triton.jit
def _token_cuts(
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
    cuts,
    vocab,
    row_stride,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    HEAD: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    slot = tl.program_id(0)
    row, _ = row_of(logits, row_offsets, slot, row_stride, WIDTH)
    there, narrows, t, top_k, top_p, min_p = asked(
        slot, num_nodes, temperature, top_ks, top_ps, min_ps, vocab, WIDTH
    )
    top, floor = tl.load(marks + slot * 2), tl.load(marks + slot * 2 + 1)
    size = tl.load(sizes + slot)
    if there:
        cut, held_in = tl.full([], _EVERYTHING, tl.int64), size * 0 - 1
        if narrows & (top > float("-inf")) & (top < float("inf")):
            guessed = (top_p < 1) & (top_k >= vocab)
            lane = tl.arange(0, LANES)
            both = masses + (slot * CHUNKS + lane) * 2
            mine = lane < tl.where(guessed, CHUNKS, 0)
            total = tl.sum(tl.load(both, mask=mine, other=0), 0)
            held = tl.sum(tl.load(both + 1, mask=mine, other=0), 0)
            enough = (guessed == 0) | (held.to(tl.float64) >= total.to(tl.float64) * top_p)
            head = keys + slot.to(tl.int64) * (HEAD + FEW)
            cut, held_in = _cut(
                row, head, total, size, enough | (min_p >= _SURE), floor, vocab, top, t,
                top_k, top_p, min_p, HEAD, FEW, BLOCK,
            )  # fmt: skip
        tl.store(cuts + slot, cut)
        tl.store(sizes + slot, held_in)


@dataclass(frozen=True, slots=True)
class CutHeads:
    """Work space of one launch at a time, and what it leaves: of row i, all that is kept is among
    the first sizes[i] of keys[i], unless that is -1.

    keys: [rows, HEAD + FEW] int64, where the tops of groups lie before there are keys. sizes:
    [rows] int32. masses: [rows, MOST_CHUNKS, 2] int64. marks: [rows, 2] float32.
    """

    keys: Tensor
    sizes: Tensor
    masses: Tensor
    marks: Tensor


def cut_heads(rows: int, device: torch.device | str) -> CutHeads:
    """Work space for this many rows."""

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=device)

    return CutHeads(
        keys=empty(HEAD + FEW, dtype=torch.int64),
        sizes=empty(dtype=torch.int32),
        masses=empty(MOST_CHUNKS, 2, dtype=torch.int64),
        marks=empty(2, dtype=torch.float32),
    )


def token_cuts(
    logits: Tensor,
    row_offsets: Tensor,
    num_nodes: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    cuts: Tensor,
    heads: CutHeads,
) -> None:
    """Fill cuts [B, N] int64 for the nodes there are; a row without filters gets the largest int64.

    logits: [T, V]; node j of request i is row row_offsets[i] + j. row_offsets, num_nodes, top_k:
    [B] int64, temperature, min_p: [B] float32, top_p: [B] float64. heads: of `cut_heads`.
    """
    (batch, nodes), vocab = cuts.shape, logits.shape[1]
    rows = batch * nodes
    assert logits.stride(1) == 1, "a row of logits must be contiguous"
    assert cuts.is_contiguous(), "cuts must be contiguous"
    assert heads.keys.shape[0] >= rows, "the work space is too small"
    assert heads.keys.shape[1] == HEAD + FEW
    assert top_p.dtype == torch.float64
    assert temperature.dtype == min_p.dtype == torch.float32
    chunk = max(CHUNK, triton.next_power_of_2(triton.cdiv(vocab, MOST_CHUNKS)))
    chunks = triton.cdiv(vocab, chunk)
    where = (logits, row_offsets)
    given = (num_nodes, temperature, top_k, top_p, min_p)
    sizes = {"WIDTH": nodes, **chained(logits.device)}
    parts = {"CHUNK": chunk, "CHUNKS": chunks}
    groups, tops = chunks * GROUPS, heads.keys.view(torch.float32)
    assert rows * groups <= tops.numel()
    head = {"HEAD": HEAD, "FEW": FEW}
    group_tops[(rows, chunks)](
        *where, *given, tops, vocab, logits.stride(0), **parts, GROUPS=GROUPS, num_warps=8,
        **sizes,
    )  # fmt: skip
    find_floors[(rows,)](
        *given, tops, heads.marks, heads.sizes, vocab, TOPS=groups,
        LANES=triton.next_power_of_2(groups), num_warps=4, **sizes,
    )  # fmt: skip
    write_heads[(rows, chunks)](
        *where, *given, heads.marks, heads.sizes, heads.masses, heads.keys, vocab,
        logits.stride(0), 1, **parts, **head, num_warps=16, **sizes,
    )  # fmt: skip
    _token_cuts[(rows,)](
        *where, *given, heads.marks, heads.sizes, heads.masses, heads.keys, cuts, vocab,
        logits.stride(0), CHUNKS=chunks, LANES=triton.next_power_of_2(chunks), **head,
        BLOCK=BLOCK, num_warps=8, maxnreg=128, **sizes,
    )  # fmt: skip
