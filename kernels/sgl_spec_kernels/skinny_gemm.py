"""y = x W^T (+ bias) (+ residual) for few rows of x, where reading W is all the work.

W [N, K] is cut into tiles of BLOCK_N outputs and, so that small matrices fill the card as well,
into `split_k` runs of K. The product is taken as W x^T: W's tile is the tall operand that the
tensor cores read from shared memory, the rows of x are its narrow side. Each split leaves its sums
in float32; the last of a tile to arrive adds them in the order of the splits, so the result does
not depend on timing, and applies the epilogue. Weights are nobody's output: their first lines are
fetched to the L2 cache while the kernel before still runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chained, let_follow, wait_before

MOST_ROWS = 64
_PROGRAMS = 264  # two for each multiprocessor of an H200


@dataclass(frozen=True, slots=True)
class GemmShape:
    """How a product is cut. ahead: 128-byte lines of each weight row that a program fetches before
    it waits for x, a power of two or 0."""

    block_n: int
    block_k: int
    split_k: int
    warps: int = 4
    stages: int = 4
    ahead: int = 8


_HEAD = (
    (32, GemmShape(64, 128, 1, stages=3, ahead=0)),
    (64, GemmShape(128, 128, 1, stages=4, ahead=0)),
)
TUNED: dict[tuple[int, int], tuple[tuple[int, GemmShape | None], ...]] = {
    (4096, 4096): ((32, GemmShape(64, 128, 2, stages=6, ahead=4)),),
    (6144, 4096): ((16, GemmShape(64, 128, 4, stages=3, ahead=4)),),
    # No faster by itself, but the layer is by 2 to 3 %: it starts while the norm still runs.
    (28672, 4096): ((16, GemmShape(64, 128, 1)),),
    (4096, 14336): ((64, GemmShape(64, 128, 2, stages=6)),),
    (4096, 12288): ((64, GemmShape(64, 128, 2, stages=6)),),
    (32000, 4096): (
        (32, GemmShape(64, 128, 1, stages=4, ahead=0)),
        (64, GemmShape(128, 128, 1, stages=4, ahead=4)),
    ),
    (49152, 4096): _HEAD,
}
"""By (N, K): (most rows, shape) in rising order, None where torch's own product is faster. Measured
on an H200 with 2-byte weights; nothing is claimed of other sizes."""

UNSPLIT: dict[tuple[int, int], tuple[tuple[int, GemmShape], ...]] = {
    (4096, 4096): (
        (16, GemmShape(64, 128, 1, stages=8, ahead=4)),
        (32, GemmShape(64, 128, 1, stages=6)),
    ),
    (6144, 4096): ((32, GemmShape(64, 128, 1, stages=6)),),
    (28672, 4096): ((16, GemmShape(64, 128, 1)),),
    (4096, 14336): ((16, GemmShape(64, 128, 1, stages=8, ahead=4)),),
    (4096, 12288): ((16, GemmShape(64, 128, 1, stages=8, ahead=4)),),
    (49152, 4096): _HEAD,
}
"""The same where K may not be split: the sum over K is then in its order for any number of rows."""


def wins(rows: int, outputs: int, inputs: int) -> GemmShape | None:
    """The shape with which `skinny_gemm` is faster than torch for so many rows, if there is one."""
    for most, shape in TUNED.get((outputs, inputs), ()):
        if rows <= most:
            return shape
    return None


@triton.jit
def _fetch(weights, first, last, LINES: tl.constexpr):
    """Lines of each row from column `first` on, into the L2 cache."""
    per_line: tl.constexpr = 1024 // weights.dtype.element_ty.primitive_bitwidth
    at = tl.minimum(first + tl.arange(0, LINES) * per_line, last - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [(weights + at[None, :]).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["rows"])
def _skinny_gemm(
    x,
    weight,
    bias,
    residual,
    out,
    part,
    arrived,
    rows,
    N,
    K,
    x_stride,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    LINES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    let_follow(CHAINED)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    output = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, ROWS)
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)
    first = split * steps * BLOCK_K
    last = tl.minimum(first + steps * BLOCK_K, K)
    if CHAINED and LINES > 0:
        _fetch(weight + tl.minimum(output, N - 1).to(tl.int64)[:, None] * K, first, last, LINES)
    wait_before(CHAINED)
    weights = weight + output.to(tl.int64)[:, None] * K
    acc = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
    for start in range(first, last, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = tl.load(
            weights + k[None, :],
            mask=(output < N)[:, None] & (k < last)[None, :],
            other=0.0,
            eviction_policy="evict_first",  # read once a round: x and sums stay in the L2 cache
        )
        xs = tl.load(
            x + row[:, None] * x_stride + k[None, :],
            mask=(row < rows)[:, None] & (k < last)[None, :],
            other=0.0,
        )
        acc += tl.dot(w, tl.trans(xs), input_precision="ieee")

    inside = (output < N)[:, None] & (row < rows)[None, :]
    at = row[None, :] * N + output[:, None]
    if SPLIT_K > 1:
        tl.store(part + split * rows * N + at, acc, mask=inside)
        tl.debug_barrier()  # every thread's sums are written before one thread says so
        if tl.atomic_add(arrived + tile, 1) < SPLIT_K - 1:
            return
        tl.store(arrived + tile, 0)  # as the next launch needs it
        acc = tl.zeros([BLOCK_N, ROWS], dtype=tl.float32)
        for other in tl.static_range(SPLIT_K):  # unrolled, so that all are on their way at once
            # Other multiprocessors wrote these: past the L1 cache.
            acc += tl.load(
                part + other * rows * N + at, mask=inside, other=0.0, cache_modifier=".cg"
            )
    if HAS_BIAS:
        acc += tl.load(bias + output, mask=output < N, other=0.0).to(tl.float32)[:, None]
    if HAS_RESIDUAL:
        # Rounded before it is added, as two operations would.
        acc = acc.to(out.dtype.element_ty).to(tl.float32)
        acc += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class GemmWork:
    """Where splits leave their sums. One launch at a time may use it.

    part: [floats] float32. arrived: [tiles] int32, zero between launches.
    """

    part: Tensor
    arrived: Tensor


def default_shape(outputs: int, inputs: int) -> GemmShape:
    """Enough programs to keep every multiprocessor reading, with runs of K that pay for the sum."""
    block_n, block_k = 64, 128
    tiles, runs = triton.cdiv(outputs, block_n), triton.cdiv(inputs, block_k)
    split = min(max(triton.cdiv(_PROGRAMS, tiles), 1), max(runs // 4, 1), 16)
    return GemmShape(block_n, block_k, triton.cdiv(runs, triton.cdiv(runs, split)))


def gemm_work(
    shapes: list[tuple[int, int]], rows: int, device: torch.device | str, most_splits: int = 16
) -> GemmWork:
    """Work space for products with weights of these (N, K) and up to `rows` rows."""
    most = max(outputs for outputs, _ in shapes)
    return GemmWork(
        part=torch.empty(most_splits * rows * most, device=device),
        arrived=torch.zeros(triton.cdiv(most, 16), dtype=torch.int32, device=device),
    )


def skinny_gemm(
    x: Tensor,
    weight: Tensor,
    work: GemmWork,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    shape: GemmShape | None = None,
) -> Tensor:
    """y [M, N]. x: [M, K], rows may lie apart. weight: [N, K] contiguous. bias: [N]. residual, out:
    [M, N] contiguous; out may be residual, or of another dtype (float32 logits of a bfloat16
    head). M is 1 to 64. Sums are float32."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    shape = shape or wins(rows, outputs, inputs) or default_shape(outputs, inputs)
    assert 1 <= rows <= MOST_ROWS, f"{rows} rows, this kernel takes 1 to {MOST_ROWS}"
    assert x.stride(1) == 1, "a row of x must be contiguous"
    assert weight.is_contiguous(), "weight must be contiguous"
    assert weight.shape[1] == inputs
    assert x.dtype == weight.dtype, "x and weight must have one dtype"
    assert residual is None or (residual.is_contiguous() and residual.shape == (rows, outputs))
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device) if out is None else out
    assert out.is_contiguous(), "out must be contiguous"
    assert out.shape == (rows, outputs)
    tiles = triton.cdiv(outputs, shape.block_n)
    if shape.split_k > 1:
        assert work.part.numel() >= shape.split_k * rows * outputs, "the work space is too small"
        assert work.arrived.numel() >= tiles, "the work space is too small"
    _skinny_gemm[(tiles, shape.split_k)](
        x,
        weight,
        bias,
        residual,
        out,
        work.part,
        work.arrived,
        rows,
        outputs,
        inputs,
        x.stride(0),
        ROWS=max(triton.next_power_of_2(rows), 16),
        BLOCK_N=shape.block_n,
        # float32 products are unrolled into single instructions: short runs keep them in registers.
        BLOCK_K=shape.block_k if x.element_size() == 2 else min(shape.block_k, 32),
        SPLIT_K=shape.split_k,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        LINES=shape.ahead,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **chained(x.device),
    )
    return out


def skinny_gemm_ref(
    x: Tensor,
    weight: Tensor,
    work: GemmWork | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    shape: GemmShape | None = None,
) -> Tensor:
    """The twin of `skinny_gemm`; it needs no work space and no shape."""
    dtype = x.dtype if out is None else out.dtype
    y = x.float() @ weight.float().T
    y = y if bias is None else y + bias.float()
    y = y.to(dtype)
    y = y if residual is None else (y.float() + residual.float()).to(dtype)
    return y if out is None else out.copy_(y)
