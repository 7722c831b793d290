"""Products by our own kernels and by cuBLASLt, where they were measured to beat torch's choice."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_spec_kernels import gated_gemm
from sgl_spec_kernels.skinny_gemm import MOST_ROWS, TUNED, GemmShape, GemmWork, skinny_gemm, wins

LT_ROWS: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {
    (4096, 4096): ((33, 48), (65, 96)),
    (4096, 14336): ((65, 96),),
    (4096, 12288): ((65, 96), (129, 192)),
}
"""By (N, K): the rows, first to last, for which cuBLASLt chooses a better kernel than cuBLAS does:
it splits K, where N alone gives too few tiles. Measured on an H200 at the last of each."""

_BLAS = torch.backends.cuda.preferred_blas_library


class Skinny:
    """The tuned products of some weights [N, K], with one work space for all.

    They must be launched in one stream, one after the other.
    """

    def __init__(self, shapes: Iterable[tuple[int, int]], device: torch.device) -> None:
        """shapes: (N, K) of each weight."""
        floats, tiles = 1, 1
        for outputs, inputs in set(shapes):
            for most, shape in TUNED.get((outputs, inputs), ()):
                if shape is not None and shape.split_k > 1:
                    floats = max(floats, shape.split_k * min(most, MOST_ROWS) * outputs)
                    tiles = max(tiles, -(-outputs // shape.block_n))
        part = torch.empty(floats, dtype=torch.float32, device=device)
        self._work = GemmWork(part, torch.zeros(tiles, dtype=torch.int32, device=device))
        self._has_lt = device.type == "cuda"
        if self._has_lt:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says once that the choice is experimental
                linear_by_lt(torch.zeros(1, 8, device=device), torch.zeros(8, 8, device=device))

    def shape(self, x: Tensor, weight: Tensor, *, biased: bool) -> GemmShape | None:
        """How the kernel takes this product, None where torch's own is faster. biased: whether
        there is a bias."""
        if weight.element_size() != 2:  # of the dtypes that were measured
            return None
        found: GemmShape | None = wins(x.shape[0], *weight.shape)
        return found

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias by torch, with the library that is better for so many rows."""
        if self._has_lt and weight.element_size() == 2 and lt_wins(x.shape[0], *weight.shape):
            return linear_by_lt(x, weight, bias)
        return F.linear(x, weight, bias)

    def gated(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """silu(x W1^T) * (x W2^T), [M, N / 2], of a weight that has W1 above W2; None where two
        kernels are as fast."""
        if weight.element_size() != 2 or x.stride(0) * x.element_size() % 16:
            return None
        shape = gated_gemm.wins(x.shape[0], *weight.shape)
        return None if shape is None else gated_gemm.gated_gemm(x, weight, shape)

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        out: Tensor | None,
        shape: GemmShape,
    ) -> Tensor:
        """x W^T + bias + residual, [M, N]; `out` may be the residual."""
        found: Tensor = skinny_gemm(x, weight, self._work, bias, residual, out, shape)
        return found


def lt_wins(rows: int, outputs: int, inputs: int) -> bool:
    """Whether cuBLASLt was measured to be faster than cuBLAS."""
    return any(first <= rows <= last for first, last in LT_ROWS.get((outputs, inputs), ()))


def linear_by_lt(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`; torch takes the library from a setting of the process."""
    before = _BLAS()
    _BLAS("cublaslt")
    try:
        return F.linear(x, weight, bias)
    finally:
        _BLAS(before)
