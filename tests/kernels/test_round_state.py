"""Beginning and ending rounds on the device and the draft's rows behind them, against the twins
and against what they are for."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from kernel_runs import INTERPRETED
from torch import Tensor

from sgl_spec_kernels import round_state
from sgl_spec_kernels.round_state import KINDS, RowState, extend_buffers
from sgl_spec_kernels.sample import Walked, walked

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# batch, nodes, levels below the root, table rows; the last of which is nobody's
SHAPES = [(1, 1, 0, 2), (1, 4, 3, 3), (3, 8, 5, 9), (5, 3, 2, 4), (4, 8, 7, 40)]
BIG_SHAPES = [(48, 8, 5, 64), (200, 64, 63, 300), (17, 33, 8, 20), (1, 64, 8, 2)]


def state_of(rows: int) -> RowState:
    def ints(most: int) -> Tensor:
        return torch.randint(1, most, (rows,), device=DEVICE)

    return RowState(
        committed=ints(900),
        last=ints(1 << 17),
        seed=ints(1 << 62),
        temperature=torch.rand(rows, device=DEVICE),
        top_k=ints(1 << 40),
        top_p=torch.rand(rows, dtype=torch.float64, device=DEVICE),
        min_p=torch.rand(rows, device=DEVICE),
        max_nodes=ints(65),
    )


def empty_like(state: RowState, batch: int) -> RowState:
    return RowState(*(getattr(state, f.name).new_zeros(batch) for f in fields(RowState)))


def result(batch: int, nodes: int, levels: int) -> Walked:
    """A root path of random length and rising nodes for each; behind its end there is garbage."""
    out = walked(batch, nodes, 9, DEVICE)
    out.tokens.random_(1, 1 << 17)
    steps = min(levels, nodes - 1)
    for path in out.path:
        path.fill_(nodes + 99)
        path[0] = 0
        path[1 : steps + 1] = 1 + torch.randperm(nodes - 1)[:steps].sort().values.to(DEVICE)
    out.counts.random_(1, steps + 2)
    out.counts[-1] = steps + 1
    return out


def check(batch: int, nodes: int, levels: int, table_rows: int) -> None:
    state = state_of(table_rows)
    dummy = table_rows - 1
    rows = torch.randperm(table_rows - 1, device=DEVICE)[:batch]
    rows = torch.cat([rows, rows.new_full((max(batch - len(rows), 0),), dummy)])
    if batch > 2:
        rows[1] = dummy
    buffers, twins = empty_like(state, batch), empty_like(state, batch)
    round_state.begin_round(state, rows, buffers)
    round_state.begin_round_ref(state, rows, twins)
    for field in fields(RowState):
        mine, twin = getattr(buffers, field.name), getattr(twins, field.name)
        assert torch.equal(mine, twin), field.name
    out = result(batch, nodes, levels)
    check_extending(out, buffers, rows, levels)
    check_ending(out, state, rows, dummy)


def check_ending(out: Walked, state: RowState, rows: Tensor, dummy: int) -> None:
    batch, nodes = out.tokens.shape
    found: list[tuple[Tensor, ...]] = []
    for end in (round_state.end_round, round_state.end_round_ref):
        mine = replace(state, committed=state.committed.clone(), last=state.last.clone())
        packed = torch.full((batch, nodes + 1), -9, dtype=torch.int32, device=DEVICE)
        end(mine.committed, mine.last, rows, out, packed, dummy)
        assert mine.committed[dummy] == state.committed[dummy]
        assert mine.last[dummy] == state.last[dummy]
        found.append((mine.committed, mine.last, packed))
    for mine_, twin in zip(*found, strict=True):
        assert torch.equal(mine_, twin)


def check_extending(out: Walked, batch: RowState, rows: Tensor, levels: int) -> None:
    width = int(batch.committed.max()) + levels + 3
    table = torch.randperm((int(rows.max()) + 1) * width, device=DEVICE).view(-1, width).int()
    where = {
        "committed": batch.committed,
        "roots": batch.last,
        "rows": rows,
        "req_to_token": table,
    }
    for kind in KINDS:
        mine, twin = (extend_buffers(len(rows), levels, DEVICE) for _ in range(2))
        for field in fields(mine):
            getattr(mine, field.name).fill_(-9)
            getattr(twin, field.name).fill_(-8)
        round_state.extend_rows(mine, out, kind, **where)
        round_state.extend_rows_ref(twin, out, kind, **where)
        for field in fields(mine):
            assert torch.equal(getattr(mine, field.name), getattr(twin, field.name)), field.name
    features = torch.randn(out.tokens.numel(), 70, device=DEVICE)[:, :37]
    found = round_state.gather_features(features, mine.features)
    assert torch.equal(found, round_state.gather_features_ref(features, mine.features))
    wide = torch.randn(out.tokens.numel(), 1025, device=DEVICE).bfloat16()
    target = torch.full((len(mine.features), 1025), torch.nan, device=DEVICE).bfloat16()
    round_state.gather_features(wide, mine.features, target)
    assert torch.equal(target, wide[mine.features])


@INTERPRETED
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_twins(shape: tuple[int, int, int, int]) -> None:
    check(*shape)


@INTERPRETED
def test_rows_of_a_known_round() -> None:
    """Text of 10 tokens whose KV is valid, root 5, accepted 7 8 9 over nodes 0, 2, 3."""
    out = walked(1, 4, 9, DEVICE)
    out.tokens[0] = torch.tensor([7, 8, 9, 77])
    out.path[0] = torch.tensor([0, 2, 3, 77])
    out.counts[0] = 3
    ints = {name: torch.tensor([n]) for name, n in (("committed", 10), ("roots", 5), ("rows", 0))}
    expected = {
        "head": ([7, 8, 9, 0], [10, 11, 12, 0]),
        "whole": ([7, 8, 9, 0], [11, 12, 13, 0]),
        "rooted": ([5, 7, 8, 0], [10, 11, 12, 0]),
    }
    for kind, (tokens, positions) in expected.items():
        rows = extend_buffers(1, 3, DEVICE)
        table = torch.arange(100, 120, dtype=torch.int32)[None]
        round_state.extend_rows(rows, out, kind, **ints, req_to_token=table)
        assert rows.tokens.tolist() == tokens
        assert rows.positions.tolist() == positions
        assert rows.slots.tolist() == [p + 100 for p in positions[:3]] + [-1]
        assert rows.words.tolist() == [1, 3, 7, 1]
        assert rows.features.tolist() == [0, 2, 3, 0]
        assert rows.last.tolist() == [2]


def test_refuses_what_a_word_cannot_hold() -> None:
    with pytest.raises(AssertionError, match="64 levels"):
        extend_buffers(1, 64, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES + BIG_SHAPES)
def test_equals_the_twins_on_the_gpu(shape: tuple[int, int, int, int]) -> None:
    check(*shape)
