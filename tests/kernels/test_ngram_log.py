"""Where the texts of an n-gram index on the device lie."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from kernel_runs import INTERPRETED

from sgl_spec.engine.cuda.ngram import DeviceNgram, IndexSize
from sgl_spec.speculative.base import DraftBatch

NODES, WIDTH = 3, 40
MOST = WIDTH - 2 * NODES  # what a text may come to


def drafter(rows: int) -> DeviceNgram:
    return DeviceNgram(rows, NODES, IndexSize.of(64, WIDTH, rows), torch.device("cpu"))


def begin(index: DeviceNgram, row: int, text: list[int]) -> None:
    index.expect(row, MOST)
    index.begin(row, np.array(text, dtype=np.int32), 0)


def drafts(index: DeviceNgram, row: int, text: list[int]) -> list[int]:
    texts = np.zeros((row + 1, WIDTH), dtype=np.int32)
    texts[row, : len(text)] = text
    one = np.array([row])
    batch = DraftBatch(one, np.array([len(text)]), np.array([NODES]), texts)
    tree = index.propose(batch)
    found: list[int] = tree.tokens[0, 1 : int(tree.num_nodes[0])].tolist()
    return found


@INTERPRETED
@pytest.mark.parametrize("rows", [2, 3, 7])
def test_a_text_that_grows_keeps_its_place(rows: int) -> None:
    index, text = drafter(rows), [1, 2, 3, 4, 5, 1, 2, 3]
    begin(index, 0, text)
    for turn in range(5):  # others come and go, as many as fill the log several times
        for row in range(1, rows):
            begin(index, row, [100 + turn, 200 + row])
            index.sync()
        assert drafts(index, 0, text) == [4, 5]
        spans = sorted(index._growing.values())
        assert len(spans) == rows
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        for row in range(1, rows):
            index.finish(row)
    assert spans[0][0] >= 1
    assert spans[-1][1] <= len(index.index.log)


@INTERPRETED
def test_a_text_that_has_ended_is_drafted_from_until_its_place_is_needed() -> None:
    index, text = drafter(2), [1, 2, 3, 4, 5]
    begin(index, 0, text)
    index.finish(0)
    begin(index, 1, [1, 2, 3])
    assert drafts(index, 1, [1, 2, 3]) == [4, 5]
    index.finish(1)
    for _ in range(3):
        begin(index, 0, [9, 8])
        index.finish(0)
    begin(index, 1, [1, 2, 3])
    assert drafts(index, 1, [1, 2, 3]) == []


def test_a_log_has_room_for_all_texts_that_grow_and_the_table_for_the_capacity() -> None:
    size = IndexSize.of(10_000_000, 131_072, 48)
    assert size.tokens > 48 * 131_072
    assert size.grams <= 10_000_000
    assert IndexSize.of(10_000_000, 4096, 48).tokens == 10_000_000 // 6
    assert IndexSize.of(10_000_000, 131_072, 100_000).nbytes < 1 << 29
