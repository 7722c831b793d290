"""The n-gram trie on the device against its twins: few tokens, so that much repeats."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from kernel_runs import INTERPRETED
from torch import Tensor

from sgl_spec.speculative.ngram_scores import NgramScores
from sgl_spec_kernels import ngram, ngram_ref, ngram_rows
from sgl_spec_kernels.ngram_ref import (
    FIRST,
    MOST_MATCHED,
    NgramDrafts,
    TokenIndex,
    ngram_drafts,
    token_index,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def twin(given: Any) -> Any:
    """A copy on the CPU of a tensor, or of the tensors of a dataclass."""
    if isinstance(given, Tensor):
        return given.cpu().clone()
    values = {f.name: getattr(given, f.name) for f in fields(given)}
    return type(given)(**{k: twin(v) if isinstance(v, Tensor) else v for k, v in values.items()})


def same(mine: Any, expected: Any) -> None:
    for field in fields(mine):
        found, wanted = getattr(mine, field.name), getattr(expected, field.name)
        if isinstance(found, Tensor):
            assert torch.equal(found.cpu(), wanted), field.name


@dataclass
class World:
    """Texts of B rows in a log, the last of them the filler, with room for what they gain."""

    index: TokenIndex
    rows: Tensor
    lengths: Tensor
    nodes: int

    @property
    def filler(self) -> int:
        return len(self.rows) - 1

    def tokens(self, width: int, vocab: int) -> tuple[Tensor, Tensor]:
        """What every text gains, and how much of it."""
        batch = len(self.rows)
        return (
            torch.randint(0, vocab, (batch, width), device=DEVICE),
            torch.randint(1, width + 1, (batch,), device=DEVICE),
        )

    def append(self, width: int, vocab: int) -> None:
        """`keep` and `enter`, both columns."""
        tokens, counts = self.tokens(width, vocab)
        new = [torch.zeros(tokens.numel(), dtype=torch.int64, device=DEVICE) for _ in range(2)]
        expected, theirs = twin(self.index), [twin(each) for each in new]
        given = (self.rows, self.lengths - 1, tokens, counts)
        ngram.keep(self.index, *given, *new, self.filler)
        ngram_ref.keep(expected, *(twin(each) for each in given), *theirs, self.filler)
        for mine, other in zip(new, theirs, strict=True):
            assert torch.equal(mine.cpu(), other)
        same(self.index, expected)
        ngram.enter(self.index, *new)
        ngram_ref.enter(expected, *theirs)
        entered = expected.table > 0
        assert bool(entered.any())
        # Of equal n-grams of one call any may win on a device.
        assert torch.equal(self.index.table.cpu() > 0, entered)
        if DEVICE == "cpu":
            same(self.index, expected)
        self.lengths += torch.where(self.rows == self.filler, 0, counts)

    def borrow(self) -> None:
        """The filler stands where the first text does, and a text that stood there before has left
        the place behind its end in the records that its end is looked up in."""
        starts, end = self.index.starts, self.index.starts[:1] + self.lengths[:1]
        starts[self.filler], self.lengths[self.filler] = starts[0], self.lengths[0]
        found = ngram_ref._records(twin(self.index), end.cpu().numpy(), starts[:1].cpu().numpy())
        self.index.table[torch.from_numpy(found).flatten()] = int(end)
        self.index.log[int(end)] = 2


def world(batch: int, nodes: int, vocab: int, *, longest: int, by_count: bool) -> World:
    span = 3 * 40 + 4 * nodes
    index = token_index(
        FIRST + batch * (span + 1), 4096, batch, nodes, DEVICE, longest=longest, by_count=by_count
    )
    NgramScores(index)
    index.breadth[4:] = 2
    rows = torch.arange(batch, device=DEVICE)
    index.starts.copy_(FIRST + rows * (span + 1))
    made = World(index, rows, torch.zeros(batch, dtype=torch.int64, device=DEVICE), nodes)
    for _ in range(3):
        made.append(40, vocab)
    return made


def check_trees(batch: int, nodes: int, vocab: int, longest: int, by_count: bool) -> None:
    """Trees, what is learned of them, and the rows that verify them."""
    made = world(batch, nodes, vocab, longest=longest, by_count=by_count)
    made.borrow()
    most = torch.randint(1, nodes + 2, (batch,), device=DEVICE)
    trees, index = ngram_drafts(batch, nodes, DEVICE), twin(made.index)
    expected = twin(trees)
    given = (made.rows, made.lengths - 1, made.rows + 7, most)
    ngram.propose(made.index, *given, trees)
    ngram_ref.propose(index, *(twin(each) for each in given), expected)
    same(trees, expected)
    assert nodes == 2 or bool((trees.drafted > 2).any())

    tokens, counts = made.tokens(nodes, vocab)
    follows = torch.rand(batch, 1, device=DEVICE) < 0.7
    tokens[:, :-1] = torch.where(follows, trees.tokens[:, 1:], tokens[:, :-1])
    ngram.judge(made.index, trees, made.rows, tokens, counts, made.filler)
    ngram_ref.judge(index, expected, *(twin(x) for x in (made.rows, tokens, counts)), made.filler)
    same(made.index, index)
    assert 0 < int(index.won.sum()) <= int(index.tried.sum())
    for total in {batch, batch + 1, batch * 2, batch * (nodes - 1) + 1, batch * nodes}:
        check_rows(made, trees, expected, total)


def check_rows(made: World, trees: NgramDrafts, expected: NgramDrafts, total: int) -> None:
    batch = len(made.rows)
    rows = ngram_rows.tree_rows_buffers(batch, total, DEVICE)
    theirs = twin(rows)
    ngram_rows.share_rows(trees, rows)
    ngram_rows.share_rows_ref(expected, theirs)
    same(trees, expected)
    assert int(trees.num_nodes.sum()) == min(total, int(trees.drafted.sum()))
    width = int(made.lengths.max()) + made.nodes + 1
    table = torch.randint(0, 999, (batch, width), dtype=torch.int32, device=DEVICE)
    ngram_rows.tree_rows(trees, made.lengths, made.rows, table, rows)
    ngram_rows.tree_rows_ref(expected, twin(made.lengths), twin(made.rows), twin(table), theirs)
    same(rows, theirs)


TREES = [
    (2, 2, 2, MOST_MATCHED, False),
    (3, 4, 2, 3, True),  # as many lanes as steps are none: 3 of 4
    (5, 8, 4, MOST_MATCHED, False),
    (4, 17, 3, MOST_MATCHED, True),  # all lanes are steps
    (2, 64, 3, 1, False),
]


@INTERPRETED
@pytest.mark.parametrize(("batch", "nodes", "vocab", "longest", "by_count"), TREES)
def test_trees(batch: int, nodes: int, vocab: int, longest: int, by_count: bool) -> None:
    check_trees(batch, nodes, vocab, longest, by_count)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    for case in (*TREES, (48, 8, 5, MOST_MATCHED, False), (256, 16, 50, MOST_MATCHED, False)):
        check_trees(*case)
