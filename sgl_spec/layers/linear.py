"""y = x W^T + b, in the memory layout that is fastest for few rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_packed: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
_packed_add: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.binary


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can hold this weight in its own blocked layout and multiply by it natively.

    Measured on SmolLM2 (2 cores, AVX-512, fp32, all linear layers, ms at 1 / 4 / 16 / 64 rows):
    packed 16 / 14 / 19 / 48, `F.linear` 35 / 50 / 50 / 126, `(w @ x.T).T` 35 / 15 / 45 / 106.
    """
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


class Linear:
    """A dense layer. weight: [out, in], repacked where that pays. bias: [out] or None."""

    __slots__ = ("bias", "packed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        self.packed = can_pack(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in] -> [rows, out]."""
        if self.packed:
            return _packed(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + layer(x). residual: [rows, out], left as it is."""
        if self.packed:
            return _packed_add(x, residual, self.weight, self.bias, "add")
        return F.linear(x, self.weight, self.bias).add_(residual)

    def plain_weight(self) -> Tensor:
        """The weight [out, in] in the ordinary layout: a copy where it is packed."""
        return self.weight.to_dense() if self.packed else self.weight

    def tensors(self) -> list[Tensor]:
        """The weight as stored, and the bias if there is one."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]
