"""The table of open requests: submit, follow, abort; exactly one terminal chunk per request.

A `Ticket` stands for one HTTP call and follows its one or more requests. Chunks that arrive while
the call is busy writing are merged, so that a slow reader costs neither memory nor repeated text.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Protocol

import msgspec

from sgl_spec.errors import (
    EngineDeadError,
    InvalidRequestError,
    SglSpecError,
    UnavailableError,
    preview,
)
from sgl_spec.messages import (
    Abort,
    Chunks,
    Control,
    ControlReply,
    EngineState,
    FromEngine,
    OutputChunk,
    Shutdown,
    Submit,
    ToEngine,
)
from sgl_spec.request import DraftRound, FinishReason, Logprobs, TokenizedRequest
from sgl_spec.server.logs import RequestLog
from sgl_spec.server.spec_trace import SpecTrace

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 10.0
SILENT_INTERVALS = 5
DRAINING = "The server is shutting down and takes no new requests."

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientGone(Exception):
    """The client closed its connection; nobody reads the reply."""


class Latencies(Protocol):
    """What is told about times; `server.metrics` listens when --enable-metrics is given."""

    def first_token(self, seconds: float) -> None:
        """Arrival to first token."""

    def next_tokens(self, seconds: float, count: int) -> None:
        """Time between two chunks, and the tokens in the later one."""

    def finished(self, seconds: float, chunk: OutputChunk) -> None:
        """Arrival to last token, and the terminal chunk."""


class Update(msgspec.Struct, frozen=True):
    """News of one request of a ticket.

    index: its place in the ticket. ids: tokens since the last update. chunk: the latest chunk,
    whose counts hold; its own `ids` are part of `ids`. logprobs: those of `ids`; prompt_logprobs:
    those of the prompt, once; draft_trees: rounds since the last update. Empty unless asked for.
    """

    index: int
    ids: list[int]
    chunk: OutputChunk
    logprobs: Logprobs = msgspec.field(default_factory=Logprobs)
    prompt_logprobs: Logprobs = msgspec.field(default_factory=Logprobs)
    draft_trees: list[DraftRound] = []


class Record:
    """One open request. `ticket` None means that its caller has left."""

    __slots__ = (
        *("request", "ticket", "index", "group"),
        *("arrival", "last", "ids", "latest", "ended"),
        *("logprobs", "prompt_logprobs", "draft_trees"),
    )

    def __init__(
        self, request: TokenizedRequest, ticket: Ticket, index: int, group: str | None
    ) -> None:
        self.request = request
        self.ticket: Ticket | None = ticket
        self.index = index
        self.group = group
        self.ended = False
        self.arrival = time.perf_counter()
        self.last: float | None = None
        self.ids: list[int] = []
        self.latest: OutputChunk | None = None
        self.logprobs = Logprobs()
        self.prompt_logprobs = Logprobs()
        self.draft_trees: list[DraftRound] = []


class Ticket:
    """The requests of one HTTP call. Use as an async context: leaving it aborts what still runs."""

    def __init__(
        self, frontend: Frontend, requests: Sequence[TokenizedRequest], group: str | None
    ) -> None:
        self._frontend = frontend
        self.records = [Record(request, self, i, group) for i, request in enumerate(requests)]
        self._running = len(self.records)
        self._fresh: list[Record] = []
        self._waiter: asyncio.Future[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._gone = False

    async def __aenter__(self) -> Ticket:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        self._frontend.leave(self)

    @property
    def finished(self) -> bool:
        """Whether every request has ended and been reported."""
        return self._running == 0 and not self._fresh

    def watch(self, receive: Receive) -> None:
        """Abort as soon as the client disconnects. The request body must have been read."""
        self._watcher = asyncio.create_task(self._watch(receive))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._frontend.leave(self)
        self._wake()

    async def updates(self) -> list[Update]:
        """News since the last call, at most one per request; waits for some. [] when all has ended.

        Raises `ClientGone` once the client has disconnected.
        """
        if not self._fresh and self._running and not self._gone:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._gone:
            raise ClientGone
        fresh, self._fresh = self._fresh, []
        return [_take(record) for record in fresh]

    def deliver(self, record: Record, chunk: OutputChunk) -> None:
        """Note a chunk and wake the reader."""
        if record.latest is None:
            self._fresh.append(record)
        record.latest = chunk
        record.ids += chunk.ids
        if chunk.logprobs is not None:
            record.logprobs.extend(chunk.logprobs)
        if chunk.prompt_logprobs is not None:
            record.prompt_logprobs.extend(chunk.prompt_logprobs)
        record.draft_trees += chunk.draft_trees
        self._running -= chunk.finish is not None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _take(record: Record) -> Update:
    assert record.latest is not None
    update = Update(
        record.index,
        record.ids,
        record.latest,
        record.logprobs,
        record.prompt_logprobs,
        record.draft_trees,
    )
    record.ids, record.latest = [], None
    record.logprobs, record.prompt_logprobs, record.draft_trees = Logprobs(), Logprobs(), []
    return update


class Frontend:
    """Every request the engine owes a terminal chunk for, by rid; and every control call.

    send: hands one message to the engine; must not block.
    """

    def __init__(
        self, send: Callable[[ToEngine], None], latencies: Latencies | None = None
    ) -> None:
        self._send = send
        self._latencies = latencies
        self.log: RequestLog | None = None
        self.trace: SpecTrace | None = None
        self._open: dict[str, Record] = {}
        self._groups: dict[str, set[str]] = {}
        self._calls: dict[int, asyncio.Future[ControlReply]] = {}
        self._call_ids = itertools.count()
        self._idle = asyncio.Event()
        self._idle.set()
        self._refusal: SglSpecError | None = None
        self.received = 0

    @property
    def open_requests(self) -> int:
        """Requests without a terminal chunk so far."""
        return len(self._open)

    def open(self, requests: Sequence[TokenizedRequest], group: str | None = None) -> Ticket:
        """Send `requests` to the engine and return the ticket that follows them.

        group: a name under which `abort` finds all of them. Raises `InvalidRequestError` when a rid
        or the group is in use, and 503 errors while shutting down or after the engine's death.
        """
        self._check_open()
        rids = [request.rid for request in requests]
        for name in {*rids, group} - {None}:
            if name in self._open or name in self._groups:
                raise InvalidRequestError(f"rid {preview(name)} is already in use.", param="rid")
        if len(set(rids)) < len(rids):
            raise InvalidRequestError("rid must differ within a batch.", param="rid")
        ticket = Ticket(self, requests, group)
        if group is not None:
            self._groups[group] = set(rids)
        for record in ticket.records:
            self._open[record.request.rid] = record
            if self.log is not None:
                self.log.received(record.request)
            request = record.request
            if self.trace is not None:
                request = msgspec.structs.replace(request, draft_trees=True)
            self._send(Submit(request))
        self._idle.clear()
        return ticket

    def _check_open(self) -> None:
        if self._refusal is not None:
            raise type(self._refusal)(self._refusal.message)

    def leave(self, ticket: Ticket) -> None:
        """The caller of `ticket` reads no more: abort what still runs."""
        for record in ticket.records:
            if record.ticket is not None and not record.ended:
                self._send(Abort(record.request.rid))
            record.ticket = None

    def abort(self, rid: str | None) -> None:
        """Abort a request, all of a group, or everything (None). Unknown rids do nothing."""
        if rid is None:
            self._send(Abort(None))
        elif rid in self._open:
            self._send(Abort(rid))
        else:
            for member in self._groups.get(rid, ()):
                self._send(Abort(member))

    async def control(
        self, op: str, args: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> ControlReply:
        """Ask the engine something; raises `UnavailableError` when it does not answer in time.
        args: of the op, see `messages.Control`. timeout_s: None for that of short answers."""
        timeout_s = CONTROL_TIMEOUT_S if timeout_s is None else timeout_s
        if isinstance(self._refusal, EngineDeadError):
            raise EngineDeadError(self._refusal.message)
        call_id = next(self._call_ids)
        future = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._send(Control(call_id, op, args or {}))
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise UnavailableError(f"The engine did not answer within {timeout_s:.0f} s.") from None
        finally:
            self._calls.pop(call_id, None)

    async def silent(self, seconds: float) -> None:
        """Return when the engine has sent nothing for so long. It is asked now and then, since one
        that is idle or busy has nothing to say by itself.

        Silence is counted in intervals that this process has seen pass, so that one which was
        stopped itself (a debugger, a sleeping machine) does not blame the engine.
        """
        unanswered = 0
        while unanswered < SILENT_INTERVALS:
            before = self.received
            self._send(Control(next(self._call_ids), "state"))
            await asyncio.sleep(seconds / SILENT_INTERVALS)
            unanswered = unanswered + 1 if self.received == before else 0

    async def state(self) -> EngineState:
        """The engine's counters."""
        return msgspec.convert((await self.control("state")).data, EngineState)

    def on_message(self, message: FromEngine) -> None:
        """Take one message from the engine."""
        self.received += 1
        if isinstance(message, Chunks):
            now = time.perf_counter()
            for chunk in message.chunks:
                self._on_chunk(chunk, now)
        elif isinstance(message, ControlReply):
            future = self._calls.get(message.call_id)
            if future is not None and not future.done():
                future.set_result(message)

    def _on_chunk(self, chunk: OutputChunk, now: float) -> None:
        record = self._open.get(chunk.rid)
        if record is None:
            logger.error("The engine sent a chunk for %r, which is not open.", chunk.rid)
            return
        self._measure(record, chunk, now)
        if self.log is not None:
            self.log.chunk(record.request, chunk)
        if self.trace is not None:
            self.trace.chunk(record.request, chunk)
        if chunk.finish is not None:
            self._close(record)
        if record.ticket is not None:
            record.ticket.deliver(record, chunk)

    def _close(self, record: Record) -> None:
        record.ended = True
        del self._open[record.request.rid]
        if record.group is not None:
            members = self._groups[record.group]
            members.remove(record.request.rid)
            if not members:
                del self._groups[record.group]
        if not self._open:
            self._idle.set()

    def _measure(self, record: Record, chunk: OutputChunk, now: float) -> None:
        if self._latencies is None:
            return
        if chunk.ids and record.last is None:
            # A reply that is not streamed may come all at once: when the first was is not known.
            if chunk.finish is None or len(chunk.ids) == 1:
                self._latencies.first_token(now - record.arrival)
        elif chunk.ids and record.last is not None:
            self._latencies.next_tokens(now - record.last, len(chunk.ids))
        if chunk.ids:
            record.last = now
        if chunk.finish is not None:
            self._latencies.finished(now - record.arrival, chunk)

    def refuse_new(self) -> None:
        """From now on, new requests get a 503; those that run go on."""
        if self._refusal is None:
            self._refusal = UnavailableError(DRAINING)

    async def drained(self, timeout_s: float) -> bool:
        """Wait until no request is open; False when the time is up."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def shut_engine_down(self) -> None:
        """Tell the engine to end."""
        self._send(Shutdown())

    def fail_all(self, message: str) -> None:
        """The engine is dead: end every open request and call with a 503, and refuse new ones."""
        self._refusal = EngineDeadError(message)
        finish = FinishReason(kind="abort", message=message, status=503)
        for record in list(self._open.values()):
            self._close(record)
            if record.ticket is not None:
                record.ticket.deliver(record, _ended(record, finish))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(message))


def _ended(record: Record, finish: FinishReason) -> OutputChunk:
    return OutputChunk(
        rid=record.request.rid,
        ids=[],
        prompt_tokens=len(record.request.input_ids),
        completion_tokens=0,
        finish=finish,
    )
