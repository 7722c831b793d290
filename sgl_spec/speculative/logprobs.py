"""Log-probabilities of tokens under the model's own distribution.

They are log_softmax, in float32, of the logits as the model gives them: before penalties,
logit_bias, masks, temperature and filters. So they say the same whatever a request samples with,
and whether its tokens were drafted or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_spec.request import LogprobParams, Logprobs
from sgl_spec.speculative.sampling import falling, one_thread

# Logits held at once: a long prompt is read in slices, never as [prompt, vocabulary].
SLICE_ELEMENTS = 1 << 21


@dataclass(frozen=True, slots=True)
class Span:
    """`count` successive rows that belong to one request, and what it asks for."""

    params: LogprobParams
    count: int


def read_logprobs(
    logits_of: Callable[[Tensor], Tensor],
    index: Tensor,
    tokens: Tensor,
    spans: Sequence[Span],
    vocab: int,
) -> list[Logprobs]:
    """For each span, the log-probabilities of its tokens.

    index: [R] int64, the rows where the tokens were predicted; tokens: [R] int64. logits_of: gives
    the logits [r, vocab] float32 of some of these rows; it is called for a slice at a time.
    """
    top = max(span.params.top_logprobs_num for span in spans)
    ids = _wanted_ids(spans, index.device)
    read = Logprobs()
    step = max(1, SLICE_ELEMENTS // vocab)
    for start in range(0, len(index), step):
        part = slice(start, start + step)
        logits = logits_of(index[part])
        with one_thread(logits):
            read.extend(_read_slice(logits, tokens[part], top, ids[part]))
    return _cut(read, spans)


def _wanted_ids(spans: Sequence[Span], device: torch.device) -> Tensor:
    """[R, K] int64: ids to report at each row; what a row does not ask for is 0, and cut later."""
    width = max(len(span.params.token_ids_logprob) for span in spans)
    each = torch.zeros(len(spans), width, dtype=torch.int64)
    for i, span in enumerate(spans):
        wanted = span.params.token_ids_logprob
        each[i, : len(wanted)] = torch.tensor(wanted, dtype=torch.int64)
    counts = torch.tensor([span.count for span in spans])
    return each.repeat_interleave(counts, dim=0).to(device)


def _read_slice(logits: Tensor, tokens: Tensor, top: int, ids: Tensor) -> Logprobs:
    logprobs = logits.log_softmax(1)
    read = Logprobs(logprobs.gather(1, tokens[:, None])[:, 0].tolist())
    if top:
        best = falling(logits, top)  # of the logits: rounding may make log-probabilities equal
        read.top_ids = best.tolist()
        read.top_values = logprobs.gather(1, best).tolist()
    if ids.shape[1]:
        read.id_values = logprobs.gather(1, ids).tolist()
    return read


def _cut(read: Logprobs, spans: Sequence[Span]) -> list[Logprobs]:
    """The spans' shares, each with as many entries a token as it asks for."""
    cut, start = [], 0
    for span in spans:
        share = read.part(start, start + span.count)
        top, ids = span.params.top_logprobs_num, len(span.params.token_ids_logprob)
        share.top_ids = [row[:top] for row in share.top_ids] if top else []
        share.top_values = [row[:top] for row in share.top_values] if top else []
        share.id_values = [row[:ids] for row in share.id_values] if ids else []
        cut.append(share)
        start += span.count
    return cut
