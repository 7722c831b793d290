"""Positions and slots of a verify forward's rows, on the device against the twin."""

from __future__ import annotations

import pytest
import torch
from kernel_runs import INTERPRETED

from sgl_spec_kernels.tree_rows import BLOCK, tree_rows, tree_rows_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(batch: int, rows: int, filler: int) -> None:
    """filler: rows behind those of requests."""
    width, table_rows = 200, batch + 3
    table = torch.randperm(table_rows * width, device=DEVICE).to(torch.int32).view(-1, width)
    committed = torch.randint(0, 100, (batch,), device=DEVICE)
    places = torch.randperm(table_rows, device=DEVICE)[:batch]
    requests = torch.randint(0, batch, (rows,), device=DEVICE)
    nodes = torch.randint(0, 64, (rows,), device=DEVICE)
    depths = torch.minimum(nodes, torch.randint(0, 9, (rows,), device=DEVICE))
    nodes[rows - filler :] = -1
    found = [torch.full((rows,), -7, device=DEVICE) for _ in range(2)]
    expected = [torch.full((rows,), -9, device=DEVICE) for _ in range(2)]
    tree_rows(requests, nodes, depths, committed, places, table, *found)
    tree_rows_ref(requests, nodes, depths, committed, places, table, *expected)
    assert torch.equal(found[0][: rows - filler], expected[0][: rows - filler])
    assert (found[0][rows - filler :] >= 0).all()
    assert torch.equal(found[1], expected[1])


# One request alone; filler rows; rows that end at, before and behind a block's edge.
SHAPES = [(1, 1, 0), (3, 7, 2), (2, BLOCK, 1), (4, BLOCK - 1, 0), (5, BLOCK + 1, 40)]


@INTERPRETED
@pytest.mark.parametrize(("batch", "rows", "filler"), SHAPES)
def test_equals_the_twin(batch: int, rows: int, filler: int) -> None:
    check(batch, rows, filler)


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "rows", "filler"), [*SHAPES, (256, 2048, 100)])
def test_equals_the_twin_on_a_gpu(batch: int, rows: int, filler: int) -> None:
    check(batch, rows, filler)
