"""top_k, top_p and min_p as one number per row: the last key that they keep.

In the order of `falling_key` (falling logit, then rising id) each filter keeps a prefix, so all
three together keep the tokens whose key is at most a cut, the largest key q with

    #(keys < q) < top_k    and    mass(keys < q) < top_p * total    and    w(q) >= min_p

w = exp((x - max) / T); mass = sum of floor(w 2^40), whole numbers whose sum has no order; total =
the mass of the tokens that top_k leaves. `sgl_spec.speculative.filters` is the twin.

One program takes a row. Reading the row twice, it writes the ids of its head, which surely holds
the prefix, to the work space, and finds the cut there by bisection; where the head is too long or
not enough the whole row takes its place, slowly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chain, chained
from sgl_spec_kernels.noise import falling_key, key_value, place

HEAD = 8192  # ids of a row in the work space
BLOCK = 2048
_UNIT = tl.constexpr(1099511627776.0)  # 2^40
_EVERYTHING = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_REACH = tl.constexpr(12.5)  # in temperatures below the top: a head for top_p, w down to 2^-18


@triton.jit
def _load(row, head, index, size, compact, vocab):
    """(x, token) of candidates: -inf behind the last."""
    inside = index < size
    token = index
    if compact:
        token = tl.load(head + index, mask=inside, other=0)
    x = tl.load(row + token, mask=inside, other=float("-inf")).to(tl.float32)
    return x, token, inside


@triton.jit
def _mass(x, top, t):
    return (tl.exp((x - top) / t) * _UNIT).to(tl.int64)


@triton.jit
def _before(row, head, size, compact, vocab, top, t, key, BLOCK: tl.constexpr):
    """(number, mass) of the candidates whose key is below `key`."""
    number = tl.zeros([BLOCK], dtype=tl.int64)
    mass = tl.zeros([BLOCK], dtype=tl.int64)
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x, token, inside = _load(row, head, index, size, compact, vocab)
        ahead = inside & (falling_key(x, token) < key)
        number += ahead.to(tl.int64)
        mass += tl.where(ahead, _mass(x, top, t), 0)
    return tl.sum(number, 0), tl.sum(mass, 0)


@triton.jit
def _last_kept(
    row, head, size, compact, vocab, top, t, top_k, limit, min_p, lowest, BLOCK: tl.constexpr
):
    """The largest key that fewer than top_k tokens, and less mass than limit, come before.

    First the logit, as the upper word of the key, then the id. The key of the top, id 0, is kept.
    """
    good = place(top)
    bad = place(lowest) + 1
    while bad - good > 1:
        middle = good + (bad - good) // 2
        number, mass = _before(row, head, size, compact, vocab, top, t, middle << 32, BLOCK)
        heavy = tl.exp((key_value(middle << 32) - top) / t) >= min_p
        keeps = (number < top_k) & (mass.to(tl.float64) < limit) & heavy
        good = tl.where(keeps, middle, good)
        bad = tl.where(keeps, bad, middle)
    first = good << 32
    good, bad = first, first + vocab
    while bad - good > 1:
        middle = good + (bad - good) // 2
        number, mass = _before(row, head, size, compact, vocab, top, t, middle, BLOCK)
        keeps = (number < top_k) & (mass.to(tl.float64) < limit)
        good = tl.where(keeps, middle, good)
        bad = tl.where(keeps, bad, middle)
    return good


@triton.jit
def _token_cuts(
    logits,
    row_offsets,
    num_nodes,
    temperature,
    top_ks,
    top_ps,
    min_ps,
    cuts,
    heads,
    vocab,
    row_stride,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    slot = tl.program_id(0)
    request, node = slot // WIDTH, slot % WIDTH
    if node >= tl.load(num_nodes + request):
        return
    t = tl.load(temperature + request)
    top_k, top_p = tl.load(top_ks + request), tl.load(top_ps + request)
    min_p = tl.load(min_ps + request)
    counted = top_k < vocab
    if (t == 0) | ((top_k >= vocab) & (top_p >= 1) & (min_p <= 0)):
        tl.store(cuts + slot, _EVERYTHING)
        return
    row = logits + (tl.load(row_offsets + request) + node).to(tl.int64) * row_stride
    head = heads + slot.to(tl.int64) * HEAD

    # The largest logit, and the largest of each lane: the k-th largest of those bounds the k-th
    # largest of all from below.
    lanes = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(row + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
        lanes = tl.maximum(lanes, x)
    top = tl.max(lanes, 0)
    if (top == float("-inf")) | (top == float("inf")):
        tl.store(cuts + slot, _EVERYTHING)
        return
    floor = tl.full([], float("-inf"), tl.float32)
    if counted & (top_k <= BLOCK):
        places = place(lanes)
        good = tl.min(places, 0) - 1  # fewer than k lie at or before it
        bad = tl.max(places, 0)
        while bad - good > 1:
            middle = good + (bad - good) // 2
            enough = tl.sum((places <= middle).to(tl.int64), 0) >= top_k
            bad = tl.where(enough, middle, bad)
            good = tl.where(enough, good, middle)
        floor = key_value(bad << 32)
    # Where top_p shares out what top_k leaves, the head holds all of that.
    if (min_p > 0) & ((counted == 0) | (top_p >= 1)):
        floor = tl.maximum(floor, top + t * tl.log(min_p * 0.5))
    guessed = (top_p < 1) & (counted == 0)
    if guessed:
        floor = tl.maximum(floor, top - t * _REACH)

    size = vocab * 0
    total = tl.zeros([BLOCK], dtype=tl.int64)
    held = tl.zeros([BLOCK], dtype=tl.int64)
    for start in range(0, vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < vocab
        x = tl.load(row + index, mask=inside, other=float("-inf")).to(tl.float32)
        mine = inside & (x >= floor)
        mass = _mass(x, top, t)
        total += mass
        held += tl.where(mine, mass, 0)
        at = size + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(head + at, index, mask=mine & (at < HEAD))
        size += tl.sum(mine.to(tl.int32), 0)
    all_mass = tl.sum(total, 0)
    enough = (guessed == 0) | (tl.sum(held, 0).to(tl.float64) >= all_mass.to(tl.float64) * top_p)
    compact = (size <= HEAD) & enough
    size = tl.where(compact, size, vocab)
    lowest = tl.where(enough, floor, float("-inf"))
    tl.debug_barrier()  # the head is written before it is read

    limit = tl.full([], float("inf"), tl.float64)
    if top_p < 1:
        if counted:
            kth = _last_kept(
                row, head, size, compact, vocab, top, t, top_k, limit, 0.0, lowest, BLOCK
            )
            _, all_mass = _before(row, head, size, compact, vocab, top, t, kth + 1, BLOCK)
        limit = all_mass.to(tl.float64) * top_p
    cut = _last_kept(row, head, size, compact, vocab, top, t, top_k, limit, min_p, lowest, BLOCK)
    tl.store(cuts + slot, cut)


def cut_heads(rows: int, device: torch.device | str) -> Tensor:
    """Work space for this many rows: [rows, HEAD] int32."""
    return torch.empty(rows, HEAD, dtype=torch.int32, device=device)


def token_cuts(
    logits: Tensor,
    row_offsets: Tensor,
    num_nodes: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    cuts: Tensor,
    heads: Tensor,
) -> None:
    """Fill cuts [B, N] int64 for the nodes there are; a row without filters gets the largest int64.

    logits: [T, V]; node j of request i is row row_offsets[i] + j. row_offsets, num_nodes, top_k:
    [B] int64, temperature, min_p: [B] float32, top_p: [B] float64. heads: of `cut_heads`.
    """
    (batch, nodes), vocab = cuts.shape, logits.shape[1]
    assert logits.stride(1) == 1, "a row of logits must be contiguous"
    assert cuts.is_contiguous(), "cuts must be contiguous"
    assert heads.shape[0] >= batch * nodes, "the work space is too small"
    assert heads.shape[1] == HEAD
    assert top_p.dtype == torch.float64
    assert temperature.dtype == min_p.dtype == torch.float32
    _token_cuts[(batch * nodes,)](
        logits,
        row_offsets,
        num_nodes,
        temperature,
        top_k,
        top_p,
        min_p,
        cuts,
        heads,
        vocab,
        logits.stride(0),
        WIDTH=nodes,
        HEAD=HEAD,
        BLOCK=BLOCK,
        num_warps=16,
        **chained(logits.device),
    )
