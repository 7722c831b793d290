"""The sampling parameters of a batch, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sgl_spec.request import SamplingParams
from sgl_spec.speculative.penalties import (
    BiasRows,
    PenaltyRows,
    TokenCounts,
    bias_rows,
    padded_ids,
    penalty_rows,
)

ALL_TOKENS = 1 << 31  # top_k that keeps every token


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of R rows, on the device of the logits.

    temperature: [R] float32, 0 is greedy. top_k: [R] int64, `ALL_TOKENS` keeps all.
    top_p: [R] float64, 1 keeps all. min_p: [R] float32, 0 keeps all. seed: [R] int64.
    end_from: [R] int64, the first absolute position where a token may end the request.
    end_ids: [R, K] int64, tokens masked before that position; a row with fewer than K repeats one
    of its ids, a row with none holds 0 and an `end_from` of 0. penalties, bias: None if no row has
    any.

    The flags are known on the host, so that a batch skips work without reading the device. False
    means that no row needs the work; True that some row may.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    end_from: Tensor
    end_ids: Tensor
    penalties: PenaltyRows | None
    bias: BiasRows | None
    any_greedy: bool
    any_sampled: bool
    any_filtered: bool
    any_minimum: bool

    @property
    def count(self) -> int:
        """Number of rows (R)."""
        return self.seed.shape[0]

    def select(self, index: Tensor | slice) -> SamplingRows:
        """Rows at `index` (ids, a bool mask or a slice)."""
        return replace(
            self,
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            min_p=self.min_p[index],
            seed=self.seed[index],
            end_from=self.end_from[index],
            end_ids=self.end_ids[index],
            penalties=None if self.penalties is None else self.penalties.select(index),
            bias=None if self.bias is None else self.bias.select(index),
        )


def build_rows(
    params: Sequence[SamplingParams],
    prompt_lens: Sequence[int],
    eos_ids: Sequence[int],
    device: torch.device | str = "cpu",
    *,
    counts: TokenCounts | None = None,
    request_rows: Sequence[int] | None = None,
) -> SamplingRows:
    """Rows of running requests; every seed must be set.

    A request that gives a minimum length cannot draw `eos_ids` (unless it ignores them) or its stop
    token ids as any of its first `min_new_tokens` tokens. prompt_lens: tokens of the prompt as
    first submitted, also after a retraction. counts: what the texts hold, needed if a request has
    penalties; request_rows: each request's row of it, None for 0, 1, ...
    """
    seeds = [p.seed for p in params if p.seed is not None]
    assert len(seeds) == len(params), (
        "a request without a seed gets one before it reaches the engine"
    )
    enders = [end_ids_of(p, eos_ids) for p in params]
    minimum = [
        n + p.min_new_tokens if e else 0
        for p, n, e in zip(params, prompt_lens, enders, strict=True)
    ]
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32)
    greedy = temperature == 0  # after rounding to float32, as the draw sees it

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return SamplingRows(
        temperature=temperature.to(device),
        top_k=column([p.top_k if p.top_k > 0 else ALL_TOKENS for p in params], torch.int64),
        top_p=column([p.top_p for p in params], torch.float64),
        min_p=column([p.min_p for p in params], torch.float32),
        seed=column(seeds, torch.int64),
        end_from=column(minimum, torch.int64),
        end_ids=padded_ids(enders, device),
        penalties=penalty_rows(params, counts, request_rows, device),
        bias=bias_rows(params, device),
        any_greedy=bool(greedy.any()),
        any_sampled=not bool(greedy.all()),
        any_filtered=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params),
        any_minimum=any(map(bool, enders)),
    )


def end_ids_of(params: SamplingParams, eos_ids: Sequence[int]) -> list[int]:
    """Tokens that may not end the request before its minimum length; none without one."""
    if params.min_new_tokens == 0:
        return []
    return [*(() if params.ignore_eos else eos_ids), *params.stop_token_ids]
