"""Rules that are biased on purpose, rules that would be by mistake, and what rightness rests on."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from chi_square import p_value
from closed_forms import relaxed
from rule_world import (
    BIASED,
    DRAWS,
    LEVEL,
    START,
    STATES,
    World,
    close,
    constant,
    generate,
    joint_p_value,
    outcomes,
    play,
    rows_of,
    world,
)
from torch import Tensor

from sgl_spec.request import SamplingParams
from sgl_spec.speculative import noise, propose, walk
from sgl_spec.speculative.rules import AcceptanceRule, make_rule
from sgl_spec.speculative.topology import Topology, topology

FOLLOW, REJECTION, BLOCK = make_rule(), make_rule(rejection=True), make_rule(block=True)
CHAIN2, CHAIN4 = topology(2, 1, 3), topology(4, 1, 5)
PAIR, TRIPLE = topology(1, 2, 3), topology(1, 3, 4)
TREE22, TREE32 = topology(2, 2, 7), topology(3, 2, 12)

# --- thresholds -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("single", "acc"), [(1.0, 0.5), (1.0, 0.9), (0.2, 1.0), (0.3, 0.8), (1.0, 0.0)]
)
def test_thresholds_do_what_they_say_and_are_biased(single: float, acc: float) -> None:
    p = [0.4, 0.25, 0.15, 0.1, 0.07, 0.03]
    place = constant(p, [0.2, 0.35, 0.05, 0.25, 0.1, 0.05])
    rule = make_rule(threshold_single=single, threshold_acc=acc)
    rows, state = rows_of(SamplingParams(seed=0), DRAWS), torch.full((DRAWS,), START)
    done = play(place, rule, TRIPLE, rows, state=state, committed=torch.full((DRAWS,), 6)).result
    expected = relaxed(tuple(p), (1, 3, 0), single, acc)
    counts = outcomes(done.tokens[:, :1], 6)
    assert close(float((done.counts > 1).double().mean()), expected.acceptance)
    assert p_value(counts, torch.tensor(p)) < BIASED
    certain = [token for token, chance in enumerate(expected.first) if chance == 1]
    if certain:
        assert int(counts[certain]) == DRAWS
    else:
        assert p_value(counts, torch.tensor(expected.first)) > LEVEL


def test_a_threshold_that_cannot_fire_is_exact() -> None:
    """No token has half of the target's mass, so a single threshold of 0.5 accepts nothing."""
    p = [0.4, 0.25, 0.15, 0.1, 0.07, 0.03]
    place = constant(p, [0.2, 0.35, 0.05, 0.25, 0.1, 0.05])
    assert joint_p_value(place, make_rule(threshold_single=0.5), TRIPLE, length=2) > LEVEL


def test_a_relaxed_tree_is_biased_through_whole_texts() -> None:
    assert joint_p_value(world(), make_rule(threshold_acc=0.8), TREE32) < BIASED


def test_filters_bound_even_the_loosest_threshold() -> None:
    place, params = world(), SamplingParams(seed=0, top_k=1)
    loose = make_rule(threshold_single=0.0, threshold_acc=0.0)
    text = generate(place, loose, TREE32, params, draws=300, length=5)
    assert text.equal(generate(place, FOLLOW, TREE32, params, draws=300, length=5))


# --- what would be biased is seen to be -----------------------------------------------------------


def test_deterministic_drafts_judged_by_p_over_q_are_biased(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Why drafters that take the best tokens by q are refused."""
    real = propose.draw_siblings

    def best(logits: Tensor, temperature: Tensor, keys: Tensor, count: int, ids: Tensor) -> object:
        _, q = real(logits, temperature, keys, count, ids)
        return ids[logits.topk(count).indices], q

    monkeypatch.setattr(propose, "draw_siblings", best)
    assert joint_p_value(world(), REJECTION, TREE22) < BIASED


def test_siblings_judged_in_another_order_are_biased() -> None:
    place = world()

    class Sorted:
        name, samples = "sorted", True

        def __call__(self, tree, logits, offsets, rows, committed, *, masks=None):  # type: ignore[no-untyped-def]
            tokens = tree.tokens.clone()
            tokens[:, 1:] = tokens[:, 1:].sort(dim=1).values
            return REJECTION(replace(tree, tokens=tokens), logits, offsets, rows, committed)

    assert joint_p_value(place, Sorted(), TRIPLE) < BIASED


def test_a_block_needs_fresh_noise_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that a block has rejected have decided about earlier ones. Noise that depended on the
    position alone would draw the same drafts again."""
    real = noise.stream_keys

    def by_position(seed: Tensor, positions: Tensor, stream: noise.Stream, depth: object) -> Tensor:
        return real(seed, positions, stream, 0)

    for module in (propose, walk):
        monkeypatch.setattr(module, "stream_keys", by_position)
    assert joint_p_value(world(off=2.0), BLOCK, CHAIN4) < BIASED


def test_streams_are_independent() -> None:
    """Proposals, coins and residuals of one request and position, and the target's own draw."""
    seeds, where = torch.arange(DRAWS), torch.full((DRAWS,), 9)
    keys = [noise.row_keys(seeds, where)]
    keys += [noise.stream_keys(seeds, where, s, d) for s in noise.Stream for d in (1, 2)]
    token = torch.zeros(DRAWS, 1, dtype=torch.int32)
    cells = [(noise.uniform(noise.noise_bits(k, token))[:, 0] * 8).long() for k in keys]
    for i, a in enumerate(cells):
        for b in cells[:i]:
            pairs = torch.bincount(a * 8 + b, minlength=64)
            assert p_value(pairs, torch.full((64,), 1 / 64)) > LEVEL


def test_coins_never_reach_an_end() -> None:
    """A coin that rounds to 1 would reject a draft that p equals q accepts for certain."""
    ends = noise.uniform(torch.tensor([-1, 0], dtype=torch.int32))
    assert ends.tolist() == [1 - 2.0**-33, 2.0**-33]


# --- a large vocabulary ---------------------------------------------------------------------------


VOCAB = 1 << 17


def spread(tail: float, width: int) -> Tensor:
    """[STATES, width] logits: one token, and `tail` spread evenly over all others."""
    logits = torch.full((1, width), math.log(tail / (width - 1)))
    logits[0, 0] = math.log1p(-tail)
    return logits.expand(STATES, -1)


def tail_of(rule: AcceptanceRule, shape: Topology, mass: float, draws: int) -> Tensor:
    """Tail tokens among `draws` first tokens, where the target has `mass` in its tail. The drafter
    knows the first half of the vocabulary and gives its tail a quarter of that."""
    place = World(spread(mass, VOCAB), spread(mass / 4, VOCAB // 2), torch.arange(VOCAB // 2))
    hits = []
    for start in range(0, draws, 20):
        rows, committed = rows_of(SamplingParams(seed=0), 20, start), torch.full((20,), 6)
        state = torch.full((20,), START)
        done = play(place, rule, shape, rows, state=state, committed=committed)
        hits.append(done.result.tokens[:, 0])
    tokens = torch.cat(hits)
    return tokens[tokens > 0]


TAILS = [(REJECTION, PAIR), (BLOCK, CHAIN2)]


def check_tail(rule: AcceptanceRule, shape: Topology, mass: float, draws: int) -> None:
    tail = tail_of(rule, shape, mass, draws)
    assert abs(tail.numel() - draws * mass) < 5 * math.sqrt(draws * mass * (1 - mass))
    if mass > 0.1:
        assert p_value(torch.bincount(tail >> 13, minlength=16), torch.ones(16)) > LEVEL


def test_tail_mass_at_a_large_vocabulary() -> None:
    """Half of the target's mass on 131,071 tokens: each 16th of the vocabulary gets its share, from
    drafts as well as from what is left of p."""
    check_tail(REJECTION, PAIR, 0.5, 1200)


@pytest.mark.slow
@pytest.mark.parametrize("mass", [0.5, 1e-3])
@pytest.mark.parametrize(("rule", "shape"), TAILS, ids=["rejection", "block"])
def test_tail_mass_at_a_large_vocabulary_in_many_draws(
    rule: AcceptanceRule, shape: Topology, mass: float
) -> None:
    check_tail(rule, shape, mass, 20_000)
