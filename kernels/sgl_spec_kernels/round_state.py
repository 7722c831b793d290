"""The two ends of a round whose state lives on the device, and the draft rows that follow it.

State is held by table row, a round runs on a batch of B requests: `begin_round` gathers what the
round reads; `end_round` moves the state on by what it accepted and packs that for the host;
`extend_rows` makes the rows by which the draft model takes the accepted tokens in. With c the
length a request had, t the tokens it accepted, p their path and 0 <= j < count:

    kind      token of row j    position of row j
    head      t[j]              c + j        reads the token behind its own position
    whole     t[j]              c + 1 + j    the root is written; the last row is the new root's
    rooted    root, t[j - 1]    c + j        the root is not written yet; no row for the new root

A row's slot is that of its position, and it sees the rows before it. Rows j >= count fill the
forward up to its size: token 0, position 0, no slot (-1), and they see the first row alone. Every
row has the feature at node p[j] (of node 0 where j >= count). The twins are at the foot.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chain, chained
from sgl_spec_kernels.sample import Walked

KINDS = ("head", "whole", "rooted")
MOST_LEVELS = 64  # rows of a request, the bits of a mask word
_BLOCK_C = 1024


@dataclass(frozen=True, slots=True)
class RowState:
    """What each request's rounds read, [R] by table row or gathered to [B].

    committed, last, seed, top_k, max_nodes: int64. temperature, min_p: float32. top_p: float64.
    committed: tokens whose KV is valid. last: the token behind them, a tree's root.
    """

    committed: Tensor
    last: Tensor
    seed: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    max_nodes: Tensor


@dataclass(frozen=True, slots=True)
class ExtendRows:
    """Rows of the draft's forward, D to a request; buffers of fixed addresses.

    tokens, positions, slots, words, features: [B * D] int64; features are rows of the verify
    forward. last: [B] int64, the row whose output the next tree grows from.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    words: Tensor
    features: Tensor
    last: Tensor


@triton.jit
def _begin_round(
    rows,
    committed,
    last,
    seed,
    temperature,
    top_k,
    top_p,
    min_p,
    max_nodes,
    to_committed,
    to_last,
    to_seed,
    to_temperature,
    to_top_k,
    to_top_p,
    to_min_p,
    to_max_nodes,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    request = tl.program_id(0)
    row = tl.load(rows + request)
    tl.store(to_committed + request, tl.load(committed + row))
    tl.store(to_last + request, tl.load(last + row))
    tl.store(to_seed + request, tl.load(seed + row))
    tl.store(to_temperature + request, tl.load(temperature + row))
    tl.store(to_top_k + request, tl.load(top_k + row))
    tl.store(to_top_p + request, tl.load(top_p + row))
    tl.store(to_min_p + request, tl.load(min_p + row))
    tl.store(to_max_nodes + request, tl.load(max_nodes + row))


@triton.jit
def _end_round(
    rows,
    tokens,
    counts,
    committed,
    last,
    packed,
    dummy_row,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    request = tl.program_id(0)
    row = tl.load(rows + request)
    lane = tl.arange(0, LANES)
    count = tl.load(counts + request)
    used = lane < count
    token = tl.load(tokens + request * WIDTH + lane, mask=used, other=0)
    real = row != dummy_row
    to = packed + request * (WIDTH + 1)
    tl.store(to, tl.where(real, count, 0).to(tl.int32))
    shown = tl.where(used & real, token, 0).to(tl.int32)
    tl.store(to + 1 + lane, shown, mask=lane < WIDTH)
    if real:
        tl.store(committed + row, tl.load(committed + row) + count)
        tl.store(last + row, tl.load(tokens + request * WIDTH + count - 1))


@triton.jit
def _extend_rows(
    committed_lens,
    roots,
    table_rows,
    req_to_token,
    tokens,
    path,
    counts,
    out_tokens,
    out_positions,
    out_slots,
    out_words,
    out_features,
    out_last,
    table_stride,
    NODES: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    SHIFT: tl.constexpr,
    ROOTED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    request = tl.program_id(0)
    j = tl.arange(0, LANES)
    count = tl.load(counts + request)
    live = j < count
    start = request * NODES
    if ROOTED:
        token = tl.load(tokens + start + j - 1, mask=live & (j > 0), other=0)
        token = tl.where(j == 0, tl.load(roots + request), token)
    else:
        token = tl.load(tokens + start + j, mask=live, other=0)
    position = tl.load(committed_lens + request) + SHIFT + j
    table = req_to_token + tl.load(table_rows + request).to(tl.int64) * table_stride
    slot = tl.load(table + position, mask=live, other=-1).to(tl.int64)
    node = tl.load(path + start + j, mask=live, other=0)
    word = (tl.full([LANES], 2, tl.int64) << j.to(tl.int64)) - 1
    to, inside = request * ROWS + j, j < ROWS
    tl.store(out_tokens + to, token, mask=inside)
    tl.store(out_positions + to, tl.where(live, position, 0), mask=inside)
    tl.store(out_slots + to, slot, mask=inside)
    tl.store(out_words + to, tl.where(live, word, 1), mask=inside)
    tl.store(out_features + to, start + node, mask=inside)
    tl.store(out_last + request, request * ROWS + count - 1)


@triton.jit
def _gather_rows(
    source, index, out, width, source_stride, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):
    chain(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(source + tl.load(index + row) * source_stride + column, mask=inside)
    tl.store(out + row * width + column, x, mask=inside)


def begin_round(state: RowState, rows: Tensor, batch: RowState) -> None:
    """Fill the batch's [B] buffers from the state's [R]. rows: [B] int64."""
    pairs = [(getattr(state, f.name), getattr(batch, f.name)) for f in fields(RowState)]
    for source, target in pairs:
        assert source.is_contiguous(), "state must be contiguous"
        assert source.dtype == target.dtype, "a batch has its state's dtypes"
    _begin_round[(rows.shape[0],)](
        rows,
        *(p[0] for p in pairs),
        *(p[1] for p in pairs),
        num_warps=1,
        **chained(rows.device),
    )


def end_round(
    committed: Tensor, last: Tensor, rows: Tensor, out: Walked, packed: Tensor, dummy_row: int
) -> None:
    """committed[row] += count and last[row] = the last token, for all rows but `dummy_row`.

    committed, last: [R] int64. rows: [B] int64, distinct but for dummy_row. out: of `sample`, N
    nodes. packed: [B, N + 1] int32, filled with the count (0 for dummy_row) and the tokens, then 0.
    """
    batch, nodes = out.tokens.shape
    assert packed.shape == (batch, nodes + 1), "packed holds a count and N tokens a request"
    assert packed.is_contiguous(), "packed must be contiguous"
    assert packed.dtype == torch.int32
    _end_round[(batch,)](
        rows,
        out.tokens,
        out.counts,
        committed,
        last,
        packed,
        dummy_row,
        WIDTH=nodes,
        LANES=max(triton.next_power_of_2(nodes), 2),
        num_warps=1,
        **chained(rows.device),
    )


def extend_buffers(batch: int, levels: int, device: torch.device | str) -> ExtendRows:
    """Buffers for `batch` requests whose trees are `levels` deep below the root: D = levels + 1."""
    assert 0 <= levels < MOST_LEVELS, f"{levels} levels, a mask word has bits for {MOST_LEVELS - 1}"
    rows = [torch.zeros(batch * (levels + 1), dtype=torch.int64, device=device) for _ in range(5)]
    return ExtendRows(*rows, torch.zeros(batch, dtype=torch.int64, device=device))


def extend_rows(
    buffers: ExtendRows,
    out: Walked,
    kind: str,
    *,
    committed: Tensor,
    roots: Tensor,
    rows: Tensor,
    req_to_token: Tensor,
) -> None:
    """Fill the buffers with what a round accepted.

    committed, roots, rows: [B] int64, as the round began. req_to_token: [table rows, width] int32,
    with the path at the front of its positions. The draft's KV must be written up to committed
    (kind whole: committed + 1); that is its forward's prefix.
    """
    assert kind in KINDS, f"kind {kind!r} is none of {KINDS}"
    (batch, nodes), depth = out.tokens.shape, buffers.tokens.shape[0] // out.tokens.shape[0]
    assert buffers.last.shape[0] == batch, "the buffers are for another batch"
    assert req_to_token.stride(1) == 1, "a table row must be contiguous"
    _extend_rows[(batch,)](
        committed,
        roots,
        rows,
        req_to_token,
        out.tokens,
        out.path,
        out.counts,
        buffers.tokens,
        buffers.positions,
        buffers.slots,
        buffers.words,
        buffers.features,
        buffers.last,
        req_to_token.stride(0),
        NODES=nodes,
        ROWS=depth,
        LANES=max(triton.next_power_of_2(depth), 2),
        SHIFT=int(kind == "whole"),
        ROOTED=kind == "rooted",
        num_warps=1,
        **chained(rows.device),
    )


def gather_features(features: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """features[index], [M, C]. features: [T, C], rows may lie apart. index: [M] int64. out: [M, C]
    contiguous, of the same dtype."""
    count, width = index.shape[0], features.shape[1]
    assert features.stride(1) == 1, "a row of features must be contiguous"
    assert index.is_contiguous(), "index must be contiguous"
    out = features.new_empty(count, width) if out is None else out
    assert out.shape == (count, width)
    assert out.is_contiguous(), "out must be contiguous"
    assert out.dtype == features.dtype
    _gather_rows[(count, triton.cdiv(width, _BLOCK_C))](
        features,
        index,
        out,
        width,
        features.stride(0),
        BLOCK=_BLOCK_C,
        num_warps=4,
        **chained(features.device),
    )
    return out


def begin_round_ref(state: RowState, rows: Tensor, batch: RowState) -> None:
    """The twin of `begin_round`."""
    for field in fields(RowState):
        getattr(batch, field.name).copy_(getattr(state, field.name)[rows])


def end_round_ref(
    committed: Tensor, last: Tensor, rows: Tensor, out: Walked, packed: Tensor, dummy_row: int
) -> None:
    """The twin of `end_round`."""
    packed.zero_()
    for i, (row, count) in enumerate(zip(rows.tolist(), out.counts.tolist(), strict=True)):
        if row != dummy_row:
            committed[row] += count
            last[row] = out.tokens[i, count - 1]
            packed[i, 0] = count
            packed[i, 1 : count + 1] = out.tokens[i, :count]


def extend_rows_ref(
    buffers: ExtendRows,
    out: Walked,
    kind: str,
    *,
    committed: Tensor,
    roots: Tensor,
    rows: Tensor,
    req_to_token: Tensor,
) -> None:
    """The twin of `extend_rows`."""
    batch, nodes = out.tokens.shape
    for buffer in (buffers.tokens, buffers.positions):
        buffer.zero_()
    buffers.slots.fill_(-1)
    buffers.words.fill_(1)
    depth = buffers.tokens.shape[0] // batch
    first = torch.arange(batch, device=rows.device) * nodes
    buffers.features.copy_(first.repeat_interleave(depth))
    for i, count in enumerate(out.counts.tolist()):
        span, step = slice(i * depth, i * depth + count), torch.arange(count, device=rows.device)
        text = torch.cat([roots[i, None], out.tokens[i, :count]])
        position = committed[i] + step + int(kind == "whole")
        buffers.tokens[span] = text[:-1] if kind == "rooted" else text[1:]
        buffers.positions[span] = position
        buffers.slots[span] = req_to_token[rows[i], position].long()
        buffers.words[span] = (2 << step) - 1
        buffers.features[span] += out.path[i, :count]
        buffers.last[i] = i * depth + count - 1


def gather_features_ref(features: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """The twin of `gather_features`."""
    found = features[index]
    return found if out is None else out.copy_(found)
