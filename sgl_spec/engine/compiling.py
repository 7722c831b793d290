"""Requests whose grammar is being compiled: they queue for the model only once it is there."""

from __future__ import annotations

from collections.abc import Iterator

from sgl_spec.engine.grammar_jobs import TIMEOUT_S, CompileJob, GrammarJobs
from sgl_spec.engine.req import Phase, Req

WAIT_S = 0.01


class Compiling:
    """In order of arrival."""

    def __init__(self, jobs: GrammarJobs | None) -> None:
        """jobs: None where no request may bring a grammar."""
        self._jobs = jobs
        self._reqs: list[Req] = []

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._reqs)

    def add(self, req: Req) -> None:
        """Have a request's grammar compiled."""
        grammar = req.sampling.grammar
        assert self._jobs is not None
        assert grammar is not None
        req.job = self._jobs.submit(grammar)
        req.phase = Phase.GRAMMAR
        self._reqs.append(req)

    def remove(self, req: Req) -> None:
        """The request no longer waits here."""
        assert self._jobs is not None
        assert req.job is not None
        self._reqs.remove(req)
        self._jobs.release(req.job)
        req.job = None

    def take(self) -> list[tuple[Req, str | None]]:
        """Those that need not wait any more: None where the grammar is there, else why it will not
        be."""
        if not self._reqs:
            return []
        assert self._jobs is not None
        self._jobs.poll()
        ends = [(place, self._end(req)) for place, req in enumerate(self._reqs)]
        ended = self._jobs.agree([(place, end) for place, end in ends if end is not None])
        chosen = [(self._reqs[place], end or None) for place, end in ended]
        return [self._take(*each) for each in chosen]

    def _end(self, req: Req) -> str | None:
        """None while a grammar may come, "" where it is there, else why it will not be."""
        assert req.job is not None
        assert self._jobs is not None
        reason = _problem(req.job, self._jobs)
        return "" if req.job.done and reason is None else reason

    def _take(self, req: Req, reason: str | None) -> tuple[Req, str | None]:
        job, jobs = req.job, self._jobs
        assert job is not None
        assert jobs is not None
        if reason is None:
            while not job.done:  # as it is on rank 0
                jobs.wait(WAIT_S)
                jobs.poll()
            req.constraint = jobs.constraint(job, req.stop_ids, req.sampling.min_new_tokens)
            req.phase = Phase.WAITING
        self.remove(req)
        return req, reason

    def wait(self) -> None:
        """With nothing else to do, wait a moment; messages are read between two steps."""
        if self._jobs is not None and self._reqs:
            self._jobs.wait(WAIT_S)


def _problem(job: CompileJob, jobs: GrammarJobs) -> str | None:
    if job.done:
        return job.error
    return f"takes longer than {TIMEOUT_S:g} s to compile" if jobs.overdue(job) else None
