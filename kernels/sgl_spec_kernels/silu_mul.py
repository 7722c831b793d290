"""The gated activation of an MLP: out = silu(gate) * up, silu(g) = g / (1 + exp(-g)), rounded
once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chain, chained

BLOCK = 1024


@triton.jit
def _silu_mul(gate_up, out, width, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    chain(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = gate_up + row * 2 * width + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[T, F]. gate_up: [T, 2 F] contiguous, the gates first."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous(), "gate_up must be contiguous"
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[(rows, triton.cdiv(width, BLOCK))](
        gate_up,
        out,
        width,
        BLOCK=BLOCK,
        num_warps=4,
        **chained(gate_up.device),
    )
    return out


def silu_mul_ref(gate_up: Tensor) -> Tensor:
    """The twin of `silu_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)
