"""Attention of the training-time test: causal rows of step 0, and each row's own chain of steps.

A draft step j at root p sees the step-0 rows 0 .. p (the committed text) and the rows of steps
1 .. j that grew from the same root p: the nodes above it in a chain. Rows are indexed by their
root, so the first part is plain causal attention and the second a dot product per row.

With s0 the scores of the step-0 rows, c_m the score of the chain's row m, and l0 = logsumexp(s0):

    l = log(exp(l0) + sum_m exp(c_m)),   out = exp(l0 - l) * flash(s0) + sum_m exp(c_m - l) v_m

The backward of the first part is flash attention's own, called with the joint `out` and `l`: it
rebuilds its probabilities as exp(s0 - l) and subtracts rowsum(grad * out), which is what the joint
softmax asks for. So no score matrix is ever stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def chain_attention(
    q: Tensor, k0: Tensor, v0: Tensor, chain_k: list[Tensor], chain_v: list[Tensor]
) -> Tensor:
    """[B, heads, S, d]: attention of row p over rows 0 .. p of `k0` and row p of every `chain_k`.

    All tensors are [B, heads, S, d] (KV heads already repeated); scores are scaled by 1 / sqrt(d).
    """
    result: Tensor = _ChainAttention.apply(q, k0, v0, *chain_k, *chain_v)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True, slots=True)
class _Flash:
    """Causal attention with what its backward needs. lse: [B, heads, S] float32."""

    out: Tensor
    lse: Tensor
    extra: tuple[Any, ...]


def _flash(q: Tensor, k: Tensor, v: Tensor) -> _Flash:
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        return _Flash(out, lse, ())
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = (
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    )
    return _Flash(out, lse, (cum_q, cum_k, max_q, max_k, seed, offset))


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, extra: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v for probabilities exp(scores - lse) and the joint `out`."""
    if q.device.type == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, True
        )
    else:
        cum_q, cum_k, max_q, max_k, seed, offset = extra
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset
        )
    grad_q, grad_k, grad_v = found
    return grad_q, grad_k, grad_v


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """[B, heads, S] float32 of two [B, heads, S, d]."""
    return (a.float() * b.float()).sum(dim=-1)


def _add(mixed: Tensor, score: Tensor, joint: Tensor, value: Tensor) -> Tensor:
    """mixed [B, heads, S, d] float32 with one chain row's value in its share."""
    return mixed + (score - joint).exp().unsqueeze(-1) * value.float()


def _row_backward(
    grad: Tensor, q: Tensor, joint: Tensor, delta: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One chain row's share of the gradients of q, and those of its key and its value."""
    scale = q.shape[-1] ** -0.5
    share = (_dot(q, key) * scale - joint).exp()
    slope = (share * (_dot(grad, value) - delta) * scale).unsqueeze(-1)
    grad_key = (slope * q.float()).to(key.dtype)
    grad_value = (share.unsqueeze(-1) * grad.float()).to(value.dtype)
    return slope * key.float(), grad_key, grad_value


class _ChainAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k0: Tensor, v0: Tensor, *rows: Tensor) -> Tensor:
        flash = _flash(q, k0, v0)
        out, joint = flash.out, flash.lse
        if rows:
            keys, values = rows[: len(rows) // 2], rows[len(rows) // 2 :]
            scale = q.shape[-1] ** -0.5
            scores = [kernels.dot(q, key) * scale for key in keys]
            joint = torch.empty_like(joint)  # in the layout that the backward reads
            joint.copy_(torch.stack((flash.lse, *scores)).logsumexp(dim=0))
            mixed = kernels.add(torch.zeros_like(out, dtype=torch.float32), flash.lse, joint, out)
            for score, value in zip(scores, values, strict=True):
                mixed = kernels.add(mixed, score, joint, value)
            out = mixed.to(out.dtype)
        ctx.save_for_backward(q, k0, v0, out, joint, *rows)
        ctx.extra = flash.extra
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k0, v0, out, joint, *rows = ctx.saved_tensors
        grad_q, grad_k, grad_v = _flash_backward(grad, q, k0, v0, out, joint, ctx.extra)
        keys, values = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        if not keys:
            return grad_q, grad_k, grad_v
        delta, chain_q = kernels.dot(grad, out), grad_q.float()
        grad_keys, grad_values = [], []
        for key, value in zip(keys, values, strict=True):
            share, grad_key, grad_value = kernels.row_backward(grad, q, joint, delta, key, value)
            chain_q = chain_q + share
            grad_keys.append(grad_key)
            grad_values.append(grad_value)
        return chain_q.to(grad_q.dtype), grad_k, grad_v, *grad_keys, *grad_values


class _Kernels:
    """The row-wise pieces, which `compile_rows` may replace by compiled ones. Each handles one
    chain row, so that chains of every length share a graph."""

    def __init__(self) -> None:
        self.dot = _dot
        self.add = _add
        self.row_backward = _row_backward


kernels = _Kernels()


def compile_rows() -> None:
    """Fuse the row-wise pieces."""
    kernels.dot = torch.compile(_dot, dynamic=True)
    kernels.add = torch.compile(_add, dynamic=True)
    kernels.row_backward = torch.compile(_row_backward, dynamic=True)
