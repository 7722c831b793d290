"""Plain decoding, one token at a time, the slow way: every setting derived again from its
definition, in Python loops over the vocabulary and in float64. It shares no code with the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from sgl_spec.request import SamplingParams

Logits = Callable[[list[int]], Sequence[float]]  # of the token after a text
Text = Callable[[list[int]], str]  # of output ids
Grammar = Callable[[list[int]], set[int]]  # tokens that may follow output ids, enders too

_WORD = 0xFFFFFFFF


def decode(
    logits: Logits,
    prompt: Sequence[int],
    params: SamplingParams,
    eos: Sequence[int] = (),
    text: Text | None = None,
    grammar: Grammar | None = None,
) -> list[int]:
    """Output ids of a request that runs alone. text: needed for stop strings. grammar: what its
    text is held to, which ends where nothing but an ender may follow."""
    output: list[int] = []
    enders = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    while len(output) < params.max_new_tokens:
        may = None if grammar is None else grammar(output)
        if may is not None and may <= enders:
            break
        token = next_token(logits([*prompt, *output]), prompt, output, params, enders, may)
        before = text(output) if text and params.stop else ""
        output.append(token)
        if len(output) < params.min_new_tokens:
            continue
        if token in enders:
            break
        if text and params.stop and _completes(before, text(output), params.stop):
            break
    return output


def _completes(before: str, after: str, stops: Sequence[str]) -> bool:
    return any(stop in after[max(0, len(before) - len(stop) + 1) :] for stop in stops)


def next_token(
    logits: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    enders: set[int],
    may: set[int] | None = None,
) -> int:
    """The token after prompt + output. may: what a grammar allows, None for everything."""
    allowed = candidates(params, enders, len(output), len(logits), may)
    values = {t: adjusted(float(logits[t]), t, prompt, output, params) for t in allowed}
    order = sorted(values, key=lambda t: (-values[t], t))
    if params.temperature == 0:
        return order[0]
    top = values[order[0]]
    weights = {t: math.exp((x - top) / params.temperature) for t, x in values.items()}
    kept = filtered(order, weights, params)
    position = len(prompt) + len(output)
    assert params.seed is not None
    scores = {t: noise(params.seed, position, t) / weights[t] for t in kept if weights[t] > 0}
    return min(scores, key=lambda t: (scores[t], t))


def adjusted(
    logit: float,
    token: int,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
) -> float:
    """Penalties and bias of one token."""
    count = output.count(token)
    if count > 0 or token in prompt:
        if logit > 0:
            logit = logit / params.repetition_penalty
        else:
            logit = logit * params.repetition_penalty
    logit -= params.frequency_penalty * count
    if count > 0:
        logit -= params.presence_penalty
    bias = params.logit_bias.get(token, 0.0)
    return logit if abs(bias) == 100 else logit + bias


def candidates(
    params: SamplingParams,
    enders: set[int],
    generated: int,
    vocab: int,
    may: set[int] | None = None,
) -> list[int]:
    """Tokens that a grammar, the minimum length, bans and forces leave."""
    early = generated < params.min_new_tokens
    legal = [t for t in range(vocab) if not (early and t in enders)]
    legal = [t for t in legal if may is None or t in may]
    bias = params.logit_bias
    unbanned = [t for t in legal if bias.get(t) != -100] or legal
    return [t for t in unbanned if bias.get(t) == 100] or unbanned


def filtered(order: list[int], weights: dict[int, float], params: SamplingParams) -> list[int]:
    """top_k, then top_p of what it left, then min_p of the largest. order: by falling weight."""
    if params.top_k > 0:
        order = order[: params.top_k]
    total, before, kept = sum(weights[t] for t in order), 0.0, []
    for token in order:
        if params.top_p < 1 and before >= params.top_p * total:
            break
        kept.append(token)
        before += weights[token]
    return [t for t in kept if weights[t] >= params.min_p * weights[order[0]]]


def noise(seed: int, position: int, token: int) -> float:
    """The exponential of the noise word of a draw."""
    words = []
    for lane in (0x9E3779B9, 0x243F6A88):
        word = _scramble((seed + lane) & _WORD)
        word = _scramble((word + (seed >> 32)) & _WORD)
        words.append(_scramble((word + position) & _WORD))
    bits = _scramble((token + words[0]) & _WORD, words[1])
    return -math.log1p(-min((bits + 0.5) / 2**32, 1 - 2**-24))


def _scramble(word: int, key: int = 0) -> int:
    word ^= word >> 17
    word = word * 0xED5AD4BB & _WORD
    word ^= word >> 11
    word = (word + key) * 0xAC4C1B51 & _WORD
    word ^= word >> 15
    word = word * 0x31848BAB & _WORD
    return word ^ word >> 14
