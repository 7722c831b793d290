"""The n-gram trie in NumPy beside one of dictionaries."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_spec.speculative.ngram_scores import NgramScores
from sgl_spec.speculative.tree import TokenTree
from sgl_spec_kernels import ngram_ref
from sgl_spec_kernels.ngram_ref import (
    FIRST,
    LONGEST,
    MOST_MATCHED,
    ORDERS,
    OWN_ORDERS,
    PLACES,
    RANKS,
    STEP,
    WAYS,
    NgramDrafts,
    TokenIndex,
    ngram_drafts,
    token_index,
    way_of,
)

SPAN = 60  # places of a text
NODES = 7
RECORDS = (1 << 16) // WAYS
Key = tuple[int, int]


@dataclass
class Dictionary:
    """What the index is, said slowly. log: token by place. texts: where each begins, and its
    length. records: the place of each (record, way)."""

    log: dict[int, int] = field(default_factory=dict)
    texts: list[tuple[int, int]] = field(default_factory=list)
    records: dict[Key, int] = field(default_factory=dict)

    longest: int = MOST_MATCHED

    def append(self, text: int, tokens: list[int]) -> None:
        start, length = self.texts[text]
        for place, token in enumerate(tokens, start + length):
            self.log[place] = token
        for place in range(start + length, start + length + len(tokens)):
            for key in self.keys(place, start):
                self.records[key, int(way_of(np.array([place]))[0])] = place
        self.texts[text] = start, length + len(tokens)

    def keys(self, place: int, start: int) -> list[int]:
        """The records of the n-grams before a place: a hash of the tokens, and of the text."""
        salted = [*((order, 0) for order in ORDERS), *((order, start) for order in OWN_ORDERS)]
        found = []
        for order, salt in salted:
            if place - start < order:
                continue
            grown = sum((self.log[place - i] + 1) * STEP**i for i in range(1, order + 1))
            key = (grown + salt * STEP ** (LONGEST + 1)) % 2**64
            found.append((key >> 32) % RECORDS)
        return found

    def matched(self, place: int, end: int) -> int:
        count = 0
        while count < self.longest:
            mine, other = self.log.get(end - 1 - count), self.log.get(place - 1 - count)
            if mine is None or mine != other:
                break
            count += 1
        return count

    def places(self, text: int, index: TokenIndex) -> list[tuple[int, int, bool]]:
        """(place, matched tokens, of the text itself), the best first."""
        start, length = self.texts[text]
        end = start + length
        found = [
            self.records[key, way]
            for key in self.keys(end, start)
            for way in range(WAYS)
            if (key, way) in self.records
        ]
        found = [place for place in found if place != end and self.matched(place, end)]
        follows = [self.log.get(place) for place in found]
        ranked = sorted(
            {
                (
                    self.matched(place, end),
                    follows.count(self.log.get(place)) if index.by_count else 0,
                    start <= place < end,
                    (place - end) % len(index.log),
                    place,
                )
                for place in found
            },
            reverse=True,
        )
        return [(each[4], each[0], each[2]) for each in ranked[:PLACES]]

    def chain(self, place: int, *, own: bool, end: int, steps: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < steps:
            ahead = len(tokens) % (end - place) if own else len(tokens)
            if place + ahead not in self.log:
                break
            tokens.append(self.log[place + ahead])
        return tokens

    def tree(self, text: int, index: TokenIndex, most: int) -> dict[tuple[int, ...], int]:
        """The paths of the chosen nodes, the cheapest first, and each one's bucket."""
        end, steps = sum(self.texts[text]), NODES - 1
        buckets: dict[tuple[int, ...], int] = {}  # by path, in the order of (place, depth)
        barred: set[tuple[int, ...]] = set()
        for place, matched, own in self.places(text, index):
            chain = self.chain(place, own=own, end=end, steps=steps)
            for depth in range(len(chain)):
                path = tuple(chain[: depth + 1])
                if path in buckets:
                    continue
                siblings = [p for p in buckets if len(p) == depth + 1 and p[:-1] == path[:-1]]
                if len(siblings) >= int(index.breadth[matched]) or path[:-1] in barred:
                    barred.add(path)
                rank = min(len(siblings), RANKS - 1)
                buckets[path] = ((matched * steps + depth) * RANKS + rank) * 2 + own
        prices = index.costs.flatten().tolist()
        costs = {  # of equal ones the place that was followed first
            path: (sum(prices[buckets[path[: i + 1]]] for i in range(len(path))), number)
            for number, path in enumerate(buckets)
        }
        chosen = sorted(buckets.keys() - barred, key=lambda path: costs[path])[: most - 1]
        return {path: buckets[path] for path in chosen}


class Both:
    """The index and the dictionary, with the same texts."""

    def __init__(self, texts: int, *, by_count: bool = False, longest: int = MOST_MATCHED) -> None:
        sizes = (FIRST + texts * SPAN, 1 << 16, texts, NODES, "cpu")
        self.index = token_index(*sizes, longest=longest, by_count=by_count)
        self.scores = NgramScores(self.index)
        starts = [FIRST + i * SPAN for i in range(texts)]
        self.index.starts.copy_(torch.tensor(starts))
        self.oracle = Dictionary(texts=[(start, 0) for start in starts], longest=longest)

    def append(self, new: dict[int, list[int]]) -> None:
        rows = torch.tensor(list(new))
        committed = torch.tensor([self.oracle.texts[row][1] - 1 for row in new])
        counts = torch.tensor([len(tokens) for tokens in new.values()])
        tokens = torch.full((len(new), int(counts.max())), 999)
        for i, mine in enumerate(new.values()):
            tokens[i, : len(mine)] = torch.tensor(mine)
        places, starts = (torch.zeros(tokens.numel(), dtype=torch.int64) for _ in range(2))
        ngram_ref.keep(self.index, rows, committed, tokens, counts, places, starts)
        ngram_ref.enter(self.index, places, starts)
        for row, mine in new.items():
            self.oracle.append(row, mine)

    def propose(self, rows: list[int], most: list[int]) -> NgramDrafts:
        out = ngram_drafts(len(rows), NODES, "cpu")
        committed = torch.tensor([self.oracle.texts[row][1] - 1 for row in rows])
        inputs = (torch.tensor(rows), committed, torch.tensor(rows) + 500, torch.tensor(most))
        ngram_ref.propose(self.index, *inputs, out)
        return out

    def judge(self, trees: NgramDrafts, emitted: list[int], count: int) -> None:
        tokens, counts = torch.tensor([emitted]), torch.tensor([count])
        ngram_ref.judge(self.index, trees, torch.tensor([0]), tokens, counts)


def paths(trees: NgramDrafts, i: int) -> dict[tuple[int, ...], int]:
    """As `Dictionary.tree`; checks what else a tree says of itself."""
    size = int(trees.drafted[i])
    found: list[tuple[int, ...]] = [()]
    for node in range(1, size):
        above = int(trees.parents[i, node])
        found.append((*found[above], int(trees.tokens[i, node])))
        assert int(trees.depths[i, node]) == len(found[node])
        assert int(trees.words[i, node]) == int(trees.words[i, above]) | 1 << node
    return dict(zip(found[1:], trees.buckets[i, 1:size].tolist(), strict=True))


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(
    rounds=st.lists(st.dictionaries(st.integers(0, 2), TOKENS, min_size=1), max_size=4),
    by_count=st.booleans(),
    most=st.integers(1, NODES),
    breadth=st.sampled_from([0, 1, 3]),
    longest=st.sampled_from([1, 3, MOST_MATCHED]),
)
def test_trees_are_those_of_a_dictionary(
    rounds: list[dict[int, list[int]]], by_count: bool, most: int, breadth: int, longest: int
) -> None:
    """Texts of few tokens, so that all suffixes are known many times; appended in turns."""
    both = Both(3, by_count=by_count, longest=longest)
    if breadth:
        both.index.breadth[2:] = breadth
    both.append({row: [row, 3, row] for row in range(3)})
    for new in rounds:
        both.append(new)
    trees = both.propose([2, 0, 1], [NODES, most, NODES])
    for i, (row, limit) in enumerate(((2, NODES), (0, most), (1, NODES))):
        assert paths(trees, i) == both.oracle.tree(row, both.index, limit)
    as_tree = TokenTree(trees.tokens, trees.parents, trees.num_nodes)
    as_tree.validate(600)


def test_a_record_that_is_full_keeps_a_place_in_each_way() -> None:
    both = Both(1)
    for token in range(20, 20 + 3 * WAYS):
        both.append({0: [1, token]})
    both.append({0: [1]})
    found = paths(both.propose([0], [NODES]), 0)
    assert found == both.oracle.tree(0, both.index, NODES)
    assert len([path for path in found if len(path) == 1]) > 1


def test_a_text_is_not_continued_at_its_own_end() -> None:
    """A longer text that stood in the same place has left records that name the end of this one."""
    both = Both(1)
    both.append({0: [1, 2, 3, 4, 5]})
    end = np.array([FIRST + 5])
    both.index.table[ngram_ref._records(both.index, end, np.array([FIRST])).flatten()] = int(end[0])
    both.index.log[FIRST + 5 : FIRST + 8] = 7
    assert both.propose([0], [NODES]).drafted.tolist() == [1]


def test_judging_counts_what_was_right_behind_what_was_right() -> None:
    """A tree [5 > 6 > 7, 8]: the text goes on with 5, 6, 9, so 7 was tried and 8 was too."""
    both = Both(1)
    both.append({0: [1, 2, 8, 0, 1, 2, 5, 6, 7, 3, 4, 1, 2]})
    trees = both.propose([0], [NODES])
    found = paths(trees, 0)
    assert {(5,), (5, 6), (5, 6, 7), (8,)} <= set(found)
    ngram_ref.judge(
        both.index, trees, torch.tensor([0]), torch.tensor([[5, 6, 9, 4]]), torch.tensor([3])
    )
    won = np.flatnonzero(both.index.won.numpy().reshape(-1))
    tried = np.flatnonzero(both.index.tried.numpy().reshape(-1))
    assert set(won) == {found[5,], found[5, 6]}
    judged = {found[path] for path in found if path[:-1] in ((), (5,), (5, 6))}
    assert set(tried) == judged
    assert found[8,] in judged


def test_nothing_is_judged_beyond_what_was_emitted() -> None:
    both = Both(1)
    both.append({0: [1, 2, 5, 6, 7, 3, 4, 1, 2]})
    trees = both.propose([0], [NODES])
    ngram_ref.judge(
        both.index, trees, torch.tensor([0]), torch.tensor([[5, 6, 7]]), torch.tensor([1])
    )
    assert int(both.index.tried.sum()) == 1


@pytest.mark.parametrize("right", [0.1, 0.5, 0.9])
def test_chances_come_to_what_was_counted_and_old_trials_fade(right: float) -> None:
    both = Both(1)
    before = both.index.costs[4, 1, 0, 0].item()
    both.index.tried[4, 1, 0, 0], both.index.won[4, 1, 0, 0] = 10_000, int(10_000 * right)
    both.scores.refresh()
    assert both.index.costs[4, 1, 0, 0].item() == pytest.approx(-1024 * np.log2(right), abs=4)
    assert both.index.tried[4, 1, 0, 0].item() == 5_000
    assert both.index.won[4, 1, 0, 0].item() == int(5_000 * right)
    both.index.clear()
    both.scores.refresh()
    assert both.index.costs[4, 1, 0, 0].item() == before
    assert int(both.index.costs.min()) >= 1


def test_guesses_rise_with_the_match_and_fall_with_the_rank() -> None:
    costs = Both(1).index.costs
    assert bool((costs[1:, 0].diff(dim=0) <= 0).all())
    assert bool((costs.diff(dim=2) > 0).all())
