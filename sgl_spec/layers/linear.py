"""y = x W^T + b, in the memory layout that is fastest for few rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from sgl_spec.layers.skinny import Skinny  # needs triton, which a CPU does without

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

    __slots__ = ("bias", "packed", "skinny", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        self.skinny: Skinny | None = None
        self.packed = can_pack(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in] -> [rows, out]."""
        if self.packed:
            return _packed(x, self.weight, self.bias, "none", [], "")
        if self.skinny is None:
            return F.linear(x, self.weight, self.bias)
        found = self._by_skinny(x)
        return self.skinny.linear(x, self.weight, self.bias) if found is None else found

    def gated(self, x: Tensor) -> Tensor | None:
        """silu(first half of layer(x)) * second half, [rows, out / 2], if one kernel does it faster
        than two."""
        if self.skinny is None or self.bias is not None:
            return None
        return self.skinny.gated(x, self.weight)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + layer(x). residual: [rows, out], left as it is."""
        if self.packed:
            return _packed_add(x, residual, self.weight, self.bias, "add")
        if self.skinny is not None and (found := self._by_skinny(x, residual)) is not None:
            return found
        return F.linear(x, self.weight, self.bias).add_(residual)

    def add_into(self, stream: Tensor, x: Tensor) -> None:
        """stream += layer(x), in one launch where there is no bias. stream: [rows, out]."""
        if self.skinny is not None and self._by_skinny(x, stream, stream) is not None:
            return
        if self.packed or self.bias is not None:
            stream.add_(self(x))
        else:
            stream.addmm_(x, self.weight.t())

    def plain_weight(self) -> Tensor:
        """The weight [out, in] in the ordinary layout: a copy where it is packed."""
        return self.weight.to_dense() if self.packed else self.weight

    def tensors(self) -> list[Tensor]:
        """The weight as stored, and the bias if there is one."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def _by_skinny(
        self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor | None:
        """By our own kernel, if it is faster for so many rows."""
        assert self.skinny is not None
        shape = self.skinny.shape(x, self.weight)
        if shape is None:
            return None
        return self.skinny.product(x, self.weight, self.bias, residual, out, shape)


def use_tuned(linears: Sequence[Linear], device: torch.device) -> None:
    """Let the layers of one model, or some of them, take the measured best product; they share a
    work space."""
    from sgl_spec.layers.skinny import Skinny

    plain = [layer for layer in linears if not layer.packed]
    shared = Skinny([(layer.weight.shape[0], layer.weight.shape[1]) for layer in plain], device)
    for layer in plain:
        layer.skinny = shared
