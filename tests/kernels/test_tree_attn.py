"""The plain-torch tree attention against a loop over rows and heads in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from model_runs import tree_words
from torch import Tensor

from sgl_spec_kernels.tree_attn_ref import AttnPlan, plan_tree_attn, tree_attn


@dataclass(frozen=True)
class Case:
    """requests: (prefix, new rows) each. trees: columns of each one's tree that earlier forwards
    wrote; chains: every node's parent is the one before it. catches: what a wrong kernel would do
    here."""

    catches: str
    requests: Sequence[tuple[int, int]]
    tree: bool = True
    trees: Sequence[int] | None = None
    chains: bool = False
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    contiguous: bool = False
    dtype: torch.dtype = torch.float32
    groups: range = field(default=range(1, 99))


CASES = {
    "one decode row": Case("a mask or a permutation where none is needed", [(37, 1)]),
    "first row of all": Case(
        "a softmax over nothing: no prefix, only itself", [(0, 1)], contiguous=True
    ),
    "one tree": Case("bits of the word shifted by the prefix", [(19, 12)]),
    "tree without prefix": Case("padding of an empty prefix", [(0, 9), (5, 3)]),
    "widest tree": Case("the sign bit of a word (bit 63)", [(70, 64)]),
    "ragged lengths": Case("columns past a shorter request's end", [(9, 4), (60, 4), (33, 4)]),
    "ragged trees": Case("padding rows scattered over real ones", [(20, 5), (20, 7), (20, 6)]),
    "far apart": Case(
        "rows returned in plan order, not batch order",
        [(3, 1), (700, 13), (5, 2), (690, 1)],
        groups=range(3, 5),
    ),
    "groups full": Case(
        "requests lost where a group is closed", [(500, 1)] * 19, groups=range(2, 6)
    ),
    "chunk": Case("a causal mask aligned at the wrong corner", [(0, 50)], tree=False),
    "chunk after prefix": Case("the prefix masked like the chunk", [(41, 50)], tree=False),
    "chunk of blocks": Case(
        "block edges: blocks of 128 rows, the last one short",
        [(13, 300)],
        tree=False,
        groups=range(3, 4),
    ),
    "chunks and single rows": Case(
        "single rows of a causal batch lost or reordered",
        [(8, 1), (0, 129), (300, 1), (7, 128)],
        tree=False,
    ),
    "contiguous decode": Case("a view that starts at the wrong slot", [(37, 1)], contiguous=True),
    "contiguous tree": Case("a view with a mask", [(37, 8)], contiguous=True),
    "contiguous chunk": Case(
        "views of a chunk's blocks", [(30, 290), (9, 3)], tree=False, contiguous=True
    ),
    "no shared heads": Case("folding with one head per KV head", [(9, 5)], heads=3, kv_heads=3),
    "one kv head": Case("folding with every head on one KV head", [(9, 5)], heads=7, kv_heads=1),
    "second step": Case(
        "rows that see themselves only, or every node of the step before",
        [(19, 4), (19, 4)],
        trees=[4, 4],
    ),
    "steps of other depths": Case(
        "bits counted from the new rows; columns past a shorter tree",
        [(19, 4), (40, 3), (7, 1), (0, 2)],
        trees=[8, 0, 5, 60],
    ),
    "last column": Case("the sign bit of a later step's word", [(30, 8)], trees=[56]),
    "chain step": Case("a mask where every column is seen", [(37, 1)], trees=[3], chains=True),
    "chain steps": Case(
        "no mask though columns of one request are padding",
        [(37, 1), (36, 1)],
        trees=[3, 2],
        chains=True,
    ),
    "one row beside another branch": Case("no mask for a single row", [(37, 1)], trees=[6]),
    "step in a run of slots": Case(
        "a view that ends before the new rows", [(37, 3)], trees=[3], contiguous=True
    ),
    "bfloat16": Case("a mask in another dtype than q", [(30, 6), (28, 5)], dtype=torch.bfloat16),
}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    rows: Tensor
    prefixes: Tensor
    starts: Tensor
    words: Tensor | None
    trees: Tensor | None

    def plan(self) -> AttnPlan:
        return plan_tree_attn(
            self.table,
            self.rows,
            self.prefixes,
            self.starts,
            self.words,
            self.trees,
            heads_per_kv=self.q.shape[1] // self.k.shape[1],
            dtype=self.q.dtype,
        )


def make_inputs(case: Case) -> Inputs:
    """Unused slots hold NaN; table rows are dealt in another order than the batch's."""
    torch.manual_seed(1)
    rng = random.Random(1)
    lens = [n for _, n in case.requests]
    trees = case.trees or [0] * len(lens)
    columns = [tree + n for tree, n in zip(trees, lens, strict=True)]
    prefixes = [prefix for prefix, _ in case.requests]
    width = max(prefix + n for prefix, n in zip(prefixes, columns, strict=True)) + 3
    count = len(lens)
    rows = torch.randperm(count + 2)[:count]
    slots = torch.arange((count + 2) * width + 5)
    if not case.contiguous:
        slots = torch.randperm(len(slots))
    table = slots[: (count + 2) * width].view(count + 2, width).int()
    kv = torch.full((2, len(slots), case.kv_heads, case.head_dim), torch.nan, dtype=case.dtype)
    words: list[int] = []
    for row, prefix, tree, n in zip(rows.tolist(), prefixes, trees, columns, strict=True):
        used = table[row, : prefix + n].long()
        kv[:, used] = torch.randn(2, len(used), *kv.shape[2:]).to(case.dtype)
        parents = [i - 1 if case.chains else rng.randrange(i) for i in range(1, n)]
        words += tree_words([-1, *parents])[0][tree:]
    return Inputs(
        q=torch.randn(sum(lens), case.heads, case.head_dim).to(case.dtype),
        k=kv[0],
        v=kv[1],
        table=table,
        rows=rows,
        prefixes=torch.tensor(prefixes),
        starts=torch.tensor([0, *lens]).cumsum(0),
        words=torch.tensor(words) if case.tree else None,
        trees=None if case.trees is None else torch.tensor(case.trees),
    )


def by_definition(inputs: Inputs) -> Tensor:
    """Row by row, head by head, in float64."""
    q, k, v = inputs.q.double(), inputs.k.double(), inputs.v.double()
    out = torch.zeros_like(q)
    for request, row in enumerate(inputs.rows.tolist()):
        start, stop = inputs.starts[request : request + 2].tolist()
        prefix = int(inputs.prefixes[request])
        for t in range(start, stop):
            word = int(inputs.words[t]) if inputs.words is not None else (2 << (t - start)) - 1
            columns = 64 if inputs.words is not None else stop - start
            new = [prefix + j for j in range(columns) if word >> j & 1]
            slots = inputs.table[row, [*range(prefix), *new]].long()
            for head in range(q.shape[1]):
                kv_head = head // (q.shape[1] // k.shape[1])
                scores = k[slots, kv_head] @ q[t, head] / math.sqrt(q.shape[2])
                out[t, head] = torch.softmax(scores, 0) @ v[slots, kv_head]
    return out.flatten(1)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case)
    plan = inputs.plan()
    out = tree_attn(inputs.q, inputs.k, inputs.v, plan, case.head_dim**-0.5)
    expected = by_definition(inputs)
    assert len(plan.groups) in case.groups
    views = [isinstance(group.slots, slice) for group in plan.groups]
    assert any(views) == case.contiguous
    assert out.dtype is case.dtype
    torch.testing.assert_close(
        out.double(),
        expected,
        atol=TOLERANCE[case.dtype],
        rtol=0,
        msg=lambda found: f"{case.catches}: {found}",
    )


def test_a_chain_step_needs_no_mask() -> None:
    """The newest node of a lone chain sees every column: attention runs without a mask."""
    for chains in (True, False):
        plan = make_inputs(Case("", [(37, 1)], trees=[6], chains=chains)).plan()
        assert (plan.groups[0].mask is None) == chains


def test_slot_placement_does_not_change_a_bit() -> None:
    """The same request in one run of slots (read in place) and in scattered ones (gathered)."""
    runs = []
    for contiguous in (True, False):
        case = Case("", [(200, 9)], contiguous=contiguous)
        inputs = make_inputs(case)
        used = inputs.table[int(inputs.rows[0]), :209].long()
        torch.manual_seed(2)
        for cache in (inputs.k, inputs.v, inputs.q):
            values = torch.randn(209, *cache.shape[1:])
            cache[used if len(cache) > 9 else slice(None)] = values[: min(209, len(cache))]
        runs.append(tree_attn(inputs.q, inputs.k, inputs.v, inputs.plan(), 0.25))
    assert torch.equal(*runs)


def test_planned_memory_is_bounded() -> None:
    """A long chunk's masks are views of one block's, not a square of its length."""
    table = torch.arange(9000, dtype=torch.int32)[None]
    zero, starts = torch.tensor([0]), torch.tensor([0, 4096])
    plan = plan_tree_attn(
        table, zero, torch.tensor([4000]), starts, None, heads_per_kv=3, dtype=torch.float32
    )
    assert len(plan.groups) == 32
    storages = {group.mask.untyped_storage().data_ptr() for group in plan.groups}
    assert len(storages) == 1
    assert plan.groups[0].mask.untyped_storage().nbytes() == 384 * 8096 * 4
