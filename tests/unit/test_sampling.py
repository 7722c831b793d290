"""The draw: its noise, its filters, its exact distribution, and what it may not depend on."""

from __future__ import annotations

import math

import pytest
import torch
from chi_square import p_value
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sgl_spec.request import SamplingParams
from sgl_spec.speculative import filters, sampling
from sgl_spec.speculative.noise import exponential, noise_bits, row_keys
from sgl_spec.speculative.sampling import (
    SamplingRows,
    TokenMasks,
    allowed_tokens,
    build_rows,
    draw,
    final_probs,
    shifted_bits,
)

DRAWS = 50_000
# Every seed is fixed, so a test passes always or never; a right sampler misses this level in one of
# 10,000 choices of seeds, a wrong one has p-values that no table prints.
LEVEL = 1e-4
WORD = 0xFFFFFFFF


def rows_of(
    *params: SamplingParams, prompt_len: int = 0, eos: tuple[int, ...] = ()
) -> SamplingRows:
    return build_rows(params, [prompt_len] * len(params), eos)


def repeat(rows: SamplingRows, times: int) -> SamplingRows:
    return rows.select(torch.zeros(times, dtype=torch.int64))


def counts_by_position(logits: Tensor, params: SamplingParams, draws: int = DRAWS) -> Tensor:
    """How often each token is drawn by one request at positions 0, 1, ..."""
    rows = repeat(rows_of(params), draws)
    tokens = draw(logits.expand(draws, -1), rows, torch.arange(draws))
    return torch.bincount(tokens, minlength=logits.shape[0])


def counts_by_seed(logits: Tensor, params: SamplingParams, draws: int = DRAWS) -> Tensor:
    """How often each token is drawn at one position by requests with seeds 0, 1, ..."""
    rows = repeat(rows_of(params), draws)
    rows.seed.copy_(torch.arange(draws))
    tokens = draw(logits.expand(draws, -1), rows, torch.full((draws,), 17))
    return torch.bincount(tokens, minlength=logits.shape[0])


def exact(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution the filters leave, the slow way: in Python, one token at a time."""
    values = [x / params.temperature for x in logits.double().tolist()]
    top = max(values)
    weight = [math.exp(x - top) for x in values]
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if params.top_k > 0:
        order = order[: params.top_k]
    total, mass, kept = sum(weight[i] for i in order), 0.0, []
    for i in order:
        if params.top_p < 1 and mass >= params.top_p * total * (1 - 1e-12):
            break
        kept.append(i)
        mass += weight[i]
    probability = torch.zeros(len(values), dtype=torch.float64)
    for i in kept:
        if weight[i] >= params.min_p:
            probability[i] = weight[i]
    return probability / probability.sum()


# --- the noise ------------------------------------------------------------------------------------


def mix_word(x: int, key: int = 0) -> int:
    """The mixer in Python integers, where nothing can overflow."""
    x ^= x >> 17
    x = x * 0xED5AD4BB & WORD
    x ^= x >> 11
    x = (x + key & WORD) * 0xAC4C1B51 & WORD
    x ^= x >> 15
    x = x * 0x31848BAB & WORD
    return x ^ x >> 14


def bits_word(seed: int, position: int, token: int) -> int:
    keys = []
    for lane in (0x9E3779B9, 0x243F6A88):
        key = mix_word((seed & WORD) + lane & WORD)
        key = mix_word(key + (seed >> 32 & WORD) & WORD)
        keys.append(mix_word(key + position & WORD))
    return mix_word(token + keys[0] & WORD, keys[1])


def bits_of(seeds: list[int], positions: list[int], tokens: int) -> Tensor:
    keys = row_keys(torch.tensor(seeds), torch.tensor(positions))
    return noise_bits(keys, torch.arange(tokens, dtype=torch.int32)).long() & WORD


@pytest.mark.parametrize("vocab", [1, 7, 33, 1003])  # vector loops and their remainders
def test_noise_is_the_stated_function_of_seed_position_and_token(vocab: int) -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 0x1234_5678_9ABC_DEF0, 1 << 32]
    positions = [0, 1, 2**31 - 1, 8191, 5, 77, 3]
    bits = bits_of(seeds, positions, vocab)
    for i, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for token in {0, vocab // 2, vocab - 1}:
            assert bits[i, token] == bits_word(seed, position, token)


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
@pytest.mark.parametrize("seed", [0, 1, 2, -7])
def test_every_byte_of_the_noise_is_uniform(seed: int, shift: int) -> None:
    bits = bits_of([seed] * 4, [0, 1, 2, 3], 1 << 16)
    counts = torch.bincount((bits >> shift & 0xFF).flatten(), minlength=256)
    assert p_value(counts, torch.ones(256)) > LEVEL


def neighbours(kind: str) -> tuple[Tensor, Tensor]:
    """Two arrays of noise words whose counters differ by one in `kind`."""
    if kind == "token":
        bits = bits_of([3], [9], 1 << 18)[0]
        return bits[:-1], bits[1:]
    ramp, flat = list(range(2049)), [5] * 2049
    bits = bits_of(flat, ramp, 128) if kind == "position" else bits_of(ramp, flat, 128)
    if kind == "position and token":  # position p, token t + 1 against position p + 1, token t
        bits = bits_of(flat, ramp, 129)
        return bits[:-1, 1:], bits[1:, :-1]
    if kind == "seed and position":  # the diagonal that a plain sum of the two would collapse
        bits = bits_of(ramp[:-1], ramp[:0:-1], 128)
    return bits[:-1], bits[1:]


@pytest.mark.parametrize(
    "kind", ["token", "position", "seed", "position and token", "seed and position"]
)
@pytest.mark.parametrize("shift", [0, 14, 28])
def test_neighbouring_counters_are_independent(kind: str, shift: int) -> None:
    """Joint distribution of four bits of both, low, middle and high."""
    first, second = (words >> shift & 15 for words in neighbours(kind))
    counts = torch.bincount((first * 16 + second).flatten(), minlength=256)
    assert p_value(counts, torch.ones(256)) > LEVEL


@pytest.mark.parametrize("field", ["seed", "position", "token"])
def test_flipping_any_input_bit_flips_every_output_bit_half_the_time(field: str) -> None:
    generator = torch.Generator().manual_seed(4)
    trials = 4096
    seeds = torch.randint(-(2**62), 2**62, (trials,), generator=generator)
    positions = torch.randint(0, 2**30, (trials,), generator=generator)
    tokens = torch.randint(0, 2**17, (trials, 1), generator=generator)
    plain = noise_bits(row_keys(seeds, positions), tokens.int())
    width = {"seed": 63, "position": 30, "token": 17}[field]
    for bit in range(width):
        flip = 1 << bit
        keys = row_keys(
            seeds ^ flip if field == "seed" else seeds,
            positions ^ flip if field == "position" else positions,
        )
        other = noise_bits(keys, (tokens ^ flip if field == "token" else tokens).int())
        changed = (plain ^ other).long() & WORD
        share = (changed >> torch.arange(32) & 1).double().mean(0)
        assert (share - 0.5).abs().max() < 6 * 0.5 / math.sqrt(trials), bit


def test_exponentials_match_float64_and_stay_finite_at_both_ends() -> None:
    words = torch.tensor([0, 1, 2, 1 << 20, 1 << 31, WORD - 512, *range(WORD - 200, WORD + 1)])
    variates = exponential(words.to(torch.int32))
    assert bool(torch.isfinite(variates).all())
    assert bool((variates > 0).all())
    assert bool((variates.diff() >= 0).all())
    uniform = ((words.double() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    torch.testing.assert_close(variates.double(), -torch.log1p(-uniform), rtol=4e-3, atol=0)
    small = slice(0, 4)  # the ones that win must be exact to the last bits
    torch.testing.assert_close(
        variates[small].double(), -torch.log1p(-uniform[small]), rtol=2e-7, atol=0
    )


# --- the distribution -----------------------------------------------------------------------------

LOGITS = torch.tensor([2.0, 1.0, 1.0, 0.0, -1.0, 0.5, 1.0, -2.0])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=0),
        SamplingParams(seed=1, temperature=0.5),
        SamplingParams(seed=2, temperature=3.0),
        SamplingParams(seed=3, top_k=3),
        SamplingParams(seed=4, top_p=0.8),
        SamplingParams(seed=5, min_p=0.2),
        SamplingParams(seed=6, top_k=5, top_p=0.75, temperature=1.5),
        SamplingParams(seed=7, top_k=6, top_p=0.95, min_p=0.15, temperature=0.8),
    ],
    ids=lambda p: f"T{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}",
)
@pytest.mark.parametrize("count", [counts_by_position, counts_by_seed])
def test_draws_follow_the_exact_distribution(count, params: SamplingParams) -> None:
    observed = count(LOGITS, params)
    assert p_value(observed, exact(LOGITS, params)) > LEVEL


def test_the_statistic_rejects_a_slightly_wrong_distribution() -> None:
    wrong = exact(LOGITS, SamplingParams(temperature=1.05))
    assert p_value(counts_by_position(LOGITS, SamplingParams(seed=0)), wrong) < 1e-8


def test_draws_at_neighbouring_positions_are_independent() -> None:
    rows = repeat(rows_of(SamplingParams(seed=11)), DRAWS)
    tokens = draw(LOGITS.expand(DRAWS, -1), rows, torch.arange(DRAWS))
    pairs = torch.bincount(tokens[:-1] * 8 + tokens[1:], minlength=64)
    p = exact(LOGITS, SamplingParams())
    assert p_value(pairs[torch.outer(p, p).flatten() > 2e-4], _pairs_above(p, 2e-4)) > LEVEL


def _pairs_above(p: Tensor, least: float) -> Tensor:
    both = torch.outer(p, p).flatten()
    return both[both > least]


def tail_hits(vocab: int, draws: int, mass: float, seed: int) -> Tensor:
    """Tokens drawn outside the head when `mass` is spread evenly over all tokens but one."""
    logits = torch.full((1, vocab), math.log(mass / (vocab - 1)))
    logits[0, 0] = math.log1p(-mass)
    rows = repeat(rows_of(SamplingParams(seed=seed)), draws)
    index = torch.zeros(draws, dtype=torch.int64)
    tokens = draw(logits, rows, torch.arange(draws), index)
    return tokens[tokens > 0]


def tail_error(mass: float) -> float:
    """Distance of the tail's share from its mass, in standard deviations."""
    draws = 2500
    hits = tail_hits(1 << 17, draws, mass, seed=1).numel()
    return abs(hits - draws * mass) / math.sqrt(draws * mass)


@pytest.mark.parametrize("mass", [1e-3, 1e-4])
def test_tail_mass_at_a_large_vocabulary(mass: float) -> None:
    assert tail_error(mass) < 5


def test_the_tail_statistic_rejects_a_rounded_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    """-log(u) in fp32: u rounds to 1 once in 2^25 words, and then that token wins any argmin."""

    def rounded(bits: Tensor) -> Tensor:
        return bits.view(torch.uint32).float().add_(0.5).mul_(2.0**-32).log_().neg_()

    monkeypatch.setattr(sampling, "exponential", rounded)
    assert tail_error(1e-4) > 5


def test_a_heavy_tail_is_drawn_evenly_at_a_large_vocabulary() -> None:
    draws, mass = 2000, 0.5
    hits = tail_hits(1 << 17, draws, mass, seed=2)
    assert abs(hits.numel() - draws * mass) < 5 * math.sqrt(draws * mass * (1 - mass))
    assert p_value(torch.bincount(hits >> 13, minlength=16), torch.ones(16)) > LEVEL


# --- the filters' edges ---------------------------------------------------------------------------


def support(logits: list[float], params: SamplingParams, draws: int = 3000) -> set[int]:
    return set(counts_by_position(torch.tensor(logits), params, draws).nonzero()[:, 0].tolist())


def test_ties_at_the_top_k_edge_go_to_the_lower_id() -> None:
    logits = [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    assert support(logits, SamplingParams(seed=0, top_k=2)) == {1, 3}
    assert support(logits, SamplingParams(seed=0, top_k=4)) == {0, 1, 3, 5}


def test_ties_at_the_top_p_edge_go_to_the_lower_id() -> None:
    equal = [0.0] * 10
    assert support(equal, SamplingParams(seed=0, top_p=0.3)) == {0, 1, 2}
    assert support(equal, SamplingParams(seed=0, top_p=0.31)) == {0, 1, 2, 3}
    assert support(equal, SamplingParams(seed=0, top_p=0.1)) == {0}
    assert support(equal, SamplingParams(seed=0, top_p=0.7)) == set(range(7))


def test_zeros_of_either_sign_are_equal_logits() -> None:
    assert support([-0.0, 0.0, -0.0, 0.0, -1.0], SamplingParams(seed=0, top_k=2)) == {0, 1}
    assert support([0.0, -0.0, 0.0, -0.0, -9.0], SamplingParams(seed=0, top_p=0.7)) == {0, 1, 2}


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    equal = [0.0] * 10
    assert support(equal, SamplingParams(seed=0, top_k=4, top_p=0.5)) == {0, 1}


def test_min_p_acts_after_top_p_and_counts_from_the_largest() -> None:
    """0.5 0.2 0.15 0.15: with the small ones dropped first, top_p 0.7 would keep one, not two."""
    logits = [math.log(p) for p in (0.5, 0.2, 0.15, 0.15)]
    assert support(logits, SamplingParams(seed=0, top_p=0.7, min_p=0.35)) == {0, 1}
    assert support(logits, SamplingParams(seed=0, top_p=0.72, top_k=4, min_p=0.35)) == {0, 1}
    assert support(logits, SamplingParams(seed=0, min_p=0.35)) == {0, 1}
    assert support(logits, SamplingParams(seed=0, min_p=0.45)) == {0}


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.integers(-3, 3), min_size=1, max_size=12),
    top_k=st.integers(1, 14) | st.just(-1),
    top_p=st.sampled_from([1e-6, 0.2, 0.37, 0.5, 0.81, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.11, 0.6, 1.0]),
)
def test_filters_leave_exactly_the_tokens_of_the_slow_reference(
    values: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    """At a temperature that makes the survivors nearly equal, all of them appear in 600 draws."""
    params = SamplingParams(seed=0, top_k=top_k, top_p=top_p, min_p=min_p, temperature=8.0)
    logits = torch.tensor(values, dtype=torch.float32)
    expected = set(exact(logits, params).nonzero()[:, 0].tolist())
    assert support(logits.tolist(), params, draws=600) == expected


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=5, temperature=0),
        SamplingParams(seed=5, temperature=1e-30),
        SamplingParams(seed=5, temperature=1.5, top_k=1),
        SamplingParams(seed=5, temperature=1.5, top_p=1e-6),
        SamplingParams(seed=5, temperature=1.5, min_p=1.0),
    ],
)
def test_degenerate_filters_are_greedy(params: SamplingParams) -> None:
    logits = torch.randn(64, 5003, generator=torch.Generator().manual_seed(0))
    rows = repeat(rows_of(params), 64)
    assert draw(logits, rows, torch.arange(64)).equal(logits.argmax(1))


@pytest.mark.parametrize("vocab", [5, 49152, 131072])
def test_greedy_ties_go_to_the_lower_id(vocab: int) -> None:
    """Far apart too, where a reduction split over threads must still agree."""
    logits = torch.zeros(3, vocab)
    logits[1, [2, vocab - 1]] = 1.0
    logits[2, [vocab - 2, vocab - 1]] = 1.0
    rows = repeat(rows_of(SamplingParams(temperature=0, seed=0)), 3)
    assert draw(logits, rows, torch.arange(3)).tolist() == [0, 2, vocab - 2]


def test_impossible_tokens_are_never_drawn_and_logits_stay_as_they_were() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0]])
    before = logits.clone()
    for params in (SamplingParams(seed=0), SamplingParams(seed=0, top_k=3, temperature=5.0)):
        rows = repeat(rows_of(params), 500)
        index = torch.zeros(500, dtype=torch.int64)
        assert set(draw(logits, rows, torch.arange(500), index).tolist()) == {1, 3}
    assert logits.equal(before)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.5}])
def test_a_row_without_usable_logits_still_draws_an_id(params: dict[str, float]) -> None:
    """An id outside the vocabulary would end the engine, not the request."""
    rows = rows_of(SamplingParams(seed=0, **params))
    position = torch.tensor([4])
    assert draw(torch.full((1, 9), -torch.inf), rows, position).tolist() == [0]
    for bad in (torch.nan, torch.inf):
        logits = torch.zeros(1, 9)
        logits[0, 6] = bad
        assert 0 <= int(draw(logits, rows, position)) < 9


def test_a_draw_leaves_the_thread_count_as_it_was() -> None:
    before = torch.get_num_threads()
    draw(torch.zeros(1, 9), rows_of(SamplingParams(seed=0)), torch.tensor([4]))
    assert torch.get_num_threads() == before


# --- minimum length -------------------------------------------------------------------------------


def test_no_ending_token_is_drawn_before_the_minimum_and_any_may_be_after() -> None:
    params = SamplingParams(seed=0, min_new_tokens=3, stop_token_ids=(1, 6))
    rows = repeat(rows_of(params, prompt_len=10, eos=(0,)), 4000)
    rows.seed.copy_(torch.arange(4000))
    positions = 10 + torch.arange(4000) % 4
    tokens = draw(LOGITS.expand(4000, -1), rows, positions)
    assert set(tokens[positions < 13].tolist()) == {2, 3, 4, 5, 7}
    assert {0, 1, 6} <= set(tokens[positions == 13].tolist())


def test_minimum_length_masks_before_the_filters_and_for_greedy_rows() -> None:
    top = SamplingParams(seed=0, min_new_tokens=1, top_k=1)
    greedy = SamplingParams(seed=0, min_new_tokens=1, temperature=0)
    rows = rows_of(top, greedy, top, greedy, prompt_len=2, eos=(0,))
    tokens = draw(LOGITS.expand(4, -1), rows, torch.tensor([2, 2, 3, 3]))
    assert tokens.tolist() == [1, 1, 0, 0]


def test_a_request_that_ignores_eos_may_draw_it_at_once() -> None:
    params = SamplingParams(seed=0, min_new_tokens=5, temperature=0, ignore_eos=True)
    assert draw(LOGITS[None], rows_of(params, eos=(0,)), torch.tensor([0])).tolist() == [0]


def test_rows_with_different_end_ids_share_a_batch() -> None:
    params = [
        SamplingParams(seed=0, temperature=0, min_new_tokens=2, stop_token_ids=(0, 1, 2)),
        SamplingParams(seed=0, temperature=0),
        SamplingParams(seed=0, temperature=0, min_new_tokens=2, stop_token_ids=(0,)),
    ]
    assert draw(LOGITS.expand(3, -1), rows_of(*params), torch.zeros(3).long()).tolist() == [6, 0, 1]


def test_the_minimum_gives_way_where_it_would_leave_no_token() -> None:
    """As without it, of what the grammar's mask leaves."""
    every = tuple(range(len(LOGITS)))
    words = torch.tensor([[0b1100]], dtype=torch.int32)
    masks = TokenMasks(words, torch.zeros(1, dtype=torch.int64))
    for extra in ({"temperature": 0}, {}, {"top_k": 3}, {"top_k": 1}):
        seeds, where = torch.arange(400), torch.zeros(400, dtype=torch.int64)
        for mask, stop in ((None, every), (masks, every), (masks, (2, 3))):
            held = SamplingParams(seed=0, min_new_tokens=5, stop_token_ids=stop, **extra)
            free = SamplingParams(seed=0, **extra)
            found = []
            for params in (held, free):
                rows = repeat(rows_of(params), 400)
                rows.seed.copy_(seeds)
                options = {"index": where, "masks": mask}
                found.append(draw(LOGITS[None], rows, where, **options))
                found.append(final_probs(LOGITS[None], rows, where, **options))
            assert torch.equal(found[0], found[2])
            assert torch.equal(found[1], found[3])
            assert mask is None or set(found[0].tolist()) <= {2, 3}


def test_the_minimum_holds_beside_a_row_where_it_gives_way() -> None:
    every = tuple(range(len(LOGITS)))
    params = [
        SamplingParams(seed=0, temperature=0, min_new_tokens=2, stop_token_ids=every),
        SamplingParams(seed=0, temperature=0, min_new_tokens=2, stop_token_ids=(0,)),
    ]
    assert draw(LOGITS.expand(2, -1), rows_of(*params), torch.zeros(2).long()).tolist() == [0, 1]


# --- what a draw may not depend on ----------------------------------------------------------------

MIXED = [
    SamplingParams(temperature=0, seed=0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=1.3, top_k=40),
    SamplingParams(seed=3, temperature=0.7, top_p=0.5),
    SamplingParams(seed=4, temperature=2.0, top_p=0.97, min_p=0.001, min_new_tokens=4),
    SamplingParams(seed=5, temperature=1.1, top_k=3000, top_p=0.9),
]


@pytest.mark.parametrize("vocab", [61, 5003, 49152])
def test_a_row_is_bitwise_independent_of_its_batch(vocab: int) -> None:
    count = 24
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(count, vocab, generator=generator) * 3
    rows = rows_of(*(MIXED[i % len(MIXED)] for i in range(count)), eos=(0,))
    positions = torch.arange(count) * 5
    together = draw(logits, rows, positions)
    alone = [
        draw(logits[i : i + 1], rows.select(slice(i, i + 1)), positions[i : i + 1])
        for i in range(count)
    ]
    assert together.equal(torch.cat(alone))
    order = torch.randperm(count, generator=generator)
    part = order[: count // 2]
    assert draw(logits, rows.select(part), positions[part], part).equal(together[part])
    mask = torch.zeros(count, dtype=torch.bool)
    mask[part] = True
    assert draw(logits[mask], rows.select(mask), positions[mask]).equal(together[mask])


@pytest.mark.parametrize("vocab", [61, 5003])
def test_noise_and_weights_have_the_same_bits_in_any_batch(vocab: int) -> None:
    """Tokens alone would hide a rounding that moves with the row's place in memory."""
    words = torch.randint(-(2**31), 2**31, (7, vocab), dtype=torch.int32)
    together = exponential(words), (words.float() * 2.0**-27).exp()
    for i in range(7):
        alone = exponential(words[i : i + 1].clone()), (words[i].clone().float() * 2.0**-27).exp()
        assert together[0][i : i + 1].equal(alone[0])
        assert together[1][i].equal(alone[1])


def test_settings_of_one_row_do_not_leak_into_another() -> None:
    """Greedy rows stay greedy in a hot batch, wherever they stand."""
    logits = torch.randn(6, 400, generator=torch.Generator().manual_seed(1))
    hot, greedy = SamplingParams(seed=9, temperature=1.3), SamplingParams(seed=9, temperature=0)
    for first in (0, 1):
        params = [hot if i % 2 == first else greedy for i in range(6)]
        tokens = draw(logits, rows_of(*params), torch.arange(6))
        cold = torch.tensor([p is greedy for p in params])
        assert tokens[cold].equal(logits.argmax(1)[cold])
        assert not tokens[~cold].equal(logits.argmax(1)[~cold])


def test_flags_say_what_a_batch_needs() -> None:
    greedy = rows_of(MIXED[0])
    assert (greedy.any_greedy, greedy.any_sampled, greedy.any_filtered) == (True, False, False)
    mixed = rows_of(*MIXED, eos=(1,))
    assert all((mixed.any_greedy, mixed.any_sampled, mixed.any_filtered, mixed.any_minimum))
    plain = rows_of(MIXED[1], eos=(1,))
    assert not any((plain.any_greedy, plain.any_filtered, plain.any_minimum))


def test_a_request_without_a_seed_is_refused() -> None:
    with pytest.raises(AssertionError, match="seed"):
        rows_of(SamplingParams())


# --- the distribution as numbers, and grammar masks -----------------------------------------------


@pytest.mark.parametrize("params", [*MIXED, SamplingParams(seed=0, top_k=5, top_p=0.75)])
def test_final_probs_are_the_slow_reference(params: SamplingParams) -> None:
    logits = torch.stack([LOGITS, LOGITS.flip(0), LOGITS * 2])
    index = torch.tensor([2, 0, 1, 1])
    probs = final_probs(logits, repeat(rows_of(params), 4), torch.arange(4) + 9, index)
    for row, i in enumerate(index.tolist()):
        if params.greedy:
            expected = torch.zeros(8, dtype=torch.float64)
            expected[logits[i].argmax()] = 1
        else:
            expected = exact(logits[i], params)
        torch.testing.assert_close(probs[row].double(), expected, rtol=1e-5, atol=1e-7)
        assert probs[row].equal(
            final_probs(logits[i][None], rows_of(params), torch.tensor([9 + row]))[0]
        )


def words_of(*allowed: set[int], vocab: int) -> Tensor:
    words = torch.zeros(len(allowed), (vocab + 31) // 32, dtype=torch.int64)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            words[row, token // 32] |= 1 << token % 32
    return torch.where(words >> 31 > 0, words - (1 << 32), words).to(torch.int32)


def test_allowed_tokens_are_the_set_bits_on_any_device() -> None:
    vocab = 77
    sets = [set(range(vocab)), set(), {0, 31, 32, 63, 64, 76}, {33, 75}]
    words = words_of(*sets, vocab=vocab)
    expected = torch.tensor([[t in allowed for t in range(vocab)] for allowed in sets])
    assert allowed_tokens(words, vocab).equal(expected)
    assert shifted_bits(words, vocab).equal(expected)


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.5}, {"min_new_tokens": 3}]
)
def test_masks_restrict_the_rows_they_name_before_the_filters(params: dict[str, float]) -> None:
    vocab, logits = 40, torch.randn(3, 40, generator=torch.Generator().manual_seed(2)) * 3
    allowed = {1, 7, 31, 32, 39}
    masks = TokenMasks(words_of({5}, allowed, vocab=vocab), torch.tensor([-1, 1, 0]))
    rows = repeat(rows_of(SamplingParams(seed=3, **params), eos=(7,), prompt_len=1), 600)
    index = torch.arange(600) % 3
    positions = torch.arange(600) % 3 + 1
    tokens = draw(logits, rows, positions, index, masks=masks)
    probs = final_probs(logits, rows, positions, index, masks=masks)
    for row in range(3):
        hidden = logits.clone()
        kept = {0: set(range(vocab)), 1: allowed, 2: {5}}[row]
        hidden[:, [t for t in range(vocab) if t not in kept]] = -torch.inf
        here = index == row
        assert tokens[here].equal(draw(hidden, rows.select(here), positions[here], index[here]))
        assert probs[here].equal(
            final_probs(hidden, rows.select(here), positions[here], index[here])
        )
        assert set(tokens[here].tolist()) <= kept


def test_a_row_where_everything_is_masked_has_all_its_mass_on_token_0() -> None:
    masks = TokenMasks(words_of(set(), vocab=8), torch.tensor([0]))
    for params in ({"temperature": 0.0}, {}, {"top_k": 2}):
        rows, position = rows_of(SamplingParams(seed=0, **params)), torch.tensor([4])
        assert draw(LOGITS[None], rows, position, masks=masks).tolist() == [0]
        assert final_probs(LOGITS[None], rows, position, masks=masks)[0].tolist() == [1] + [0] * 7


# --- rows that are sorted only down to where the filters end --------------------------------------

WIDE = filters.SMALL + 1811  # more than is sorted as a whole
EDGES = [
    SamplingParams(seed=0, top_k=1),
    SamplingParams(seed=1, top_k=40, temperature=0.8),
    SamplingParams(seed=2, top_k=filters.SMALL + 7, top_p=0.99),
    SamplingParams(seed=3, top_k=WIDE - 1, min_p=1e-9),
    SamplingParams(seed=4, top_k=300, top_p=0.7, min_p=0.01, temperature=1.2),
    SamplingParams(seed=5, top_p=0.3),
    SamplingParams(seed=6, top_p=0.95, temperature=0.7),
    SamplingParams(seed=7, top_p=0.9999, temperature=2.5),
    SamplingParams(seed=8, top_p=1e-6, min_p=0.3),
    SamplingParams(seed=9, min_p=0.05),
    SamplingParams(seed=10, min_p=1.0, temperature=1e-30),
    SamplingParams(seed=11, min_p=1e-8, temperature=5.0),
    SamplingParams(seed=12, top_p=0.8, temperature=1e6),
    SamplingParams(seed=13, top_p=0.99, min_p=0.2, temperature=1.5),
]


def rows_of_every_kind(kind: str) -> Tensor:
    """[rows, WIDE] logits."""
    generator = torch.Generator().manual_seed(len(kind))
    logits = torch.randn(len(EDGES), WIDE, generator=generator) * 4
    logits[:, :50] += torch.linspace(16, 0, 50)
    if kind == "equal logits":
        logits = (logits * 2).round() / 2
        logits[:, ::7] *= -0.0
    if kind == "masked":
        keep = torch.rand(logits.shape, generator=generator) < 0.002
        logits.masked_fill_(~keep, -torch.inf)
    if kind == "flat":
        logits *= 0.01
    if kind == "beyond numbers":
        logits[:, 5], logits[:, 6] = torch.inf, -torch.inf
    return logits


@pytest.mark.parametrize("kind", ["usual", "equal logits", "masked", "flat", "beyond numbers"])
def test_a_sorted_head_gives_the_bits_of_a_whole_sort(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, rows = rows_of_every_kind(kind), rows_of(*EDGES)
    positions = torch.arange(len(EDGES))
    before = logits.clone()
    sorted_whole = []
    whole = filters._whole
    monkeypatch.setattr(filters, "_whole", lambda *a: sorted_whole.append(1) or whole(*a))
    drawn, probs = draw(logits, rows, positions), final_probs(logits, rows, positions)
    if kind == "usual":
        assert 0 < len(sorted_whole) <= 10, "five rows keep most tokens, nine do not"
    monkeypatch.setattr(filters, "SMALL", WIDE)
    assert drawn.equal(draw(logits, rows, positions))
    assert probs.equal(final_probs(logits, rows, positions))
    assert logits.equal(before)
    if kind in ("usual", "masked"):
        for i, params in enumerate(EDGES):
            expected = exact(logits[i], params)
            torch.testing.assert_close(probs[i].double(), expected, rtol=2e-4, atol=1e-6)
