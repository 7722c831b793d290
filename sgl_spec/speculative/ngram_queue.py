"""Texts that wait to go into the n-gram trie, a slice a round."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_spec.speculative.trie import Piece

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]

MAX_PENDING = 1 << 20  # queued tokens; beyond, the oldest text is dropped


@dataclass(slots=True, eq=False)
class Job:
    """Text of which tokens[done:] is to be inserted.

    row: the request it belongs to, -1 once that is gone. tail: log position of tokens[done - 1], 0
    if that is not in the log.
    """

    row: int
    tokens: Ints32
    done: int
    tail: int = 0

    @property
    def left(self) -> int:
        """Tokens still to insert."""
        return self.tokens.size - self.done


class InsertQueue:
    """Jobs in turn; at most one for each request row."""

    def __init__(self, num_rows: int, depth: int) -> None:
        """num_rows: request rows. depth: of the trie."""
        self._depth = depth
        self._jobs: deque[Job] = deque()
        self.queued = np.zeros(num_rows, np.bool_)  # the row has a job
        self.pending = 0
        self.dropped = 0

    def clear(self) -> None:
        """Drop everything."""
        self._jobs.clear()
        self.queued[:] = False
        self.pending = self.dropped = 0

    def add(self, row: int, text: Ints32, known: int, tail: int) -> None:
        """Queue text[known:] of a row that has no job."""
        context = max(0, known - self._depth)
        job = Job(row, np.array(text[context:], np.int32), known - context, tail)
        self._jobs.append(job)
        self.queued[row] = True
        self.pending += job.left
        while self.pending > MAX_PENDING:
            self._drop(self._jobs.popleft())

    def extend(self, row: int, tokens: Ints32) -> None:
        """More text of a row that has a job."""
        job = next(job for job in self._jobs if job.row == row)
        job.tokens = np.concatenate([job.tokens, tokens])
        self.pending += tokens.size

    def forget(self, row: int) -> None:
        """The row's request is gone; its text is still inserted."""
        if self.queued[row]:
            next(job for job in self._jobs if job.row == row).row = -1
            self.queued[row] = False

    def _drop(self, job: Job) -> None:
        self.pending -= job.left
        self.dropped += job.left
        if job.row >= 0:
            self.queued[job.row] = False

    def slices(self, room: int) -> list[tuple[Job, Piece]]:
        """Parts of the first jobs, `room` tokens in all; those jobs go to the end of the queue."""
        slices: list[tuple[Job, Piece]] = []
        while room > 0 and len(slices) < len(self._jobs):
            job = self._jobs[0]
            size = min(room, job.left)
            slices.append((job, self._piece(job, size)))
            self._jobs.rotate(-1)
            room -= size
        return slices

    def _piece(self, job: Job, size: int) -> Piece:
        ends = np.arange(job.done, job.done + size)
        windows = job.tokens.take(np.maximum(ends[:, None] - np.arange(self._depth), 0))
        known = np.minimum(ends + 1, self._depth)
        return Piece(windows, known, np.zeros(1, np.int64), np.array([job.tail]))

    def advance(self, job: Job, size: int, tail: int) -> bool:
        """`size` tokens went in, the last at log position `tail`. Returns whether the job is
        done."""
        job.done += size
        job.tail = tail
        self.pending -= size
        if job.left:
            return False
        self._jobs.remove(job)
        if job.row >= 0:
            self.queued[job.row] = False
        return True


def join(pieces: list[Piece]) -> Piece:
    """Pieces one after the other."""
    if len(pieces) == 1:
        return pieces[0]
    sizes = np.cumsum([0, *[p.known.size for p in pieces]])
    longest = pieces[0].windows.shape[1] - 1
    before = [
        np.full((p.starts.size, longest), -1) if p.before is None else p.before for p in pieces
    ]
    return Piece(
        windows=np.concatenate([p.windows for p in pieces]),
        known=np.concatenate([p.known for p in pieces]),
        starts=np.concatenate([p.starts + s for p, s in zip(pieces, sizes, strict=False)]),
        tails=np.concatenate([p.tails for p in pieces]),
        before=np.concatenate(before),
    )
