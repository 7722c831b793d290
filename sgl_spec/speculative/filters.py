"""top_k, top_p and min_p: which tokens a row may still draw, and how much each weighs.

In the order of falling logit, then rising id, each filter keeps a prefix. On the CPU a row is
therefore sorted only down to where its prefix surely ends: its head, all tokens whose logit is at
least some cut. What comes out does not depend on the cut, to the bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgl_spec.speculative.rows import SamplingRows

MASS_BITS = 40  # top_p counts probability in units of 2^-40 of the most likely token
CUTS = (
    2.0**-10,
    2.0**-14,
    2.0**-18,
)  # of the weight relative to the most likely token's, for top_p
SMALL = 8192  # so few tokens are sorted as a whole, and heads up to this length together
_WORD = 0xFFFFFFFF
_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class _Head:
    """The first tokens of r rows in falling order.

    ids: [r, n] int64. weights: [r, n] float32, 0 behind a row's own. top_k: [r] int64, tokens that
    this filter leaves, at most the row's own. total: [r] int64, the mass that it leaves, or None:
    the mass of the first top_k tokens in here.
    """

    ids: Tensor
    weights: Tensor
    top_k: Tensor
    total: Tensor | None


def survivors(x: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """[r, n] ids of the tokens that top_k, top_p and min_p leave, and their weights.

    x: [r, V] logits, left unchanged. A row that keeps fewer than n has weight 0 behind its own,
    where ids mean nothing.
    """
    if x.device.type != "cpu" or x.shape[1] <= SMALL:
        return _kept(_whole(x, rows), rows)
    found = [_columns(*row) for row in zip(x, *_settings(rows), strict=True)]
    sizes = [columns.size for columns, _ in found]
    together = [i for i, size in enumerate(sizes) if 0 < size <= SMALL]
    alone = [[i] for i, size in enumerate(sizes) if not 0 < size <= SMALL]
    parts = []
    for group in ([together] if together else []) + alone:
        index = torch.tensor(group)
        part, heads = rows.select(index), [found[i] for i in group]
        head = _gathered(x[index], part, heads) if sizes[group[0]] else _whole(x[index], part)
        parts.append((index, _kept(head, part)))
    return _joined(parts, x)


def falling(x: Tensor, most: int | None = None) -> Tensor:
    """[r, V] token ids by falling logit, equal logits by rising id; [r, most] for the first few."""
    keys = _keys(x, torch.arange(x.shape[1], device=x.device))
    return (_sorted(keys) if most is None else keys.topk(most, largest=False).values) & _WORD


def weights_of(x: Tensor, temperature: Tensor, top: Tensor | None = None) -> Tensor:
    """[r, V] probability relative to the most likely token, in place of the logits. temperature:
    [r]. top: [r, 1], the largest logits, if they are not those of x."""
    x.sub_(x.amax(1, keepdim=True) if top is None else top)
    return x.div_(temperature[:, None]).exp_()


def _keys(x: Tensor, ids: Tensor) -> Tensor:
    """One integer holds logit and id, so that any sort will do, and the fastest one is used."""
    bits = (x + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: the two are equal logits
    place = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))  # rises as the logit falls
    return (place.to(torch.int64) << 32) | ids


def _sorted(keys: Tensor) -> Tensor:
    if keys.device.type == "cpu":
        return torch.from_numpy(np.sort(keys.numpy(), axis=1))  # vectorised, 15 times torch's
    return keys.sort(dim=1).values


def _mass(weights: Tensor) -> Tensor:
    return (weights * 2.0**MASS_BITS).to(torch.int64)


def _whole(x: Tensor, rows: SamplingRows) -> _Head:
    ids = falling(x)
    weights = weights_of(x.clone(), rows.temperature).gather(1, ids)
    return _Head(ids, weights, rows.top_k.clamp(max=x.shape[1]), None)


def _settings(rows: SamplingRows) -> tuple[list[int], list[float], list[float], list[float]]:
    columns = (rows.top_k, rows.top_p, rows.min_p, rows.temperature)
    top_k, top_p, min_p, temperature = (column.tolist() for column in columns)
    return top_k, top_p, min_p, temperature


def _columns(
    row: Tensor, top_k: int, top_p: float, min_p: float, temperature: float
) -> tuple[npt.NDArray[np.int64], int]:
    """Columns of a row's head, and the mass of the row where top_p needs that. No columns: the head
    would be no small part of the row."""
    x, none = row.numpy(), (np.empty(0, np.int64), 0)
    if top_k < len(x):
        last = float(np.partition(x, len(x) - top_k)[len(x) - top_k])
        return _at_least(x, last if last > -math.inf else _LOWEST), 0
    top = float(x.max())
    if not math.isfinite(top):
        return none
    if top_p >= 1:
        return _at_least(x, top + temperature * math.log(min_p / 2)), 0
    mass = _mass(weights_of(row[None].clone(), row.new_tensor([temperature])))[0].numpy()
    total = int(mass.sum())
    for cut in CUTS:
        columns = _at_least(x, top + temperature * math.log(cut))
        if columns.size == 0 or cut <= min_p / 2 or mass[columns].sum() >= total * top_p:
            return columns, total
    return none


def _at_least(x: npt.NDArray[np.float32], cut: float) -> npt.NDArray[np.int64]:
    columns = np.flatnonzero(x >= cut)
    return columns if columns.size <= len(x) // 2 else columns[:0]


def _gathered(
    x: Tensor, rows: SamplingRows, found: list[tuple[npt.NDArray[np.int64], int]]
) -> _Head:
    sizes = torch.tensor([columns.size for columns, _ in found])
    width = int(sizes.max())
    ids = np.zeros((len(found), width), np.int64)
    for row, (columns, _) in zip(ids, found, strict=True):
        row[: columns.size] = columns
    behind = torch.arange(width) >= sizes[:, None]
    heads = torch.from_numpy(ids)
    logits = x.gather(1, heads).masked_fill_(behind, -torch.inf)
    order = _sorted(_keys(logits, heads)) & _WORD
    top = x.amax(1, keepdim=True)
    weights = weights_of(x.gather(1, order), rows.temperature, top).masked_fill_(behind, 0)
    top_k = torch.minimum(rows.top_k, sizes)
    inner = torch.gather(_mass(weights).cumsum(1), 1, top_k[:, None] - 1)[:, 0]
    total = torch.where(rows.top_k < x.shape[1], inner, torch.tensor([mass for _, mass in found]))
    return _Head(order, weights, top_k, total)


def _kept(head: _Head, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """[r, n] ids and weights of what the filters keep of a head."""
    counts = _kept_counts(head, rows)
    longest = max([1, *counts.tolist()])
    behind = torch.arange(longest, device=counts.device) >= counts[:, None]
    return head.ids[:, :longest], head.weights[:, :longest].masked_fill(behind, 0)


def _kept_counts(head: _Head, rows: SamplingRows) -> Tensor:
    """[r] int64: how many tokens survive top_k, then top_p, then min_p.

    top_p keeps the tokens before which less than p of the mass lies that top_k left.
    """
    mass = _mass(head.weights)
    upto = mass.cumsum(1)  # exact in any order of summation
    total = head.total
    if total is None:
        total = upto.gather(1, head.top_k[:, None] - 1)[:, 0]
    limit = (total * rows.top_p)[:, None]
    top_p = torch.where(rows.top_p < 1, (upto - mass < limit).sum(1), mass.shape[1])
    min_p = (head.weights >= rows.min_p[:, None]).sum(1)
    return torch.minimum(torch.minimum(head.top_k, top_p), min_p)


def _joined(parts: list[tuple[Tensor, tuple[Tensor, Tensor]]], x: Tensor) -> tuple[Tensor, Tensor]:
    width = max(ids.shape[1] for _, (ids, _) in parts)
    all_ids = torch.zeros(x.shape[0], width, dtype=torch.int64)
    all_weights = x.new_zeros(x.shape[0], width)
    for rows, (ids, weights) in parts:
        all_ids[rows, : ids.shape[1]] = ids
        all_weights[rows, : ids.shape[1]] = weights
    return all_ids, all_weights
