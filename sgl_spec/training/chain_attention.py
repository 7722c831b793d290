"""Attention of the training-time test: causal rows of step 0, and each row's own chain of steps.

A draft step j at root p sees the step-0 rows 0 .. p (the committed text) and the rows of steps
1 .. j that grew from the same root p: the nodes above it in a chain. Rows are indexed by their
root, so the first part is plain causal attention and the second a dot product per row.

With l0 = logsumexp of the scores of the step-0 rows and c_m the score of the chain's row m:

    l = log(exp(l0) + sum_m exp(c_m)),   out = exp(l0 - l) * causal + sum_m exp(c_m - l) v_m
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)


def chain_attention(
    q: Tensor, k0: Tensor, v0: Tensor, chain_k: Sequence[Tensor], chain_v: Sequence[Tensor]
) -> Tensor:
    """[B, heads, S, d]: attention of row p over rows 0 .. p of `k0` and row p of every `chain_k`.

    All tensors are [B, heads, S, d] (KV heads already repeated); scores are scaled by 1 / sqrt(d).
    """
    fused = q.device.type == "cuda"
    out, lse = kernels.fused(q, k0, v0) if fused else _causal(q, k0, v0)
    return kernels.join(q, out, lse, chain_k, chain_v) if chain_k else out


def _causal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention and the logsumexp of its scores, [B, heads, S] float32."""
    length = q.shape[2]
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    ahead = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(ahead, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    return (scores - lse[..., None]).exp().to(v.dtype) @ v, lse


@lru_cache(maxsize=64)
def _causal_mask(length: int, device: torch.device) -> BlockMask:
    def causal(_batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return row >= column

    return create_block_mask(causal, None, None, length, length, device=str(device))


def _flex(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same without a matrix of scores in memory."""
    mask = _causal_mask(q.shape[2], q.device)
    out, aux = kernels.flex(q, k, v, block_mask=mask, return_aux=AuxRequest(lse=True))
    return out, aux.lse


def _join(
    q: Tensor, out: Tensor, lse: Tensor, chain_k: Sequence[Tensor], chain_v: Sequence[Tensor]
) -> Tensor:
    """The two parts under one softmax."""
    scale = q.shape[-1] ** -0.5
    scores = [(q.float() * key.float()).sum(dim=-1) * scale for key in chain_k]
    joint = torch.stack((lse, *scores)).logsumexp(dim=0)
    mixed = (lse - joint).exp()[..., None] * out.float()
    for score, value in zip(scores, chain_v, strict=True):
        mixed = mixed + (score - joint).exp()[..., None] * value.float()
    return mixed.to(out.dtype)


class _Kernels:
    """What `compile_rows` may replace by compiled functions."""

    def __init__(self) -> None:
        self.fused: Callable[..., tuple[Tensor, Tensor]] = _flex
        self.flex: Callable[..., Any] = torch.compile(flex_attention)
        self.join: Callable[..., Tensor] = _join


kernels = _Kernels()


def compile_rows() -> None:
    """Fuse what joins the two parts."""
    kernels.join = torch.compile(_join, dynamic=True)
