"""Soft-label losses fused with their output layer: no logits are kept for the backward.

For a row with hidden h, weight w, target probabilities p over the draft's columns (which may sum
to less than 1: the rest lies outside the draft's vocabulary), z = W h and q = softmax(z):

    kl   w * (sum(p) * logsumexp(z) - sum(p * z)),   d/dz = w * (sum(p) * q - p)
    tv   w * (1 - A),                                d/dz = w * q * (sum(m * q) - m)
    lk   w * -log(A),                                d/dz = the same / A

with A = sum(min(p, q)), the chance that a draft drawn from q is accepted by rejection sampling, and
m = 1 where q < p. `kl` pulls q towards all of p, `tv` and `lk` only as far as it is accepted more
often; `tv` stops teaching where nothing is accepted yet, `lk` does not.

The gradients of h and W are formed in the forward, chunk by chunk of rows, and handed out in the
backward. A row's `hit` says whether the draft's best column is the target's best token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Labels = Callable[[int, int], tuple[Tensor, Tensor]]
"""Probabilities [n, W] and best column [n] (-1: outside the columns) of rows start .. end - 1."""

CHUNK_ROWS = 8192
LOSSES = ("kl", "tv", "lk")
_LEAST = 1e-8  # of A, whose logarithm and inverse are taken


@dataclass(frozen=True, slots=True)
class HeadLoss:
    """loss: sum of the weighted row losses, differentiable. hits: [N] bool."""

    loss: Tensor
    hits: Tensor


def soft_label_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Labels,
    weights: Tensor,
    chunk: int = CHUNK_ROWS,
    kind: str = "kl",
) -> HeadLoss:
    """hidden: [N, H]; head: [W, H], same dtype; weights: [N] float32; kind: one of `LOSSES`."""
    loss, hits = _SoftLabelLoss.apply(hidden, head, labels, weights, chunk, kind)  # type: ignore[no-untyped-call]
    return HeadLoss(loss, hits)


def wide_logits(hidden: Tensor, head: Tensor) -> Tensor:
    """hidden @ head^T, [N, W], in float32 without gradients.

    Logits near 20 have steps of 1/8 in bfloat16: too coarse for labels, and full of ties.
    """
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, head.t(), out_dtype=torch.float32)
    return (hidden @ head.t()).float()


def _rows(
    z: Tensor, probs: Tensor, best: Tensor, weights: Tensor, dtype: torch.dtype, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss (summed), its gradient in the logits z as `dtype`, and hits of a chunk."""
    p = probs.float()
    lse = z.logsumexp(dim=-1, keepdim=True)
    q = (z - lse).exp()
    if kind == "kl":
        mass = p.sum(dim=-1, keepdim=True)
        loss, grad = mass * lse - (p * z).sum(dim=-1, keepdim=True), mass * q - p
    else:
        accepted = torch.minimum(p, q).sum(dim=-1, keepdim=True).clamp(min=_LEAST)
        below = (q < p).float()
        grad = q * ((below * q).sum(dim=-1, keepdim=True) - below)
        loss, grad = (1 - accepted, grad) if kind == "tv" else (-accepted.log(), grad / accepted)
    weight = weights.unsqueeze(-1)
    return (weight * loss).sum(), (weight * grad).to(dtype), z.argmax(dim=-1) == best


class _SoftLabelLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Labels,
        weights: Tensor,
        chunk: int,
        kind: str,
    ) -> tuple[Tensor, Tensor]:
        total = torch.zeros((), device=hidden.device)
        hits = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head, dtype=torch.float32)
        for start in range(0, len(hidden), chunk):
            part = slice(start, min(start + chunk, len(hidden)))
            probs, best = labels(part.start, part.stop)
            logits = wide_logits(hidden[part], head)
            loss, grad, hits[part] = kernels.rows(
                logits, probs, best, weights[part], head.dtype, kind
            )
            total += loss
            grad_hidden[part] = grad @ head
            grad_head += grad.t() @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_head.to(head.dtype))
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _hits: Any) -> tuple[Any, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        # The scale is folded into the weights, so that bf16 gradients keep their range.
        return grad_hidden * grad, grad_head * grad, None, None, None, None


class _Kernels:
    """The row-wise piece, which `compile_rows` may replace by a compiled one."""

    def __init__(self) -> None:
        self.rows = _rows


kernels = _Kernels()


def compile_rows() -> None:
    """Fuse the row-wise piece."""
    kernels.rows = torch.compile(_rows, dynamic=True)
