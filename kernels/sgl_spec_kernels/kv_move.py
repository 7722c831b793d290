"""Writing and moving rows of the slot-addressed KV cache."""

from __future__ import annotations

import torch
from torch import Tensor


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """k_cache[slots[t]] = k[t] and v_cache[slots[t]] = v[t], in place.

    k_cache, v_cache: [num_slots, num_kv_heads, head_dim], one layer. k, v: [T, num_kv_heads,
    head_dim], last dimension contiguous. slots: [T] int64, distinct.
    """
    k_cache.index_copy_(0, slots, k)
    v_cache.index_copy_(0, slots, v)


def move_kv_rows(k: Tensor, v: Tensor, sources: Tensor, targets: Tensor) -> None:
    """k[:, targets[m]] = k[:, sources[m]] for all m at once, and the same for v, in place.

    k, v: [num_layers, num_slots, num_kv_heads, head_dim]. sources, targets: [M] int64; targets are
    distinct and may overlap sources, so every row is gathered before any is written.
    """
    for cache in (k, v):
        cache.index_copy_(1, targets, cache.index_select(1, sources))


def move_path(
    k: Tensor,
    v: Tensor,
    req_to_token: Tensor,
    rows: Tensor,
    committed: Tensor,
    path: Tensor,
    counts: Tensor,
) -> None:
    """Bring the KV of the accepted path of every tree to the front of its positions, in place.

    Node i of a tree lies at logical position committed + i; afterwards the KV of node path[:, j]
    is at committed + j for j < counts. The table stays.

    k, v: [num_layers, num_slots, num_kv_heads, head_dim]. req_to_token: [table rows, width] int32.
    rows, committed, counts: [B] int64, counts >= 1. path: [B, W] int64, path[:, 0] = 0 and
    path[:, :counts] rises.
    """
    step = torch.arange(path.shape[1], device=path.device)
    request, to = ((step < counts[:, None]) & (path != step)).nonzero(as_tuple=True)
    row, start = rows[request], committed[request]
    sources, targets = (req_to_token[row, start + node] for node in (path[request, to], to))
    move_kv_rows(k, v, sources.long(), targets.long())
