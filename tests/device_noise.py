"""A kernel that writes out what the device functions of `sgl_spec_kernels.noise` return."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.noise import exponential, noise_bits, row_keys, stream_keys


@triton.jit
def _probe(seed, positions, keys, streams, bits, variates, stream, depth, COUNT: tl.constexpr):
    row = tl.program_id(0)
    seeds, where = tl.load(seed + row), tl.load(positions + row)
    first, second = row_keys(seeds, where)
    token = tl.arange(0, COUNT)
    found = noise_bits(first, second, token)
    tl.store(bits + row * COUNT + token, found.to(tl.int32, bitcast=True))
    tl.store(variates + row * COUNT + token, exponential(found))
    tl.store(keys + row * 2, first.to(tl.int32, bitcast=True))
    tl.store(keys + row * 2 + 1, second.to(tl.int32, bitcast=True))
    first, second = stream_keys(seeds, where, stream, depth)
    tl.store(streams + row * 2, first.to(tl.int32, bitcast=True))
    tl.store(streams + row * 2 + 1, second.to(tl.int32, bitcast=True))


def probe(
    seed: Tensor, positions: Tensor, stream: int, depth: int, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row keys [R, 2], stream keys [R, 2], bits and exponential variates [R, count]."""
    rows = len(seed)
    keys, streams = torch.zeros(2, rows, 2, dtype=torch.int32, device=seed.device)
    bits = torch.zeros(rows, count, dtype=torch.int32, device=seed.device)
    variates = torch.zeros(rows, count, device=seed.device)
    _probe[(rows,)](seed, positions, keys, streams, bits, variates, stream, depth, COUNT=count)
    return keys, streams, bits, variates
