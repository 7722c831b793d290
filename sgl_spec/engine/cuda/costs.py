"""What rounds with trees cost on this card, so that trees are as large as pays.

Such rounds come in few shapes, all of them captured and timed at the start: batch sizes that at
least double, and for each a few counts of rows. A batch is filled up to the next shape, and what
fits into it is verified for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

ROWS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Rows of rounds. Up to 64 cost the same on an H200: the weights are read, and tiles of a matrix
product are as tall as that."""
_NEAR = 5  # so many of them a batch size has; of the larger ones every other


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
    """Milliseconds of rounds by batch size and rows, timed without requests; a `costs.CostModel`.
    Rounds are filled up to the next shape."""

    filled = True

    def __init__(self, shapes: TreeShapes) -> None:
        self.shapes = shapes
        self._plain: dict[int, float] = {}
        self._trees: dict[int, dict[int, float]] = {}

    def know(self, size: int, rows: int, ms: float) -> None:
        """A round takes so long; rows equal to the size: one without trees."""
        if rows == size:
            self._plain[size] = ms
        else:
            self._trees.setdefault(size, {})[rows] = ms

    def ms(self, size: int, rows: int) -> float:
        """Of a round of one of the shapes that are known."""
        return self._plain[size] if rows == size else self._trees[size][rows]

    def size_of(self, requests: int) -> int:
        """See `CostModel`: the batch size of rounds with trees."""
        return _at_least(self._trees, requests)

    def extras(self, size: int) -> Sequence[int]:
        """See `CostModel`."""
        return (0, *(rows - size for rows in sorted(self._trees[size])))

    def modelled(self, size: int, extra: int) -> float:
        """See `CostModel`."""
        if extra:
            return self._trees[size][size + extra]
        return self._plain[_at_least(self._plain, size)]

    def __str__(self) -> str:
        plain = " ".join(f"{size}:{ms:.2f}" for size, ms in sorted(self._plain.items()))
        trees = " ".join(
            f"{size}x{rows}:{ms:.2f}"
            for size, times in sorted(self._trees.items())
            for rows, ms in sorted(times.items())
        )
        return f"plain {plain}; with trees, by rows {trees}"


def _at_least(known: Iterable[int], size: int) -> int:
    """The smallest known size that is as large; the largest if none is."""
    sizes = sorted(known)
    return next((each for each in sizes if each >= size), sizes[-1])
