"""The rows that verify trees, made on the host: those of the one function that defines them."""

from __future__ import annotations

import random
from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import Tensor

from sgl_spec.engine.batch import host_tree_forward, tree_forward
from sgl_spec.engine.kv_pool import SlotTable
from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec.speculative.tree import TokenTree, root_only


def trees(rng: random.Random, batch: int, width: int) -> TokenTree:
    above = [[-1, *(rng.randrange(i) for i in range(1, width))] for _ in range(batch)]
    tokens = torch.tensor([rng.sample(range(900), width) for _ in range(batch)])
    return TokenTree(
        tokens, torch.tensor(above), torch.tensor([rng.randint(1, width) for _ in range(batch)])
    )


@pytest.mark.parametrize("width", [1, 2, 7, 64])
def test_rows_made_on_the_host_are_the_same(width: int) -> None:
    rng = random.Random(width)
    table = SlotTable(9, 120)
    table.host[:] = np.random.default_rng(1).permutation(9 * 120).reshape(9, 120)
    for batch in (1, 2, 5):
        tree = trees(rng, batch, width) if width > 1 else root_only(torch.arange(batch) + 3)
        rows = np.array(rng.sample(range(9), batch))
        committed = np.array([rng.randrange(50) for _ in range(batch)])
        found = host_tree_forward(ArrayTree.of(tree), rows, committed, table)
        expected = tree_forward(
            tree, torch.from_numpy(rows), torch.from_numpy(committed), table.device
        )
        for field in fields(found):
            mine, theirs = getattr(found, field.name), getattr(expected, field.name)
            if isinstance(theirs, Tensor):
                assert mine.dtype == theirs.dtype, field.name
                assert torch.equal(mine, theirs), field.name
            else:
                assert mine == theirs, field.name
