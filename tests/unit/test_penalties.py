"""Penalties and biases: the formula in mixed batches, and what the extremes may not do."""

from __future__ import annotations

import random
from collections.abc import Sequence

import plain
import pytest
import torch
from torch import Tensor

from sgl_spec.errors import InvalidRequestError
from sgl_spec.request import SamplingParams, Speculation
from sgl_spec.speculative.penalties import TokenCounts
from sgl_spec.speculative.sampling import TokenMasks, build_rows, draw, final_probs

VOCAB = 40


def random_params(rng: random.Random, seed: int) -> SamplingParams:
    """Some of the settings, never the same twice."""
    ids = rng.sample(range(VOCAB), 12)
    choices = {
        "frequency_penalty": rng.uniform(-2, 2),
        "presence_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.uniform(0.3, 2),
        "logit_bias": {t: rng.choice([-100.0, 100.0, rng.uniform(-99, 99)]) for t in ids},
        "temperature": rng.choice([0.0, 0.6, 1.4]),
        "top_k": rng.choice([-1, 6]),
        "min_new_tokens": 3,
    }
    kept = {name: value for name, value in choices.items() if rng.random() < 0.5}
    return SamplingParams(seed=seed, **kept)  # type: ignore[arg-type]


def test_rows_of_a_mixed_batch_are_what_plain_decoding_gives() -> None:
    """Prompt and output in the counts, more output on the path, rows in any order and subset."""
    rng = random.Random(3)
    count, depth = 60, 4
    params = [random_params(rng, i) for i in range(count)]
    texts = [[rng.choices(range(VOCAB), k=n) for n in (5, 7, depth)] for _ in params]
    counts = TokenCounts(count + 3, VOCAB)
    rows_at = rng.sample(range(count + 3), count)
    for row, (prompt, output, _) in zip(rows_at, texts, strict=True):
        counts.start(row, [1] * 20, [2] * 9)  # an earlier request's
        counts.start(row, prompt, output[:3])
        counts.add(torch.full((4,), row), torch.tensor(output[3:]))
    rows = build_rows(params, [5] * count, [0], counts=counts, request_rows=rows_at)
    logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    before = logits.clone()
    paths = torch.tensor([path for _, _, path in texts])
    for used in range(depth + 1):
        order = torch.tensor(rng.sample(range(count), count - used))
        positions = torch.full((len(order),), 12 + used)
        drawn = draw(logits, rows.select(order), positions, order, path=paths[order, :used])
        for i, token in zip(order.tolist(), drawn.tolist(), strict=True):
            prompt, output, path = texts[i]
            text = output + path[:used]
            assert token == plain.next_token(logits[i].tolist(), prompt, text, params[i], {0})
    assert logits.equal(before)


def test_a_batch_without_penalties_or_biases_carries_none() -> None:
    rows = build_rows([SamplingParams(seed=0)] * 3, [1] * 3, [0])
    assert rows.penalties is None
    assert rows.bias is None


def test_penalties_without_counts_are_our_mistake() -> None:
    with pytest.raises(AssertionError, match="counts"):
        build_rows([SamplingParams(seed=0, presence_penalty=1.0)], [1], [])


# --- biases of -100 and 100 -----------------------------------------------------------------------


def words_of(*allowed: Sequence[int]) -> Tensor:
    words = torch.zeros(len(allowed), 2, dtype=torch.int32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            words[row, token // 32] |= 1 << (token % 32)
    return words


def support(params: SamplingParams, allowed: Sequence[int] | None = None, at: int = 9) -> set[int]:
    """Tokens with any probability; drawn with 200 seeds, nothing else appears."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4)) * 8
    masks = None if allowed is None else TokenMasks(words_of(allowed), torch.tensor([0]))
    rows = build_rows([params], [5], [0])
    probs = final_probs(logits, rows, torch.tensor([at]), masks=masks)[0]
    found = set(probs.nonzero()[:, 0].tolist())
    many = rows.select(torch.zeros(200, dtype=torch.int64))
    many.seed.copy_(torch.arange(200))
    index = torch.zeros(200, dtype=torch.int64)
    tokens = draw(logits, many, torch.full((200,), at), index, masks=masks)
    assert set(tokens.tolist()) <= found
    return found


@pytest.mark.parametrize("temperature", [0.5, 1e6])
def test_a_ban_and_a_force_hold_at_any_temperature(temperature: float) -> None:
    banned = SamplingParams(
        seed=1, temperature=temperature, logit_bias=dict.fromkeys(range(3, 40), -100.0)
    )
    assert support(banned) == {0, 1, 2}
    forced = SamplingParams(
        seed=1, temperature=temperature, logit_bias={7: 100.0, 9: 100.0, 11: 99.0, 8: -100.0}
    )
    assert support(forced) == {7, 9}


def test_a_force_outweighs_a_penalty() -> None:
    params = SamplingParams(
        seed=1, temperature=0.0, logit_bias={7: 100.0}, frequency_penalty=2.0, presence_penalty=2.0
    )
    counts = TokenCounts(1, VOCAB)
    counts.start(0, [1], [7] * 500)
    rows = build_rows([params], [1], [], counts=counts)
    assert draw(torch.zeros(1, VOCAB), rows, torch.tensor([501])).tolist() == [7]


def test_neither_leads_out_of_a_grammar_or_before_the_minimum_length() -> None:
    bias = {7: 100.0, 9: 100.0, 20: -100.0, 21: -100.0}
    params = SamplingParams(seed=1, temperature=50.0, logit_bias=bias)
    assert support(params, allowed=[9, 20, 30]) == {9}
    assert support(params, allowed=[20, 30, 31]) == {30, 31}
    assert support(params, allowed=[20, 21]) == {20, 21}, "banned, but all that there is"
    ender = SamplingParams(seed=1, temperature=50.0, logit_bias={0: 100.0}, min_new_tokens=6)
    assert support(ender, at=10) == set(range(1, VOCAB))
    assert support(ender, at=300) == {0}
    assert support(ender, allowed=[0, 3], at=10) <= {3}


def test_a_bias_for_every_token_at_either_end_changes_nothing() -> None:
    for value in (-100.0, 100.0):
        params = SamplingParams(seed=1, logit_bias=dict.fromkeys(range(VOCAB), value))
        assert support(params) == support(SamplingParams(seed=1))


# --- ranges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("frequency_penalty", v) for v in (-2.01, 2.01, float("nan"), float("inf"))),
        *(("presence_penalty", v) for v in (-3.0, 3.0, float("nan"))),
        *(("repetition_penalty", v) for v in (0.0, -1.0, 2.01, float("nan"))),
        *(("logit_bias", v) for v in ({3: 100.5}, {3: float("nan")}, {VOCAB: 1.0}, {-1: 1.0})),
        ("speculation", True),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field} must be") as caught:
        SamplingParams(**{field: value}).check(VOCAB)  # type: ignore[arg-type]
    assert caught.value.param == field


def test_the_ends_of_the_ranges_are_allowed() -> None:
    for sign in (-1, 1):
        SamplingParams(
            frequency_penalty=sign * 2.0,
            presence_penalty=sign * 2.0,
            repetition_penalty=2.0 if sign > 0 else 1e-3,
            logit_bias={0: sign * 100.0, VOCAB - 1: 0.0},
            speculation=Speculation(max_draft_tokens=0),
        ).check(VOCAB)
    with pytest.raises(InvalidRequestError, match=r"speculation\.max_draft_tokens must be"):
        SamplingParams(speculation=Speculation(max_draft_tokens=-1)).check(VOCAB)
