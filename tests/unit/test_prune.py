"""Pruning: the best choice of nodes for the cost of their rows, and trees that stay trees."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tree import VOCAB, ancestors, trees

from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec.speculative.prune import CostTable, choose, keep_nodes
from sgl_spec.speculative.tree import TokenTree

FLAT = CostTable(rows=(1,), ms=(5.0,))
STEEP = CostTable(rows=(1, 2), ms=(1.0, 1000.0))


def choose_nodes(tree: TokenTree, table: CostTable, min_gain: float = 0.0) -> torch.Tensor:
    return torch.from_numpy(choose(ArrayTree.of(tree), table, min_gain))


@st.composite
def tables(draw: st.DrawFn) -> CostTable:
    rows = sorted(draw(st.sets(st.integers(1, 20), min_size=1, max_size=5)))
    steps = draw(st.lists(st.sampled_from([0.0, 0.1, 0.5, 2.0]), min_size=5, max_size=5))
    ms = [1.0]
    for step in steps[1 : len(rows)]:
        ms.append(ms[-1] + step)
    return CostTable(tuple(rows), tuple(ms), draw(st.sampled_from([0.0, 0.7])))


def rate(tree: TokenTree, mask: torch.Tensor, table: CostTable) -> float:
    assert tree.scores is not None
    return float(tree.scores[mask].double().sum()) / table.cost(int(mask.sum()))


def closed_choices(tree: TokenTree) -> list[torch.Tensor]:
    """Every set of nodes that holds the roots and its own ancestors."""
    nodes = [(i, j) for i in range(tree.batch) for j in range(1, int(tree.num_nodes[i]))]
    choices = []
    for size in range(len(nodes) + 1):
        for chosen in combinations(nodes, size):
            mask = torch.zeros(tree.batch, tree.width, dtype=torch.bool)
            mask[:, 0] = True
            for i, j in chosen:
                mask[i, j] = True
            if all(bool(mask[i, ancestors(tree, i, j)].all()) for i, j in chosen):
                choices.append(mask)
    return choices


@settings(max_examples=60, deadline=None)
@given(trees(max_nodes=4).filter(lambda t: t.batch * t.width <= 12), tables())
def test_the_choice_is_the_best_of_all_closed_choices(tree: TokenTree, table: CostTable) -> None:
    mask = choose_nodes(tree, table)
    best = max(rate(tree, choice, table) for choice in closed_choices(tree))
    assert rate(tree, mask, table) == pytest.approx(best, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(trees(max_nodes=16), tables())
def test_roots_stay_ancestors_stay_and_the_result_is_a_tree(
    tree: TokenTree, table: CostTable
) -> None:
    mask = choose_nodes(tree, table)
    assert bool(mask[:, 0].all())
    assert not bool((mask & ~tree.used()).any())
    for i, node in mask.nonzero().tolist():
        assert bool(mask[i, ancestors(tree, i, node)].all())
    pruned = keep_nodes(tree, mask)
    pruned.validate(VOCAB)
    assert pruned.num_nodes.equal(mask.sum(1))
    for i in range(tree.batch):
        old = mask[i].nonzero()[:, 0]
        for new, node in enumerate(old.tolist()):
            path = [int(pruned.tokens[i, n]) for n in ancestors(pruned, i, new)]
            assert path == [int(tree.tokens[i, n]) for n in ancestors(tree, i, node)]
            assert pruned.scores[i, new] == tree.scores[i, node]


@settings(max_examples=30, deadline=None)
@given(trees(max_nodes=12))
def test_free_rows_are_all_taken_and_dear_ones_are_not(tree: TokenTree) -> None:
    assert choose_nodes(tree, FLAT).equal(tree.used())
    assert choose_nodes(tree, STEEP).sum() == tree.batch


def chain(scores: list[list[float]]) -> TokenTree:
    width = len(scores[0])
    index = torch.arange(width).repeat(len(scores), 1)
    return TokenTree(index, index - 1, torch.full((len(scores),), width), torch.tensor(scores))


def test_rows_that_padding_makes_free_are_taken() -> None:
    """One request: up to four rows cost the same, so even poor nodes fill them."""
    table = CostTable(rows=(1, 4, 5), ms=(10.0, 10.0, 14.0))
    tree = chain([[1, 0.3, 0.02, 0.01, 0.009, 0.008]])
    assert choose_nodes(tree, table).sum() == 4


def test_a_dip_is_crossed_to_reach_a_better_size() -> None:
    """The first node alone does not pay, three do: the step to two rows is dear, the rest free."""
    table = CostTable(rows=(1, 2, 4), ms=(10.0, 16.0, 16.0))
    tree = chain([[1, 0.5, 0.5, 0.5]])
    assert choose_nodes(tree, table).sum() == 4
    assert choose_nodes(chain([[1, 0.1, 0.1, 0.1]]), table).sum() == 1


def test_requests_compete_for_rows_and_ties_go_to_shallower_then_lower_nodes() -> None:
    table = CostTable(rows=(2, 4, 5), ms=(10.0, 10.0, 1000.0))
    best = choose_nodes(chain([[1, 0.9, 0.8], [1, 0.3, 0.2]]), table)
    assert best.tolist() == [[True, True, True], [True, False, False]]
    tied = choose_nodes(chain([[1, 0.5, 0.5], [1, 0.5, 0.5]]), table)
    assert tied.tolist() == [[True, True, False], [True, True, False]]
    star = TokenTree(
        torch.arange(5)[None],
        torch.tensor([[-1, 0, 1, 0, 0]]),
        torch.tensor([5]),
        torch.tensor([[1, 0.5, 0.5, 0.5, 0.5]]),
    )
    one = CostTable(rows=(1, 3, 4), ms=(10.0, 10.0, 1000.0))
    assert choose_nodes(star, one).tolist() == [[True, True, False, True, False]]


def test_scores_that_rise_along_a_path_still_give_a_tree() -> None:
    tree = chain([[1, 0.1, 0.9, 0.8]])
    table = CostTable(rows=(1, 2, 3), ms=(10.0, 10.0, 1000.0))
    assert choose_nodes(tree, table).tolist() == [[True, True, False, False]]


def test_a_gain_that_is_not_worth_the_trouble_is_left() -> None:
    tree = TokenTree(
        torch.tensor([[10, 11]]),
        torch.tensor([[-1, 0]]),
        torch.tensor([2]),
        torch.tensor([[1.0, 0.5]]),
    )
    table = CostTable(rows=(1, 2), ms=(10.0, 14.0))  # 1.5 tokens in 1.4 times the time: 7 % more
    assert choose_nodes(tree, table, min_gain=0.07).sum() == 2
    assert choose_nodes(tree, table, min_gain=0.08).sum() == 1


def test_keep_nodes_renumbers_parents() -> None:
    tree = TokenTree(
        torch.tensor([[10, 11, 12, 13, 14]]),
        torch.tensor([[-1, 0, 0, 2, 3]]),
        torch.tensor([5]),
    )
    kept = keep_nodes(tree, torch.tensor([[True, False, True, True, False]]))
    assert kept.num_nodes.tolist() == [3]
    assert kept.tokens[0, :3].tolist() == [10, 12, 13]
    assert kept.parents[0, :3].tolist() == [-1, 0, 1]


def test_cost_between_below_and_beyond_the_measured_counts() -> None:
    table = CostTable(rows=(2, 4, 8), ms=(10.0, 20.0, 24.0), fixed=1.0)
    assert [table.cost(n) for n in (1, 2, 3, 4, 6, 8, 10)] == [11, 11, 16, 21, 23, 25, 27]
    steps = CostTable(rows=(2, 4, 8), ms=(10.0, 20.0, 24.0), steps=True)
    assert [steps.cost(n) for n in (1, 2, 3, 4, 5, 8, 10)] == [10, 10, 20, 20, 24, 24, 26]
    noisy = CostTable(rows=(2, 4), ms=(10.0, 9.0))
    assert noisy.cost(20) == 9.0  # a falling last slope is noise, not a gift


@pytest.mark.parametrize(
    ("rows", "ms"),
    [((), ()), ((1, 1), (1.0, 1.0)), ((2, 1), (1.0, 1.0)), ((1,), (0.0,)), ((1,), ())],
)
def test_a_table_that_is_no_function_is_refused(
    rows: tuple[int, ...], ms: tuple[float, ...]
) -> None:
    with pytest.raises(ValueError, match="rising rows and positive times"):
        CostTable(rows, ms)
