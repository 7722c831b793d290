"""Rejection sampling on trees of sampled drafts, on the device. `sgl_spec.speculative.rejection`
is the twin and says why it is exact.

From the root on, with p the target's final distribution at a node and q what its children were
drawn from, the children x are judged in order:

    accept x if coin q(x) < p(x), else    p <- norm(max(0, p - q)),    q <- norm(q without x)

and when none is accepted a token is drawn from the p that remains. A node without children draws as
plain decoding does. One program walks one tree; p and q of its node lie in the work space, each
with the divisor that would make it sum to 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chain, chained
from sgl_spec_kernels.noise import (
    ACCEPTANCE,
    RESIDUAL,
    falling_key,
    gumbel,
    noise_bits,
    row_keys,
    stream_keys,
    uniform,
)
from sgl_spec_kernels.sample import Trees, Walked

BLOCK = 4096


@triton.jit
def _logits(row, start, cut, vocab, BLOCK: tl.constexpr):
    """(logits, tokens) of a block, -inf for what the filters drop."""
    token = start + tl.arange(0, BLOCK)
    x = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return tl.where(falling_key(x, token) > cut, float("-inf"), x), token


@triton.jit
def _best(score, token, best, winner, vocab):
    """The better of (best, winner) and a later block's highest score, the lower id of equals."""
    highest = tl.max(score, 0)
    at = tl.min(tl.where(score == highest, token, vocab), 0)
    winner = tl.where(highest > best, at, winner)
    return tl.maximum(highest, best), winner


@triton.jit
def _plain_draw(row, t, seed, position, cut, vocab, BLOCK: tl.constexpr):
    """The target's own draw, as `sample` has it."""
    first, second = row_keys(seed, position)
    best = tl.full([], float("-inf"), tl.float64)
    winner = tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        x, token = _logits(row, start, cut, vocab, BLOCK)
        score = x.to(tl.float64)
        if t > 0:
            score = score * (1.0 / t.to(tl.float64)) + gumbel(noise_bits(first, second, token))
        best, winner = _best(score, token, best, winner, vocab)
    return winner.to(tl.int64)


@triton.jit
def _target(row, p, t, cut, vocab, BLOCK: tl.constexpr):
    """Write the target's weights to p; returns their sum. A greedy row has all on its best."""
    top = tl.full([], float("-inf"), tl.float32)
    winner = tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        x, token = _logits(row, start, cut, vocab, BLOCK)
        top, winner = _best(x, token, top, winner, vocab)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        x, token = _logits(row, start, cut, vocab, BLOCK)
        weight = tl.where(token == winner, 1.0, 0.0)
        if (t > 0) & (top > float("-inf")):
            weight = tl.exp((x - top) / t)
        tl.store(p + token, weight, mask=token < vocab)
        total += weight
    return tl.sum(total, 0)


@triton.jit
def _proposal(probs, ids, q, columns, vocab, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr):
    """Write a draft distribution to q, by token."""
    if HAS_IDS:
        for start in range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            tl.store(q + token, tl.zeros([BLOCK], dtype=tl.float32), mask=token < vocab)
        tl.debug_barrier()
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        token = column.to(tl.int64)
        if HAS_IDS:
            token = tl.load(ids + column, mask=inside, other=0)
        tl.store(q + token, tl.load(probs + column, mask=inside, other=0.0), mask=inside)


@triton.jit
def _after_rejection(p, q, p_sum, q_sum, rejected, vocab, BLOCK: tl.constexpr):
    """p and q without a rejected token, in place; returns the divisors. p stays where nothing of it
    would be left, which is p = q up to rounding."""
    left = tl.zeros([BLOCK], dtype=tl.float32)
    rest = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        mine = tl.load(p + token, mask=token < vocab, other=0.0) / p_sum
        drafts = tl.load(q + token, mask=token < vocab, other=0.0) / q_sum
        left += tl.maximum(mine - drafts, 0.0)
        rest += tl.where(token == rejected, 0.0, drafts)
    left_sum, rest_sum = tl.sum(left, 0), tl.sum(rest, 0)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocab
        drafts = tl.load(q + token, mask=inside, other=0.0) / q_sum
        if left_sum > 0:
            mine = tl.load(p + token, mask=inside, other=0.0) / p_sum
            tl.store(p + token, tl.maximum(mine - drafts, 0.0), mask=inside)
        tl.store(q + token, tl.where(token == rejected, 0.0, drafts), mask=inside)
    p_sum = tl.where(left_sum > 0, left_sum, p_sum)
    return p_sum, tl.where(rest_sum > 0, rest_sum, 1.0)


@triton.jit
def _weighted_draw(p, seed, position, depth, vocab, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    """A token in proportion to p."""
    first, second = stream_keys(seed, position, RESIDUAL, depth)
    best = tl.full([], float("-inf"), tl.float32)
    winner = tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        weight = tl.load(p + token, mask=token < vocab, other=0.0)
        score = tl.log(tl.where(weight > 0, weight, 1.0)) + gumbel(noise_bits(first, second, token))
        score = tl.where(weight > 0, score, float("-inf"))
        best, winner = _best(score, token, best, winner, vocab)
    return winner.to(tl.int64)


@triton.jit
def _next_child(parents, request, node, after, count, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """The first child of a node behind node `after`, or -1."""
    lane = tl.arange(0, LANES)
    inside = (lane < count) & (lane > after)
    parent = tl.load(parents + request * WIDTH + lane, mask=inside, other=-2)
    child = tl.min(tl.where(parent == node, lane, LANES), 0)
    return tl.where(child < LANES, child, -1)


@triton.jit
def _judged(
    p,
    q,
    p_sum,
    parents,
    tokens,
    request,
    node,
    child,
    accepted,
    emitted,
    count,
    t,
    seed,
    position,
    depth,
    vocab,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    ACCEPTANCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(the first child that passes; its token), children being judged from `child` on; as given
    where none does.
    What then remains of the target's distribution is left in p."""
    q_sum = tl.full([], 1.0, tl.float32)
    first, second = stream_keys(seed, position, ACCEPTANCE, depth + 1)
    while child >= 0:
        token = tl.load(tokens + request * WIDTH + child)
        px = (tl.load(p + token) / p_sum).to(tl.float64)
        qx = (tl.load(q + token) / q_sum).to(tl.float64)
        coin = uniform(noise_bits(first, second, token))
        greedy = t == 0
        passes = (greedy & (px > 0)) | ((t > 0) & (qx > 0) & (coin * qx < px))
        judged = greedy | (qx > 0)
        if passes:
            accepted = child
            emitted = token
            child = child * 0 - 1
        else:
            if judged:
                tl.debug_barrier()  # every thread has read px and qx
                p_sum, q_sum = _after_rejection(p, q, p_sum, q_sum, token, vocab, BLOCK)
                tl.debug_barrier()
            child = _next_child(parents, request, node, child, count, WIDTH, LANES)
    return accepted, emitted


@triton.jit
def _reject(
    logits,
    cuts,
    row_offsets,
    seeds,
    temperature,
    committed_lens,
    num_nodes,
    parents,
    tokens,
    probs,
    row_of,
    ids,
    out_tokens,
    out_path,
    out_counts,
    p_space,
    q_space,
    vocab,
    columns,
    row_stride,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    ACCEPTANCE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    request = tl.program_id(0)
    count = tl.load(num_nodes + request).to(tl.int32)
    seed, t = tl.load(seeds + request), tl.load(temperature + request)
    committed, offset = tl.load(committed_lens + request), tl.load(row_offsets + request)
    p = p_space + request.to(tl.int64) * vocab
    q = q_space + request.to(tl.int64) * vocab
    node, depth = count * 0, count * 0
    while node >= 0:
        row = logits + (offset + node).to(tl.int64) * row_stride
        position = committed + depth + 1
        cut = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
        if HAS_CUTS:
            cut = tl.load(cuts + request * WIDTH + node)
        child = _next_child(parents, request, node, node, count, WIDTH, LANES)
        accepted = child * 0 - 1
        emitted = seed * 0
        if child < 0:
            emitted = _plain_draw(row, t, seed, position, cut, vocab, BLOCK)
        else:
            p_sum = _target(row, p, t, cut, vocab, BLOCK)
            draft = tl.load(row_of + request * WIDTH + node)
            _proposal(probs + draft * columns, ids, q, columns, vocab, HAS_IDS, BLOCK)
            tl.debug_barrier()  # p and q are written before single values are read
            accepted, emitted = _judged(
                p, q, p_sum, parents, tokens, request, node, child, accepted, emitted, count,
                t, seed, position, depth, vocab, WIDTH, LANES, ACCEPTANCE, BLOCK,
            )  # fmt: skip
            if accepted < 0:
                emitted = _weighted_draw(p, seed, position, depth + 1, vocab, RESIDUAL, BLOCK)
            tl.debug_barrier()  # the next node's p and q replace these
        tl.store(out_tokens + request * WIDTH + depth, emitted)
        tl.store(out_path + request * WIDTH + depth, node.to(tl.int64))
        depth += 1
        node = accepted
    tl.store(out_counts + request, depth.to(tl.int64))


def reject_space(batch: int, vocab: int, device: torch.device | str) -> Tensor:
    """Work space: [2, batch, vocab] float32."""
    return torch.empty(2, batch, vocab, device=device)


def reject_and_follow(
    trees: Trees,
    probs: Tensor,
    row_of: Tensor,
    out: Walked,
    space: Tensor,
    ids: Tensor | None = None,
) -> None:
    """Fill out.tokens, path and counts.

    trees.temperature is required. probs: [Q, W] float32, the distributions that drafts were drawn
    from. row_of: [B, N] int64, the row of a node's children, -1 where it has none. ids: [W] int64,
    the token of each column, None where columns are the vocabulary. Siblings stand in the order in
    which they were drawn.
    """
    (batch, nodes), vocab = trees.tokens.shape, trees.logits.shape[1]
    assert trees.temperature is not None, "rejection needs the temperatures"
    assert trees.logits.stride(1) == 1, "a row of logits must be contiguous"
    assert probs.is_contiguous(), "probs must be contiguous"
    assert row_of.is_contiguous(), "row_of must be contiguous"
    assert probs.dtype == torch.float32
    assert ids is not None or probs.shape[1] == vocab, "columns need the tokens they stand for"
    assert space.shape[1] >= batch, "the work space is too small"
    assert space.shape[2] == vocab, "the work space is for another vocabulary"
    _reject[(batch,)](
        trees.logits,
        trees.cuts,
        trees.row_offsets,
        trees.seed,
        trees.temperature,
        trees.committed_lens,
        trees.num_nodes,
        trees.parents,
        trees.tokens,
        probs,
        row_of,
        ids,
        out.tokens,
        out.path,
        out.counts,
        space[0],
        space[1],
        vocab,
        probs.shape[1],
        trees.logits.stride(0),
        WIDTH=nodes,
        LANES=triton.next_power_of_2(nodes),
        BLOCK=BLOCK,
        HAS_CUTS=trees.cuts is not None,
        HAS_IDS=ids is not None,
        ACCEPTANCE=ACCEPTANCE,
        RESIDUAL=RESIDUAL,
        num_warps=8,
        **chained(trees.logits.device),
    )
