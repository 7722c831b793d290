"""Bring the accepted path of every tree to the front of its positions, on the device.

`kv_move.move_path` says what that means and is the twin. All of a program's rows are read before
one is written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chain, chained

_COLUMNS = 128  # values of a KV row that a program moves


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


def move_path(
    k: Tensor,
    v: Tensor,
    req_to_token: Tensor,
    rows: Tensor,
    committed: Tensor,
    path: Tensor,
    counts: Tensor,
) -> None:
    """As `kv_move.move_path`, for contiguous k, v and path."""
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
