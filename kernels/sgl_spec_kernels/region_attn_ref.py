"""Attention of one new row per sequence over KV regions, in plain torch.

out[b, h] = softmax_j(q[b, h] . k[b, g, j] / sqrt(d)) v[b, g, j],  j < lens[b], g = h // group
"""

from __future__ import annotations

import torch
from torch import Tensor


def region_attention(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, width: int) -> Tensor:
    """q: [B, heads, d]; k, v: [B, kv_heads, capacity, d], each head's positions contiguous; lens:
    [B] int64, positions that row b sees, from 0 on, at least one; width: at least max(lens).
    Returns [B, heads * d].

    Two batched products over the first `width` positions, the queries of a KV head as one small
    matrix. What lies beyond a row's positions has weight 0 and must be finite.
    """
    k, v = k[:, :, :width], v[:, :, :width]
    batch, kv_heads, _, dim = k.shape
    keys, values = (part.reshape(batch * kv_heads, width, dim) for part in (k, v))  # views
    queries = q.reshape(batch * kv_heads, -1, dim)
    hidden = torch.arange(width, device=q.device) >= lens[:, None]
    bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
    bias = bias.masked_fill_(hidden, float("-inf"))[:, None, None]
    bias = bias.expand(-1, kv_heads, queries.shape[1], -1).reshape(batch * kv_heads, -1, width)
    scores = torch.baddbmm(bias, queries, keys.transpose(1, 2), alpha=dim**-0.5)
    return torch.bmm(scores.softmax(-1), values).view(batch, -1)
