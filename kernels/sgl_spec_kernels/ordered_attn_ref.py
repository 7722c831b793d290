"""The twin of `ordered_attn`: the same tiles, by position, folded in the same order, row by row in
plain torch. It says what the order is; `tree_attn_ref` is what a CPU runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_spec_kernels.ordered_attn import tile_columns


@dataclass(frozen=True, slots=True)
class OrderedPlan:
    """seen: of each row the slots that it sees, by position."""

    seen: list[Tensor]
    heads_per_kv: int
    tile: int


def plan_ordered_attn(
    req_to_token: Tensor,
    rows: Tensor,
    prefix_lens: Tensor,
    q_starts: Tensor,
    mask_words: Tensor | None,
    *,
    heads_per_kv: int,
    head_dim: int,
    dtype: torch.dtype,
) -> OrderedPlan:
    """See `ordered_attn.plan_ordered_attn`; it needs no work space."""
    seen: list[Tensor] = []
    starts = q_starts.tolist()
    for index, (row, prefix) in enumerate(zip(rows.tolist(), prefix_lens.tolist(), strict=True)):
        for at in range(starts[index], starts[index + 1]):
            new = list(range(at - starts[index] + 1))
            if mask_words is not None:
                word = int(mask_words[at])
                new = [bit for bit in range(64) if word >> bit & 1]
            columns = torch.tensor([*range(prefix), *(prefix + j for j in new)], dtype=torch.int64)
            seen.append(req_to_token[row].cpu()[columns].long().to(req_to_token.device))
    return OrderedPlan(seen, heads_per_kv, tile_columns(head_dim, dtype.itemsize))


def ordered_attn(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: OrderedPlan, scale: float
) -> Tensor:
    """See `ordered_attn.ordered_attn`."""
    rows = [
        _row(one, k_cache[slots], v_cache[slots], plan, scale)
        for one, slots in zip(q, plan.seen, strict=True)
    ]
    return torch.stack(rows).to(q.dtype)


def _row(q: Tensor, keys: Tensor, values: Tensor, plan: OrderedPlan, scale: float) -> Tensor:
    """[heads * head_dim] float32. q: [heads, head_dim]; keys, values: [columns, kv_heads,
    head_dim]."""
    keys, values = (each.repeat_interleave(plan.heads_per_kv, 1).float() for each in (keys, values))
    acc, total = torch.zeros_like(q, dtype=torch.float32), q.new_zeros(len(q)).float()
    best = torch.full_like(total, -torch.inf)
    for k, v in zip(keys.split(plan.tile), values.split(plan.tile), strict=True):
        scores = torch.einsum("hd,phd->hp", q.float(), k) * (scale * math.log2(math.e))
        top = scores.amax(1)
        weights = _exp2(scores - top[:, None]).to(q.dtype).float()
        higher = torch.maximum(best, top)
        old, new = _exp2(best - higher), _exp2(top - higher)
        acc = acc * old[:, None] + torch.einsum("hp,phd->hd", weights, v) * new[:, None]
        total = total * old + weights.sum(1) * new
        best = higher
    return (acc / torch.where(total > 0, total, 1.0)[:, None]).flatten()


def _exp2(x: Tensor) -> Tensor:
    return (x * math.log(2)).exp()
