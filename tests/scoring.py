"""Log-probabilities by the definition: transformers reads the whole text in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from reference import Reference
from torch import Tensor

from sgl_spec import Completion, LogprobParams
from sgl_spec.request import Logprobs

TOLERANCE = 1e-4  # fp32 rounding between ways of batching, on the tiny model


@torch.inference_mode()
def rescore(reference: Reference, ids: Sequence[int]) -> Tensor:
    """[len(ids), V]: row p is the distribution of what follows ids[: p + 1]."""
    logits: Tensor = reference.model(torch.tensor([list(ids)])).logits[0]
    return logits.float().log_softmax(-1)


def agree(
    found: Logprobs, ids: Sequence[int], rows: Tensor, ask: LogprobParams, tolerance: float
) -> None:
    """`found` of `ids`, which `rows` predict."""
    wanted = rows.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert len(found.values) == len(ids)
    assert max(found.values) <= 0
    near(found.values, wanted, tolerance)
    if top := ask.top_logprobs_num:
        near(found.top_values, rows.topk(top).values, tolerance)
        near(found.top_values, rows.gather(1, torch.tensor(found.top_ids)), tolerance)
        assert all(len(set(best)) == top for best in found.top_ids)
    else:
        assert found.top_ids == found.top_values == []
    if ask.token_ids_logprob:
        near(found.id_values, rows[:, list(ask.token_ids_logprob)], tolerance)
    else:
        assert found.id_values == []


def near(found: list[Any], wanted: Tensor, tolerance: float) -> None:
    assert torch.tensor(found).shape == wanted.shape
    assert float((torch.tensor(found) - wanted).abs().max()) <= tolerance


def check(
    reference: Reference,
    prompt: Sequence[int],
    done: Completion,
    ask: LogprobParams | None,
    tolerance: float = TOLERANCE,
) -> None:
    """A completion's log-probabilities against one forward over all of its text."""
    if ask is None:
        assert done.logprobs is done.prompt_logprobs is None
        return
    assert done.logprobs is not None
    assert done.prompt_logprobs is not None
    ids = [*prompt, *done.output_ids]
    rows = rescore(reference, ids)
    start = len(prompt) - 1 if ask.logprob_start_len == -1 else ask.logprob_start_len
    if start < len(prompt) - 1:
        within = ids[start + 1 : len(prompt)]
        agree(done.prompt_logprobs, within, rows[start : len(prompt) - 1], ask, tolerance)
    else:
        assert len(done.prompt_logprobs) == 0
    agree(done.logprobs, done.output_ids, rows[len(prompt) - 1 : -1], ask, tolerance)


def close(found: Any, wanted: Any) -> None:
    """The same lists; numbers may differ by rounding."""
    assert type(found) is type(wanted)
    if isinstance(found, dict):
        assert found.keys() == wanted.keys()
        found, wanted = list(found.values()), [wanted[name] for name in found]
    if isinstance(found, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            close(one, other)
    elif isinstance(found, float):
        assert abs(found - wanted) <= TOLERANCE
    else:
        assert found == wanted
