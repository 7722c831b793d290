"""Who runs when. One thread, one step at a time; the worker does the computing.

A worker on a device lets the scheduler launch a batch before it has collected the one before, so
that the device never waits for the host. What the host then knows of a request in flight is one
batch old: its committed length, and that it has not ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice

from sgl_spec.engine.batch import Batch, Computed, DecodeBatch, PrefillBatch, StepOutput
from sgl_spec.engine.compiling import Compiling
from sgl_spec.engine.draft_trees import keep_trees
from sgl_spec.engine.grammar_jobs import GrammarJobs
from sgl_spec.engine.limits import Limits
from sgl_spec.engine.metrics import EngineCounters
from sgl_spec.engine.plan import Flight, Plan, decode_plan, prefill_plan
from sgl_spec.engine.policy import (
    TRIED_PER_STEP,
    Need,
    admission_order,
    can_admit,
    prefill_next,
    prefill_order,
    prefill_tokens,
    retract_order,
    split_prefill,
    tree_reserve,
    waits_for_prefix,
)
from sgl_spec.engine.replies import chunk_of, count_round, is_due, keep_logprobs, too_long
from sgl_spec.engine.req import Phase, Req
from sgl_spec.engine.runner import Runner
from sgl_spec.engine.slots import SlotManager
from sgl_spec.messages import OutputChunk
from sgl_spec.request import FinishReason


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
        self.compiling = Compiling(grammars)
        self.waiting: deque[Req] = deque()
        self.running: list[Req] = []  # in admission order; phase PREFILL or DECODE
        self._leaving: list[Req] = []  # ended while in flight: they keep their rows until collected
        self._ended: list[Req] = []  # to be told
        self._flights: deque[Flight] = deque()  # in order of launch; between steps at most one
        self._uncounted: list[tuple[list[Req], StepOutput, list[int]]] = []
        self._prefills = 0  # since the last round
        self._reserve = tree_reserve(limits.round_slots)

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._wanted() or self._ended or self._flights)

    def _wanted(self) -> bool:
        """Whether some request has not ended."""
        return bool(self.compiling or self.waiting or self.running)

    def submit(self, req: Req) -> None:
        """Queue a request, or end it at once when it can never run or the queue is full."""
        self.counters.requests += 1
        limit, rows = self.limits.max_queued, self.limits.max_running - len(self.running)
        longest = self.limits.max_request_tokens
        if len(req.ids) + req.sampling.max_new_tokens > longest:
            problem = too_long(len(req.ids), req.sampling.max_new_tokens, longest)
            self._refuse(req, 400, problem, "max_new_tokens")
        elif limit is not None and len(self.waiting) + len(self.compiling) >= limit + rows:
            self._refuse(req, 503, "The request queue is full.")
        elif req.sampling.grammar is not None:
            self.compiling.add(req)
        else:
            self.waiting.append(req)

    def abort(self, rid: str | None) -> None:
        """End a request (all of them for None) with an "abort" finish; unknown ids are ignored,
        because a request may end while its abort is on the way. What a batch in flight gives it is
        dropped."""
        for req in [r for r in self._live() if rid is None or r.rid == rid]:
            if req.phase is Phase.WAITING:
                self.waiting.remove(req)
            elif req.phase is Phase.GRAMMAR:
                self.compiling.remove(req)
            self.counters.aborted += 1
            self._end(req, FinishReason(kind="abort", message="Aborted"))

    def step(self) -> list[OutputChunk]:
        """One batch launched, those that are due collected, and what there is to tell."""
        self._take_compiled()
        plan = self._plan_ahead()
        if plan is None:
            self._collect(under_way=0)
            plan = self._plan()
        self._launch(plan)
        self._count()
        if self.limits.check_every_step:
            self.slots.check([*self.running, *self._leaving])
        return self._reply()

    def flush(self) -> bool:
        """Drop cached prefixes and what the drafter has learned; False while requests are
        running."""
        if self._wanted():
            return False
        self._collect(under_way=0)
        self._count()
        self.slots.flush()
        self.worker.flush()
        return True

    def _take_compiled(self) -> None:
        """Let requests queue whose grammar is ready; refuse those whose grammar will not be."""
        for req, problem in self.compiling.take():
            grammar = req.sampling.grammar
            assert grammar is not None
            if problem is None:
                self.waiting.append(req)
            else:
                self._refuse(req, 400, f"{grammar.field} {problem}.", grammar.field)

    # --- launch and collect -----------------------------------------------------------------------

    def _plan_ahead(self) -> Plan | None:
        """A batch to launch behind the one in flight; None if that is to be collected first."""
        if not self._flights or not self._flights[-1].ahead:
            return None
        plan = self._plan()
        return plan if plan is not None and self._runs_ahead(plan) else None

    def _runs_ahead(self, plan: Plan) -> bool:
        return self.limits.overlap and self.worker.runs_ahead(plan.reqs)

    def _launch(self, plan: Plan | None) -> None:
        """Launch a batch, then collect those before it, whose tokens a grammar's masks need. A
        batch in flight stays so until the next step: meanwhile the host sends replies and receives
        requests."""
        if plan is None:
            if not (self.waiting or self._ended):
                self.compiling.wait()
            return
        ahead = self._runs_ahead(plan)
        for req in plan.reqs:
            assert req.in_flight <= isinstance(plan.batch, DecodeBatch), "known to one batch"
            req.in_flight += 1
        launched = self.worker.launch(plan.batch)
        self.worker.settle()
        self._prefills = self._prefills + 1 if isinstance(plan.batch, PrefillBatch) else 0
        if self._prefills:
            for req in self.running:
                req.passed += req.phase is Phase.PREFILL and not req.in_flight
        self._collect(under_way=0)
        launched = self.worker.resume(launched)
        self._flights.append(Flight(plan, launched, ahead))
        self._collect(under_way=self.limits.overlap and not isinstance(launched, Computed))

    def _collect(self, under_way: int) -> None:
        """Wait for the oldest batches and commit what they gave, until so many are in flight."""
        while len(self._flights) > under_way:
            flight = self._flights.popleft()
            output = self.worker.collect(flight.launched)
            for req in flight.plan.reqs:
                req.in_flight -= 1
            self._commit(flight.plan.reqs, flight.plan.batch, output)
            self._give_rows_back()

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
        return waits_for_prefix(req.ids[: req.reusable + 1], self.slots.cached_len(req), filling)

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
            req.queued_s = time.monotonic() - req.submitted
            req.cached_tokens = have
            self.counters.admitted += 1
            self.counters.prompt_tokens += req.prompt_len
            self.counters.cached_tokens += have
        req.admissions += 1
        req.phase = Phase.PREFILL
        self.running.append(req)
        return True

    # --- batch ------------------------------------------------------------------------------------

    def _plan(self) -> Plan | None:
        """Let requests in and choose the next batch; None if nobody can run before the batch in
        flight is collected."""
        self._admit()
        filling = [r for r in self.running if r.phase is Phase.PREFILL and not r.in_flight]
        # The round that a request is in gives it a token, which may be its last.
        going_on = [r for r in self.running if r.remaining > r.in_flight]
        decoding = [r for r in going_on if r.phase is Phase.DECODE]
        if prefill_next(
            prefilling=len(filling),
            decoding=len(decoding),
            prefills_in_a_row=self._prefills,
            most_in_a_row=self.limits.prefills_in_a_row,
        ):
            return self._prefill_batch(filling, decoding=len(decoding))
        return self._decode_batch(decoding)

    def _prefill_batch(self, filling: list[Req], *, decoding: int) -> Plan:
        order = prefill_order([r.unfilled for r in filling], [r.passed for r in filling])
        reqs = [filling[i] for i in order[: self.limits.prefill_requests]]
        unfilled = [req.unfilled for req in reqs]
        budget = prefill_tokens(
            self.limits.prefill_budget,
            self.limits.pause_tokens,
            prefilling=len(filling),
            decoding=decoding,
        )
        takes = split_prefill(unfilled, budget, chunked=self.limits.chunked)
        return prefill_plan(reqs[: len(takes)], takes)

    def _decode_batch(self, decoding: list[Req]) -> Plan | None:
        missing = [self._shortfall(req) for req in decoding]
        if not self.slots.make_room(sum(missing)):
            if not self._retract_for(decoding):
                return None
            decoding = [req for req in decoding if req.phase is Phase.DECODE]
            missing = [self._shortfall(req) for req in decoding]
        if not decoding:
            return None
        self.slots.grow_all(decoding, missing)
        return decode_plan(decoding, self.limits.draft_tokens)

    def _retract_for(self, decoding: list[Req]) -> bool:
        """Retract requests until the next round of the others has its slots. False if a batch in
        flight is to be collected before: nobody is retracted whose tokens are on the way, and
        perhaps nobody need be."""
        if self._flights:
            return False
        running = self.running
        order = retract_order([r.output_len for r in running], [r.prompt_len for r in running])
        victims = [running[i] for i in order]
        staying = set(decoding)
        while not self.slots.make_room(sum(map(self._shortfall, staying))):
            assert len(victims) > 1, "a request that passed submit fits the pool alone"
            victim = victims.pop(0)
            staying.discard(victim)
            self._retract(victim)
        return True

    def _shortfall(self, req: Req) -> int:
        """Slots that a request lacks for its next round."""
        return self.slots.shortfall(req, req.held.committed_len + self._reserve)

    def _retract(self, req: Req) -> None:
        """Free a request's slots and put it at the head of the queue; it resumes with the same
        text, since the noise of a draw depends on the seed and the position alone."""
        self._leave(req)
        req.phase = Phase.WAITING
        self.waiting.appendleft(req)
        self.counters.retracted += 1

    # --- commit -----------------------------------------------------------------------------------

    def _commit(self, reqs: list[Req], batch: Batch, output: StepOutput) -> None:
        """Give the requests of a collected batch what is theirs. A request that ended while the
        batch was in flight has no part in it."""
        live = [req for req in reqs if req.finish is None]
        if isinstance(batch, PrefillBatch):
            for req, take, final, tokens in zip(
                reqs, batch.takes, batch.finals, output.tokens, strict=True
            ):
                if req.finish is None:
                    self._commit_chunk(req, int(take), bool(final), tokens)
        else:
            self.counters.rounds += bool(live)
            taken = [
                self._commit_round(req, tokens) if req.finish is None else 0
                for req, tokens in zip(reqs, output.tokens, strict=True)
            ]
            self.worker.observe(taken)
            keep_trees(reqs, output, taken)
            self._uncounted.append((reqs, output, taken))
        keep_logprobs(reqs, output)
        for req in live:
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

    def _commit_round(self, req: Req, tokens: list[int]) -> int:
        taken = req.append(tokens)
        req.held.committed_len += taken
        req.drafted = len(req.ids)
        return taken

    def _count(self) -> None:
        """Count the rounds that were committed; the next one need not wait for it."""
        for reqs, output, taken in self._uncounted:
            self.counters.generated += sum(taken)
            if self.limits.draft_tokens > 1:
                count_round(self.counters, reqs, output, taken)
        self._uncounted.clear()

    # --- ends and replies -------------------------------------------------------------------------

    def _end(self, req: Req, reason: FinishReason) -> None:
        req.finish = reason
        if req.holding is not None:
            self._leave(req)
        self._ended.append(req)

    def _leave(self, req: Req) -> None:
        """Take a request out of what runs; its committed tokens stay reusable. Its slots are free
        at once, its row when it is in no batch any more."""
        self.running.remove(req)
        self.slots.release(req, min(self.worker.shareable(req), len(req.ids)))
        self._leaving.append(req)
        self._give_rows_back()

    def _give_rows_back(self) -> None:
        for req in [r for r in self._leaving if not r.in_flight]:
            self._leaving.remove(req)
            self.worker.close(req.held.row)
            self.slots.give_row(req)

    def _refuse(self, req: Req, status: int, message: str, param: str | None = None) -> None:
        self.counters.refused += 1
        reason = FinishReason(kind="abort", message=message, status=status, param=param)
        self._end(req, reason)

    def _live(self) -> Iterator[Req]:
        return chain(self.compiling, self.waiting, self.running)

    def _reply(self) -> list[OutputChunk]:
        interval = self.limits.stream_interval
        chunks = [chunk_of(req) for req in self.running if is_due(req, interval)]
        chunks += [chunk_of(req) for req in self._ended]
        self._ended.clear()
        return chunks
