"""Where a draft model's rows lie: positions, slots, masks of text and of trees run step by step."""

from __future__ import annotations

import torch

from sgl_spec.speculative.draft_rows import DraftTrees, span

TABLE = (torch.arange(5)[:, None] * 1000 + torch.arange(300)).int()  # row r, position p: 1000 r + p
ROWS = torch.tensor([3, 1, 4])


def test_a_span_is_request_by_request() -> None:
    some = span(ROWS, torch.tensor([10, 0, 7]), torch.tensor([3, 1, 2]))
    assert some.positions.tolist() == [10, 11, 12, 0, 7, 8]
    assert some.request.tolist() == [0, 0, 0, 1, 2, 2]
    assert some.within().tolist() == [0, 1, 2, 0, 0, 1]
    assert some.ends.tolist() == [2, 3, 5]


def test_rows_of_a_span_see_what_comes_before_them() -> None:
    some = span(ROWS, torch.tensor([10, 0, 7]), torch.tensor([3, 1, 2]))
    batch = some.forward(torch.arange(6), TABLE)
    assert batch.slots.tolist() == [3010, 3011, 3012, 1000, 4007, 4008]
    assert batch.prefix_lens.tolist() == [10, 0, 7]
    assert batch.q_starts.tolist() == [0, 3, 4, 6]
    assert batch.mask_words is not None
    assert batch.mask_words.tolist() == [1, 3, 7, 1, 1, 3]
    assert batch.rows.tolist() == ROWS.tolist()
    assert batch.tree_lens is None


def test_words_of_a_span_hold_64_rows_and_more_rows_need_none() -> None:
    for count in (64, 65):
        some = span(ROWS[:1], torch.tensor([2]), torch.tensor([count]))
        words = some.forward(torch.zeros(count, dtype=torch.int64), TABLE).mask_words
        assert (words is None) == (count == 65)
        if words is not None:
            assert words[-1] == -1, "all 64 bits"


def test_tree_nodes_take_column_after_column() -> None:
    """Three requests, the middle one with fewer nodes and absent from the second step."""
    trees = DraftTrees(TABLE, ROWS, torch.tensor([20, 30, 40]))
    first = torch.tensor([0, 0, 1, 2, 2])
    assert trees.columns(first).tolist() == [0, 1, 0, 0, 1]
    batch = trees.forward(first, torch.arange(5), torch.tensor([1, 2, 1, 1, 2]), 1)
    assert batch.positions.tolist() == [20, 20, 30, 40, 40]
    assert batch.slots.tolist() == [3020, 3021, 1030, 4040, 4041]
    assert batch.q_starts.tolist() == [0, 2, 3, 5]
    assert batch.tree_lens is not None
    assert batch.tree_lens.tolist() == [0, 0, 0]
    second = torch.tensor([0, 2, 2])
    assert trees.columns(second).tolist() == [2, 2, 3]
    batch = trees.forward(second, torch.arange(3), torch.tensor([5, 6, 10]), 2)
    assert batch.positions.tolist() == [21, 41, 41]
    assert batch.slots.tolist() == [3022, 4042, 4043]
    assert batch.rows.tolist() == [3, 4]
    assert batch.prefix_lens.tolist() == [20, 40]
    assert batch.q_starts.tolist() == [0, 1, 3]
    assert batch.tree_lens is not None
    assert batch.tree_lens.tolist() == [2, 2]
    assert trees.columns(torch.tensor([0, 1, 2])).tolist() == [3, 1, 4]
