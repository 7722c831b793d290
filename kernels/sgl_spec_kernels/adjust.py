"""What moves single logits before temperature, at every node of every tree, in place.

In order: repetition, frequency and presence penalties, biases, the grammar's mask, the minimum
length, and the biases that are absolute. `sgl_spec.speculative.sampling.adjust` and `penalties` say
what each does and are the twin; the tokens on the path from the root to a node count as output.
One program takes a row, in few passes over it; rows with nothing to adjust cost a launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chain, chained

BLOCK = 4096


@triton.jit
def _penalised(x, count, held, repetition, frequency, presence):
    y = tl.where(x > 0, x / repetition, x * repetition)
    y = y - frequency * count - tl.where(count > 0, presence, 0.0)
    return tl.where(held, y, x)


@triton.jit
def _penalise(
    row,
    text,
    output,
    tokens,
    word,
    repetition,
    frequency,
    presence,
    vocab,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """word: the node's ancestors and itself."""
    lane = tl.arange(0, LANES)
    # The root is in the counts already.
    on_path = (((word >> lane.to(tl.int64)) & 1) != 0) & (lane > 0)
    token = tl.load(tokens + lane, mask=on_path, other=-1)
    same = (token[:, None] == token[None, :]) & on_path[None, :]
    times = tl.sum(same.to(tl.float32), 1)
    x = tl.load(row + token, mask=on_path, other=0.0)
    count = times + tl.load(output + token, mask=on_path, other=0.0)
    moved = _penalised(x, count, on_path, repetition, frequency, presence)
    tl.debug_barrier()  # those are read before the row is written
    for start in range(0, vocab, BLOCK):
        each = start + tl.arange(0, BLOCK)
        inside = each < vocab
        held = tl.load(text + each, mask=inside, other=0) != 0
        old = tl.load(row + each, mask=inside, other=0.0)
        seen = tl.load(output + each, mask=inside, other=0.0)
        y = _penalised(old, seen, held, repetition, frequency, presence)
        tl.store(row + each, y, mask=inside & held)
    tl.debug_barrier()
    tl.store(row + token, moved, mask=on_path)
    tl.debug_barrier()


@triton.jit
def _add(row, ids, values, count, LANES: tl.constexpr):
    """Biases of `count` tokens; of those that fill the list up they are 0."""
    lane = tl.arange(0, LANES)
    token = tl.load(ids + lane, mask=lane < count, other=0)
    value = tl.load(values + lane, mask=lane < count, other=0.0)
    tl.atomic_add(row + token, value, mask=(lane < count) & (value != 0))
    tl.debug_barrier()


@triton.jit
def _mask(row, mask, vocab, BLOCK: tl.constexpr):
    """Tokens whose bit is not set cannot be drawn."""
    for start in range(0, vocab, BLOCK):
        each = start + tl.arange(0, BLOCK)
        word = tl.load(mask + each // 32, mask=each < vocab, other=0)
        out = ((word >> (each % 32)) & 1) == 0
        nothing = tl.full([BLOCK], float("-inf"), tl.float32)
        tl.store(row + each, nothing, mask=(each < vocab) & out)
    tl.debug_barrier()


@triton.jit
def _highest(row, vocab, BLOCK: tl.constexpr):
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        each = start + tl.arange(0, BLOCK)
        x = tl.load(row + each, mask=each < vocab, other=float("-inf"))
        best = tl.maximum(best, x)
    return tl.max(best, 0)


@triton.jit
def _hold_back(row, ids, count, vocab, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """These tokens cannot be drawn as long as any other can."""
    lane = tl.arange(0, LANES)
    inside = lane < count
    token = tl.load(ids + lane, mask=inside, other=0)
    before = tl.load(row + token, mask=inside, other=0.0)
    tl.debug_barrier()
    tl.store(row + token, tl.full([LANES], float("-inf"), tl.float32), mask=inside)
    tl.debug_barrier()
    if _highest(row, vocab, BLOCK) == float("-inf"):
        tl.debug_barrier()
        tl.store(row + token, before, mask=inside)
    tl.debug_barrier()


@triton.jit
def _only(row, ids, count, vocab, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """No token but these can be drawn as long as one of them can."""
    lane = tl.arange(0, LANES)
    inside = lane < count
    token = tl.load(ids + lane, mask=inside, other=0)
    before = tl.load(row + token, mask=inside, other=float("-inf"))
    tl.debug_barrier()
    if tl.max(before, 0) > float("-inf"):
        for start in range(0, vocab, BLOCK):
            each = start + tl.arange(0, BLOCK)
            nothing = tl.full([BLOCK], float("-inf"), tl.float32)
            tl.store(row + each, nothing, mask=each < vocab)
        tl.debug_barrier()
        tl.store(row + token, before, mask=inside)
    tl.debug_barrier()


@triton.jit
def _at_extremes(
    row,
    request,
    banned,
    has_banned,
    forced,
    has_forced,
    vocab,
    BANNED: tl.constexpr,
    FORCED: tl.constexpr,
    BANNED_LANES: tl.constexpr,
    FORCED_LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The biases of a request that are absolute."""
    if BANNED > 0:  # noqa: SIM102 - a constant alone keeps what is absent from being compiled
        if tl.load(has_banned + request) != 0:
            _hold_back(row, banned + request * BANNED, BANNED, vocab, BANNED_LANES, BLOCK)
    if FORCED > 0:  # noqa: SIM102
        if tl.load(has_forced + request) != 0:
            _only(row, forced + request * FORCED, FORCED, vocab, FORCED_LANES, BLOCK)


@triton.jit
def _adjust(
    logits,
    row_offsets,
    committed_lens,
    num_nodes,
    tokens,
    depths,
    words,
    active,
    penalty_row,
    text,
    output,
    repetition,
    frequency,
    presence,
    bias_ids,
    bias_values,
    banned,
    has_banned,
    forced,
    has_forced,
    end_from,
    end_ids,
    masks,
    mask_of,
    vocab,
    row_stride,
    mask_stride,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    BIASES: tl.constexpr,
    BANNED: tl.constexpr,
    FORCED: tl.constexpr,
    ENDERS: tl.constexpr,
    PENALTIES: tl.constexpr,
    MASKS: tl.constexpr,
    BIAS_LANES: tl.constexpr,
    BANNED_LANES: tl.constexpr,
    FORCED_LANES: tl.constexpr,
    END_LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    slot = tl.program_id(0)
    request, node = slot // WIDTH, slot % WIDTH
    if node >= tl.load(num_nodes + request):
        return
    is_active = tl.load(active + request).to(tl.int32)
    mask_row = is_active.to(tl.int64) * 0 - 1
    if MASKS:
        mask_row = tl.load(mask_of + slot).to(tl.int64)
    if (is_active == 0) & (mask_row < 0):
        return
    row = logits + (tl.load(row_offsets + request) + node).to(tl.int64) * row_stride
    if PENALTIES:
        counted = tl.load(penalty_row + request).to(tl.int64)
        if counted >= 0:
            _penalise(
                row, text + counted * vocab, output + counted * vocab, tokens + request * WIDTH,
                tl.load(words + slot), tl.load(repetition + request),
                tl.load(frequency + request), tl.load(presence + request), vocab, LANES, BLOCK,
            )  # fmt: skip
    if BIASES > 0:
        at = request * BIASES
        _add(row, bias_ids + at, bias_values + at, BIASES, BIAS_LANES)
    if MASKS:  # noqa: SIM102 - a constant alone keeps what is absent from being compiled
        if mask_row >= 0:
            _mask(row, masks + mask_row * mask_stride, vocab, BLOCK)
    if ENDERS > 0:
        position = tl.load(committed_lens + request) + tl.load(depths + slot) + 1
        if position < tl.load(end_from + request):
            _hold_back(row, end_ids + request * ENDERS, ENDERS, vocab, END_LANES, BLOCK)
    _at_extremes(
        row, request, banned, has_banned, forced, has_forced, vocab,
        BANNED, FORCED, BANNED_LANES, FORCED_LANES, BLOCK,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Penalties:
    """row: [B] int64, row of the counts, -1 for none. text: [P, V] bool, output: [P, V] float32:
    what the texts hold. repetition, frequency, presence: [B] float32."""

    row: Tensor
    text: Tensor
    output: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


@dataclass(frozen=True, slots=True)
class Biases:
    """ids [B, K] int64, values [B, K] float32: between the extremes, filled up with zeros. banned,
    forced: [B, X] int64, at the extremes, filled up with repetitions; has_...: [B] bool."""

    ids: Tensor
    values: Tensor
    banned: Tensor
    has_banned: Tensor
    forced: Tensor
    has_forced: Tensor


@dataclass(frozen=True, slots=True)
class Masks:
    """words: [M, ceil(V / 32)] int32, bit t % 32 of word t // 32 allows token t. row_of: [B, N]
    int64, the row that restricts a node, -1 for none."""

    words: Tensor
    row_of: Tensor


def adjust_logits(
    logits: Tensor,
    row_offsets: Tensor,
    committed_lens: Tensor,
    num_nodes: Tensor,
    tokens: Tensor,
    depths: Tensor,
    words: Tensor,
    active: Tensor,
    end_from: Tensor,
    end_ids: Tensor,
    penalties: Penalties | None = None,
    biases: Biases | None = None,
    masks: Masks | None = None,
) -> None:
    """Adjust the logits of all nodes, in place.

    logits: [T, V] float32; node j of request i is row row_offsets[i] + j. tokens, depths, words:
    [B, N] int64 of the trees. active: [B] bool, requests with anything but a mask to adjust.
    end_from: [B] int64, first position where a request may end. end_ids: [B, E] int64.
    """
    (batch, nodes), vocab = tokens.shape, logits.shape[1]
    assert logits.dtype == torch.float32, f"logits are float32 here, not {logits.dtype}"
    assert logits.stride(1) == 1, "a row of logits must be contiguous"
    pen, bias = penalties, biases
    for part in (tokens, depths, words, end_ids):
        assert part.is_contiguous(), "trees and ids must be contiguous"
    for setting in () if pen is None else (pen.repetition, pen.frequency, pen.presence, pen.row):
        assert setting.is_contiguous(), "penalties must be contiguous"
    assert pen is None or (pen.text.shape[1] == pen.output.shape[1] == vocab)
    assert masks is None or masks.words.stride(1) == 1, "a mask must be contiguous"
    sizes = (
        [0, 0, 0] if bias is None else [t.shape[1] for t in (bias.ids, bias.banned, bias.forced)]
    )
    sizes.append(end_ids.shape[1])
    lanes = [triton.next_power_of_2(max(size, 1)) for size in sizes]
    _adjust[(batch * nodes,)](
        logits,
        row_offsets,
        committed_lens,
        num_nodes,
        tokens,
        depths,
        words,
        active.view(torch.uint8),
        pen and pen.row,
        pen and pen.text.view(torch.uint8),
        pen and pen.output,
        pen and pen.repetition,
        pen and pen.frequency,
        pen and pen.presence,
        bias and bias.ids,
        bias and bias.values,
        bias and bias.banned,
        bias and bias.has_banned.view(torch.uint8),
        bias and bias.forced,
        bias and bias.has_forced.view(torch.uint8),
        end_from,
        end_ids,
        masks and masks.words,
        masks and masks.row_of,
        vocab,
        logits.stride(0),
        0 if masks is None else masks.words.stride(0),
        WIDTH=nodes,
        LANES=triton.next_power_of_2(nodes),
        BIASES=sizes[0],
        BANNED=sizes[1],
        FORCED=sizes[2],
        ENDERS=sizes[3],
        PENALTIES=pen is not None,
        MASKS=masks is not None,
        BIAS_LANES=lanes[0],
        BANNED_LANES=lanes[1],
        FORCED_LANES=lanes[2],
        END_LANES=lanes[3],
        BLOCK=BLOCK,
        num_warps=8,
        **chained(logits.device),
    )
