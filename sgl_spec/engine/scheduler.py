"""Who runs when. One thread, one step at a time; the worker does the computing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

from sgl_spec.engine.batch import Batch, DecodeBatch, PrefillBatch, StepOutput
from sgl_spec.engine.grammar_jobs import TIMEOUT_S, CompileJob, GrammarJobs
from sgl_spec.engine.metrics import EngineCounters
from sgl_spec.engine.policy import (
    TRIED_PER_STEP,
    Need,
    admission_order,
    can_admit,
    prefill_next,
    retract_order,
    split_prefill,
    tree_reserve,
    waits_for_prefix,
)
from sgl_spec.engine.replies import chunk_of, keep_logprobs
from sgl_spec.engine.req import Phase, Req
from sgl_spec.engine.slots import SlotManager
from sgl_spec.messages import OutputChunk
from sgl_spec.request import FinishReason

GRAMMAR_WAIT_S = 0.01


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's bounds, resolved from the flags.

    max_request_tokens: prompt + output tokens that one request can hold when it runs alone.
    prefill_budget: prompt tokens of one forward; chunked: whether a prompt may be cut to fit it.
    draft_tokens: most nodes of a tree, root included (1: no speculation). round_slots: most slots
    behind the committed tokens that one round writes.
    """

    max_running: int
    max_queued: int | None
    max_request_tokens: int
    prefill_budget: int
    chunked: bool
    draft_tokens: int
    round_slots: int
    schedule_policy: str = "fcfs"
    stream_interval: int = 1
    check_every_step: bool = False


class Runner(Protocol):
    """What the scheduler asks of the worker; see `engine.worker.Worker`."""

    def open(self, req: Req) -> None: ...
    def begin(self, req: Req) -> None: ...
    def execute(self, batch: Batch) -> StepOutput: ...
    def observe(self, taken: list[int]) -> None: ...
    def shareable(self, req: Req) -> int: ...
    def close(self, row: int) -> None: ...
    def flush(self) -> None: ...


class Scheduler:
    """Continuous batching over one worker.

    Every submitted request gets exactly one chunk with `finish` set, whatever happens to it.
    """

    def __init__(
        self,
        worker: Runner,
        slots: SlotManager,
        limits: Limits,
        counters: EngineCounters,
        grammars: GrammarJobs | None = None,
    ) -> None:
        self.worker = worker
        self.slots = slots
        self.limits = limits
        self.counters = counters
        self.grammars = grammars
        self.compiling: list[Req] = []  # in order of arrival
        self.waiting: deque[Req] = deque()
        self.running: list[Req] = []  # in admission order; phase PREFILL or DECODE
        self._ended: list[Req] = []
        self._last_was_prefill = False
        self._reserve = tree_reserve(limits.round_slots)

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self.compiling or self.waiting or self.running or self._ended)

    def submit(self, req: Req) -> None:
        """Queue a request, or end it at once when it can never run or the queue is full."""
        self.counters.requests += 1
        limit, rows = self.limits.max_queued, self.limits.max_running - len(self.running)
        if len(req.ids) + req.sampling.max_new_tokens > self.limits.max_request_tokens:
            self._refuse(req, 400, self._too_long(req), "max_new_tokens")
        elif limit is not None and len(self.waiting) + len(self.compiling) >= limit + rows:
            self._refuse(req, 503, "The request queue is full.")
        elif (grammar := req.sampling.grammar) is not None:
            assert self.grammars is not None
            req.job = self.grammars.submit(grammar)
            req.phase = Phase.GRAMMAR
            self.compiling.append(req)
        else:
            self.waiting.append(req)

    def abort(self, rid: str | None) -> None:
        """End a request (all of them for None) with an "abort" finish; unknown ids are ignored,
        because a request may end while its abort is on the way."""
        for req in [r for r in self._live() if rid is None or r.rid == rid]:
            if req.phase is Phase.WAITING:
                self.waiting.remove(req)
            elif req.phase is Phase.GRAMMAR:
                self._stop_compiling(req)
            self.counters.aborted += 1
            self._end(req, FinishReason(kind="abort", message="Aborted"))

    def step(self) -> list[OutputChunk]:
        """One forward, and what there is to tell about it."""
        self._take_compiled()
        self._admit()
        reqs, batch = self._next_batch()
        if batch is None:
            self._await_grammars()
        else:
            output = self.worker.execute(batch)
            self._commit(reqs, batch, output)
        if self.limits.check_every_step:
            self.slots.check(self.running)
        return self._reply()

    def flush(self) -> bool:
        """Drop cached prefixes and what the drafter has learned; False while requests are
        running."""
        if self.compiling or self.waiting or self.running:
            return False
        self.slots.flush()
        self.worker.flush()
        return True

    # --- grammars ---------------------------------------------------------------------------------

    def _take_compiled(self) -> None:
        """Let requests queue whose grammar is ready; refuse those whose grammar will not be."""
        if not self.compiling:
            return
        assert self.grammars is not None
        self.grammars.poll()
        for req in list(self.compiling):
            assert req.job is not None
            if req.job.done:
                self._take_grammar(req, req.job)
            elif self.grammars.overdue(req.job):
                self._refuse_grammar(req, f"takes longer than {TIMEOUT_S:g} s to compile")

    def _take_grammar(self, req: Req, job: CompileJob) -> None:
        if job.error is not None:
            self._refuse_grammar(req, job.error)
            return
        assert self.grammars is not None
        req.constraint = self.grammars.constraint(job, req.stop_ids, req.sampling.min_new_tokens)
        self._stop_compiling(req)
        req.phase = Phase.WAITING
        self.waiting.append(req)

    def _refuse_grammar(self, req: Req, reason: str) -> None:
        grammar = req.sampling.grammar
        assert grammar is not None
        self._stop_compiling(req)
        self._refuse(req, 400, f"{grammar.field} {reason}.", grammar.field)

    def _stop_compiling(self, req: Req) -> None:
        assert self.grammars is not None
        assert req.job is not None
        self.compiling.remove(req)
        self.grammars.release(req.job)
        req.job = None

    def _await_grammars(self) -> None:
        """With nothing else to do, wait a moment; messages are read between two steps."""
        if self.grammars is not None and self.compiling and not (self.waiting or self._ended):
            self.grammars.wait(GRAMMAR_WAIT_S)

    # --- admit ------------------------------------------------------------------------------------

    def _admit(self) -> None:
        for req in self._candidates():
            if len(self.running) >= self.limits.max_running or not self.slots.table.free_rows:
                return
            if self._should_share(req):
                continue
            if not self._try_admit(req):
                return

    def _candidates(self) -> Iterator[Req]:
        """The head of the queue, in the order in which its requests are tried."""
        head = list(islice(self.waiting, TRIED_PER_STEP))
        if self.limits.schedule_policy == "fcfs" or len(self.running) >= self.limits.max_running:
            return iter(head)
        cached = [self.slots.cached_len(req) for req in head]
        return (head[i] for i in admission_order(cached, self.limits.schedule_policy))

    def _should_share(self, req: Req) -> bool:
        filling = [r.ids for r in self.running if r.phase is Phase.PREFILL]
        if not filling or not self.slots.use_cache:
            return False
        sharable = req.ids[: req.reusable + 1]
        return waits_for_prefix(sharable, self.slots.cached_len(req), filling)

    def _try_admit(self, req: Req) -> bool:
        have = self.slots.pin_prefix(req)
        tokens = len(req.ids) + self._reserve
        need = Need(have=have, tokens=tokens, remaining=req.remaining)
        running = [self.slots.need(r, self._reserve) for r in self.running]
        if not can_admit(need, running, self.slots.counts()):
            self.slots.unpin(req)
            return False
        self.waiting.remove(req)
        self.slots.open(req, tokens)
        self.worker.open(req)
        if req.admissions == 0:
            req.cached_tokens = have
            self.counters.prompt_tokens += req.prompt_len
            self.counters.cached_tokens += have
        req.admissions += 1
        req.phase = Phase.PREFILL
        self.running.append(req)
        return True

    # --- batch ------------------------------------------------------------------------------------

    def _next_batch(self) -> tuple[list[Req], Batch | None]:
        filling = [r for r in self.running if r.phase is Phase.PREFILL]
        decoding = [r for r in self.running if r.phase is Phase.DECODE]
        self._last_was_prefill = prefill_next(
            prefilling=len(filling),
            decoding=len(decoding),
            last_was_prefill=self._last_was_prefill,
        )
        if self._last_was_prefill:
            return self._prefill_batch(filling)
        return self._decode_batch(decoding)

    def _prefill_batch(self, filling: list[Req]) -> tuple[list[Req], Batch]:
        unfilled = [req.unfilled for req in filling]
        takes = split_prefill(unfilled, self.limits.prefill_budget, chunked=self.limits.chunked)
        reqs = filling[: len(takes)]
        finals = [take == want for take, want in zip(takes, unfilled, strict=False)]
        return reqs, PrefillBatch(
            rows=_ints(r.held.row for r in reqs),
            starts=_ints(r.held.committed_len for r in reqs),
            takes=_ints(takes),
            finals=np.array(finals, dtype=np.bool_),
            unscored=_ints(r.unscored for r in reqs),
        )

    def _decode_batch(self, decoding: list[Req]) -> tuple[list[Req], Batch | None]:
        self._make_room(decoding)
        reqs = [r for r in decoding if r.phase is Phase.DECODE]
        if not reqs:
            return [], None
        for req in reqs:
            self.slots.grow(req, req.held.committed_len + self._reserve)
        return reqs, DecodeBatch(
            rows=_ints(r.held.row for r in reqs),
            committed=_ints(r.held.committed_len for r in reqs),
            max_nodes=_ints(r.sampling.max_nodes(self.limits.draft_tokens) for r in reqs),
            remaining=_ints(r.remaining for r in reqs),
        )

    def _make_room(self, decoding: list[Req]) -> None:
        """Retract requests until the next round of the others has its slots."""
        order = retract_order(
            [r.output_len for r in self.running], [r.prompt_len for r in self.running]
        )
        victims = [self.running[i] for i in order]
        staying = set(decoding)
        while not self.slots.make_room(self._round_shortfall(staying)):
            assert len(victims) > 1, "a request that passed submit fits the pool alone"
            victim = victims.pop(0)
            staying.discard(victim)
            self._retract(victim)

    def _round_shortfall(self, staying: set[Req]) -> int:
        return sum(self.slots.shortfall(r, r.held.committed_len + self._reserve) for r in staying)

    def _retract(self, req: Req) -> None:
        """Free a request's slots and put it at the head of the queue; it resumes with the same
        text, since the noise of a draw depends on the seed and the position alone."""
        self._leave(req)
        req.phase = Phase.WAITING
        self.waiting.appendleft(req)
        self.counters.retracted += 1

    # --- commit -----------------------------------------------------------------------------------

    def _commit(self, reqs: list[Req], batch: Batch, output: StepOutput) -> None:
        if isinstance(batch, PrefillBatch):
            for req, take, final, tokens in zip(
                reqs, batch.takes, batch.finals, output.tokens, strict=True
            ):
                self._commit_chunk(req, int(take), bool(final), tokens)
        else:
            self.counters.rounds += 1
            taken = [
                self._commit_round(req, tokens, proposed)
                for req, tokens, proposed in zip(reqs, output.tokens, output.proposed, strict=True)
            ]
            self.worker.observe(taken)
        keep_logprobs(reqs, output)
        for req in reqs:
            if req.finish is not None:
                self._end(req, req.finish)

    def _commit_chunk(self, req: Req, take: int, final: bool, tokens: list[int]) -> None:
        req.held.committed_len += take
        self.slots.publish(req, self.worker.shareable(req))
        if not final:
            return
        req.phase = Phase.DECODE
        if req.remaining <= 0:
            req.finish = FinishReason(kind="length")
            return
        self.counters.generated += req.append(tokens)
        self.worker.begin(req)

    def _commit_round(self, req: Req, tokens: list[int], proposed: int) -> int:
        taken = req.append(tokens)
        req.held.committed_len += taken
        accepted = min(taken, len(tokens) - 1)
        if self.limits.draft_tokens > 1:
            req.spec.add_round(proposed=proposed, accepted=accepted, emitted=taken)
            self.counters.add_round(proposed=proposed, accepted=accepted, emitted=taken)
        self.counters.generated += taken
        req.drafted = len(req.ids)
        return taken

    # --- ends and replies -------------------------------------------------------------------------

    def _end(self, req: Req, reason: FinishReason) -> None:
        req.finish = reason
        if req.holding is not None:
            self._leave(req)
        self._ended.append(req)

    def _leave(self, req: Req) -> None:
        """Take a request off its row; its committed tokens stay reusable."""
        row = req.held.row
        self.running.remove(req)
        keep = min(self.worker.shareable(req), len(req.ids))
        self.worker.close(row)
        self.slots.close(req, keep)

    def _refuse(self, req: Req, status: int, message: str, param: str | None = None) -> None:
        self.counters.aborted += 1
        reason = FinishReason(kind="abort", message=message, status=status, param=param)
        self._end(req, reason)

    def _too_long(self, req: Req) -> str:
        return (
            f"Requested token count exceeds what the KV pool can hold for one request: "
            f"{len(req.ids)} prompt + {req.sampling.max_new_tokens} new tokens > "
            f"{self.limits.max_request_tokens}. Lower max_new_tokens or raise --max-total-tokens."
        )

    def _live(self) -> Iterator[Req]:
        yield from self.compiling
        yield from self.waiting
        yield from self.running

    def _reply(self) -> list[OutputChunk]:
        chunks = [chunk_of(req) for req in self.running if self._due(req)]
        chunks += [chunk_of(req) for req in self._ended]
        self._ended.clear()
        return chunks

    def _due(self, req: Req) -> bool:
        fresh = req.output_len - req.reported
        enough = fresh >= self.limits.stream_interval or (fresh > 0 and req.reported == 0)
        return req.stream and enough


def _ints(values: Iterator[int] | list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.fromiter(values, dtype=np.int64)
