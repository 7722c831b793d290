"""Every acceptance rule against its exact reference: what it emits, and how much it accepts."""

from __future__ import annotations

import math

import pytest
import torch
from chi_square import p_value
from closed_forms import as_block, following, one_by_one, siblings
from rule_world import (
    BIASED,
    DRAWS,
    LEVEL,
    START,
    STATES,
    World,
    close,
    constant,
    follow,
    generate,
    joint_p_value,
    outcomes,
    play,
    rows_of,
    world,
)
from torch import Tensor

from sgl_spec.request import SamplingParams
from sgl_spec.speculative.rules import AcceptanceRule, make_rule
from sgl_spec.speculative.sampling import build_rows
from sgl_spec.speculative.topology import Topology, topology
from sgl_spec.speculative.walk import residual_draw

FOLLOW, REJECTION, BLOCK = make_rule(), make_rule(rejection=True), make_rule(block=True)
CHAIN1, CHAIN2, CHAIN4 = (topology(n, 1, n + 1) for n in (1, 2, 4))
PAIR, TRIPLE = topology(1, 2, 3), topology(1, 3, 4)
TREE22, TREE23 = topology(2, 2, 7), topology(2, 3, 9)
TREE32 = topology(3, 2, 12)

LOSSLESS = {
    "follow, plain": (FOLLOW, topology(1, 1, 1)),
    "follow, one-hot": (FOLLOW, CHAIN1),
    "follow, chain": (FOLLOW, CHAIN4),
    "follow, tree": (FOLLOW, TREE32),
    "rejection, plain": (REJECTION, topology(1, 1, 1)),
    "rejection, one": (REJECTION, CHAIN1),
    "rejection, chain": (REJECTION, CHAIN4),
    "rejection, 2 siblings": (REJECTION, PAIR),
    "rejection, 3 siblings": (REJECTION, TRIPLE),
    "rejection, 2 levels of 2": (REJECTION, TREE22),
    "rejection, 2 levels of 3": (REJECTION, TREE23),
    "rejection, 3 levels of 2": (REJECTION, TREE32),
    "block, one": (BLOCK, CHAIN1),
    "block, chain of 2": (BLOCK, CHAIN2),
    "block, chain of 4": (BLOCK, CHAIN4),
    "thresholds of 1": (make_rule(threshold_single=1.0, threshold_acc=1.0), TREE32),
}


# --- what is emitted ------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["seed", "position"])
@pytest.mark.parametrize("case", LOSSLESS)
def test_three_tokens_have_the_targets_joint_distribution(case: str, by: str) -> None:
    rule, shape = LOSSLESS[case]
    assert joint_p_value(world(), rule, shape, by=by) > LEVEL


SAMPLED = {name: LOSSLESS[name] for name in LOSSLESS if "rejection" in name or "block" in name}
SETTINGS = [
    SamplingParams(seed=0, temperature=1.6),
    SamplingParams(seed=0, temperature=0.7, top_k=2),
    SamplingParams(seed=0, top_p=0.8),
    SamplingParams(seed=0, min_p=0.3),
    SamplingParams(seed=0, logit_bias={1: 0.6, 3: -0.3}),
    SamplingParams(seed=0, temperature=1.2, top_k=3, top_p=0.9, min_p=0.05),
]


@pytest.mark.parametrize("params", SETTINGS, ids=range(len(SETTINGS)))
@pytest.mark.parametrize(
    "case", ["rejection, chain", "rejection, 2 levels of 2", "block, chain of 4"]
)
def test_the_targets_filters_apply_and_the_drafter_need_not_know_them(
    case: str, params: SamplingParams
) -> None:
    rule, shape = LOSSLESS[case]
    place, plain = world(), SamplingParams(seed=0)
    text = generate(place, rule, shape, params, draws=DRAWS, length=3)
    counts = outcomes(text, place.vocab)
    assert p_value(counts, place.joint(params, 3)) > LEVEL
    assert p_value(counts, place.joint(plain, 3)) < BIASED


@pytest.mark.parametrize("off", [0.0, 0.1, 4.0])
@pytest.mark.parametrize(
    "case", ["rejection, chain", "rejection, 3 levels of 2", "block, chain of 4"]
)
def test_the_drafter_may_be_perfect_or_hopeless(case: str, off: float) -> None:
    rule, shape = LOSSLESS[case]
    assert joint_p_value(world(off=off), rule, shape) > LEVEL


@pytest.mark.parametrize(
    "case", ["rejection, chain", "rejection, 2 levels of 2", "block, chain of 4"]
)
@pytest.mark.parametrize("ids", [[0, 2, 3], [3, 1]])
def test_the_drafter_may_know_part_of_the_vocabulary(case: str, ids: list[int]) -> None:
    rule, shape = LOSSLESS[case]
    assert joint_p_value(world(ids=ids), rule, shape) > LEVEL


def test_a_drafter_may_run_out_of_tokens() -> None:
    """Three siblings are asked for where only one or two tokens have mass."""
    place = world()
    place.draft[::2, 1:] = -torch.inf
    place.draft[1::2, 2:] = -torch.inf
    assert joint_p_value(place, REJECTION, TREE23) > LEVEL
    assert joint_p_value(place, BLOCK, CHAIN4) > LEVEL


@pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=["rejection", "block"])
def test_requests_with_fewer_nodes_share_a_batch(rule: AcceptanceRule) -> None:
    """A request's budget is known before its drafts are drawn, and cuts the shape's tail."""
    shape = CHAIN4 if rule is BLOCK else TREE22
    place, params = world(), SamplingParams(seed=0)
    rows, budget = rows_of(params, DRAWS), 1 + torch.arange(DRAWS) % shape.width
    state, committed = torch.full((DRAWS,), START), torch.full((DRAWS,), 6)
    done = play(place, rule, shape, rows, state=state, committed=committed, max_nodes=budget)
    assert done.tree.num_nodes.equal(budget)
    first = done.result.tokens[:, :1]
    expected = place.joint(params, 1)
    for nodes in range(1, shape.width + 1):
        mine = budget == nodes
        assert p_value(outcomes(first[mine], place.vocab), expected) > LEVEL
        assert int(done.result.counts[mine].max()) <= nodes
        alone = play(
            place,
            rule,
            shape,
            rows.select(mine),
            state=state[mine],
            committed=committed[mine],
            max_nodes=budget[mine],
        )
        assert alone.result.counts.equal(done.result.counts[mine])
        assert alone.result.tokens[:, 0].equal(first[mine, 0])


@pytest.mark.parametrize("case", SAMPLED)
def test_greedy_requests_get_the_argmax_beside_sampled_ones(case: str) -> None:
    rule, shape = SAMPLED[case]
    place, count = world(), 3000
    mixed = [SamplingParams(seed=0, temperature=0.0), SamplingParams(seed=0)]
    turn = torch.arange(count) % 2
    rows = build_rows(mixed, [1, 1], []).select(turn)
    rows.seed.copy_(torch.arange(count))
    state = torch.arange(count) % STATES
    done = play(place, rule, shape, rows, state=state, committed=torch.full((count,), 6))
    tokens, counts = done.result.tokens[turn == 0], done.result.counts[turn == 0]
    here = state[turn == 0]
    for i in range(int(counts.max())):
        best, some = place.target[here].argmax(1), counts > i
        assert tokens[some, i].equal(best[some])
        here = follow(here, best)
    assert counts.double().mean() > 1.3 or shape.width == 1
    assert not done.result.tokens[turn == 1, 0].equal(place.target[state[turn == 1]].argmax(1))


@pytest.mark.parametrize("case", LOSSLESS)
def test_a_request_alone_gets_what_it_gets_in_a_batch(case: str) -> None:
    rule, shape = LOSSLESS[case]
    place, rows = world(), rows_of(SamplingParams(seed=0), 200)
    state, committed = torch.arange(200) % STATES, 5 + torch.arange(200) % 40
    together = play(place, rule, shape, rows, state=state, committed=committed).result
    again = play(place, rule, shape, rows, state=state, committed=committed).result
    assert again.tokens.equal(together.tokens)
    for i in range(0, 200, 13):
        one = slice(i, i + 1)
        alone = play(
            place, rule, shape, rows.select(one), state=state[one], committed=committed[one]
        ).result
        count = int(together.counts[i])
        assert alone.counts.item() == count
        assert alone.tokens[0, :count].equal(together.tokens[i, :count])
        assert alone.path[0, :count].equal(together.path[i, :count])


@pytest.mark.parametrize("rule", [REJECTION, make_rule(threshold_acc=0.5)])
def test_rows_off_the_walk_are_never_read(rule: AcceptanceRule) -> None:
    place, rows, count = world(), rows_of(SamplingParams(seed=0), 200), 200
    state, committed = torch.arange(count) % STATES, torch.full((count,), 6)
    done = play(place, rule, TREE32, rows, state=state, committed=committed)
    logits = place.target[done.states].clone()  # [R, N, V]
    result = done.result
    on_walk = torch.zeros(count, TREE32.width, dtype=torch.bool)
    for i in range(count):
        on_walk[i, result.path[i, : result.counts[i]]] = True
    logits[~on_walk] = torch.nan
    offsets = torch.arange(count) * TREE32.width
    again = rule(done.tree, logits.flatten(0, 1), offsets, rows, committed)
    assert again.counts.equal(result.counts)
    assert again.tokens.equal(result.tokens)


@pytest.mark.parametrize("rule", [FOLLOW, REJECTION, BLOCK, make_rule(threshold_acc=0.5)])
def test_without_drafts_every_rule_is_plain_decoding(rule: AcceptanceRule) -> None:
    place, params = world(), SamplingParams(seed=0)
    plain = generate(place, FOLLOW, topology(1, 1, 1), params, draws=500, length=6)
    assert generate(place, rule, topology(1, 1, 1), params, draws=500, length=6).equal(plain)


def test_the_default_rule_gives_the_plain_text_seed_by_seed_and_the_others_do_not() -> None:
    place, params = world(), SamplingParams(seed=0)
    plain = generate(place, FOLLOW, topology(1, 1, 1), params, draws=500, length=6)
    assert generate(place, FOLLOW, TREE32, params, draws=500, length=6).equal(plain)
    assert not generate(place, REJECTION, TREE32, params, draws=500, length=6).equal(plain)


# --- how much is accepted -------------------------------------------------------------------------


def first_round(place: World, rule: AcceptanceRule, shape: Topology) -> Tensor:
    """[DRAWS] drafts kept in a round that starts at START."""
    rows, state = rows_of(SamplingParams(seed=0), DRAWS), torch.full((DRAWS,), START)
    done = play(place, rule, shape, rows, state=state, committed=torch.full((DRAWS,), 6))
    return done.result.counts - 1


def at_start(place: World) -> tuple[tuple[float, ...], tuple[float, ...]]:
    p = place.probs(SamplingParams(seed=0))[START]
    return tuple(p.tolist()), tuple(place.draft_probs(1.0)[START].tolist())


@pytest.mark.parametrize("ids", [None, [0, 2, 3]])
@pytest.mark.parametrize("seed", [5, 6])
def test_the_first_level_accepts_as_often_as_theory_says(ids: list[int] | None, seed: int) -> None:
    place = world(ids=ids, seed=seed)
    p, q = at_start(place)
    best = sorted(range(len(q)), key=lambda token: -q[token])
    expected = {
        "one-hot: p of the draft": (FOLLOW, CHAIN1, following(p, best[:1]).acceptance),
        "sum of the children's p": (FOLLOW, PAIR, p[best[0]] + p[best[1]]),
        "sum of min(p, q)": (REJECTION, CHAIN1, sum(map(min, p, q))),
        "two siblings": (REJECTION, PAIR, siblings(p, q, 2).acceptance),
        "three siblings": (REJECTION, TRIPLE, siblings(p, q, 3).acceptance),
    }
    for name, (rule, shape, chance) in expected.items():
        kept = first_round(place, rule, shape)
        assert close(float((kept > 0).double().mean()), chance), name
    assert siblings(p, q, 3).acceptance > siblings(p, q, 2).acceptance > sum(map(min, p, q))


@pytest.mark.parametrize("length", [2, 3, 4])
@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.4, 0.25, 0.15, 0.1, 0.07, 0.03], [0.2, 0.35, 0.05, 0.25, 0.1, 0.05]),
        ([1 / 3, 2 / 3], [2 / 3, 1 / 3]),
        ([0.05, 0.05, 0.9], [0.5, 0.4, 0.1]),
    ],
)
def test_a_block_keeps_at_least_as_much_as_one_by_one(
    p: list[float], q: list[float], length: int
) -> None:
    place, shape = constant(p, q), topology(length, 1, length + 1)
    block, single = (first_round(place, rule, shape) for rule in (BLOCK, REJECTION))
    accept = sum(map(min, p, q))
    for least in range(1, length + 1):
        as_one = float((block >= least).double().mean())
        in_turn = float((single >= least).double().mean())
        assert close(in_turn, accept**least)
        assert as_one > accept**least - 5 * math.sqrt(0.25 / DRAWS)
    expected = as_block(tuple(p), tuple(q), length)
    error = 5 * length / 2 / math.sqrt(DRAWS)
    assert abs(float(block.double().mean()) - expected.kept) < error
    assert expected.kept > sum(accept**i for i in range(1, length + 1)) + 1e-6


def test_the_published_example_of_block_verification() -> None:
    """Sun et al., section 2: of two drafts 11/9 are kept on average, 10/9 judged one by one."""
    p, q = (1 / 3, 2 / 3), (2 / 3, 1 / 3)
    assert as_block(p, q, 2).kept == pytest.approx(11 / 9)
    assert one_by_one(p, q, 2).kept == pytest.approx(10 / 9)


def test_a_residual_of_the_smallest_weights_still_gives_a_token_that_has_one() -> None:
    """Noise over a subnormal weight alone is infinite, for every token alike."""
    seeds, zero = torch.arange(4000), torch.zeros(4000, dtype=torch.int64)
    small = torch.tensor([0.0, 3.0, 0.0, 1.0]) * 2.0**-148
    assert small.max() > 0
    drawn = residual_draw(seeds, zero, 1, small.expand(4000, -1))
    assert set(drawn.tolist()) == {1, 3}
    assert abs(float((drawn == 1).double().mean()) - 0.75) < 0.04
