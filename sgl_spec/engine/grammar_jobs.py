"""Compiling grammars beside the engine's steps.

Compilations run in threads of their own, the engine only looks at which have ended; nothing here
waits for one unless there is nothing else to do. All methods are for the engine's thread.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from sgl_spec.engine.grammar import Compile, GrammarError
from sgl_spec.layers.parallel import ALONE
from sgl_spec.request import Grammar
from sgl_spec.speculative.grammar import Automaton, Constraint

TIMEOUT_S = 10.0
AT_ONCE = 2  # so that a grammar that takes long does not keep a small one waiting
# A compilation cannot be stopped. One that is overdue makes room for others, up to this many.
MAX_THREADS = 4
# The grammar compiler recurses as deep as rules refer to each other: 2 kB to 16 kB of stack each,
# of which the longest grammar that is accepted can hold some ten thousand. Only what is used is
# ever paged in.
STACK_BYTES = 256 << 20
CACHED_GRAMMARS = 128
CACHED_CHARS = 1 << 20


class CompileJob:
    """One grammar on its way. automaton or error is set once `done` is true."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.waiting = 0  # requests
        self.started: float | None = None
        self.automaton: Automaton | None = None
        self.error: str | None = None
        self.done = False

    def overdue(self, now: float) -> bool:
        """Whether the compilation has taken too long."""
        return not self.done and self.started is not None and now - self.started > TIMEOUT_S


class GrammarJobs:
    """Compiles grammars once each and keeps the last ones.

    compile: called in threads. clock: seconds that only grow. agree: see `layers.parallel.Ranks`.
    """

    def __init__(
        self,
        compile: Compile,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
        agree: Callable[[Any], Any] = ALONE.agree,
    ) -> None:
        self.agree = agree
        self._compile = compile
        self._vocab_size = vocab_size
        self._clock = clock
        self._queued: OrderedDict[tuple[str, str], CompileJob] = OrderedDict()
        self._running: dict[tuple[str, str], CompileJob] = {}
        self._finished: OrderedDict[tuple[str, str], CompileJob] = OrderedDict()
        self._bell = threading.Event()

    def submit(self, grammar: Grammar) -> CompileJob:
        """The job of a grammar, for one more request. It may be done."""
        key = (grammar.kind, grammar.text)
        for jobs in (self._finished, self._running, self._queued):
            if key in jobs:
                job = jobs[key]
                break
        else:
            job = self._queued[key] = CompileJob(grammar)
        if job.done and key in self._finished:
            self._finished.move_to_end(key)
        job.waiting += 1
        return job

    def release(self, job: CompileJob) -> None:
        """A request no longer waits for its job; one that nobody waits for is not begun."""
        job.waiting -= 1
        if not job.waiting:
            self._queued.pop((job.grammar.kind, job.grammar.text), None)

    def poll(self) -> None:
        """Take in what has ended and start what there is room for."""
        self._bell.clear()
        for key, job in list(self._running.items()):
            if job.done:
                del self._running[key]
                self._keep(key, job)
        now = self._clock()
        while self._queued and self._has_room(now):
            key, job = self._queued.popitem(last=False)
            self._running[key] = job
            job.started = now
            self._start(job)

    def overdue(self, job: CompileJob) -> bool:
        """Whether a request should no longer wait for its job."""
        return job.overdue(self._clock())

    def wait(self, seconds: float) -> None:
        """Wait until some job ends, for at most so long."""
        self._bell.wait(seconds)

    def constraint(
        self, job: CompileJob, end_ids: Iterable[int], min_new_tokens: int = 0
    ) -> Constraint:
        """A finished job's grammar for one request, which `end_ids` end from its minimum length
        on."""
        assert job.automaton is not None
        return Constraint(job.automaton.restart(), end_ids, self._vocab_size, min_new_tokens)

    def _has_room(self, now: float) -> bool:
        timely = sum(not job.overdue(now) for job in self._running.values())
        return timely < AT_ONCE and len(self._running) < MAX_THREADS

    def _start(self, job: CompileJob) -> None:
        before = threading.stack_size(STACK_BYTES)
        try:
            # A daemon: a compilation that hangs does not keep the process alive.
            threading.Thread(target=self._run, args=(job,), daemon=True).start()
        finally:
            threading.stack_size(before)

    def _run(self, job: CompileJob) -> None:
        error: str | None = "cannot be compiled: the grammar engine failed on it"
        try:
            job.automaton = self._compile(job.grammar)
            error = None
        except GrammarError as reason:
            error = str(reason)
        finally:  # whatever happened, the requests that wait must hear of it
            job.error = error
            job.done = True
            self._bell.set()

    def _keep(self, key: tuple[str, str], job: CompileJob) -> None:
        self._finished[key] = job
        chars = sum(len(text) for _, text in self._finished)
        while len(self._finished) > CACHED_GRAMMARS or chars > CACHED_CHARS:
            (_, text), _ = self._finished.popitem(last=False)
            chars -= len(text)
