"""silu(x Wg^T) * (x Wu^T), the first product and the activation of an MLP, in one kernel.

For some dozens to hundreds of rows of x, where reading W and the arithmetic weigh the same: every
tile of W is read once, by the copy engine, and meets all rows of x, which are cut into at most two
pieces that the tensor cores take; so 192 rows are computed as 128 and 64. As in `skinny_gemm` the
product is W x^T. A program holds a block of gates and the block of what they gate.

Sharing the steps along K evenly among the multiprocessors was measured as well, for this and for
plain products: what is left to add costs more than the last, emptier wave. So was fetching the
first 6, 12 or 24 MB of the next weights to the L2 cache, from here and from the norms: a forward of
192 rows takes 6.23 ms without, 6.35, 6.41 and 6.51 ms with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sgl_spec_kernels.chain import chained, let_follow, wait_before

MOST_ROWS = 256


@dataclass(frozen=True, slots=True)
class GatedShape:
    """How the product is cut: `block` outputs a program, `block_k` inputs a step."""

    block: int
    block_k: int
    warps: int
    stages: int


TUNED: dict[tuple[int, int], tuple[tuple[int, GatedShape | None], ...]] = {
    (28672, 4096): (
        (16, None),
        (64, GatedShape(64, 128, 4, 4)),
        (128, GatedShape(64, 64, 4, 3)),
        (192, GatedShape(128, 64, 8, 4)),
        (256, GatedShape(64, 64, 8, 4)),
    ),
}
"""By (N, K) of both halves together: (most rows, shape) in rising order, None where a product and
`silu_mul` are as fast. Measured on an H200 with 2-byte weights."""


def wins(rows: int, outputs: int, inputs: int) -> GatedShape | None:
    """The shape with which `gated_gemm` is faster than two kernels, if there is one."""
    for most, shape in TUNED.get((outputs, inputs), ()):
        if rows <= most:
            return shape
    return None


def pieces(rows: int) -> tuple[int, int]:
    """Powers of two from 16 on, the second smaller or 0, that hold so many rows together."""
    first = max(1 << (rows.bit_length() - 1), 16)
    rest = rows - first
    if rest <= 0:
        return first, 0
    second = max(1 << (rest - 1).bit_length(), 16)
    return (2 * first, 0) if second >= first else (first, second)


@triton.jit
def _write(gate, up, output, row, out, rows, width):
    """silu(gate) * up of sums [outputs, rows], rounded in between as if they had been written."""
    gate = gate.to(out.dtype.element_ty).to(tl.float32)
    up = up.to(out.dtype.element_ty).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    inside = (output < width)[:, None] & (row < rows)[None, :]
    at = row[None, :] * width + output[:, None]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _gated_gemm(
    x_first,
    x_second,
    weight,
    out,
    rows,
    width,
    K,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHAINED: tl.constexpr,
):
    let_follow(CHAINED)
    wait_before(CHAINED)
    start = tl.program_id(0) * BLOCK
    gate = tl.zeros([BLOCK, FIRST], dtype=tl.float32)
    up = tl.zeros([BLOCK, FIRST], dtype=tl.float32)
    if SECOND > 0:
        more_gate = tl.zeros([BLOCK, SECOND], dtype=tl.float32)
        more_up = tl.zeros([BLOCK, SECOND], dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        w = weight.load([start, k])
        xs = x_first.load([0, k]).T
        gate = tl.dot(w, xs, gate, input_precision="ieee")
        if SECOND > 0:
            more = x_second.load([FIRST, k]).T
            more_gate = tl.dot(w, more, more_gate, input_precision="ieee")
        w = weight.load([width + start, k])
        up = tl.dot(w, xs, up, input_precision="ieee")
        if SECOND > 0:
            more_up = tl.dot(w, more, more_up, input_precision="ieee")
    output = start + tl.arange(0, BLOCK)
    _write(gate, up, output, tl.arange(0, FIRST), out, rows, width)
    if SECOND > 0:
        _write(more_gate, more_up, output, FIRST + tl.arange(0, SECOND), out, rows, width)


def gated_gemm(x: Tensor, weight: Tensor, shape: GatedShape) -> Tensor:
    """y [M, N / 2] = silu(first half of x W^T) * second half. x: [M, K], M from 1 to 256, rows a
    multiple of 16 bytes apart. weight: [N, K] contiguous, the gates first. Sums are float32."""
    (rows, inputs), width = x.shape, weight.shape[0] // 2
    assert 1 <= rows <= MOST_ROWS, f"{rows} rows, this kernel takes 1 to {MOST_ROWS}"
    assert x.stride(1) == 1, "a row of x must be contiguous"
    assert weight.is_contiguous(), "weight must be contiguous"
    assert weight.shape == (2 * width, inputs)
    assert x.dtype == weight.dtype, "x and weight must have one dtype"
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    first, second = pieces(rows)
    _gated_gemm[(triton.cdiv(width, shape.block),)](
        _blocks(x, first, shape.block_k),
        _blocks(x, second, shape.block_k) if second else None,
        _blocks(weight, shape.block, shape.block_k),
        out,
        rows,
        width,
        inputs,
        FIRST=first,
        SECOND=second,
        BLOCK=shape.block,
        BLOCK_K=shape.block_k,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **chained(x.device),
    )
    return out


def _blocks(matrix: Tensor, rows: int, columns: int) -> Any:
    """How the copy engine reads blocks of it: zeros beyond its end."""
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [rows, columns])


def gated_gemm_ref(x: Tensor, weight: Tensor, shape: GatedShape | None = None) -> Tensor:
    """The twin of `gated_gemm`; it needs no shape."""
    gate, up = (x.float() @ weight.float().T).to(x.dtype).float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)
