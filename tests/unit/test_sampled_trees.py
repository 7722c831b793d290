"""The shape of sampled trees, how they are drawn, and what the engine refuses to verify."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from chi_square import p_value
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sgl_spec.request import SamplingParams
from sgl_spec.speculative.base import DraftBatch
from sgl_spec.speculative.noise import Stream, stream_keys
from sgl_spec.speculative.propose import SampledTrees, draw_siblings, require_sampled
from sgl_spec.speculative.prune import keep_nodes
from sgl_spec.speculative.sampling import build_rows
from sgl_spec.speculative.topology import SIBLING_COST, Topology, topology
from sgl_spec.speculative.tree import TokenTree, narrow

LEVEL = 1e-4  # see test_rules
VOCAB = 9


# --- the shape ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "topk", "nodes", "parents"),
    [
        (3, 1, 4, (-1, 0, 1, 2)),
        (3, 1, 3, (-1, 0, 1)),
        (1, 3, 4, (-1, 0, 0, 0)),
        (2, 2, 7, (-1, 0, 1, 0, 1, 3, 3)),
        (5, 4, 8, (-1, 0, 1, 2, 0, 3, 1, 4)),
        (4, 2, 1, (-1,)),
    ],
)
def test_shapes(steps: int, topk: int, nodes: int, parents: tuple[int, ...]) -> None:
    assert topology(steps, topk, nodes).parents == parents


def test_a_shape_that_holds_fewer_nodes_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 levels of 2 children hold 7 nodes, not 8"):
        topology(2, 2, 8)


shapes = st.tuples(st.integers(2, 6), st.integers(1, 4), st.integers(1, 12)).filter(
    lambda shape: shape[2] <= sum(shape[1] ** level for level in range(shape[0] + 1))
)


@given(shapes)
def test_a_shape_is_the_cheapest_tree_and_each_beginning_is_one_too(
    shape: tuple[int, int, int],
) -> None:
    steps, topk, nodes = shape
    tree = topology(*shape)
    assert tree.width == nodes
    assert all(parent < node for node, parent in enumerate(tree.parents))
    assert max(tree.depths()) <= steps
    cost, unused = [0], []
    for node, parent in enumerate(tree.parents[1:], 1):
        rank = tree.children()[parent].index(node)
        assert rank < topk
        cost.append(cost[parent] + 1 + SIBLING_COST * rank)
    assert cost == sorted(cost)
    for node, kids in enumerate(tree.children()):
        if tree.depths()[node] < steps and len(kids) < topk:
            unused.append(cost[node] + 1 + SIBLING_COST * len(kids))
    assert min(unused, default=cost[-1]) >= cost[-1]
    for fewer in range(1, nodes):
        assert topology(steps, topk, fewer).parents == tree.parents[:fewer]


# --- the draw -------------------------------------------------------------------------------------


def draft_batch(budgets: list[int], params: list[SamplingParams]) -> DraftBatch:
    count = len(budgets)
    tokens = np.arange(count * 12, dtype=np.int32).reshape(count, 12) % VOCAB
    return DraftBatch(
        rows=np.arange(count),
        lengths=5 + np.arange(count) % 7,
        max_nodes=np.array(budgets),
        tokens=tokens,
        sampling=build_rows(params, [1] * count, []),
    )


def grown(batch: DraftBatch, shape: Topology, ids: Tensor | None = None) -> TokenTree:
    """Trees by a drafter whose logits depend on the node."""
    trees = SampledTrees(batch, shape, ids)
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(64, VOCAB if ids is None else len(ids), generator=generator)
    for level in trees.levels():
        known = trees.tokens[level.request, level.node]
        trees.grow(level, table[known * 5 + level.depth])
    return trees.finish()


@given(shapes, st.data())
def test_trees_take_the_shape_as_far_as_each_request_may(
    shape: tuple[int, int, int], data: st.DataObject
) -> None:
    form = topology(*shape)
    budgets = data.draw(st.lists(st.integers(1, form.width + 3), min_size=1, max_size=4))
    kinds = st.sampled_from([0.0, 0.7, 1.3])
    params = [SamplingParams(seed=i, temperature=data.draw(kinds)) for i in range(len(budgets))]
    batch = draft_batch(budgets, params)
    tree = grown(batch, form)
    tree.validate(VOCAB)
    require_sampled(tree, form)
    assert tree.num_nodes.tolist() == [min(b, form.width) for b in budgets]
    assert tree.tokens[:, 0].tolist() == batch.tokens[batch.rows, batch.lengths - 1].tolist()
    assert tree.draft is not None
    for i, nodes in enumerate(tree.num_nodes.tolist()):
        for node in range(nodes):
            kids = [kid for kid in form.children()[node] if kid < nodes]
            if not kids:
                continue
            row = tree.draft.rows(torch.tensor([i]), torch.tensor([node]), VOCAB)[0]
            assert float(row.sum()) == pytest.approx(1)
            if params[i].temperature == 0:
                assert int(row.argmax()) == int(tree.tokens[i, kids[0]])
                assert float(row.max()) == 1


def test_a_request_alone_draws_the_same_drafts() -> None:
    form = topology(3, 2, 10)
    params = [SamplingParams(seed=i, temperature=(i % 3) * 0.6) for i in range(9)]
    budgets = [3, 10, 7, 1, 10, 2, 8, 10, 10]
    batch = draft_batch(budgets, params)
    together = grown(batch, form)
    assert batch.sampling is not None
    for i, nodes in enumerate(budgets):
        one = slice(i, i + 1)
        alone = grown(
            replace(
                batch,
                rows=batch.rows[one],
                lengths=batch.lengths[one],
                max_nodes=batch.max_nodes[one],
                sampling=batch.sampling.select(one),
            ),
            form,
        )
        assert alone.tokens[0, :nodes].equal(together.tokens[i, :nodes])


def test_siblings_are_drawn_one_after_the_other_without_replacement() -> None:
    draws, q = 30_000, torch.tensor([0.5, 0.25, 0.2, 0.05])
    keys = stream_keys(torch.arange(draws), torch.full((draws,), 4), Stream.PROPOSAL, 1)
    logits, one = q.log().expand(draws, -1), torch.ones(draws)
    tokens, probs = draw_siblings(logits, one, keys, 3)
    assert torch.allclose(probs, q)
    order = [(a, b, c) for a in range(4) for b in range(4) for c in range(4) if len({a, b, c}) == 3]
    expected = [float(q[a] * q[b] / (1 - q[a]) * q[c] / (1 - q[a] - q[b])) for a, b, c in order]
    index = {text: i for i, text in enumerate(order)}
    counts = torch.bincount(torch.tensor([index[tuple(row)] for row in tokens.tolist()]))
    assert p_value(counts, torch.tensor(expected)) > LEVEL


def test_the_requests_temperature_reaches_the_drafts() -> None:
    draws, logits = 30_000, torch.tensor([1.0, 0.0, -1.0])
    keys = stream_keys(torch.arange(draws), torch.full((draws,), 4), Stream.PROPOSAL, 1)
    for temperature in (0.5, 2.0):
        heat = torch.full((draws,), temperature)
        tokens, _ = draw_siblings(logits.expand(draws, -1), heat, keys, 1)
        expected = (logits.double() / temperature).softmax(0)
        assert p_value(torch.bincount(tokens[:, 0]), expected) > LEVEL


def test_a_smaller_vocabulary_is_mapped_to_the_targets() -> None:
    ids = torch.tensor([7, 2, 5])
    tree = grown(
        draft_batch([4, 4], [SamplingParams(seed=i) for i in (1, 2)]), topology(2, 2, 4), ids
    )
    assert set(tree.tokens[:, 1:].flatten().tolist()) <= set(ids.tolist())
    assert tree.draft is not None
    q = tree.draft.rows(torch.tensor([0, 1]), torch.tensor([0, 1]), VOCAB)
    assert q.shape == (2, VOCAB)
    assert torch.allclose(q[:, ids].sum(1), torch.ones(2))
    assert float(q.sum()) == pytest.approx(2)


def test_more_siblings_than_tokens_are_an_error() -> None:
    ids = torch.tensor([7, 2])
    batch = draft_batch([4], [SamplingParams(seed=1)])
    with pytest.raises(AssertionError, match="3 distinct drafts out of 2 tokens"):
        grown(batch, topology(1, 3, 4), ids)


# --- what becomes of q when a tree is cut --------------------------------------------------------


def test_a_cut_tree_keeps_each_nodes_q() -> None:
    form = topology(3, 2, 12)
    params = [SamplingParams(seed=i) for i in range(5)]
    tree = grown(draft_batch([12, 12, 7, 2, 1], params), form)
    shallow = torch.tensor(form.depths()) < 2
    cut = narrow(keep_nodes(tree, shallow & tree.used()))
    assert cut.width == int((shallow & tree.used()).sum(1).max())
    assert cut.draft is not None
    assert tree.draft is not None
    for i in range(5):
        kept = torch.nonzero(shallow & tree.used()[i])[:, 0]
        inner = [
            (new, int(old)) for new, old in enumerate(kept) if int(tree.draft.row_of[i, old]) >= 0
        ]
        for new, old in inner:
            at = torch.tensor([i])
            seen = cut.draft.rows(at, torch.tensor([new]), VOCAB)
            assert seen.equal(tree.draft.rows(at, torch.tensor([old]), VOCAB))


def test_trees_that_are_not_samples_of_the_shape_are_refused() -> None:
    form = topology(2, 2, 7)
    tree = grown(draft_batch([7, 3], [SamplingParams(seed=i) for i in range(2)]), form)
    require_sampled(tree, form)
    with pytest.raises(ValueError, match="carry the distributions"):
        require_sampled(replace(tree, draft=None), form)
    moved = tree.parents.clone()
    moved[1, 2] = 0
    with pytest.raises(ValueError, match="have the parents"):
        require_sampled(replace(tree, parents=moved), form)
    moved = tree.parents.clone()
    moved[1, 5] = 0  # beyond the request's budget, so not a node
    require_sampled(replace(tree, parents=moved), form)
    with pytest.raises(ValueError, match="at most 3 nodes, got 7"):
        require_sampled(tree, topology(2, 2, 3))
