"""What is derived from a token tree, and the rules a tree keeps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_spec.speculative.array_tree import ArrayTree, accepted_of
from sgl_spec.speculative.prune import keep_nodes
from sgl_spec.speculative.tree import MAX_TREE_NODES, TokenTree, root_only

VOCAB = 1000


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = MAX_TREE_NODES) -> TokenTree:
    """A batch of random trees whose unused entries hold garbage."""
    batch, width = draw(st.integers(1, 4)), draw(st.integers(1, max_nodes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    parents = torch.randint(-99, 99, (batch, width), generator=generator)
    scores = torch.rand(batch, width, generator=generator) * 9 - 4
    num_nodes = torch.randint(1, width + 1, (batch,), generator=generator)
    reach = draw(st.sampled_from([1, 2, 64]))  # 1: chains; 64: any earlier node
    for i, used in enumerate(num_nodes.tolist()):
        parents[i, 0], scores[i, 0] = -1, 1
        for node in range(1, used):
            low = max(0, node - reach)
            parents[i, node] = torch.randint(low, node, (), generator=generator)
            share = torch.rand((), generator=generator)
            scores[i, node] = scores[i, parents[i, node]] * share
    tokens = torch.arange(width).repeat(batch, 1)
    return TokenTree(tokens, parents, num_nodes, scores)


def ancestors(tree: TokenTree, i: int, node: int) -> list[int]:
    """`node` and its ancestors, upwards."""
    chain = [node]
    while node:
        node = int(tree.parents[i, node])
        chain.append(node)
    return chain


@settings(max_examples=60, deadline=None)
@given(trees())
def test_depths_words_and_scores_agree_with_walking_up(tree: TokenTree) -> None:
    depths, words, arrays = tree.depths(), tree.ancestor_words(), ArrayTree.of(tree)
    for i in range(tree.batch):
        for node in range(int(tree.num_nodes[i])):
            chain = ancestors(tree, i, node)
            assert depths[i, node] == len(chain) - 1
            assert int(words[i, node]) % 2**64 == sum(1 << j for j in chain)
            assert arrays.scores[i, node] == tree.scores[i, chain].min()
            assert arrays.depths[i, node] == depths[i, node]
            assert arrays.words()[i, node] == words[i, node]
    tree.validate(VOCAB)


def test_a_path_of_64_nodes_uses_the_sign_bit() -> None:
    parents = torch.arange(-1, 63)[None]
    tree = TokenTree(torch.zeros(1, 64, dtype=torch.int64), parents, torch.tensor([64]))
    assert tree.ancestor_words()[0, 63] == -1
    assert tree.depths()[0].tolist() == list(range(64))


def test_a_score_above_its_parents_counts_as_its_parents() -> None:
    parents = torch.tensor([[-1, 0, 1, 2]])
    scores = torch.tensor([[1.0, 0.2, 0.9, 0.1]])
    tree = TokenTree(torch.arange(4)[None], parents, torch.tensor([4]), scores)
    arrays = ArrayTree.of(tree)
    assert arrays.scores.tolist() == scores.new_tensor([[1.0, 0.2, 0.2, 0.1]]).tolist()
    assert arrays.depths.tolist() == [[0, 1, 2, 3]]


@settings(max_examples=60, deadline=None)
@given(trees(), st.integers(0, 2**64 - 1))
def test_arrays_keep_nodes_as_tensors_do(tree: TokenTree, bits: int) -> None:
    chosen = torch.tensor([bits >> i & 1 for i in range(tree.width)], dtype=torch.bool)
    mask = tree.used() & chosen
    mask[:, 0] = True
    words = tree.ancestor_words()
    wanted = (mask.long() << torch.arange(tree.width)).sum(1)
    mask &= words & ~wanted[:, None] == 0  # nodes whose ancestors are all wanted
    kept, arrays = keep_nodes(tree, mask), ArrayTree.of(tree).keep(mask.numpy())
    back = arrays.tensors()
    back.validate(VOCAB)
    assert back.num_nodes.equal(kept.num_nodes)
    assert arrays.drafts == int(kept.num_nodes.sum()) - tree.batch
    used = back.used()
    for mine, theirs in ((back.tokens, kept.tokens), (back.parents, kept.parents)):
        assert mine[used].equal(theirs[:, : back.width][used])
    assert torch.from_numpy(arrays.depths)[used].equal(kept.depths()[:, : back.width][used])


def test_used_counts_the_nodes() -> None:
    tree = TokenTree(torch.zeros(2, 3), torch.zeros(2, 3), torch.tensor([1, 3]))
    assert tree.used().tolist() == [[True, False, False], [True, True, True]]
    assert (tree.batch, tree.width) == (2, 3)


def test_root_only_trees_are_valid_and_see_themselves() -> None:
    tree = root_only(torch.tensor([5, 7]))
    tree.validate(8)
    assert tree.ancestor_words().tolist() == [[1], [1]]
    assert tree.depths().tolist() == [[0], [0]]


def test_a_mask_of_more_than_64_nodes_is_refused() -> None:
    wide = torch.zeros(1, 65, dtype=torch.int64)
    with pytest.raises(ValueError, match="at most 64 nodes, got 65"):
        TokenTree(wide, wide, torch.tensor([2])).ancestor_words()


def valid() -> TokenTree:
    return TokenTree(
        tokens=torch.tensor([[9, 1, 2, 1], [9, 1, 7, 7]]),
        parents=torch.tensor([[-1, 0, 0, 1], [-1, 0, 0, 0]]),
        num_nodes=torch.tensor([4, 2]),
        scores=torch.tensor([[1, 0.5, 0.5, 0.25], [1, 0.5, 7.0, 7.0]]),
    )


def test_cousins_may_share_a_token_and_unused_entries_mean_nothing() -> None:
    valid().validate(10)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("num_nodes", [4, 0], "tree 1 .*num_nodes is 1 to 4"),
        ("num_nodes", [5, 2], "tree 0 .*num_nodes is 1 to 4"),
        ("num_nodes", [4, 2, 1], r"num_nodes \[3\]$"),
        ("num_nodes", [4, 4], "tree 1 .*distinct"),
        ("parents", [[-1, 0, 0, 1], [0, 0, 0, 0]], "tree 1 .*root"),
        ("parents", [[-1, 0, 2, 1], [-1, 0, 0, 0]], "tree 0 .*before"),
        ("parents", [[-1, -1, 0, 1], [-1, 0, 0, 0]], "tree 0 .*before"),
        ("parents", [[-1, 0, 0, 0], [-1, 0, 0, 0]], "tree 0 .*distinct"),
        ("parents", [[-1, 0, 0], [-1, 0, 0]], r"got tokens \[2, 4\], parents \[2, 3\]"),
        ("tokens", [[9, 1, 2, 1], [9, 10, 7, 7]], "tree 1 .*tokens are 0 to 9"),
        ("tokens", [[-1, 1, 2, 1], [9, 1, 7, 7]], "tree 0 .*tokens are 0 to 9"),
        ("tokens", [[9, 1, 1, 1], [9, 1, 7, 7]], "tree 0 .*distinct"),
        ("tokens", [[9.0, 1, 2, 1], [9, 1, 7, 7]], "int64"),
        ("scores", [[1, 0.5, 0.5, 0.6], [1, 0.5, 7, 7]], "tree 0 .*never rise"),
        ("scores", [[1, 0.5, 0.5, 0.2], [0.5, 0.5, 7, 7]], "tree 1 .*start at 1"),
        ("scores", [[1, 0.5, float("nan"), 0.2], [1, 0.5, 7, 7]], "tree 0 .*never rise"),
    ],
)
def test_validate_names_the_broken_rule(field: str, value: list[object], rule: str) -> None:
    broken = replace(valid(), **{field: torch.tensor(value)})
    with pytest.raises(ValueError, match=rule):
        broken.validate(10)


def test_tokens_name_the_path_that_emitted_them() -> None:
    """Also where a cousin or an unused entry has the same token, and where a stop cut the round."""
    tree = ArrayTree.of(valid())
    emitted = np.array([[1, 1, 1], [7, 9, 9]])
    accepted = accepted_of(tree, emitted, np.array([3, 1]), np.array([2, 1]))
    assert accepted.path[:, 0].tolist() == [0, 0]
    assert accepted.path[0].tolist() == [0, 1, 3]
    assert accepted.tokens[0].tolist() == [1, 1, 1]
    assert accepted.tokens[1, 0] == 7
    assert accepted.counts.tolist() == [2, 1]
    emitted = np.array([[2, 5], [4, 0]])
    accepted = accepted_of(tree, emitted, np.array([2, 1]), np.array([0, 1]))
    assert accepted.path[0, :2].tolist() == [0, 2]
    assert accepted.counts.tolist() == [0, 1]
