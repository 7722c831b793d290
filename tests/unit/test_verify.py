"""Sample-and-follow: any tree gives the text of plain decoding, with the target's distribution.

The target here is a table: the logits after a prefix are a fixed function of the prefix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from chi_square import p_value
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sgl_spec.request import SamplingParams
from sgl_spec.speculative.sampling import SamplingRows, build_rows, draw
from sgl_spec.speculative.tree import AcceptResult, TokenTree, root_only
from sgl_spec.speculative.verify import sample_and_follow

VOCAB = 6
EOS = 0
DRAWS = 50_000
LEVEL = 1e-4  # all seeds are fixed; see test_sampling
_TABLE = torch.randn(101, VOCAB, generator=torch.Generator().manual_seed(12)) * 1.5


def target(prefix: Sequence[int]) -> Tensor:
    """[V] logits after a prefix; they depend on all of it."""
    state = 7
    for token in prefix:
        state = (state * 31 + token + 1) % 101
    return _TABLE[state]


@dataclass(frozen=True)
class Draft:
    """One request's tree in Python: node 0 is the root, the last token of `prefix`."""

    prefix: tuple[int, ...]
    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def path(self, node: int) -> tuple[int, ...]:
        """Tokens from the root's first descendant down to `node`."""
        if node == 0:
            return ()
        return (*self.path(self.parents[node]), self.tokens[node])

    def logits(self) -> Tensor:
        """[nodes, V]: what one forward of the target under the ancestor mask gives."""
        return torch.stack([target(self.prefix + self.path(i)) for i in range(len(self.tokens))])


def batch_of(drafts: Sequence[Draft]) -> TokenTree:
    """The drafts as one batch; entries beyond a short tree hold traps."""
    width = max(len(d.tokens) for d in drafts)
    tokens = torch.full((len(drafts), width), 1)  # a real token id
    parents = torch.zeros(len(drafts), width, dtype=torch.int64)  # a child of the root
    for i, draft in enumerate(drafts):
        tokens[i, : len(draft.tokens)] = torch.tensor(draft.tokens)
        parents[i, : len(draft.parents)] = torch.tensor(draft.parents)
    tree = TokenTree(tokens, parents, torch.tensor([len(d.tokens) for d in drafts]))
    tree.validate(VOCAB)
    return tree


def verify(drafts: Sequence[Draft], rows: SamplingRows) -> list[list[int]]:
    """Tokens each draft's round emits, from ragged logits."""
    sizes = torch.tensor([len(d.tokens) for d in drafts])
    committed = torch.tensor([len(d.prefix) - 1 for d in drafts])
    logits = torch.cat([d.logits() for d in drafts])
    result = sample_and_follow(batch_of(drafts), logits, sizes.cumsum(0) - sizes, rows, committed)
    for i, draft in enumerate(drafts):  # the path is the accepted nodes, the tokens are its text
        count = int(result.counts[i])
        last = int(result.path[i, count - 1])
        assert draft.path(last) == tuple(result.tokens[i, : count - 1].tolist())
    return emitted(result)


def emitted(result: AcceptResult) -> list[list[int]]:
    pairs = zip(result.tokens.tolist(), result.counts.tolist(), strict=True)
    return [tokens[:count] for tokens, count in pairs]


def decode(
    prefix: tuple[int, ...], params: SamplingParams, prompt_len: int, count: int
) -> list[int]:
    """Plain decoding, one draw at a time, without a tree."""
    rows = build_rows([params], [prompt_len], [EOS])
    text = list(prefix)
    for _ in range(count):
        text += draw(target(text)[None], rows, torch.tensor([len(text)])).tolist()
    return text[len(prefix) :]


# --- any tree gives the text of plain decoding ----------------------------------------------------


@st.composite
def drafts(draws: st.DrawFn) -> Draft:
    prefix = draws(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4))
    tokens, parents, taken = [prefix[-1]], [-1], set()
    for node in range(1, draws(st.integers(1, 10))):
        parent, token = draws(st.integers(0, node - 1)), draws(st.integers(0, VOCAB - 1))
        if (parent, token) not in taken:
            taken.add((parent, token))
            if parent < len(tokens):
                tokens.append(token)
                parents.append(parent)
    return Draft(tuple(prefix), tuple(tokens), tuple(parents))


sampling_params = st.builds(
    SamplingParams,
    seed=st.integers(-(2**63), 2**63 - 1),
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 1, 3]),
    top_p=st.sampled_from([1.0, 0.9, 0.6]),
    min_p=st.sampled_from([0.0, 0.1]),
    min_new_tokens=st.integers(0, 4),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(drafts(), sampling_params), min_size=1, max_size=5))
def test_any_tree_emits_what_plain_decoding_draws(
    requests: list[tuple[Draft, SamplingParams]],
) -> None:
    trees, params = zip(*requests, strict=True)
    rows = build_rows(params, [len(d.prefix) for d in trees], [EOS])
    for draft, param, tokens in zip(trees, params, verify(trees, rows), strict=True):
        assert tokens == decode(draft.prefix, param, len(draft.prefix), len(tokens))


def chain(prefix: tuple[int, ...], tokens: Sequence[int]) -> Draft:
    return Draft(prefix, (prefix[-1], *tokens), (-1, *range(len(tokens))))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_knows_the_text_is_accepted_whole_and_junk_not_at_all(
    temperature: float,
) -> None:
    params = [SamplingParams(seed=i, temperature=temperature) for i in range(20)]
    rows = build_rows(params, [3] * 20, [EOS])
    prefixes = [(1, i % VOCAB, 2) for i in range(20)]
    texts = [decode(prefix, p, 3, 9) for prefix, p in zip(prefixes, params, strict=True)]
    own = [chain(prefix, text[:8]) for prefix, text in zip(prefixes, texts, strict=True)]
    junk = [
        chain(prefix, [(token + 1) % VOCAB for token in text])
        for prefix, text in zip(prefixes, texts, strict=True)
    ]
    assert verify(own, rows) == texts
    assert verify(junk, rows) == [text[:1] for text in texts]


def test_a_wide_tree_is_followed_through_its_later_siblings() -> None:
    """Every token is a child at both levels, so every walk goes to the bottom."""
    tokens, parents = [2, *range(VOCAB)], [-1] + [0] * VOCAB
    for parent in range(1, VOCAB + 1):
        tokens += range(VOCAB)
        parents += [parent] * VOCAB
    draft = Draft((4, 2), tuple(tokens), tuple(parents))
    params = [SamplingParams(seed=i, temperature=1.5) for i in range(40)]
    rounds = verify([draft] * 40, build_rows(params, [2] * 40, [EOS]))
    assert rounds == [decode((4, 2), p, 2, 3) for p in params]
    assert len({tuple(tokens) for tokens in rounds}) > 20


def test_a_root_only_tree_is_a_plain_draw() -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(3))
    params = [SamplingParams(seed=i, temperature=i % 2) for i in range(8)]
    rows = build_rows(params, [4] * 8, [EOS])
    committed = torch.arange(8) + 3
    result = sample_and_follow(root_only(torch.arange(8)), logits, torch.arange(8), rows, committed)
    assert result.tokens[:, 0].equal(draw(logits, rows, committed + 1))
    assert result.counts.tolist() == [1] * 8
    assert result.path.tolist() == [[0]] * 8


def test_rows_off_the_walk_are_never_read() -> None:
    draft = chain((3,), [1, 2, 4, 5])
    params = [SamplingParams(seed=i) for i in range(30)]
    rows = build_rows(params, [1] * 30, [EOS])
    for i, tokens in enumerate(verify([draft] * 30, rows)):
        logits = draft.logits()
        logits[len(tokens) :] = torch.nan  # a NaN would win the argmin
        one = rows.select(slice(i, i + 1))
        start = torch.tensor([0])
        assert emitted(sample_and_follow(batch_of([draft]), logits, start, one, start)) == [tokens]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_end_token_in_the_draft_waits_for_the_minimum_length(temperature: float) -> None:
    """The minimum is judged by each node's own depth. EOS is likely everywhere."""
    logits = torch.zeros(6, VOCAB)
    logits[:, EOS] = 20.0
    tree = batch_of([chain((2,), [EOS] * 5), chain((2,), [3, EOS, EOS, EOS, EOS])])
    params = [
        SamplingParams(seed=1, min_new_tokens=0, temperature=temperature),
        SamplingParams(seed=1, min_new_tokens=1, temperature=temperature),
    ]
    logits[0, 3] = 10.0
    result = sample_and_follow(
        tree,
        logits,
        torch.zeros(2).long(),
        build_rows(params, [1, 1], [EOS]),
        torch.zeros(2).long(),
    )
    assert emitted(result) == [[EOS] * 6, [3, EOS, EOS, EOS, EOS, EOS]]


# --- the distribution -----------------------------------------------------------------------------

PREFIX = (1, 4)
SHAPES = {
    "plain": chain(PREFIX, []),
    "chain": chain(PREFIX, [2, 5, 1]),
    "tree": Draft(PREFIX, (4, 2, 3, 5, 1, 0, 2), (-1, 0, 0, 0, 1, 1, 2)),
    "siblings": Draft(PREFIX, (4, 0, 1, 2, 3), (-1, 0, 0, 0, 0)),
    "all siblings": Draft(PREFIX, (4, *range(VOCAB)), (-1, *([0] * VOCAB))),
}


def exact_pairs(temperature: float = 1.0) -> Tensor:
    """[V, V] probability of the next two tokens after PREFIX."""
    first = (target(PREFIX).double() / temperature).softmax(0)
    then = torch.stack([target((*PREFIX, a)).double() / temperature for a in range(VOCAB)])
    return first[:, None] * then.softmax(1)


def many(params: SamplingParams, by: str) -> tuple[SamplingRows, Tensor]:
    """DRAWS requests that differ in seed, or in where PREFIX stands in their text."""
    rows = build_rows([params], [2], [EOS]).select(torch.zeros(DRAWS, dtype=torch.int64))
    if by == "seed":
        rows.seed.copy_(torch.arange(DRAWS))
        return rows, torch.ones(DRAWS, dtype=torch.int64)
    return rows, 1 + 8 * torch.arange(DRAWS)  # no two requests share a position


def pairs_drawn(shapes: Sequence[Draft], params: SamplingParams, by: str) -> Tensor:
    """[V, V] counts of the first two tokens, over DRAWS requests that take `shapes` in turn.

    A round that emits one token is followed by a plain one.
    """
    rows, committed = many(params, by)
    turn = torch.arange(DRAWS) % len(shapes)
    tree = batch_of(shapes)
    tree = TokenTree(tree.tokens[turn], tree.parents[turn], tree.num_nodes[turn])
    sizes = torch.tensor([len(s.tokens) for s in shapes])
    logits = torch.cat([s.logits() for s in shapes])
    result = sample_and_follow(tree, logits, (sizes.cumsum(0) - sizes)[turn], rows, committed)
    first = result.tokens[:, 0]
    after = torch.stack([target((*PREFIX, a)) for a in range(VOCAB)])
    plain = sample_and_follow(root_only(first), after, first, rows, committed + 1).tokens[:, 0]
    second = plain
    if tree.width > 1:
        second = torch.where(result.counts > 1, result.tokens[:, min(1, tree.width - 1)], plain)
    return torch.bincount(first * VOCAB + second, minlength=VOCAB * VOCAB)


CASES = {
    "plain": ["plain"],
    "chain": ["chain"],
    "tree": ["tree"],
    "siblings": ["siblings"],
    "short trees beside long ones": ["tree", "plain", "chain", "all siblings", "siblings"],
}


@pytest.mark.parametrize("by", ["seed", "position"])
@pytest.mark.parametrize("case", CASES)
def test_two_tokens_follow_the_exact_distribution(case: str, by: str) -> None:
    counts = pairs_drawn([SHAPES[name] for name in CASES[case]], SamplingParams(seed=3), by)
    assert p_value(counts, exact_pairs()) > LEVEL


def test_temperature_reaches_every_node() -> None:
    counts = pairs_drawn([SHAPES["tree"]], SamplingParams(seed=3, temperature=1.4), "seed")
    assert p_value(counts, exact_pairs(1.4)) > LEVEL
    assert p_value(counts, exact_pairs(1.0)) < 1e-12


@pytest.mark.parametrize("shape", ["chain", "siblings", "all siblings"])
def test_a_child_is_followed_as_often_as_the_target_draws_one(shape: str) -> None:
    draft = SHAPES[shape]
    rows, committed = many(SamplingParams(seed=8), "seed")
    tree = batch_of([draft])
    one = torch.zeros(DRAWS, dtype=torch.int64)
    tree = TokenTree(tree.tokens[one], tree.parents[one], tree.num_nodes[one])
    counts = sample_and_follow(tree, draft.logits(), one, rows, committed).counts
    children = [t for t, parent in zip(draft.tokens, draft.parents, strict=True) if parent == 0]
    mass = float(target(PREFIX).double().softmax(0)[children].sum())
    followed = int((counts > 1).sum())
    error = 5 * math.sqrt(DRAWS * mass * (1 - mass) + 1)
    assert abs(followed - DRAWS * mass) < error


# --- the statistic catches rules that are biased in known ways ------------------------------------


def accept_or_residual(candidates: Sequence[int], chance: Tensor, coins: Tensor) -> Tensor:
    """[DRAWS] tokens of a coin rule.

    Walk the candidates, adding up their chances until they pass the coin; if none does, draw from
    the target without the candidates. With each candidate once, and the target's probabilities as
    chances, this is exact.
    """
    p = target(PREFIX).double().softmax(0)
    left = p.clone()
    left[list(candidates)] = 0
    generator = torch.Generator().manual_seed(1)
    tokens = torch.multinomial(left, DRAWS, replacement=True, generator=generator)
    passed = torch.zeros(DRAWS, dtype=torch.bool)
    total = 0.0
    for token, extra in zip(candidates, chance.tolist(), strict=True):
        total += extra
        tokens = torch.where(~passed & (coins < total), token, tokens)
        passed |= coins < total
    return tokens


def rule_p_value(candidates: Sequence[int], chance: Tensor) -> float:
    coins = torch.rand(DRAWS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tokens = accept_or_residual(candidates, chance, coins)
    p = target(PREFIX).double().softmax(0)
    return p_value(torch.bincount(tokens, minlength=VOCAB), p)


def test_the_statistic_passes_the_exact_coin_rule() -> None:
    p = target(PREFIX).double().softmax(0)
    assert rule_p_value([3, 5], p[[3, 5]]) > LEVEL


def test_the_statistic_rejects_a_sibling_padded_with_a_real_token() -> None:
    """A short tree filled up with copies of a token counts that token's probability twice."""
    p = target(PREFIX).double().softmax(0)
    assert rule_p_value([3, 5, 5], p[[3, 5, 5]]) < 1e-12


def test_the_statistic_rejects_a_lenient_acceptance() -> None:
    """Accepting a draft token a little more often than the target would draw it."""
    p = target(PREFIX).double().softmax(0)
    assert rule_p_value([3, 5], p[[3, 5]] * 1.1) < 1e-6


def test_the_statistic_rejects_noise_reused_at_the_next_depth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All nodes drawn at one position: each token alone is right, pairs are not."""
    real = draw

    def stuck(
        logits: Tensor, rows: SamplingRows, positions: Tensor, index: Tensor, **_: object
    ) -> Tensor:
        return real(logits, rows, torch.zeros_like(positions), index)

    monkeypatch.setattr("sgl_spec.speculative.verify.draw", stuck)
    counts = pairs_drawn([SHAPES["tree"]], SamplingParams(seed=3), "seed")
    assert p_value(counts.view(VOCAB, VOCAB).sum(1), exact_pairs().sum(1)) > LEVEL
    assert p_value(counts, exact_pairs()) < 1e-12
