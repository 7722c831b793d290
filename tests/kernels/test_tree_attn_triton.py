"""The Triton tree attention against its twin: in the interpreter on small shapes, and on a GPU at
every block edge."""

from __future__ import annotations

import functools
import operator
import random
from dataclasses import dataclass

import pytest
import torch
from kernel_runs import GPU_DTYPES, INTERPRETED, relative_error
from model_runs import tree_words
from torch import Tensor

from sgl_spec_kernels import tree_attn, tree_attn_ref


@dataclass(frozen=True)
class Case:
    """requests: (prefix, columns of the tree that are there, new rows) each. catches: what a wrong
    kernel would do here. fillers: last rows of each request that see just the first new column, and
    that no row sees, themselves included."""

    catches: str
    requests: list[tuple[int, int, int]]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    tree: bool = True
    fillers: int = 0


# With splits of 32 columns and blocks of 16: a few blocks each, the interpreter is slow.
SMALL = {
    "a decode row": Case("a mask where none is needed", [(20, 0, 1)]),
    "no prefix": Case("a softmax over nothing", [(0, 0, 1), (0, 0, 3)]),
    "merged splits": Case("splits lost or merged twice", [(70, 0, 3), (5, 0, 1), (96, 0, 2)]),
    "a split of other branches": Case("NaN where a split holds nothing seen", [(31, 30, 3)]),
    "rows of two blocks": Case("rows of the second block", [(17, 0, 11), (3, 0, 2)]),
    "bit 63": Case("the sign bit of a word", [(3, 60, 4)], heads=1, kv_heads=1),
    "odd head size": Case("columns past the head", [(18, 2, 2)], heads=3, kv_heads=1, dim=24),
    "filler rows": Case("what no one wrote", [(18, 9, 4), (0, 0, 3), (37, 2, 20)], fillers=2),
    "causal chunk": Case("a mask at the wrong corner", [(13, 0, 20), (0, 0, 5)], tree=False),
}
_EDGES = [1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 4097]
LARGE = {
    "decode": Case("column edges", [(n, 0, 1) for n in _EDGES], heads=32, kv_heads=8, dim=128),
    "trees": Case("row edges", [(n, 0, 8) for n in _EDGES], heads=32, kv_heads=8, dim=128),
    "ragged": Case(
        "rows of other requests",
        [(n, n % 7 * 5, 1 + n % 29) for n in _EDGES] + [(0, 0, 64), (3000, 0, 64), (64, 63, 1)],
        heads=9,
        kv_heads=3,
        dim=64,
    ),
    "wide group": Case("16 rows a token", [(300, 3, 3)], heads=32, kv_heads=2, dim=256),
    "filler rows": Case(
        "what no one wrote", [(500, 0, 8), (1, 9, 3), (0, 30, 33)], heads=32, kv_heads=8, fillers=2
    ),
    "many requests": Case(
        "long ones that are merged by the program that is last",
        [(n % 1700, 0, 1 + n % 4) for n in range(7, 5000, 113)],
        heads=32,
        kv_heads=8,
        dim=128,
    ),
    "many wide requests": Case(
        "the same, blocks of 64 rows", [(37 * n, 0, 16) for n in range(40)], 32, 8, 128
    ),
    "one request": Case("many splits", [(7777, 0, 5)], heads=32, kv_heads=8, dim=128),
    "chunks": Case(
        "causal blocks", [(0, 0, 700), (333, 0, 257), (64, 0, 1)], 32, 8, 128, tree=False
    ),
    "odd head size": Case("columns past the head", [(100, 2, 9)], heads=8, kv_heads=4, dim=80),
}


def run(case: Case, dtype: torch.dtype, device: str, seed: int) -> tuple[Tensor, Tensor]:
    """(kernel's, twin's in float32). Slots lie scattered; unused ones hold NaN, and so do, for
    the kernel, those that no row sees."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    count, lens = len(case.requests), [n for _, _, n in case.requests]
    width = max(sum(request) for request in case.requests) + 3
    table = torch.randperm((count + 1) * width + 4)[: (count + 1) * width].view(count + 1, width)
    rows = torch.randperm(count + 1)[:count]
    kv = torch.full((2, table.numel() + 4, case.kv_heads, case.dim), torch.nan)
    words: list[int] = []
    unseen: list[Tensor] = []
    for row, (prefix, tree, new) in zip(rows.tolist(), case.requests, strict=True):
        used = table[row, : prefix + tree + new]
        kv[:, used] = torch.randn(2, len(used), *kv.shape[2:])
        if case.tree:
            parents = [rng.randrange(i) for i in range(1, tree + new)]
            rest = [1] * case.fillers
            words += tree_words([-1, *parents])[0][tree : tree + new - len(rest)] + rest
            seen = functools.reduce(operator.or_, words[len(words) - new :])
            unseen += [used[prefix + j] for j in range(tree + new) if not seen >> j & 1]
    qkv = torch.randn(sum(lens), case.heads + 1, case.dim)  # q as a slice of wider rows
    args = [
        table.int(),
        rows,
        torch.tensor([prefix for prefix, _, _ in case.requests]),
        torch.tensor([0, *lens]).cumsum(0),
        torch.tensor(words) if case.tree else None,
        torch.tensor([tree for _, tree, _ in case.requests]) if case.tree else None,
    ]
    args = [None if arg is None else arg.to(device) for arg in args]
    q, kv = qkv.to(device, dtype)[:, : case.heads], kv.to(device, dtype)
    q32, (k32, v32) = q.float().contiguous(), kv.float()
    if unseen:
        kv = kv.clone()
        kv[:, torch.stack(unseen).to(device)] = torch.nan
    group, longest, scale = case.heads // case.kv_heads, max(lens), case.dim**-0.5
    work = tree_attn.attn_work(count, case.kv_heads, longest, group, case.dim, device)
    plan = tree_attn.plan_tree_attn(
        *args, heads_per_kv=group, kv_heads=case.kv_heads, max_q_len=longest, work=work
    )
    found = tree_attn.tree_attn(q, kv[0], kv[1], plan, scale)
    work.part.fill_(torch.nan)
    work.stats.fill_(torch.nan)
    again = tree_attn.tree_attn(q, kv[0], kv[1], plan, scale)
    assert torch.equal(found, again), "two launches differ"
    twin = tree_attn_ref.plan_tree_attn(*args, heads_per_kv=group, dtype=torch.float32)
    return found, tree_attn_ref.tree_attn(q32, k32, v32, twin, scale)


@INTERPRETED
@pytest.mark.parametrize("name", [name for name, case in SMALL.items() if case.tree])
def test_the_last_program_merges(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attn, "_tile", lambda *_: (16, 4, 2))
    monkeypatch.setattr(tree_attn, "LONG_SPLIT", 32)
    monkeypatch.setattr(tree_attn, "_FEW_BLOCKS", 0)
    monkeypatch.setattr(tree_attn, "FAIR_PROGRAMS", 10**9)  # 0 columns each
    monkeypatch.setattr(tree_attn, "_MOST_ROWS", 16)
    assert tree_attn.attn_grid(2, 2, 3, 2).merges
    case = SMALL[name]
    found, expected = run(case, torch.float32, "cpu", seed=3)
    assert relative_error(found, expected) < 1e-6, case.catches


@INTERPRETED
def test_only_long_requests_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attn, "_tile", lambda *_: (16, 4, 2))
    monkeypatch.setattr(tree_attn, "LONG_SPLIT", 16)
    monkeypatch.setattr(tree_attn, "_FEW_BLOCKS", 0)
    works: list[tree_attn.AttnWork] = []
    made = tree_attn.AttnWork.of

    def noted(*args: object) -> tree_attn.AttnWork:
        works.append(made(*args))
        return works[-1]

    monkeypatch.setattr(tree_attn.AttnWork, "of", noted)
    case = Case("a share that is not fair", [(20, 0, 1)] * 3 + [(100, 0, 1)])
    for programs in (4, 16):
        monkeypatch.setattr(tree_attn, "FAIR_PROGRAMS", programs)
        found, expected = run(case, torch.float32, "cpu", seed=4)
        assert relative_error(found, expected) < 1e-6, case.catches
        # Two KV heads, 164 columns each.
        assert works[-1].fair.tolist() == [2 * 164 // programs]
        assert not works[-1].arrived.any()
    few, many = (int(work.part.isfinite().sum()) for work in works)
    assert 0 < few < many, "parts of the splits of the long one, then of all"


@INTERPRETED
@pytest.mark.parametrize("name", SMALL)
def test_equals_its_twin(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attn, "_tile", lambda *_: (16, 4, 2))
    monkeypatch.setattr(tree_attn, "MIN_SPLIT", 32)
    monkeypatch.setattr(tree_attn, "_MOST_ROWS", 16)
    monkeypatch.setattr(tree_attn, "_MERGED_AT_ONCE", 2)  # of up to four splits
    case = SMALL[name]
    found, expected = run(case, torch.float32, "cpu", seed=1)
    assert relative_error(found, expected) < 1e-6, case.catches
    if name == "merged splits":  # the interpreter has no bfloat16
        found, expected = run(case, torch.float16, "cpu", seed=2)
        assert found.dtype is torch.float16
        assert relative_error(found, expected) < 2e-3, case.catches


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "error"), GPU_DTYPES)
@pytest.mark.parametrize("name", LARGE)
def test_equals_its_twin_on_the_gpu(name: str, dtype: torch.dtype, error: float) -> None:
    case = LARGE[name]
    for seed in torch.randint(1 << 30, (3,)).tolist():
        found, expected = run(case, dtype, "cuda", seed)
        assert relative_error(found, expected) < error, f"seed {seed}: {case.catches}"
