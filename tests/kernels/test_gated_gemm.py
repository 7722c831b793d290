"""The gated product against its twin."""

from __future__ import annotations

import pytest
import torch
from kernel_runs import INTERPRETED, relative_error

from sgl_spec_kernels.gated_gemm import (
    MOST_ROWS,
    TUNED,
    GatedShape,
    gated_gemm,
    gated_gemm_ref,
    pieces,
    wins,
)
from sgl_spec_kernels.silu_mul import silu_mul
from sgl_spec_kernels.skinny_gemm import gemm_work, skinny_gemm

# rows, outputs, inputs: one piece, two pieces, rows, outputs and steps that end inside a block
SMALL = [(1, 16, 16), (20, 48, 64), (33, 40, 72), (52, 17, 24)]


def check(rows: int, width: int, inputs: int, shape: GatedShape, device: str, dtype: str) -> None:
    kind = getattr(torch, dtype)
    x = torch.randn(rows, inputs + 8, device=device).to(kind)[:, :inputs]
    weight = torch.randn(2 * width, inputs, device=device).to(kind) * 8 / inputs**0.5
    error = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
    assert relative_error(gated_gemm(x, weight, shape), gated_gemm_ref(x, weight)) < error


@INTERPRETED
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("rows", "width", "inputs"), SMALL)
def test_equals_its_twin(rows: int, width: int, inputs: int, dtype: str) -> None:
    check(rows, width, inputs, GatedShape(16, 16, 4, 3), "cpu", dtype)


@INTERPRETED
def test_equals_a_product_and_the_activation() -> None:
    """Where sums are exact, to the bit: it rounds where two kernels round."""
    x, weight = (torch.randint(-3, 4, shape) / 4 for shape in ((21, 32), (96, 32)))
    x, weight = x.half(), weight.half()
    apart = silu_mul(skinny_gemm(x, weight, gemm_work([(96, 32)], 21, "cpu")))
    assert torch.equal(gated_gemm(x, weight, GatedShape(16, 16, 4, 3)), apart)


def test_pieces_hold_the_rows_and_little_more() -> None:
    for rows in range(1, MOST_ROWS + 1):
        first, second = pieces(rows)
        assert rows <= first + second < max(1.34 * rows, rows + 16)
        assert first > second
        assert all(piece & (piece - 1) == 0 for piece in (first, second))
    assert pieces(48) == (32, 16)
    assert pieces(192) == (128, 64)
    assert pieces(256) == (256, 0)


def test_shapes_go_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = GatedShape(64, 128, 4, 4), GatedShape(128, 64, 8, 3)
    monkeypatch.setitem(TUNED, (40, 72), ((1, None), (16, few), (32, many)))
    assert [wins(rows, 40, 72) for rows in (1, 2, 16, 17, 32, 33)] == [
        None, few, few, many, many, None,
    ]  # fmt: skip
    assert wins(2, 72, 40) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [shape for _, shape in TUNED[28672, 4096] if shape is not None])
def test_equals_its_twin_on_the_gpu(shape: GatedShape, dtype: str) -> None:
    most = max(most for most, found in TUNED[28672, 4096] if found == shape)
    for rows in (1, 17, 48, 64, 100, 192, 256):
        if rows <= most:  # as it is used; more may not fit into registers and shared memory
            check(rows, 2100, 1000, shape, "cuda", dtype)
    check(most, 14336, 4096, shape, "cuda", dtype)
