"""RMSNorm with residual, rotary with KV write and the gated activation, each against its twin."""

from __future__ import annotations

import pytest
import torch
from kernel_runs import GPU_DTYPES, INTERPRETED, relative_error
from torch import Tensor

from sgl_spec_kernels.embed import embed_beside, embed_beside_ref, embed_norm, embed_norm_ref
from sgl_spec_kernels.rms_norm import rms_norm, rms_norm_ref
from sgl_spec_kernels.rope_kv import rope_kv, rope_kv_ref
from sgl_spec_kernels.silu_mul import silu_mul, silu_mul_ref

# Widths: below, at and beyond a block, and no power of two.
NORMS = [(1, 16), (3, 24), (2, 576), (5, 1025), (64, 4096)]
ROPES = [(1, 2, 1, 16), (3, 9, 3, 24), (7, 6, 2, 32), (65, 32, 8, 128)]
GATES = [(1, 7), (2, 1024), (3, 1025), (33, 14336)]


def check_norm(rows: int, width: int, device: str, dtype: torch.dtype, error: float) -> None:
    wide = torch.randn(rows, 2 * width, device=device).to(dtype)
    weight = torch.randn(width, device=device).to(dtype)
    for residual in (None, torch.randn(rows, width, device=device).to(dtype)):
        streams = [None if residual is None else residual.clone() for _ in range(2)]
        outs = [torch.full_like(wide, torch.nan) for _ in range(2)]
        copies = [torch.full_like(wide, torch.nan) for _ in range(2)]
        for norm, stream, out, copy in zip(
            (rms_norm, rms_norm_ref), streams, outs, copies, strict=True
        ):
            into = None if stream is None else copy[:, width:]
            norm(wide[:, width:], weight, 1e-5, stream, out[:, :width], into)
        assert relative_error(outs[0][:, :width], outs[1][:, :width]) < error
        assert outs[0][:, width:].isnan().all(), "it wrote beyond its columns"
        if residual is not None:
            assert torch.equal(streams[0], streams[1])
            assert torch.equal(copies[0][:, width:], streams[0])
            assert copies[0][:, :width].isnan().all(), "it wrote beyond its columns"


def check_embed(rows: int, width: int, device: str, dtype: torch.dtype, error: float) -> None:
    table = torch.randn(50, width, device=device).to(dtype)
    tokens = torch.randint(50, (rows,), device=device)
    wide = torch.randn(rows, 2 * width, device=device).to(dtype)
    weights = torch.randn(2, width, device=device).to(dtype)
    found = embed_norm(table, tokens, weights[0], 1e-5)
    twin = embed_norm_ref(table, tokens, weights[0], 1e-5)
    assert torch.equal(found[0], twin[0])
    assert relative_error(found[1], twin[1]) < error
    for norms in (None, (weights[0], weights[1])):
        streams = [torch.full((rows, width), torch.nan, device=device).to(dtype) for _ in range(2)]
        both = [
            op(table, tokens, wide[:, width:], norms, 1e-5, stream)
            for op, stream in zip((embed_beside, embed_beside_ref), streams, strict=True)
        ]
        plain = embed_beside(table, tokens, wide[:, width:], norms, 1e-5)
        assert torch.equal(both[0], plain)
        assert torch.equal(streams[0], both[0][:, width:])
        assert relative_error(both[0], both[1]) < error
        assert torch.equal(both[0], both[1]) or norms is not None


def check_rope(
    shape: tuple[int, int, int, int], normed: bool, device: str, dtype: torch.dtype, error: float
) -> None:
    tokens, heads, kv_heads, dim = shape
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=device).to(dtype)
    angles = torch.rand(50, dim // 2, device=device) * 6
    positions = torch.randint(50, (tokens,), device=device)
    slots = torch.randperm(tokens + 9, device=device)[:tokens]
    slots[tokens // 2 :: 5] = -1
    weights = torch.rand(2, dim, device=device).to(dtype)
    norms = (weights[0], weights[1]) if normed else None
    found: list[tuple[Tensor, ...]] = []
    for op in (rope_kv, rope_kv_ref):
        caches = torch.full((2, tokens + 9, kv_heads, dim), -7.0, device=device).to(dtype)
        q = op(qkv.clone(), *caches, angles.cos(), angles.sin(), positions, slots, norms, 1e-5)
        found.append((q, *caches))
    for mine, twin in zip(*found, strict=True):
        assert relative_error(mine, twin) < error
    assert torch.equal(found[0][2], found[1][2]), "values are copied as they are"


def check_silu(rows: int, width: int, device: str, dtype: torch.dtype, error: float) -> None:
    gate_up = 4 * torch.randn(rows, 2 * width, device=device)
    gate_up[0, :2] = torch.tensor([-90.0, 90.0])  # exp overflows
    gate_up = gate_up.to(dtype)
    assert relative_error(silu_mul(gate_up), silu_mul_ref(gate_up)) < error


@INTERPRETED
@pytest.mark.parametrize(("rows", "width"), NORMS[:4])
def test_rms_norm(rows: int, width: int) -> None:
    check_norm(rows, width, "cpu", torch.float32, 1e-6)
    check_norm(rows, width, "cpu", torch.float16, 2e-3)


@INTERPRETED
@pytest.mark.parametrize(("rows", "width"), NORMS[:4])
def test_embed(rows: int, width: int) -> None:
    check_embed(rows, width, "cpu", torch.float32, 1e-6)
    check_embed(rows, width, "cpu", torch.float16, 2e-3)


@INTERPRETED
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", ROPES[:3])
def test_rope_kv(shape: tuple[int, int, int, int], normed: bool) -> None:
    check_rope(shape, normed, "cpu", torch.float32, 1e-6)
    check_rope(shape, normed, "cpu", torch.float16, 2e-3)


@INTERPRETED
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize(("rows", "width"), GATES[:3])
def test_silu_mul(rows: int, width: int) -> None:
    check_silu(rows, width, "cpu", torch.float32, 1e-6)
    check_silu(rows, width, "cpu", torch.float16, 2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "error"), GPU_DTYPES)
def test_on_the_gpu(dtype: torch.dtype, error: float) -> None:
    for rows, width in NORMS:
        check_norm(rows, width, "cuda", dtype, error)
        check_embed(rows, width, "cuda", dtype, error)
    for shape in ROPES:
        check_rope(shape, False, "cuda", dtype, error)
        check_rope(shape, True, "cuda", dtype, error)
    for rows, width in GATES:
        check_silu(rows, width, "cuda", dtype, error)
