"""Trees grown from a draft's logits: against a plain reference, and what holds of any of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sgl_spec.request import SamplingParams
from sgl_spec.speculative.grow import GrownTrees
from sgl_spec.speculative.penalties import TokenCounts
from sgl_spec.speculative.sampling import SamplingRows, build_rows, draw
from sgl_spec.speculative.tree import TokenTree
from sgl_spec.speculative.verify import sample_and_follow

VOCAB = 11
SHUFFLED = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))
SHAPES = [(3, 1, 4), (1, 4, 5), (2, 3, 6), (5, 4, 8), (7, 8, 32), (3, 5, 12), (4, 3, 2)]
Path = tuple[int, ...]  # tokens below the root
Model = Callable[[int, Path], Tensor]  # (request, path) -> logits [W]


def random_model(seed: int, width: int = VOCAB, spread: float = 2.0) -> Model:
    """Logits that depend on the request and on every token of the path."""

    def logits(request: int, path: Path) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, request, path)) % 2**40)
        return torch.randn(width, generator=generator) * spread

    return logits


def sampling_of(*temperatures: float, seed: int = 5, **rest: float) -> SamplingRows:
    params = [
        SamplingParams(temperature=t, seed=seed + i, **rest)  # type: ignore[arg-type]
        for i, t in enumerate(temperatures)
    ]
    return build_rows(params, [3] * len(params), [])


def grow(
    model: Model,
    shape: tuple[int, int, int],
    sampling: SamplingRows | None = None,
    *,
    batch: int = 3,
    ids: Tensor | None = None,
    max_nodes: Tensor | None = None,
    shared_noise: bool = True,
    error: float = 1.0,
) -> TokenTree:
    """Drive the growth as a drafter does; the paths of the frontier come from its parents."""
    steps, topk, draft_tokens = shape
    roots, lengths = torch.arange(batch), torch.arange(batch) * 7 + 4
    trees = GrownTrees(
        roots,
        lengths,
        sampling,
        steps=steps,
        topk=topk,
        draft_tokens=draft_tokens,
        shared_noise=shared_noise,
        error=error,
    )
    paths: list[list[Path]] = [[()] for _ in range(batch)]
    while True:
        rows = [model(b, path) for b in range(batch) for path in paths[b]]
        trees.expand(torch.stack(rows), ids)
        if trees.depth == steps:
            return trees.finish(max_nodes)
        front = trees.frontier()
        paths = [
            [
                (*paths[b][parent], token)
                for parent, token in zip(
                    front.parents[b].tolist(), front.tokens[b].tolist(), strict=True
                )
            ]
            for b in range(batch)
        ]


def reference(model: Model, request: int, shape: tuple[int, int, int]) -> dict[Path, float]:
    """The same tree for a greedy request, written with lists: path -> log-probability."""
    steps, topk, draft_tokens = shape
    frontier: list[tuple[Path, float]] = [((), 0.0)]
    seen: list[tuple[Path, float]] = []
    for _ in range(steps):
        children = []
        for path, score in frontier:
            log_probs = model(request, path).log_softmax(0).tolist()
            best = sorted(range(len(log_probs)), key=lambda t: (-log_probs[t], t))[:topk]
            children += [
                ((*path, t), score + log_probs[t]) for t in best if log_probs[t] > -math.inf
            ]
        frontier = sorted(children, key=lambda c: -c[1])[:topk]
        seen += children
    return dict(sorted(seen, key=lambda c: -c[1])[: draft_tokens - 1])


def paths_of(tree: TokenTree, request: int) -> dict[Path, float]:
    """path -> log-score of every node but the root."""
    assert tree.scores is not None
    paths: list[Path] = [()]
    for node in range(1, int(tree.num_nodes[request])):
        parent = int(tree.parents[request, node])
        paths.append((*paths[parent], int(tree.tokens[request, node])))
    scores = tree.scores[request].log().tolist()
    return dict(zip(paths[1:], scores[1 : len(paths)], strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_tree_is_the_reference_s(shape: tuple[int, int, int]) -> None:
    for seed in range(8):
        model = random_model(seed)
        tree = grow(model, shape)
        tree.validate(VOCAB)
        assert tree.width <= shape[2]
        for request in range(3):
            wanted, got = reference(model, request, shape), paths_of(tree, request)
            assert got.keys() == wanted.keys()
            assert got == pytest.approx(wanted, abs=1e-4)


def test_one_branch_is_a_chain() -> None:
    tree = grow(random_model(1), (5, 1, 6))
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3, 4]] * 3
    assert tree.tokens[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shared_noise", [True, False])
def test_any_tree_is_valid_and_within_its_bounds(
    shape: tuple[int, int, int], shared_noise: bool
) -> None:
    for seed in range(6):
        rng = random.Random(seed)
        temperatures = [rng.choice([0.0, 0.3, 1.0, 2.0]) for _ in range(4)]
        bounds = torch.tensor([rng.randint(1, shape[2] + 2) for _ in temperatures])
        tree = grow(
            random_model(seed, spread=rng.choice([0.1, 2.0, 30.0])),
            shape,
            sampling_of(*temperatures, top_p=rng.choice([1.0, 0.8])),
            batch=4,
            max_nodes=bounds,
            shared_noise=shared_noise,
        )
        tree.validate(VOCAB)
        assert bool((tree.num_nodes <= torch.minimum(bounds, torch.tensor(shape[2]))).all())
        assert int(tree.depths().max()) <= shape[0]


@pytest.mark.parametrize("shape", [(3, 2, 8), (5, 4, 8)])
def test_a_bound_keeps_the_best_nodes(shape: tuple[int, int, int]) -> None:
    model = random_model(3)
    whole = grow(model, shape)
    for most in range(1, shape[2] + 1):
        cut = grow(model, shape, max_nodes=torch.full((3,), most))
        for request in range(3):
            best = sorted(paths_of(whole, request).items(), key=lambda item: -item[1])[: most - 1]
            assert paths_of(cut, request) == dict(sorted(best))
            assert paths_of(cut, request) == dict(best)


def test_ties_go_to_the_shallower_node_then_to_the_lower_index() -> None:
    """Of two equal tokens the lower comes first; a sure child ties with its parent."""

    def model(request: int, path: Path) -> Tensor:
        logits = torch.full((VOCAB,), -torch.inf)
        logits[[6, 2]] = 0.0  # a fair coin at the root, then certainty
        return logits if not path else torch.where(torch.arange(VOCAB) == 4, 0.0, -torch.inf)

    for nodes, wanted in [(2, [(2,)]), (3, [(2,), (6,)]), (4, [(2,), (6,), (2, 4)])]:
        tree = grow(model, (3, 2, nodes))
        tree.validate(VOCAB)
        assert list(paths_of(tree, 0)) == wanted
    assert len(paths_of(grow(model, (3, 2, 12)), 1)) == 6, "there is nothing else to draft"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_outside_the_support_are_never_drafted(temperature: float) -> None:
    allowed = {0: [3], 1: [], 2: list(range(VOCAB))}

    def model(request: int, path: Path) -> Tensor:
        held = torch.full((VOCAB,), -torch.inf)
        held[allowed[request]] = random_model(4)(request, path)[allowed[request]]
        return held

    tree = grow(model, (4, 3, 9), sampling_of(*[temperature] * 3))
    tree.validate(VOCAB)
    assert list(paths_of(tree, 0)) == [(3,), (3, 3), (3, 3, 3), (3, 3, 3, 3)]
    assert tree.num_nodes.tolist() == [5, 1, 9]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_row_drafts_nothing(broken: float) -> None:
    def model(request: int, path: Path) -> Tensor:
        logits = random_model(2)(request, path)
        if request == 1:
            logits[5] = broken
        return logits

    tree = grow(model, (3, 2, 6))
    tree.validate(VOCAB)
    assert tree.num_nodes.tolist() == [6, 1, 6]


def test_columns_become_tokens() -> None:
    ids = torch.tensor([9, 0, 4, 40, 7])
    tree = grow(random_model(6, width=5), (4, 3, 9), ids=ids)
    plain = grow(random_model(6, width=5), (4, 3, 9))
    assert set(tree.tokens[:, 1:].flatten().tolist()) <= set(ids.tolist())
    for request in range(3):
        renamed = [tuple(int(ids[t]) for t in path) for path in paths_of(plain, request)]
        # The paths hold tokens, so the model of the renamed run sees others from the first on.
        assert sorted(p for p in paths_of(tree, request) if len(p) == 1) == sorted(
            p for p in renamed if len(p) == 1
        )


def test_fewer_columns_than_branches() -> None:
    tree = grow(random_model(6, width=3), (3, 5, 12))
    tree.validate(3)
    for request in range(3):
        wanted = reference(random_model(6, width=3), request, (3, 5, 12))
        assert paths_of(tree, request).keys() == wanted.keys()


def test_a_tree_may_stop_before_its_last_step() -> None:
    trees = GrownTrees(
        torch.tensor([4, 5]), torch.tensor([9, 9]), None, steps=5, topk=3, draft_tokens=9
    )
    alone = trees.finish()
    assert (alone.tokens.tolist(), alone.num_nodes.tolist()) == ([[4], [5]], [1, 1])
    alone.validate(VOCAB)
    trees.expand(torch.randn(2, VOCAB))
    tree = trees.finish()
    tree.validate(VOCAB)
    assert tree.parents.tolist() == [[-1, 0, 0, 0]] * 2


def test_the_frontier_says_where_its_ancestors_lie() -> None:
    """A node's word holds the columns of its path, in a cache of topk columns per step."""
    topk, steps = 3, 7
    trees = GrownTrees(
        torch.arange(2), torch.arange(2) + 5, None, steps=steps, topk=topk, draft_tokens=9
    )
    trees.expand(random_model(0)(0, ()).expand(2, -1) + torch.randn(2, VOCAB))
    above = [[1 << j for j in range(topk)] for _ in range(2)]
    assert trees.frontier().words.tolist() == above
    assert trees.frontier().parents.tolist() == [[0] * topk] * 2
    while trees.depth < steps - 1:
        trees.expand(torch.randn(2 * topk, VOCAB))
        front = trees.frontier()
        for b in range(2):
            column = [1 << ((front.depth - 1) * topk + j) for j in range(topk)]
            above[b] = [above[b][p] | column[j] for j, p in enumerate(front.parents[b].tolist())]
        assert front.words.tolist() == above


# --- shared noise ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 1, 5), (5, 4, 8), (4, 2, 9)])
@pytest.mark.parametrize("rest", [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.1}])
@pytest.mark.parametrize("ids", [None, SHUFFLED])
def test_a_draft_that_is_the_target_drafts_what_the_target_draws(
    shape: tuple[int, int, int], rest: dict[str, float], ids: Tensor | None
) -> None:
    """It sees the same noise at every position, so a chain is accepted whole, and so is a path of
    any tree that trusts the draft (a small error)."""
    steps = shape[0]
    drafted = random_model(8)

    def target(request: int, path: Path) -> Tensor:
        logits = drafted(request, path)
        return logits if ids is None else torch.empty(VOCAB).index_copy_(0, ids, logits)

    for seed in range(10):
        sampling = sampling_of(0.0, 0.6, 1.0, 2.5, seed=seed, **rest)
        tree = grow(drafted, shape, sampling, batch=4, ids=ids, error=1e-3)
        tree.validate(VOCAB)
        logits = torch.stack(
            [
                target(b, path)
                for b in range(4)
                for path in [(), *paths_of(tree, b)] + [()] * (tree.width - int(tree.num_nodes[b]))
            ]
        )
        offsets, committed = torch.arange(4) * tree.width, torch.arange(4) * 7 + 3
        accepted = sample_and_follow(tree, logits, offsets, sampling, committed)
        assert accepted.counts.tolist() == [steps + 1] * 4


def test_the_first_candidate_is_the_target_s_draw() -> None:
    """The noise is the sampler's own, at its positions."""
    logits = torch.randn(400, 500) * 3
    sampling = sampling_of(*[1.3] * 400)
    lengths = torch.arange(400) + 20
    trees = GrownTrees(
        torch.zeros_like(lengths), lengths, sampling, steps=1, topk=1, draft_tokens=2
    )
    trees.expand(logits)
    drawn = draw(logits, sampling, lengths)  # the root is token lengths - 1, counted from 0
    assert torch.equal(trees.finish().tokens[:, 1], drawn)
    plain = GrownTrees(
        torch.zeros_like(lengths),
        lengths,
        sampling,
        steps=1,
        topk=1,
        draft_tokens=2,
        shared_noise=False,
    )
    plain.expand(logits)
    assert torch.equal(plain.finish().tokens[:, 1], logits.argmax(1))
    assert not torch.equal(drawn, logits.argmax(1))


SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"logit_bias": {3: 4.0, 5: -3.0}},
    {"logit_bias": {1: -100, 2: -100}},
    {"logit_bias": {7: 100, 9: 100}},
    {"min_new_tokens": 9, "stop_token_ids": [2, 8]},
    {"repetition_penalty": 0.8, "logit_bias": {4: 2}, "min_new_tokens": 5, "top_k": 6},
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("ids", [None, SHUFFLED])
@pytest.mark.parametrize("given", SETTINGS, ids=str)
def test_settings_that_move_logits_move_the_draft_s(
    given: dict[str, Any], ids: Tensor | None, temperature: float
) -> None:
    """Those of a request with neighbours that have none: a draft that is the target is right about
    every token, also about those that the draft's own tokens make less likely."""
    steps, moved = 6, 0
    for seed in range(6):
        model = random_model(seed)
        counts = TokenCounts(3, VOCAB)
        params = [
            SamplingParams(temperature=temperature, seed=seed, **(given if i == 1 else {}))
            for i in range(3)
        ]
        for row in range(3):
            counts.start(row, [0, 1, 5], [6, 6])
        sampling = build_rows(params, [3] * 3, [2], counts=counts, request_rows=[0, 1, 2])
        tree = grow(model, (steps, 1, steps + 1), sampling, ids=ids)
        tree.validate(VOCAB)
        rows = [model(b, path) for b in range(3) for path in [(), *paths_of(tree, b)]]
        logits = torch.stack(rows)
        if ids is not None:
            logits = torch.empty_like(logits).index_copy_(1, ids, logits)
        offsets, committed = torch.arange(3) * tree.width, torch.arange(3) * 7 + 3
        accepted = sample_and_follow(tree, logits, offsets, sampling, committed)
        assert accepted.counts.tolist() == [steps + 1] * 3
        free = build_rows([params[0]] * 3, [3] * 3, [2])
        unmoved = grow(model, (steps, 1, steps + 1), free, ids=ids)
        moved += tree.tokens[1].tolist() != unmoved.tokens[1].tolist()
    assert moved > 0, "the settings make no difference"


def test_a_forced_token_without_a_column_is_left_to_the_target() -> None:
    params = [SamplingParams(temperature=0, seed=1, logit_bias={10: 100, 2: -100})]
    ids = torch.tensor([2, 4, 6])
    tree = grow(random_model(0, 3), (2, 2, 5), build_rows(params, [3], []), batch=1, ids=ids)
    tree.validate(VOCAB)
    assert set(tree.tokens[0, 1:].tolist()) == {4, 6}


def test_greedy_requests_ignore_the_noise_of_their_neighbours() -> None:
    model = random_model(9)
    mixed = grow(model, (4, 3, 9), sampling_of(1.0, 0.0, 0.7))
    greedy = grow(model, (4, 3, 9), sampling_of(0.0, 0.0, 0.0))
    assert paths_of(mixed, 1) == paths_of(greedy, 1)
    assert paths_of(mixed, 0).keys() != paths_of(greedy, 0).keys()


def test_plain_scores_are_the_draft_s_filtered_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    sampling = sampling_of(0.5, top_k=2)
    trees = GrownTrees(
        torch.tensor([0]),
        torch.tensor([4]),
        sampling,
        steps=1,
        topk=3,
        draft_tokens=4,
        shared_noise=False,
    )
    trees.expand(logits)
    wanted = (logits[0, :2] / 0.5).softmax(0)
    tree = trees.finish()
    assert tree.num_nodes.tolist() == [3]
    assert tree.scores is not None
    torch.testing.assert_close(tree.scores[0, 1:3], wanted)
