"""Counter-based noise: 32 random bits, or an exponential variate, for each (seed, position, token).

Rules that sample the drafts as well need more than one number there: each `Stream` is a source of
its own.

All arithmetic is what a GPU kernel does as well: 32-bit wrapping integers, then fp32.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_LARGEST_UNIFORM = 1.0 - 2.0**-24  # the largest fp32 below 1: keeps -log1p(-u) finite


def exponential(bits: Tensor) -> Tensor:
    """Standard exponential variates from 32 random bits k: -log1p(-(k + 1/2) 2^-32), float32.

    The midpoint keeps the small values exact, and small values are the ones that win an argmin; the
    clamp keeps the largest finite (16.6). bits: int32, read as unsigned.
    """
    uniform = bits.view(torch.uint32).to(torch.float32).add_(0.5).mul_(2.0**-32)
    return uniform.clamp_(max=_LARGEST_UNIFORM).neg_().log1p_().neg_()


def row_keys(seed: Tensor, positions: Tensor) -> Tensor:
    """[R, 2] int32: two independent hash words of (seed, position) for each row."""
    word = seed.to(torch.int32)
    key = torch.stack([word + lane for lane in _LANES], 1)
    _mix(key)
    _mix(key.add_((seed >> 32).to(torch.int32)[:, None]))
    return _mix(key.add_(positions.to(torch.int32)[:, None]))


class Stream(IntEnum):
    """What noise is for, where it is not the target's own draw (`row_keys`)."""

    PROPOSAL = 1
    ACCEPTANCE = 2
    RESIDUAL = 3


def stream_keys(seed: Tensor, positions: Tensor, stream: Stream, depth: int | Tensor) -> Tensor:
    """[R, 2] int32: `row_keys` for one stream, in a round that reaches `positions` at `depth` (one
    for all, or [R]) below its root.

    The depth keeps rounds apart. A rule that looks ahead lets drafts at later positions decide
    about an earlier one; a next round that drew its drafts there from the same noise would depend
    on what the last one rejected.
    """
    depth = depth[:, None].to(torch.int32) if isinstance(depth, Tensor) else depth
    return _mix(row_keys(seed, positions).add_(depth * len(Stream) + int(stream)))


def uniform(bits: Tensor) -> Tensor:
    """Numbers inside (0, 1) from 32 random bits k: (k + 1/2) 2^-32, float64, never rounded to an
    end."""
    return (bits.to(torch.int64) & _WORD).to(torch.float64).add_(0.5).mul_(2.0**-32)


def noise_bits(keys: Tensor, tokens: Tensor) -> Tensor:
    """[R, n] int32: 32 random bits of (row key, token).

    The first key word offsets the token before the first round, the second enters after it, so that
    rows whose counters happen to overlap still differ by two full rounds. For one key, distinct
    tokens give distinct bits. tokens: [n] or [R, n] int32.
    """
    x = tokens + keys[:, :1]
    return _mix(x, keys[:, 1:])


def _mix(x: Tensor, key: Tensor | None = None) -> Tensor:
    """Three rounds of xor-shift and multiply, in place: a bijection of words that avalanches.

    Shifts and constants: the "triple32" search result of C. Wellons, hash-prospector.
    """
    _xor_shift(x, 17)
    _xor_shift(x.mul_(_signed(0xED5AD4BB)), 11)
    if key is not None:
        x.add_(key)
    _xor_shift(x.mul_(_signed(0xAC4C1B51)), 15)
    return _xor_shift(x.mul_(_signed(0x31848BAB)), 14)


def _xor_shift(x: Tensor, bits: int) -> Tensor:
    return x.bitwise_xor_((x >> bits).bitwise_and_(_WORD >> bits))  # masked: the shift is unsigned


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


_LANES = (_signed(0x9E3779B9), 0x243F6A88)
