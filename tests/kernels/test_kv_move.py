"""KV rows land where they belong, also when source and target slots overlap."""

from __future__ import annotations

import pytest
import torch

from sgl_spec_kernels.kv_move import move_kv_rows, write_kv

MOVES = {
    "apart": ([3, 9], [1, 2]),
    "shifted onto each other": ([4, 5, 6, 7], [3, 4, 5, 6]),
    "shifted the other way": ([3, 4, 5, 6], [4, 5, 6, 7]),
    "swapped": ([2, 8], [8, 2]),
    "in place": ([5], [5]),
    "none": ([], []),
}


@pytest.mark.parametrize("name", MOVES)
def test_move_reads_every_row_before_it_writes_one(name: str) -> None:
    sources, targets = MOVES[name]
    k, v = torch.randn(2, 3, 10, 2, 4)
    expected = {"k": k.clone(), "v": v.clone()}
    for source, target in zip(sources, targets, strict=True):
        expected["k"][:, target] = k[:, source]
        expected["v"][:, target] = v[:, source]
    index = torch.tensor([sources, targets], dtype=torch.int64)
    move_kv_rows(k, v, index[0], index[1])
    assert torch.equal(k, expected["k"])
    assert torch.equal(v, expected["v"])


def test_write_touches_only_its_slots() -> None:
    """k and v arrive as slices of one fused row, so they are not contiguous."""
    caches = torch.zeros(2, 10, 2, 4)
    fused = torch.randn(3, 5, 4)
    slots = torch.tensor([7, 0, 4])
    write_kv(caches[0], caches[1], fused[:, 1:3], fused[:, 3:], slots)
    assert torch.equal(caches[:, slots], torch.stack((fused[:, 1:3], fused[:, 3:])))
    untouched = [1, 2, 3, 5, 6, 8, 9]
    assert not caches[:, untouched].any()
