"""Where the rows of a verify forward stand: rotary positions and slots, from the device's own
lengths, for trees whose shape came from elsewhere.

    position = committed[request] + depth,    slot = table[row of request, committed + node]

A row with node -1 fills the forward up to its size: position 0, slot -1 (nothing is stored).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chain, chained

BLOCK = 128


@triton.jit
def _tree_rows(
    requests,
    nodes,
    depths,
    committed_lens,
    table_rows,
    req_to_token,
    positions,
    slots,
    count,
    table_stride,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    node = tl.load(nodes + at, mask=inside, other=-1)
    live = inside & (node >= 0)
    request = tl.load(requests + at, mask=live, other=0)
    committed = tl.load(committed_lens + request, mask=live, other=0)
    row = tl.load(table_rows + request, mask=live, other=0)
    depth = tl.load(depths + at, mask=live, other=0)
    slot = tl.load(req_to_token + row * table_stride + committed + node, mask=live, other=-1)
    tl.store(positions + at, committed + depth, mask=inside)
    tl.store(slots + at, slot.to(tl.int64), mask=inside)


def tree_rows(
    requests: Tensor,
    nodes: Tensor,
    depths: Tensor,
    committed: Tensor,
    rows: Tensor,
    req_to_token: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> None:
    """Fill positions and slots [T] int64.

    requests, nodes, depths: [T] int64, what each forward row is. committed, rows: [B] int64.
    req_to_token: [table rows, width] int32.
    """
    for name, ints in (("requests", requests), ("nodes", nodes), ("depths", depths)):
        assert ints.is_contiguous(), f"{name} must be contiguous"
        assert ints.dtype == torch.int64, f"{name} must be int64"
    count = nodes.shape[0]
    _tree_rows[(triton.cdiv(count, BLOCK),)](
        requests,
        nodes,
        depths,
        committed,
        rows,
        req_to_token,
        positions,
        slots,
        count,
        req_to_token.stride(0),
        BLOCK=BLOCK,
        num_warps=1,
        **chained(nodes.device),
    )


def tree_rows_ref(
    requests: Tensor,
    nodes: Tensor,
    depths: Tensor,
    committed: Tensor,
    rows: Tensor,
    req_to_token: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> None:
    """The twin of `tree_rows`."""
    live = nodes >= 0
    start = committed[requests]
    positions.copy_(torch.where(live, start + depths, 0))
    place = torch.where(live, start + nodes, 0)
    slots.copy_(torch.where(live, req_to_token[rows[requests], place].long(), -1))
