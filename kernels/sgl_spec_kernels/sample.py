"""Sample-and-follow on the device: draw the target's token at nodes, and go on while it is a child.

    greedy     argmax x
    sampled    argmax x / T - log E over the tokens that the filters keep       (argmin of E / p)

E: the noise of (seed, position, token). The score is float64, so that neither the size of x / T nor
a batch of other rows decides a draw; equal scores go to the lower id. A row's draw depends on its
logits, its parameters and (seed, position) alone. Programs take chunks of the vocabulary, or of the
few tokens that filters may keep; the last of a row to finish merges them.

Two ways to walk. `draw_all`: every node is drawn in one launch, then the paths are followed: least
latency for few rows. `draw_walk`: a launch per level draws only the nodes where the walks stand,
and its last programs step on: least work for many. `sgl_spec.speculative.verify` is the twin.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chain, chained
from sgl_spec_kernels.filters import CutHeads
from sgl_spec_kernels.noise import (
    falling_key,
    gumbel,
    key_index,
    key_value,
    noise_bits,
    row_keys,
)

BLOCK = 4096  # tokens of a program
_EVERYTHING = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def _child(parents, tokens, request, node, drawn, count, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """The child of a node that holds the token, or -1."""
    lane = tl.arange(0, LANES)
    inside = (lane < count) & (lane > 0)
    parent = tl.load(parents + request * WIDTH + lane, mask=inside, other=-2)
    token = tl.load(tokens + request * WIDTH + lane, mask=inside, other=-1)
    child = tl.min(tl.where((parent == node) & (token == drawn), lane, LANES), 0)
    return tl.where(child < LANES, child, -1)


@triton.jit
def _share(row, heads, slot, held, chunk, vocab, BLOCK: tl.constexpr, ROOM: tl.constexpr):
    """(logits, tokens, which there are) of a program: its part of the row's head where that holds
    all that is kept, of the row otherwise."""
    index = chunk * BLOCK + tl.arange(0, BLOCK)
    inside, token = index < vocab, index
    if ROOM > 0:
        if held >= 0:
            inside = index < held
            key = tl.load(heads + slot.to(tl.int64) * ROOM + index, mask=inside, other=0)
            token = key_index(key).to(tl.int32)
            x = tl.where(inside, key_value(key), float("-inf"))
        else:
            x = tl.load(row + index, mask=inside, other=float("-inf")).to(tl.float32)
    else:
        x = tl.load(row + index, mask=inside, other=float("-inf")).to(tl.float32)
    return x, token, inside


@triton.jit
def _scored(x, token, t, position, seed, cut):
    """Scores of tokens at temperature t, -inf of those behind the cut."""
    score = x.to(tl.float64)
    if t > 0:
        first, second = row_keys(seed, position)
        score = score * (1.0 / t.to(tl.float64)) + gumbel(noise_bits(first, second, token))
        score = tl.where(falling_key(x, token) <= cut, score, float("-inf"))
    return score


@triton.jit
def _merged(scores, ids, count, vocab, MERGED: tl.constexpr):
    """The winner of the parts that `count` programs left."""
    one = tl.arange(0, MERGED)
    there = one < count
    # Other multiprocessors wrote these: past the L1 cache.
    score = tl.load(scores + one, mask=there, other=float("-inf"), cache_modifier=".cg")
    token = tl.load(ids + one, mask=there, other=vocab, cache_modifier=".cg")
    return tl.min(tl.where(score == tl.max(score, 0), token, vocab), 0)


@triton.jit
def _part_drawn(
    row,
    heads,
    cuts,
    temperature,
    committed_lens,
    seed,
    slot,
    request,
    depth,
    held,
    chunk,
    vocab,
    BLOCK: tl.constexpr,
    SAMPLED: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    ROOM: tl.constexpr,
):
    """(highest score, its token) of a program's part of a row."""
    x, token, inside = _share(row, heads, slot, held, chunk, vocab, BLOCK, ROOM)
    score = x.to(tl.float64)
    if SAMPLED:
        t, cut = tl.load(temperature + request), tl.full([], _EVERYTHING, tl.int64)
        if HAS_CUTS:
            cut = tl.load(cuts + slot)
        position = tl.load(committed_lens + request) + depth + 1
        score = _scored(x, token, t, position, tl.load(seed + request), cut)
    best = tl.max(score, 0)
    return best, tl.min(tl.where(inside & (score == best), token, vocab), 0)


@triton.jit(do_not_specialize=["level"])
def _draw(
    logits,
    cuts,
    heads,
    sizes,
    row_offsets,
    seed,
    temperature,
    committed_lens,
    num_nodes,
    depths,
    parents,
    tokens,
    current,
    drawn,
    out_tokens,
    out_path,
    out_counts,
    part_scores,
    part_ids,
    arrived,
    vocab,
    row_stride,
    level,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    MERGED: tl.constexpr,
    WALK: tl.constexpr,
    SAMPLED: tl.constexpr,
    HAS_CUTS: tl.constexpr,
    ROOM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    row, chunk = tl.program_id(0), tl.program_id(1)
    if WALK:
        request = row
        node = tl.load(current + request).to(tl.int32)
        depth = level
    else:
        request, node = row // WIDTH, row % WIDTH
        depth = tl.load(depths + row)
    count = tl.load(num_nodes + request).to(tl.int32)
    if (node < 0) | (node >= count):
        return
    at = (tl.load(row_offsets + request) + node).to(tl.int64)
    slot, held, last = request * WIDTH + node, node * 0 - 1, node * 0 + CHUNKS
    if ROOM > 0:
        held = tl.load(sizes + slot)
        if not WALK:  # all programs of a walk arrive, so that each has read where it stands
            last = tl.where(held < 0, CHUNKS, tl.cdiv(held, BLOCK))
    if chunk >= last:
        return
    best, winner = tl.full([], float("-inf"), tl.float64), chunk * 0 + vocab
    if (held < 0) | (chunk * BLOCK < held):
        part = logits + at * row_stride
        best, winner = _part_drawn(
            part, heads, cuts, temperature, committed_lens, seed, slot, request, depth, held,
            chunk, vocab, BLOCK, SAMPLED, HAS_CUTS, ROOM,
        )  # fmt: skip
    if CHUNKS > 1:
        tl.store(part_scores + row * CHUNKS + chunk, best)
        tl.store(part_ids + row * CHUNKS + chunk, winner)
        tl.debug_barrier()  # the part is written before it is announced
        if tl.atomic_add(arrived + row, 1) < last - 1:
            return
        tl.store(arrived + row, 0)  # as the next launch needs it
        mine = row * CHUNKS
        winner = _merged(part_scores + mine, part_ids + mine, last, vocab, MERGED)
    winner = tl.where(winner < vocab, winner, 0).to(tl.int64)  # of a row of NaN
    if WALK:
        child = _child(parents, tokens, request, node, winner, count, WIDTH, LANES)
        tl.store(out_tokens + request * WIDTH + level, winner)
        tl.store(out_path + request * WIDTH + level, node.to(tl.int64))
        tl.store(out_counts + request, level + 1)
        tl.store(current + request, child.to(tl.int64))
    else:
        tl.store(drawn + row, winner)


@triton.jit
def _follow(
    num_nodes,
    parents,
    tokens,
    drawn,
    out_tokens,
    out_path,
    out_counts,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    request = tl.program_id(0)
    count = tl.load(num_nodes + request).to(tl.int32)
    node, depth = count * 0, count * 0
    while node >= 0:
        token = tl.load(drawn + request * WIDTH + node)
        tl.store(out_tokens + request * WIDTH + depth, token)
        tl.store(out_path + request * WIDTH + depth, node.to(tl.int64))
        depth += 1
        node = _child(parents, tokens, request, node, token, count, WIDTH, LANES)
    tl.store(out_counts + request, depth.to(tl.int64))


@dataclass(frozen=True, slots=True)
class Walked:
    """What came of B trees of N nodes (`AcceptResult` says what the fields mean), and work space of
    one launch at a time.

    tokens, path: [B, N] int64. counts: [B] int64. current, drawn: [B], [B, N] int64, scores, ids:
    [B * N, chunks], arrived: [B * N] int32, zero between launches.
    """

    tokens: Tensor
    path: Tensor
    counts: Tensor
    current: Tensor
    drawn: Tensor
    scores: Tensor
    ids: Tensor
    arrived: Tensor


def walked(batch: int, nodes: int, vocab: int, device: torch.device | str) -> Walked:
    """Buffers for trees of this size."""
    tokens, path, drawn = (
        torch.zeros(batch, nodes, dtype=torch.int64, device=device) for _ in range(3)
    )
    rows, chunks = batch * nodes, triton.cdiv(vocab, BLOCK)
    return Walked(
        tokens,
        path,
        torch.zeros_like(tokens[:, 0]),
        torch.zeros_like(tokens[:, 0]),
        drawn,
        torch.empty(rows, chunks, dtype=torch.float64, device=device),
        torch.empty(rows, chunks, dtype=torch.int32, device=device),
        torch.zeros(rows, dtype=torch.int32, device=device),
    )


@dataclass(frozen=True, slots=True)
class Trees:
    """B trees of N nodes with the target's logits.

    tokens, parents, depths: [B, N] int64. num_nodes: [B] int64. logits: [T, V], adjusted by
    whatever comes before temperature; node j of request i is row row_offsets[i] + j. row_offsets,
    committed_lens, seed: [B] int64. temperature: [B] float32, None where all are 0. cuts: [B, N]
    int64 of `filters.token_cuts`, and the heads it left, None where no request filters.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    num_nodes: Tensor
    logits: Tensor
    row_offsets: Tensor
    committed_lens: Tensor
    seed: Tensor
    temperature: Tensor | None
    cuts: Tensor | None = None
    heads: CutHeads | None = None


def draw_all(trees: Trees, out: Walked) -> None:
    """Draw every node, then follow: fills out.tokens, path and counts."""
    batch, nodes = trees.tokens.shape
    _launch(trees, out, level=0, walk=False)
    _follow[(batch,)](
        trees.num_nodes,
        trees.parents,
        trees.tokens,
        out.drawn,
        out.tokens,
        out.path,
        out.counts,
        WIDTH=nodes,
        LANES=triton.next_power_of_2(nodes),
        num_warps=1,
        **chained(trees.logits.device),
    )


def draw_walk(trees: Trees, out: Walked, levels: int) -> None:
    """Draw where the walks stand, `levels` times: one more than the trees are deep."""
    out.current.zero_()
    for level in range(levels):
        _launch(trees, out, level, walk=True)


def _launch(trees: Trees, out: Walked, level: int, *, walk: bool) -> None:
    (batch, nodes), vocab = trees.tokens.shape, trees.logits.shape[1]
    assert trees.logits.stride(1) == 1, "a row of logits must be contiguous"
    for name in ("tokens", "parents", "depths"):
        assert getattr(trees, name).is_contiguous(), f"{name} must be contiguous"
    chunks, heads = triton.cdiv(vocab, BLOCK), trees.heads
    assert heads is None or trees.cuts is not None
    assert out.tokens.shape == (batch, nodes), "the buffers are for trees of another size"
    assert out.scores.shape[1] == chunks, "the buffers are for another vocabulary"
    _draw[(batch if walk else batch * nodes, chunks)](
        trees.logits,
        trees.cuts,
        None if heads is None else heads.keys,
        None if heads is None else heads.sizes,
        trees.row_offsets,
        trees.seed,
        trees.temperature,
        trees.committed_lens,
        trees.num_nodes,
        trees.depths,
        trees.parents,
        trees.tokens,
        out.current,
        out.drawn,
        out.tokens,
        out.path,
        out.counts,
        out.scores,
        out.ids,
        out.arrived,
        vocab,
        trees.logits.stride(0),
        level,
        WIDTH=nodes,
        LANES=triton.next_power_of_2(nodes),
        BLOCK=BLOCK,
        CHUNKS=chunks,
        MERGED=triton.next_power_of_2(chunks),
        WALK=walk,
        SAMPLED=trees.temperature is not None,
        HAS_CUTS=trees.cuts is not None,
        ROOM=0 if heads is None else heads.keys.shape[1],
        num_warps=8,
        maxnreg=None if heads is None else 128,  # two programs to a multiprocessor
        **chained(trees.logits.device),
    )
