"""y = x W^T + b, in the memory layout that is fastest for few rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sgl_spec.layers.products import PLAIN, form_of, hold, padded_rows, product

if TYPE_CHECKING:
    from sgl_spec.layers.skinny import Skinny  # needs triton, which a CPU does without

_packed_add: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.binary


class Linear:
    """A dense layer. weight: [out, in], held in the form that is fastest on a CPU. bias: [out] or
    None."""

    __slots__ = ("bias", "few_weight", "form", "skinny", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        self.skinny: Skinny | None = None
        self.form = form_of(weight)
        self.weight = hold(weight, self.form.layout)
        self.few_weight = hold(weight, self.form.few_layout) if self.form.few else None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in] -> [rows, out]."""
        if self.skinny is None:
            return product(self.form.layout_at(len(x)), x, self._copy_for(len(x)), self.bias)
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
        if self.skinny is not None and (found := self._by_skinny(x, residual)) is not None:
            return found
        layout, weight = self.form.layout_at(len(x)), self._copy_for(len(x))
        if layout == "packed" and padded_rows(len(x)) == len(x):
            return _packed_add(x, residual, weight, self.bias, "add")
        if layout == "transposed" and self.bias is None:
            return torch.addmm(residual, x, weight)
        return product(layout, x, weight, self.bias).add_(residual)

    def add_into(self, stream: Tensor, x: Tensor) -> None:
        """stream += layer(x), in one launch where there is no bias. stream: [rows, out]."""
        if self.skinny is not None and self._by_skinny(x, stream, stream) is not None:
            return
        if self.form != PLAIN or self.bias is not None:
            stream.add_(self(x))
        else:
            stream.addmm_(x, self.weight.t())

    def plain_weight(self) -> Tensor:
        """The weight [out, in] in the ordinary layout: a copy where it is packed, a view where
        it is transposed."""
        if self.form.layout == "packed":
            return self.weight.to_dense()
        return self.weight.t() if self.form.layout == "transposed" else self.weight

    @property
    def size(self) -> tuple[int, int]:
        """(out, in) of the weight."""
        first, second = self.weight.shape
        return (second, first) if self.form.layout == "transposed" else (first, second)

    def tensors(self) -> list[Tensor]:
        """The weight as stored, a second copy and the bias if there are any."""
        stored = (self.weight, self.few_weight, self.bias)
        return [tensor for tensor in stored if tensor is not None]

    def _copy_for(self, rows: int) -> Tensor:
        return self.weight if self.few_weight is None or rows > self.form.few else self.few_weight

    def _by_skinny(
        self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor | None:
        """By our own kernel, if it is faster for so many rows."""
        assert self.skinny is not None
        shape = self.skinny.shape(x, self.weight, biased=self.bias is not None)
        if shape is None:
            return None
        return self.skinny.product(x, self.weight, self.bias, residual, out, shape)


def use_tuned(linears: Sequence[Linear], device: torch.device, *, strict: bool = False) -> None:
    """Let the layers of one model, or some of them, take the measured best product; they share a
    work space. strict: of those that give a row the same bits beside any others."""
    from sgl_spec.layers.skinny import Skinny
    from sgl_spec.layers.unsplit import Unsplit

    plain = [layer for layer in linears if layer.form == PLAIN]
    shapes = [(layer.weight.shape[0], layer.weight.shape[1]) for layer in plain]
    shared = Unsplit(shapes, device) if strict else Skinny(shapes, device)
    for layer in plain:
        layer.skinny = shared
