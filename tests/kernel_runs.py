"""What kernel tests share. Without a GPU kernels run in triton's interpreter (see conftest)."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs on a GPU here, not in the interpreter"
)
# The error that one rounding of the result to the dtype, and of the weights in between, explains.
GPU_DTYPES = [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|; NaN where either holds one."""
    difference = found.double() - expected.double()
    return float(difference.norm() / expected.double().norm().clamp(min=1e-30))
