"""What lies between the QKV product and attention, in one pass over the QKV rows.

For a token at rotary position p and slot s, and each head x of q and k (halves x1, x2):

    x  = x / sqrt(mean(x^2) + eps) * norm                       where the model norms its heads
    x1' = x1 cos[p] - x2 sin[p],    x2' = x2 cos[p] + x1 sin[p]

q' replaces q in place; k' goes to k_cache[s], v to v_cache[s]. A slot below 0 stores nothing: the
rows that fill a batch up to the size of a graph have none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chain, chained

HEADS = 8  # heads a program takes


@triton.jit
def _weights(norm, dim, HALF: tl.constexpr):
    return tl.load(norm + dim, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _rope_kv(
    qkv,
    k_cache,
    v_cache,
    cos,
    sin,
    positions,
    slots,
    q_norm,
    k_norm,
    eps,
    kv_stride,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, BLOCK)
    inside = (head < Q_HEADS + 2 * KV_HEADS)[:, None] & (dim < HALF)[None, :]
    at = (token * (Q_HEADS + 2 * KV_HEADS) + head)[:, None] * (2 * HALF) + dim[None, :]
    stored = qkv.dtype.element_ty
    first = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv + at + HALF, mask=inside, other=0.0).to(tl.float32)
    is_q, is_v = (head < Q_HEADS)[:, None], (head >= Q_HEADS + KV_HEADS)[:, None]
    x1, x2 = first, second
    if HAS_NORM:
        mean = (tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * HALF)
        scale = (1.0 / tl.sqrt(mean + eps))[:, None]
        w1 = tl.where(is_q, _weights(q_norm, dim, HALF), _weights(k_norm, dim, HALF))
        w2 = tl.where(is_q, _weights(q_norm + HALF, dim, HALF), _weights(k_norm + HALF, dim, HALF))
        x1 = (x1 * scale * w1).to(stored).to(tl.float32)
        x2 = (x2 * scale * w2).to(stored).to(tl.float32)
    c = tl.load(cos + position * HALF + dim, mask=dim < HALF, other=0.0)[None, :]
    s = tl.load(sin + position * HALF + dim, mask=dim < HALF, other=0.0)[None, :]
    y1 = tl.where(is_v, first, x1 * c - x2 * s).to(stored)
    y2 = tl.where(is_v, second, x2 * c + x1 * s).to(stored)
    tl.store(qkv + at, y1, mask=inside & is_q)
    tl.store(qkv + at + HALF, y2, mask=inside & is_q)
    if slot < 0:
        return
    kv_head = tl.where(head < Q_HEADS + KV_HEADS, head - Q_HEADS, head - Q_HEADS - KV_HEADS)
    cached = slot * kv_stride + kv_head[:, None] * (2 * HALF) + dim[None, :]
    is_k = ((head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS))[:, None]
    tl.store(k_cache + cached, y1, mask=inside & is_k)
    tl.store(k_cache + cached + HALF, y2, mask=inside & is_k)
    tl.store(v_cache + cached, y1, mask=inside & is_v)
    tl.store(v_cache + cached + HALF, y2, mask=inside & is_v)


def rope_kv(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotate and store; returns q, [T, q_heads, d], a view of qkv.

    qkv: [T, (q_heads + 2 kv_heads) * d] contiguous, changed. k_cache, v_cache: [num_slots,
    kv_heads, d], laid out alike. cos, sin: [positions, d / 2] float32. positions, slots: [T] int64,
    slots >= 0 distinct. norms: (q, k) weights [d] where heads are normed.
    """
    tokens, (_, kv_heads, dim) = qkv.shape[0], k_cache.shape
    q_heads = qkv.shape[1] // dim - 2 * kv_heads
    assert qkv.is_contiguous(), "qkv must be contiguous"
    assert k_cache.stride() == v_cache.stride(), "k and v must be laid out alike"
    assert k_cache.stride()[1:] == (dim, 1), "a slot's heads must be contiguous"
    assert cos.is_contiguous(), "cos must be contiguous"
    assert sin.is_contiguous(), "sin must be contiguous"
    assert cos.shape[1] == sin.shape[1] == dim // 2
    assert cos.dtype == sin.dtype == torch.float32
    assert qkv.dtype == k_cache.dtype == v_cache.dtype, "qkv and the caches must have one dtype"
    q_norm, k_norm = norms if norms is not None else (qkv, qkv)
    _rope_kv[(tokens, triton.cdiv(q_heads + 2 * kv_heads, HEADS))](
        qkv,
        k_cache,
        v_cache,
        cos,
        sin,
        positions,
        slots,
        q_norm,
        k_norm,
        eps,
        k_cache.stride(0),
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        BLOCK=triton.next_power_of_2(dim // 2),
        HEADS=HEADS,
        HAS_NORM=norms is not None,
        num_warps=4,
        **chained(qkv.device),
    )
    return qkv.view(tokens, -1, dim)[:, :q_heads]


def rope_kv_ref(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """The twin of `rope_kv`."""
    tokens, (_, kv_heads, dim) = qkv.shape[0], k_cache.shape
    rows = qkv.view(tokens, -1, dim)
    q_heads = rows.shape[1] - 2 * kv_heads
    c, s = cos[positions][:, None], sin[positions][:, None]

    def rotated(x: Tensor, norm: Tensor | None) -> Tensor:
        x = x.float()
        if norm is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.float()
            x = x.to(qkv.dtype).float()  # as where the norm is an operation of its own
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1).to(qkv.dtype)

    q_norm, k_norm = norms or (None, None)
    keep = slots >= 0
    k_cache[slots[keep]] = rotated(rows[:, q_heads:-kv_heads], k_norm)[keep]
    v_cache[slots[keep]] = rows[:, -kv_heads:][keep]
    rows[:, :q_heads] = rotated(rows[:, :q_heads], q_norm)
    return rows[:, :q_heads]
