"""Products whose K is never split: a row's result is the same bits for any number of rows.

What makes rows depend on each other is the split of K alone (docs/strict.md): a sum over K in its
order has the same bits whatever the tiles. Libraries split K where they see fit, and do not say so.
So for each weight's shape and number of rows the fastest of several ways that gives the bits of the
unsplit kernel is found when that number first comes, before a graph is captured, and kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_spec.layers.skinny import Skinny, linear_by_lt, lt_wins
from sgl_spec_kernels.silu_mul import silu_mul
from sgl_spec_kernels.skinny_gemm import MOST_ROWS, UNSPLIT, GemmShape, skinny_gemm

logger = logging.getLogger(__name__)

REFERENCE = GemmShape(64, 128, 1)
_TRIED_ROWS = 64  # at least, of each way: a split shows in some outputs of a thousand


@dataclass(frozen=True, slots=True)
class Pin:
    """One way to do a product. name: `kernel`, `cublas`, `cublaslt` or `pieces`; shape: of the
    kernel."""

    name: str
    shape: GemmShape | None = None


class Unsplit(Skinny):
    """See `Skinny`, with ways that are verified. pins: by (N, K, rows, whether there is a bias)."""

    def __init__(self, shapes: list[tuple[int, int]], device: torch.device) -> None:
        super().__init__(shapes, device)
        self.pins: dict[tuple[int, int, int, bool], Pin] = {}
        self._gates: dict[tuple[int, int, int], bool] = {}

    def shape(self, x: Tensor, weight: Tensor, *, biased: bool) -> GemmShape | None:
        """See `Skinny.shape`."""
        return self._pin(x, weight, biased).shape

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Skinny.linear`."""
        return self._by(self._pin(x, weight, bias is not None), x, weight, bias)

    def gated(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """See `Skinny.gated`; only where it has the bits of two kernels."""
        key = (*weight.shape, x.shape[0])
        if key not in self._gates:
            self._gates[key] = self._verified_gate(x, weight)
        return super().gated(x, weight) if self._gates[key] else None

    def _pin(self, x: Tensor, weight: Tensor, biased: bool) -> Pin:
        key = (*weight.shape, x.shape[0], biased)
        found = self.pins.get(key)
        if found is None:
            found = self.pins[key] = self._first_right(x, weight, biased)
        return found

    def _first_right(self, like: Tensor, weight: Tensor, biased: bool) -> Pin:
        """The first way, in the order of their speed, with the bits of the reference."""
        rows = like.shape[0]
        inputs = list(_random_rows(like))
        bias = _random_like(weight[:, 0]) if biased else None
        expected = [self._in_pieces(x, weight, bias) for x in inputs]
        for pin in _ways(rows, weight):
            way = partial(self._by, pin)
            if pin.name == "pieces" or _same(way, inputs, weight, bias, expected):
                logger.debug("%s x %s: %s", rows, tuple(weight.shape), pin)
                return pin
        raise AssertionError("pieces are the reference")

    def _verified_gate(self, like: Tensor, weight: Tensor) -> bool:
        inputs = list(_random_rows(like))
        if Skinny.gated(self, inputs[0], weight) is None:
            return False
        expected = [silu_mul(self._in_pieces(x, weight, None)) for x in inputs]
        return _same(lambda x, w, _: Skinny.gated(self, x, w), inputs, weight, None, expected)

    def _by(self, pin: Pin, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if pin.name == "kernel":
            assert pin.shape is not None
            return self.product(x, weight, bias, None, None, pin.shape)
        if pin.name == "cublas":
            return F.linear(x, weight, bias)
        if pin.name == "cublaslt":
            return linear_by_lt(x, weight, bias)
        return self._in_pieces(x, weight, bias)

    def _in_pieces(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """By the kernel, some rows at a time: always right, and slow for many rows."""
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
        for start in range(0, x.shape[0], MOST_ROWS):
            part = slice(start, start + MOST_ROWS)
            skinny_gemm(x[part], weight, self._work, bias, None, out[part], REFERENCE)
        return out


def _ways(rows: int, weight: Tensor) -> Iterator[Pin]:
    """All ways, the fastest first where that was measured."""
    outputs, inputs = weight.shape
    if rows <= MOST_ROWS and weight.element_size() == 2:
        for most, shape in UNSPLIT.get((outputs, inputs), ()):
            if rows <= most:
                yield Pin("kernel", shape)
                break
    if weight.device.type == "cuda":
        libraries = [Pin("cublas"), Pin("cublaslt")]
        halves = weight.element_size() == 2
        # At few rows cuBLAS splits K where cuBLASLt does not.
        better = halves and (rows <= MOST_ROWS or lt_wins(rows, outputs, inputs))
        yield from reversed(libraries) if better else libraries
    if rows <= MOST_ROWS:
        yield Pin("kernel", REFERENCE)
    yield Pin("pieces")


def _random_like(like: Tensor) -> Tensor:
    generator = torch.Generator(device=like.device).manual_seed(like.numel())
    shape, device = like.shape, like.device
    return torch.randn(shape, generator=generator, device=device).to(like.dtype)


def _random_rows(like: Tensor) -> Iterator[Tensor]:
    """As many inputs in the shape of `like` as show a split."""
    tries = max(1, -(-_TRIED_ROWS // like.shape[0]))
    blocks = _random_like(like.new_empty(tries, *like.shape))
    yield from blocks


def _same(
    way: Callable[[Tensor, Tensor, Tensor | None], Tensor | None],
    inputs: list[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    expected: list[Tensor],
) -> bool:
    """Whether it gives these bits."""
    wrong = torch.zeros((), dtype=torch.bool, device=weight.device)
    for x, right in zip(inputs, expected, strict=True):
        found = way(x, weight, bias)
        assert found is not None
        wrong |= (found != right).any()
    return not bool(wrong)
