"""What requests ask of their logits before temperature, at every node of every tree.

    y = p(x, c) + bias            p: repetition, then frequency and presence penalties
    y = -inf                      for tokens outside the grammar's mask
    y = -inf                      for tokens that end a request before its minimum length
    y = -inf                      for banned tokens (bias -100), then for all but forced ones (100)

x: the target's logit. c: how often the token occurs in the output, the path from the root to the
node included. Each of the last three holds as long as it leaves a token that can be drawn. The
result lies beside the logits, in float32, because log-probabilities are of the logits themselves.

Settings are kept by table row, a vocabulary wide, so that one launch serves rows of every kind and
a captured graph needs no list lengths. Programs take chunks of a row. A row without settings is
copied. `sgl_spec.speculative.sampling.adjust` is the twin of `adjust_logits`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chain, chained
from sgl_spec_kernels.sample import Walked

BLOCK = 4096

# Bits of a row's flags: which settings it has.
PENALISED = 1
BIASED = 2
HAS_MINIMUM = 4
HAS_BANNED = 8
HAS_FORCED = 16
# Bits of a token's mark in a row.
HELD = 1  # prompt or output hold it
ENDS = 2  # it ends the request
BANNED = 4
FORCED = 8

_PENALISED = tl.constexpr(PENALISED)
_BIASED = tl.constexpr(BIASED)
_LIMITED = tl.constexpr(HAS_MINIMUM | HAS_BANNED | HAS_FORCED)
_HELD = tl.constexpr(HELD)
_ENDS = tl.constexpr(ENDS)
_BANNED = tl.constexpr(BANNED)
_FORCED = tl.constexpr(FORCED)
_HIGHEST = tl.constexpr(8)  # floats that a chunk leaves: five maxima


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Settings of R table rows over V tokens.

    flags, end_from: [R] int64; a request may end from position end_from on. repetition, frequency,
    presence: [R] float32. marks: [R, V] uint8. output: [R, V] int32, occurrences in the output.
    bias: [R, V] float32, biases between the extremes.
    """

    flags: Tensor
    end_from: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    marks: Tensor
    output: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class Masks:
    """words: [M, ceil(V / 32)] int32, bit t % 32 of word t // 32 allows token t. row_of: [B, N]
    int64, the row that restricts a node, -1 for none."""

    words: Tensor
    row_of: Tensor


@dataclass(frozen=True, slots=True)
class Adjusted:
    """Where a round's adjusted logits go. logits: [T, V] float32. highest: [B * N, chunks, 8]
    float32, work space of one launch at a time."""

    logits: Tensor
    highest: Tensor


def adjusted_space(rows: int, vocab: int, device: torch.device | str) -> Adjusted:
    """For up to this many rows of logits."""
    chunks = triton.cdiv(vocab, BLOCK)
    return Adjusted(
        torch.empty(rows, vocab, device=device),
        torch.empty(rows, chunks, _HIGHEST.value, device=device),
    )


@triton.jit
def _penalise(
    x,
    mark,
    each,
    inside,
    output,
    tokens,
    word,
    repetition,
    frequency,
    presence,
    WIDTH: tl.constexpr,
):
    """word: the node's ancestors and itself. The root is in the counts already."""
    count = tl.load(output + each, mask=inside, other=0)
    for node in range(1, WIDTH):
        if ((word >> node) & 1) != 0:
            count += (each == tl.load(tokens + node)).to(tl.int32)
    held = ((mark & _HELD) != 0) | (count > 0)
    y = tl.where(x > 0, x / repetition, x * repetition)
    y = y - frequency * count.to(tl.float32) - tl.where(count > 0, presence, 0.0)
    return tl.where(held, y, x)


@triton.jit
def _leave_highest(to, x, mark, early, inside):
    """The largest logits among the tokens that each choice of limits would leave."""
    nothing = float("-inf")
    ends = ((mark & _ENDS) != 0) & early
    banned = (mark & _BANNED) != 0
    forced = (mark & _FORCED) != 0
    x = tl.where(inside, x, nothing)
    tl.store(to, tl.max(tl.where(ends, nothing, x), 0))
    tl.store(to + 1, tl.max(tl.where(banned, nothing, x), 0))
    tl.store(to + 2, tl.max(tl.where(ends | banned, nothing, x), 0))
    tl.store(to + 3, tl.max(tl.where(forced & (ends == 0), x, nothing), 0))
    tl.store(to + 4, tl.max(tl.where(forced & ends, x, nothing), 0))


@triton.jit
def _adjust(
    logits,
    adjusted,
    highest,
    row_offsets,
    committed_lens,
    num_nodes,
    rows,
    tokens,
    depths,
    words,
    flags,
    end_from,
    repetition,
    frequency,
    presence,
    marks,
    output,
    bias,
    masks,
    mask_of,
    vocab,
    row_stride,
    mask_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    MASKS: tl.constexpr,
    HIGHEST: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    slot, chunk = tl.program_id(0), tl.program_id(1)
    request, node = slot // WIDTH, slot % WIDTH
    if node >= tl.load(num_nodes + request):
        return
    each = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = each < vocab
    at = (tl.load(row_offsets + request) + node).to(tl.int64)
    x = tl.load(logits + at * row_stride + each, mask=inside, other=float("-inf")).to(tl.float32)
    row = tl.load(rows + request).to(tl.int64)
    flag = tl.load(flags + row)
    mark = tl.zeros([BLOCK], tl.int32)
    if flag != 0:
        mark = tl.load(marks + row * vocab + each, mask=inside, other=0).to(tl.int32)
        if (flag & _PENALISED) != 0:
            x = _penalise(
                x, mark, each, inside, output + row * vocab, tokens + request * WIDTH,
                tl.load(words + slot), tl.load(repetition + row), tl.load(frequency + row),
                tl.load(presence + row), WIDTH,
            )  # fmt: skip
        if (flag & _BIASED) != 0:
            x += tl.load(bias + row * vocab + each, mask=inside, other=0.0)
    if MASKS:
        mask_row = tl.load(mask_of + slot)
        if mask_row >= 0:
            word = tl.load(masks + mask_row * mask_stride + each // 32, mask=inside, other=0)
            x = tl.where(((word >> (each % 32)) & 1) != 0, x, float("-inf"))
    tl.store(adjusted + at * vocab + each, x, mask=inside)
    if (flag & _LIMITED) != 0:
        position = tl.load(committed_lens + request) + tl.load(depths + slot) + 1
        early = position < tl.load(end_from + row)
        _leave_highest(
            highest + (slot.to(tl.int64) * CHUNKS + chunk) * HIGHEST, x, mark, early, inside
        )


@triton.jit
def _limit(
    adjusted,
    highest,
    row_offsets,
    committed_lens,
    num_nodes,
    rows,
    depths,
    flags,
    end_from,
    marks,
    vocab,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    HIGHEST: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Minimum length, banned and forced tokens: what `_leave_highest` found says which can hold."""
    chain(CHAINED)
    slot, chunk = tl.program_id(0), tl.program_id(1)
    request, node = slot // WIDTH, slot % WIDTH
    if node >= tl.load(num_nodes + request):
        return
    row = tl.load(rows + request).to(tl.int64)
    if (tl.load(flags + row) & _LIMITED) == 0:
        return
    nothing = float("-inf")
    lane = tl.arange(0, LANES)
    found = highest + (slot.to(tl.int64) * CHUNKS + lane) * HIGHEST
    there = lane < CHUNKS
    no_ends = tl.max(tl.load(found, mask=there, other=nothing), 0)
    no_banned = tl.max(tl.load(found + 1, mask=there, other=nothing), 0)
    neither = tl.max(tl.load(found + 2, mask=there, other=nothing), 0)
    forced_on = tl.max(tl.load(found + 3, mask=there, other=nothing), 0)
    forced_ends = tl.max(tl.load(found + 4, mask=there, other=nothing), 0)
    position = tl.load(committed_lens + request) + tl.load(depths + slot) + 1
    early = position < tl.load(end_from + row)
    goes_on = early & (no_ends > nothing)
    left = tl.where(goes_on, neither, no_banned)
    forceable = tl.where(goes_on, forced_on, tl.maximum(forced_on, forced_ends))

    each = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = each < vocab
    mark = tl.load(marks + row * vocab + each, mask=inside, other=0).to(tl.int32)
    barred = tl.where(goes_on, mark & _ENDS, 0)
    barred |= tl.where(left > nothing, mark & _BANNED, 0)
    barred |= tl.where(forceable > nothing, (mark & _FORCED) ^ _FORCED, 0)
    out = barred != 0
    at = (tl.load(row_offsets + request) + node).to(tl.int64)
    empty = tl.full([BLOCK], nothing, tl.float32)
    tl.store(adjusted + at * vocab + each, empty, mask=inside & out)


@triton.jit
def _count(
    rows,
    tokens,
    counts,
    flags,
    marks,
    output,
    dummy_row,
    vocab,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    request, lane = tl.program_id(0), tl.arange(0, LANES)
    row = tl.load(rows + request).to(tl.int64)
    if (row == dummy_row) | ((tl.load(flags + row) & _PENALISED) == 0):
        return
    used = lane < tl.load(counts + request)
    token = tl.load(tokens + request * WIDTH + lane, mask=used, other=0)
    at = row * vocab + token
    tl.atomic_add(output + at, 1, mask=used)
    mark = tl.load(marks + at, mask=used, other=0)
    tl.store(marks + at, mark | _HELD, mask=used)


def adjust_logits(
    logits: Tensor,
    out: Adjusted,
    settings: RowSettings,
    rows: Tensor,
    row_offsets: Tensor,
    committed_lens: Tensor,
    num_nodes: Tensor,
    tokens: Tensor,
    depths: Tensor,
    words: Tensor,
    masks: Masks | None = None,
) -> None:
    """Fill out.logits with the rows of all nodes.

    logits: [T, V]; node j of request i is row row_offsets[i] + j. rows, row_offsets,
    committed_lens, num_nodes: [B] int64. tokens, depths, words: [B, N] int64 of the trees.
    """
    (batch, nodes), vocab = tokens.shape, logits.shape[1]
    chunks = triton.cdiv(vocab, BLOCK)
    assert logits.stride(1) == 1, "a row of logits must be contiguous"
    assert out.logits.shape[0] >= logits.shape[0], "there is no room for so many rows"
    assert out.highest.shape[0] >= batch * nodes, "there is no room for so many nodes"
    assert out.highest.shape[1] == chunks, "the work space is of another vocabulary"
    assert settings.marks.shape[1] == out.logits.shape[1] == vocab
    for part in (tokens, depths, words):
        assert part.is_contiguous(), "trees must be contiguous"
    assert masks is None or masks.words.stride(1) == 1, "a mask must be contiguous"
    grid, own = (batch * nodes, chunks), settings
    shape = {"WIDTH": nodes, "BLOCK": BLOCK, "CHUNKS": chunks, "HIGHEST": _HIGHEST.value}
    _adjust[grid](
        logits, out.logits, out.highest, row_offsets, committed_lens, num_nodes, rows, tokens,
        depths, words, own.flags, own.end_from, own.repetition, own.frequency, own.presence,
        own.marks, own.output, own.bias, masks and masks.words, masks and masks.row_of, vocab,
        logits.stride(0), 0 if masks is None else masks.words.stride(0), **shape,
        MASKS=masks is not None, num_warps=8, **chained(logits.device),
    )  # fmt: skip
    _limit[grid](
        out.logits, out.highest, row_offsets, committed_lens, num_nodes, rows, depths, own.flags,
        own.end_from, own.marks, vocab, **shape, LANES=triton.next_power_of_2(chunks), num_warps=8,
        **chained(logits.device),
    )  # fmt: skip


def count_tokens(settings: RowSettings, rows: Tensor, out: Walked, dummy_row: int) -> None:
    """Add what a round emitted to the counts of the rows that have penalties.

    rows: [B] int64, distinct but for `dummy_row`, which counts nothing. out: of `sample`.
    """
    batch, nodes = out.tokens.shape
    _count[(batch,)](
        rows, out.tokens, out.counts, settings.flags, settings.marks, settings.output, dummy_row,
        settings.marks.shape[1], WIDTH=nodes, LANES=max(triton.next_power_of_2(nodes), 2),
        num_warps=1, **chained(rows.device),
    )  # fmt: skip


def count_tokens_ref(settings: RowSettings, rows: Tensor, out: Walked, dummy_row: int) -> None:
    """The twin of `count_tokens`."""
    for row, tokens, count in zip(
        rows.tolist(), out.tokens.tolist(), out.counts.tolist(), strict=True
    ):
        if row != dummy_row and int(settings.flags[row]) & PENALISED:
            for token in tokens[:count]:
                settings.output[row, token] += 1
                settings.marks[row, token] |= HELD
