"""Rounds by batch size: each captured as a CUDA graph when it is first needed, then replayed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import numpy as np
import torch

from sgl_spec.engine.cuda.costs import sparse_sizes
from sgl_spec.engine.cuda.round import Program

logger = logging.getLogger(__name__)

BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)


def captured_parts(program: Program) -> list[Callable[[], None]]:
    """What becomes a graph each."""
    return list(program.pieces) if program.split else [partial(run_all, program)]


def run_all(program: Program) -> None:
    """Enqueue its pieces, kernel by kernel."""
    for piece in program.pieces:
        piece()


class Replayed:
    """A program and, where it was captured, its graphs: one, or one for each piece."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def run(self, piece: int | None = None) -> None:
        """Enqueue all of it, or one piece of a program that is split."""
        assert piece is None or self.program.split
        parts = self.program.pieces
        runs = [graph.replay for graph in self.graphs] or list(parts)
        for run in runs if piece is None else runs[piece : piece + 1]:
            run()

    def capture(self, pool: object) -> None:
        """Run it once with nothing but filler, which compiles what it needs, then record it."""
        self.program.load(np.zeros(0, dtype=np.int64), None)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run_all(self.program)
        torch.cuda.current_stream().wait_stream(stream)
        for part in captured_parts(self.program):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):  # type: ignore[arg-type]
                part()
            self.graphs.append(graph)


class Rounds:
    """Rounds by what they are. sizes: batch sizes that are captured, rising; a batch is filled up
    to the next of them, and one larger than all runs as it is, launch by launch. captures: whether
    to use graphs at all."""

    def __init__(self, sizes: Sequence[int], *, captures: bool) -> None:
        self.sizes = tuple(sizes) if captures else ()
        self._made: dict[Hashable, Replayed] = {}
        self._pool = torch.cuda.graph_pool_handle() if captures else None

    def padded(self, batch: int, *, masked: bool = False) -> int:
        """The batch size that a batch is run with."""
        return next((size for size in self.sizes_for(masked=masked) if size >= batch), batch)

    def sizes_for(self, *, masked: bool) -> tuple[int, ...]:
        """Batch sizes that are captured. What the pieces of a masked round hand on is never
        another's memory, so of these there are fewer."""
        return sparse_sizes(self.sizes) if masked else self.sizes

    def get(self, key: Hashable, make: Callable[[], Program], batch: int | None = None) -> Replayed:
        """The round of this key; `make` builds it. batch: its size, from `padded`: of sizes that
        are not captured it is made anew each time. None: it is captured if any is."""
        known = self._made.get(key)
        if known is not None:
            return known
        start = time.perf_counter()
        made, wanted = Replayed(make()), batch is None or batch in self.sizes
        if self._pool is not None and wanted:
            made.capture(self._pool)
        if self._pool is None or wanted:
            self._made[key] = made
        logger.debug("Made the round %s in %.2f s", key, time.perf_counter() - start)
        return made

    def __contains__(self, key: Hashable) -> bool:
        return key in self._made

    @property
    def captures(self) -> bool:
        """Whether rounds are captured at all."""
        return self._pool is not None

    def __len__(self) -> int:
        return len(self._made)


def capture_sizes(most: int, asked: Sequence[int] | None, limit: int | None) -> tuple[int, ...]:
    """Batch sizes to capture, rising. most: requests that may run; no batch is larger. asked:
    --cuda-graph-bs. limit: --cuda-graph-max-bs."""
    if asked:
        return tuple(sorted({min(size, most) for size in asked}))
    top = min(most, limit or BATCH_SIZES[-1])
    sizes = {size for size in BATCH_SIZES if size < top}
    return tuple(sorted(sizes | {top}))
