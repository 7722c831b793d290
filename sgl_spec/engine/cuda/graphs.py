"""Rounds by batch size: each captured as a CUDA graph when it is first needed, then replayed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch

from sgl_spec.engine.cuda.rounds import Round

logger = logging.getLogger(__name__)

BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)


class Replayed:
    """A round and, where it was captured, its graph."""

    def __init__(self, program: Round) -> None:
        self.program = program
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        """Enqueue it."""
        if self.graph is None:
            self.program()
        else:
            self.graph.replay()

    def capture(self, pool: object) -> None:
        """Run it once with nothing but filler, which compiles what it needs, then record it."""
        self.program.load(np.zeros(0, dtype=np.int64), None)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.program()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):  # type: ignore[arg-type]
            self.program()
        self.graph = graph


class Rounds:
    """Rounds by what they are. sizes: batch sizes that are captured, rising; a batch is filled up
    to the next of them, and one larger than all runs as it is, launch by launch. captures: whether
    to use graphs at all."""

    def __init__(self, sizes: Sequence[int], *, captures: bool) -> None:
        self.sizes = tuple(sizes) if captures else ()
        self._made: dict[Hashable, Replayed] = {}
        self._pool = torch.cuda.graph_pool_handle() if captures else None

    def padded(self, batch: int) -> int:
        """The batch size that a batch is run with."""
        return next((size for size in self.sizes if size >= batch), batch)

    def get(self, key: Hashable, make: Callable[[], Round], batch: int | None = None) -> Replayed:
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

    def forget(self) -> None:
        """Drop all rounds: they are made again when they are needed. The pool of graphs that are
        gone cannot be used again."""
        self._made.clear()
        if self._pool is not None:
            self._pool = torch.cuda.graph_pool_handle()

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
