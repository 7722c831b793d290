"""Device functions of the counter-based noise and of the order of tokens.

The integers are those of `sgl_spec.speculative.noise`, to the bit: 32-bit wrapping arithmetic keyed
by (seed, position, token). The order is that of `sgl_spec.speculative.filters`: falling logit, then
rising id.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

# Streams of noise; 0 is the target's own draw.
PROPOSAL, ACCEPTANCE, RESIDUAL = 1, 2, 3
_STREAMS = tl.constexpr(3)
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _shift(x, BITS: tl.constexpr):
    return x ^ (x >> BITS)


@triton.jit
def _mix(x):
    x = _shift(x, 17) * tl.full([], 0xED5AD4BB, tl.uint32)
    x = _shift(x, 11) * tl.full([], 0xAC4C1B51, tl.uint32)
    x = _shift(x, 15) * tl.full([], 0x31848BAB, tl.uint32)
    return _shift(x, 14)


@triton.jit
def _row_key(low, high, position, LANE: tl.constexpr):
    key = _mix(low + tl.full([], LANE, tl.uint32))
    return _mix(_mix(key + high) + position)


@triton.jit
def row_keys(seed, position):
    """Two uint32 words of a seed (int64) and a position."""
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    position = position.to(tl.uint32)
    first = _row_key(low, high, position, 0x9E3779B9)
    return first, _row_key(low, high, position, 0x243F6A88)


@triton.jit
def stream_keys(seed, position, stream, depth):
    """`row_keys` of one stream in a round that reaches the position at this depth."""
    first, second = row_keys(seed, position)
    offset = tl.cast(depth * _STREAMS + stream, tl.uint32)
    return _mix(first + offset), _mix(second + offset)


@triton.jit
def noise_bits(first, second, token):
    """uint32 random bits of a key and tokens."""
    x = _shift(token.to(tl.uint32) + first, 17) * tl.full([], 0xED5AD4BB, tl.uint32)
    x = (_shift(x, 11) + second) * tl.full([], 0xAC4C1B51, tl.uint32)
    x = _shift(x, 15) * tl.full([], 0x31848BAB, tl.uint32)
    return _shift(x, 14)


@triton.jit
def _log(x, ROUGH: tl.constexpr):
    """Rough: good to 2^-22, absolutely near 1, and in a tenth of the instructions."""
    if ROUGH and not _INTERPRETED:
        two = tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        y = two * 0.6931471805599453
    else:
        y = tl.log(x)
    return y


@triton.jit
def exponential(bits, ROUGH: tl.constexpr = False):
    """E = -log1p(-u), u = (bits + 1/2) 2^-32 below 1, float32.

    The device's logarithm is only good to 2^-22 absolutely near 1, and the smallest variates, which
    win, would be mostly error: below 1/16 the power series is exact to float32.
    """
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = tl.minimum(u, 0.999999940395355224609375)  # 1 - 2^-24
    series = u * (1 / 5 + u * (1 / 6 + u * (1 / 7)))
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + series))))
    return tl.where(u < 0.0625, series, -_log(1.0 - u, ROUGH))


@triton.jit
def gumbel(bits, ROUGH: tl.constexpr = False):
    """-log E, float32. Rough, to 1e-5: for what only ranks guesses."""
    return -_log(exponential(bits, ROUGH), ROUGH)


@triton.jit
def uniform(bits):
    """(bits + 1/2) 2^-32, float64, inside (0, 1)."""
    return (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10


@triton.jit
def place(x):
    """int64 in the range of int32 that rises as x (float32) falls: the upper word of a key."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0: the two are equal
    return (~(bits ^ ((bits >> 31) & 0x7FFFFFFF))).to(tl.int64)


@triton.jit
def falling_key(x, index):
    """int64 that rises as x (float32) falls, then with the index (below 2^32)."""
    return (place(x) << 32) | index.to(tl.int64)


@triton.jit
def key_value(key):
    """The x of a `falling_key`."""
    bits = ~(key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def key_index(key):
    """The index of a `falling_key`."""
    return key & 0xFFFFFFFF
