"""Attention over the KV slots: store the new rows, then let every row see what its mask allows."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_spec.layers.context import AttnBatch
from sgl_spec_kernels.kv_move import write_kv
from sgl_spec_kernels.tree_attn_ref import AttnPlan, plan_tree_attn, tree_attn


def plan_attention(batch: AttnBatch, heads_per_kv: int, dtype: torch.dtype) -> AttnPlan:
    """What all layers of one forward share. heads_per_kv: query heads per KV head; dtype: of q."""
    return plan_tree_attn(
        batch.req_to_token,
        batch.rows,
        batch.prefix_lens,
        batch.q_starts,
        batch.mask_words,
        batch.tree_lens,
        heads_per_kv=heads_per_kv,
        dtype=dtype,
    )


def store_and_attend(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, plan: AttnPlan
) -> Tensor:
    """Write k, v [T, num_kv_heads, head_dim] at `slots` [T], then attend: [T, num_heads *
    head_dim].

    q: [T, num_heads, head_dim], or of the plan's rows alone. k_cache, v_cache: one layer,
    [num_slots, num_kv_heads, head_dim].
    """
    write_kv(k_cache, v_cache, k, v, slots)
    out: Tensor = tree_attn(q, k_cache, v_cache, plan, q.shape[-1] ** -0.5)
    return out
