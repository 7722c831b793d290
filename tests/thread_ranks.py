"""Ranks of a model as threads of one process: what `layers.parallel.Ranks` promises, with barriers
in place of a network."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class _Meeting:
    """Where all ranks bring something and see what the others brought."""

    def __init__(self, size: int) -> None:
        self.size, self.calls = size, 0
        self.barrier = threading.Barrier(size, timeout=60)
        self._brought: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._brought[rank] = value
        self.barrier.wait()
        seen = list(self._brought)
        self.calls += rank == 0
        self.barrier.wait()
        return seen


class ThreadRanks:
    """See `layers.parallel.Ranks`."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.size, self.meeting = rank, meeting.size, meeting

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x)).sum(0)

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self.meeting.exchange(self.rank, x), dim=1)

    def agree(self, value: Any) -> Any:
        return self.meeting.exchange(self.rank, value)[0]

    def least(self, count: int) -> int:
        return min(self.meeting.exchange(self.rank, count))


def on_ranks(size: int, run: Callable[[ThreadRanks], T]) -> list[T]:
    """What `run` gives on each of so many ranks."""
    meeting = _Meeting(size)

    def one(rank: int) -> T:
        try:
            return run(ThreadRanks(rank, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))
