"""Bring the accepted path of every tree to the front of its positions, on the device.

Node i of a tree lies at logical position committed + i; afterwards node path[j] does at committed +
j for j < counts. With one slot a page that renames slots: the other nodes follow in rising order,
so the request's slots are permuted and no KV moves. Else the KV rows move, all of a program's rows
being read before one is written. The twins are at the foot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chain, chained

_COLUMNS = 128  # values of a KV row that a program moves


@triton.jit
def _rename_slots(
    req_to_token,
    table_rows,
    committed_lens,
    path,
    counts,
    table_stride,
    path_width,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    request = tl.program_id(0)
    count = tl.load(counts + request).to(tl.int32)
    node, step = tl.arange(0, BLOCK), tl.arange(0, BLOCK_W)
    kept = tl.load(path + request * path_width + step, mask=step < count, other=-1).to(tl.int32)
    hit = node[:, None] == kept[None, :]
    rank = tl.max(tl.where(hit, step[None, :], -1), 1)  # [BLOCK], -1 off the path
    inside = node < NODES
    left = inside & (rank < 0)
    rank = tl.where(left, count + tl.cumsum(left.to(tl.int32), 0) - 1, rank)
    table = req_to_token + tl.load(table_rows + request).to(tl.int64) * table_stride
    table += tl.load(committed_lens + request)
    slot = tl.load(table + node, mask=inside, other=0)
    tl.debug_barrier()  # every slot is read before one is written
    tl.store(table + rank, slot, mask=inside)


@triton.jit
def _move_path(
    k,
    v,
    req_to_token,
    table_rows,
    committed_lens,
    path,
    counts,
    table_stride,
    path_width,
    layer_stride,
    slot_stride,
    width,
    BLOCK_W: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    request, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count = tl.load(counts + request).to(tl.int32)
    step = tl.arange(0, BLOCK_W)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    table = req_to_token + tl.load(table_rows + request).to(tl.int64) * table_stride
    table += tl.load(committed_lens + request)
    kept = tl.load(path + request * path_width + step, mask=step < count, other=0)
    moves = (step < count) & (kept != step)
    if tl.sum(moves.to(tl.int32), 0) == 0:
        return
    source = tl.load(table + kept, mask=moves, other=0).to(tl.int64)
    target = tl.load(table + step, mask=moves, other=0).to(tl.int64)
    used = moves[:, None] & (column < width)[None, :]
    origin = layer * layer_stride + column[None, :]
    keys = tl.load(k + origin + source[:, None] * slot_stride, mask=used, other=0.0)
    values = tl.load(v + origin + source[:, None] * slot_stride, mask=used, other=0.0)
    tl.debug_barrier()  # every row is read before one is written
    tl.store(k + origin + target[:, None] * slot_stride, keys, mask=used)
    tl.store(v + origin + target[:, None] * slot_stride, values, mask=used)


def rename_slots(
    req_to_token: Tensor, rows: Tensor, committed: Tensor, path: Tensor, counts: Tensor, nodes: int
) -> None:
    """Permute the slots of `nodes` positions from `committed` on, in place.

    req_to_token: [table rows, width] int32. rows, committed, counts: [B] int64, counts >= 1. path:
    [B, W] int64, path[:, :counts] distinct nodes, path[:, 0] = 0.
    """
    assert path.is_contiguous(), "path must be contiguous"
    _rename_slots[(rows.shape[0],)](
        req_to_token,
        rows,
        committed,
        path,
        counts,
        req_to_token.stride(0),
        path.shape[1],
        NODES=nodes,
        BLOCK=triton.next_power_of_2(nodes),
        BLOCK_W=triton.next_power_of_2(path.shape[1]),
        num_warps=1,
        **chained(rows.device),
    )


def move_path(
    k: Tensor,
    v: Tensor,
    req_to_token: Tensor,
    rows: Tensor,
    committed: Tensor,
    path: Tensor,
    counts: Tensor,
) -> None:
    """Move the path's KV rows in place, the table stays. k, v: [layers, slots, kv_heads, d],
    contiguous; path[:, :counts] rises; the rest as in `rename_slots`."""
    assert path.is_contiguous(), "path must be contiguous"
    assert k.is_contiguous(), "k must be contiguous"
    assert v.is_contiguous(), "v must be contiguous"
    assert k.shape == v.shape
    width = k.shape[2] * k.shape[3]
    _move_path[(rows.shape[0], k.shape[0], triton.cdiv(width, _COLUMNS))](
        k,
        v,
        req_to_token,
        rows,
        committed,
        path,
        counts,
        req_to_token.stride(0),
        path.shape[1],
        k.stride(0),
        k.stride(1),
        width,
        BLOCK_W=triton.next_power_of_2(path.shape[1]),
        COLUMNS=_COLUMNS,
        num_warps=4,
        **chained(k.device),
    )


def rename_slots_ref(
    req_to_token: Tensor, rows: Tensor, committed: Tensor, path: Tensor, counts: Tensor, nodes: int
) -> None:
    """The twin of `rename_slots`."""
    for row, start, nodes_kept, count in zip(
        rows.tolist(), committed.tolist(), path.tolist(), counts.tolist(), strict=True
    ):
        kept = nodes_kept[:count]
        order = kept + [node for node in range(nodes) if node not in set(kept)]
        at = torch.tensor(order, device=req_to_token.device)
        req_to_token[row, start : start + nodes] = req_to_token[row, start + at]


def move_path_ref(
    k: Tensor,
    v: Tensor,
    req_to_token: Tensor,
    rows: Tensor,
    committed: Tensor,
    path: Tensor,
    counts: Tensor,
) -> None:
    """The twin of `move_path`."""
    for row, start, nodes, count in zip(
        rows.tolist(), committed.tolist(), path, counts.tolist(), strict=True
    ):
        sources = req_to_token[row, start + nodes[:count]].long()
        targets = req_to_token[row, start : start + count].long()
        for cache in (k, v):
            cache[:, targets] = cache[:, sources]
