"""Attention over KV regions: the twin against a plain softmax, the kernel against the twin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sgl_spec_kernels import region_attn_ref

# heads, kv_heads, head_dim, capacity, lens: one position, the edges of a block of 64, a full region
CASES = {
    "one position": (4, 4, 16, 64, [1, 1]),
    "around a block's end": (6, 2, 16, 192, [63, 64, 65, 128]),
    "three queries a head, long beside short": (9, 3, 64, 256, [1, 200, 256]),
}


def inputs(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Regions as a generator has them: slices of one tensor, finite garbage beyond each length."""
    heads, kv_heads, dim, capacity, lens = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    kv = 3 * torch.randn(2, len(lens), kv_heads, capacity, dim, generator=generator)
    q = torch.randn(len(lens), heads, dim, generator=generator)
    return q, kv[0], kv[1], torch.tensor(lens)


def plain(q: Tensor, k: Tensor, v: Tensor, lens: Tensor) -> Tensor:
    """Head by head, in float64."""
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(q, dtype=torch.float64)
    for row, length in enumerate(lens.tolist()):
        for head in range(q.shape[1]):
            keys = k[row, head // group, :length].double()
            weights = (keys @ q[row, head].double() * q.shape[2] ** -0.5).softmax(0)
            out[row, head] = weights @ v[row, head // group, :length].double()
    return out.view(len(q), -1)


@pytest.mark.parametrize("name", CASES)
def test_twin_equals_a_plain_softmax(name: str) -> None:
    q, k, v, lens = inputs(name)
    width = int(lens.max())
    found = region_attn_ref.region_attention(q, k, v, lens, width)
    torch.testing.assert_close(found.double(), plain(q, k, v, lens), atol=2e-5, rtol=1e-5)


def test_kernel_equals_its_twin_in_the_interpreter() -> None:
    """In a process of its own: triton reads the variable when it is imported. NaN beyond each
    length proves that the kernel reads nothing there."""
    pytest.importorskip("triton")
    script = """
import torch
from test_region_attn import CASES, inputs
from sgl_spec_kernels import region_attn, region_attn_ref
for name in CASES:
    q, k, v, lens = inputs(name)
    expected = region_attn_ref.region_attention(q, k, v, lens, k.shape[2])
    for row, length in enumerate(lens.tolist()):
        k[row, :, length:] = v[row, :, length:] = float("nan")
    found = region_attn.region_attention(q, k, v, lens, k.shape[2])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5, msg=lambda m: name + m)
    print(name)
"""
    here = Path(__file__).resolve()
    paths = [str(here.parent), str(here.parents[1]), str(here.parents[2] / "kernels")]
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == list(CASES)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_a_plain_softmax_on_the_gpu(
    name: str, dtype: torch.dtype, error: float
) -> None:
    from sgl_spec_kernels import region_attn

    q, k, v, lens = (part.cuda() for part in inputs(name))
    q, k, v = (part.to(dtype) for part in (q, k, v))
    found = region_attn.region_attention(q, k, v, lens, k.shape[2]).double()
    expected = plain(q, k, v, lens)
    assert (found - expected).norm() / expected.norm() < error
