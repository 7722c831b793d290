"""RMSNorm, with the addition to the residual stream that precedes it.

h = residual + x, rounded to the dtype as a sum of its own is, written over residual (and to a copy)
y = h / sqrt(mean(h^2) + eps) * weight        (h = x where there is no residual)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chained, let_follow, wait_before

_MOST_COLUMNS = 65536  # of a row, which one program holds whole
COLUMNS_OF_A_WARP = 512


@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    out,
    copy,
    eps,
    x_stride,
    out_stride,
    copy_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_COPY: tl.constexpr,
    CHAINED: tl.constexpr,
):
    let_follow(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    # No kernel writes weights. Later the compiler would ask for them behind the rows' first use.
    w = tl.load(weight + column, mask=inside, other=0.0)
    wait_before(CHAINED)
    h = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        stream = residual + row * WIDTH + column
        h += tl.load(stream, mask=inside, other=0.0).to(tl.float32)
        rounded = h.to(residual.dtype.element_ty)
        tl.store(stream, rounded, mask=inside)
        if HAS_COPY:
            tl.store(copy + row * copy_stride + column, rounded, mask=inside)
        h = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(h * h, 0) / WIDTH + eps)
    y = h * scale * w.to(tl.float32)
    tl.store(out + row * out_stride + column, y.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    copy: Tensor | None = None,
) -> Tensor:
    """y [T, H]. x: [T, H], rows may lie apart. weight: [H]. residual: [T, H] contiguous, replaced
    by h. out: where y goes, [T, H], rows may lie apart; x itself is allowed. copy: where h
    goes besides, with a residual only, [T, H], rows may lie apart."""
    rows, width = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    assert x.stride(1) == out.stride(1) == weight.stride(0) == 1, "rows must be contiguous"
    assert width <= _MOST_COLUMNS, f"rows of {width}, at most {_MOST_COLUMNS}"
    assert out.shape == x.shape
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape)
    assert copy is None or residual is not None, "x itself needs no copy"
    assert copy is None or (copy.shape == x.shape and copy.stride(1) == 1)
    block = triton.next_power_of_2(width)
    _rms_norm[(rows,)](
        x,
        residual,
        weight,
        out,
        copy,
        eps,
        x.stride(0),
        out.stride(0),
        0 if copy is None else copy.stride(0),
        WIDTH=width,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        HAS_COPY=copy is not None,
        num_warps=min(max(block // COLUMNS_OF_A_WARP, 1), 16),
        **chained(x.device),
    )
    return out


def rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    copy: Tensor | None = None,
) -> Tensor:
    """The twin of `rms_norm`."""
    h = x.float()
    if residual is not None:
        residual.copy_(h + residual.float())
        h = residual.float()
    if copy is not None:
        copy.copy_(h)
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight.float()
    return y.to(x.dtype) if out is None else out.copy_(y)
