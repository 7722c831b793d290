"""The product for few rows against its twin."""

from __future__ import annotations

import pytest
import torch
from kernel_runs import GPU_DTYPES, INTERPRETED, relative_error

from sgl_spec_kernels.skinny_gemm import (
    TUNED,
    GemmShape,
    default_shape,
    gemm_work,
    skinny_gemm,
    skinny_gemm_ref,
    wins,
)

# rows, N, K, shape: one split, uneven splits, a split of nothing, edges of N and K
SMALL = [
    (1, 16, 16, GemmShape(16, 16, 1)),
    (3, 40, 72, GemmShape(16, 16, 3)),
    (17, 33, 50, GemmShape(32, 16, 3)),
    (16, 16, 40, GemmShape(16, 16, 4)),
]
LARGE = [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (576, 1536), (1000, 520)]


def check(
    rows: int,
    outputs: int,
    inputs: int,
    shape: GemmShape | None,
    device: str,
    dtype: torch.dtype,
    error: float,
) -> None:
    work = gemm_work([(outputs, inputs)], rows, device)
    x = torch.randn(rows, inputs + 8, device=device).to(dtype)[:, :inputs]
    weight = torch.randn(outputs, inputs, device=device).to(dtype)
    bias = torch.randn(outputs, device=device).to(dtype)
    residual = torch.randn(rows, outputs, device=device).to(dtype)
    for more in ((None, None), (bias, None), (None, residual), (bias, residual)):
        expected = skinny_gemm_ref(x, weight, None, *more)
        work.part.fill_(torch.nan)
        found = skinny_gemm(x, weight, work, *more, shape=shape)
        assert relative_error(found, expected) < error
        assert not work.arrived.any(), "the counters are not back at zero"
    wide = torch.empty(rows, outputs, device=device)
    skinny_gemm(x, weight, work, out=wide, shape=shape)
    assert relative_error(wide, skinny_gemm_ref(x, weight, out=torch.empty_like(wide))) < 1e-5
    stream = residual.clone()
    skinny_gemm(x, weight, work, None, stream, stream, shape)  # in place of the residual
    assert relative_error(stream, skinny_gemm_ref(x, weight, None, None, residual)) < error


@INTERPRETED
@pytest.mark.parametrize(("rows", "outputs", "inputs", "shape"), SMALL)
def test_equals_its_twin(rows: int, outputs: int, inputs: int, shape: GemmShape) -> None:
    check(rows, outputs, inputs, shape, "cpu", torch.float32, 1e-6)
    check(rows, outputs, inputs, shape, "cpu", torch.float16, 2e-3)


@pytest.mark.parametrize(("outputs", "inputs"), LARGE)
def test_default_shapes_leave_no_split_empty(outputs: int, inputs: int) -> None:
    shape = default_shape(outputs, inputs)
    runs = -(-inputs // shape.block_k)
    steps = -(-runs // shape.split_k)
    assert (shape.split_k - 1) * steps < runs
    assert shape.split_k <= 16


def test_shapes_go_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = GemmShape(64, 128, 4), GemmShape(128, 64, 2)
    monkeypatch.setitem(TUNED, (40, 72), ((1, few), (16, None), (32, many)))
    found = [wins(rows, 40, 72) for rows in (1, 2, 16, 17, 32, 33)]
    assert found == [few, None, None, many, many, None]
    assert wins(1, 72, 40) is None


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "error"), GPU_DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), LARGE)
def test_equals_its_twin_on_the_gpu(
    outputs: int, inputs: int, dtype: torch.dtype, error: float
) -> None:
    for rows in (1, 2, 15, 16, 17, 32, 64):
        check(rows, outputs, inputs, None, "cuda", dtype, error)
