"""What rounds with trees cost on this card, so that trees are as large as pays.

Such rounds come in few shapes, all of them captured and timed at the start: batch sizes that at
least double, and for each a few counts of rows. A batch is filled up to the next shape, and what
fits into it is verified for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from sgl_spec.speculative.prune import CostTable

ROWS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Rows of rounds. Up to 64 cost the same on an H200: the weights are read, and tiles of a matrix
product are as tall as that."""
_NEAR = 5  # so many of them a batch size has; of the larger ones every other
_BLEND = 1 / 16  # weight of the newest round
_MOST_WAITED = 20.0  # ms; a longer gap is none of the host's work


def sparse_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Of these batch sizes, rising, those that at least double, and the largest."""
    kept: list[int] = []
    for size in sizes:
        if not kept or size >= 2 * kept[-1] or size == sizes[-1]:
            kept.append(size)
    return tuple(kept)


class TreeShapes:
    """The shapes. sizes: batch sizes, rising; none where rounds are not captured. most_nodes: of a
    tree, root included."""

    def __init__(self, captured: Sequence[int], most_nodes: int) -> None:
        """captured: batch sizes that are captured without trees."""
        self.most_nodes = most_nodes
        self.sizes = sparse_sizes(captured)

    def rows(self, size: int) -> tuple[int, ...]:
        """Rows of the rounds of a batch size, rising; a request has one for its root."""
        most = size * self.most_nodes
        counts = [count for count in ROWS if size < count < most]
        return (*counts[:_NEAR], *counts[_NEAR + 1 :: 2], most)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Batch size and rows of each."""
        return ((size, rows) for size in self.sizes for rows in self.rows(size))

    def __len__(self) -> int:
        return sum(len(self.rows(size)) for size in self.sizes)

    def fit(self, batch: int, drafts: int) -> tuple[int, int]:
        """Batch size and rows of the round for a batch with so many drafts. Beyond the largest size
        a round is as large as it must be."""
        size = next((size for size in self.sizes if size >= batch), None)
        if size is None:
            return batch, batch + drafts
        return size, next(rows for rows in self.rows(size) if rows - size >= drafts)


class DeviceCosts:
    """Milliseconds of rounds by batch size and rows. They are timed without requests; what rounds
    with requests take longer, and how long the device waits for the host to make trees, is learned
    from those that run."""

    def __init__(self, shapes: TreeShapes) -> None:
        self.shapes = shapes
        self._plain: dict[int, float] = {}
        self._trees: dict[int, dict[int, float]] = {}
        self._tables: dict[int, CostTable] = {}
        self._more: dict[int, float] = {}
        self._waits: dict[int, float] = {}

    def know(self, size: int, rows: int, ms: float) -> None:
        """A round without requests takes so long; rows equal to the size: one without trees."""
        if rows == size:
            self._plain[size] = ms
        else:
            self._trees.setdefault(size, {})[rows] = ms
        self._tables.clear()

    def ms(self, size: int, rows: int) -> float:
        """Of a round of one of the shapes that are known."""
        return self._plain[size] if rows == size else self._trees[size][rows]

    def table(self, requests: int) -> CostTable:
        """Cost by total rows of a round of `requests` trees."""
        size = self.size_of(requests)
        if requests not in self._tables:
            self._tables[requests] = self._table(requests, size)
        fixed = _of(self._more, size) + _of(self._waits, size)
        return replace(self._tables[requests], fixed=fixed)

    def _table(self, requests: int, size: int) -> CostTable:
        known = self._trees[size]
        plain = self._plain[_at_least(self._plain, requests)]
        counts = (requests, *(requests + rows - size for rows in sorted(known)))
        times = accumulate((plain, *(known[rows] for rows in sorted(known))), max)
        return CostTable(counts, tuple(times), steps=True)

    def size_of(self, requests: int) -> int:
        """The batch size of rounds with trees of so many requests."""
        return _at_least(self._trees, requests)

    def plain_ahead(self, requests: int) -> float:
        """What a round without trees takes that does not wait for the host, as far as rounds of any
        kind tell."""
        size = self.size_of(requests)
        return self.table(requests).cost(requests) - _of(self._waits, size)

    def add(self, requests: int, rows: int, seconds: float) -> None:
        """Rounds that the host runs one forward at a time say nothing of captured ones."""

    def ran(self, requests: int, drafts: int, ms: float) -> None:
        """A round of `requests` with so many drafts took so long on the device."""
        size = self.size_of(requests)
        table = replace(self.table(requests), fixed=0.0)
        _blend(self._more, size, max(0.0, ms - table.cost(requests + drafts)))

    @property
    def wait(self) -> float:
        """What was last known of it, ms."""
        return next(reversed(self._waits.values()), 0.0)

    def waited(self, requests: int, ms: float) -> None:
        """The device had nothing to do before a round for which trees were made."""
        if ms < _MOST_WAITED:
            _blend(self._waits, self.size_of(requests), max(0.0, ms))

    def __str__(self) -> str:
        plain = " ".join(f"{size}:{ms:.2f}" for size, ms in sorted(self._plain.items()))
        trees = " ".join(
            f"{size}x{rows}:{ms:.2f}"
            for size, times in sorted(self._trees.items())
            for rows, ms in sorted(times.items())
        )
        return f"plain {plain}; with trees, by rows {trees}"


def _at_least(known: dict[int, float] | dict[int, dict[int, float]], size: int) -> int:
    """The smallest known size that is as large; the largest if none is."""
    return min((each for each in known if each >= size), default=max(known))


def _of(known: dict[int, float], size: int) -> float:
    """What is known of a size, or of the one that it was last known of."""
    return known.get(size, next(reversed(known.values()), 0.0))


def _blend(known: dict[int, float], size: int, value: float) -> None:
    """The first values of a size may be those of a round that was still being compiled."""
    before = known.pop(size, None)
    known[size] = value / 2 if before is None else before + _BLEND * (value - before)
