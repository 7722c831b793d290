"""Products of few rows by our own kernel, where it was measured to beat torch's."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sgl_spec_kernels.skinny_gemm import MOST_ROWS, TUNED, GemmShape, GemmWork, skinny_gemm, wins


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

    def shape(self, x: Tensor, weight: Tensor) -> GemmShape | None:
        """How the kernel takes this product, None where torch's own is faster."""
        if weight.element_size() != 2:  # of the dtypes that were measured
            return None
        found: GemmShape | None = wins(x.shape[0], *weight.shape)
        return found

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
