"""The table of open requests: one terminal chunk each, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from sgl_spec.errors import EngineDeadError, InvalidRequestError, UnavailableError
from sgl_spec.messages import (
    Abort,
    Chunks,
    Control,
    ControlReply,
    EngineState,
    OutputChunk,
    Shutdown,
    Submit,
    ToEngine,
)
from sgl_spec.request import FinishReason, SamplingParams, TokenizedRequest
from sgl_spec.server import frontend as frontend_module
from sgl_spec.server.frontend import ClientGone, Frontend

STOP = FinishReason(kind="stop", matched=2)
ABORTED = FinishReason(kind="abort", message="Aborted")


def request(rid: str) -> TokenizedRequest:
    return TokenizedRequest(rid=rid, input_ids=[1, 2], sampling=SamplingParams(seed=0))


def chunk(rid: str, *ids: int, finish: FinishReason | None = None) -> OutputChunk:
    return OutputChunk(
        rid=rid, ids=list(ids), prompt_tokens=2, completion_tokens=len(ids), finish=finish
    )


class Link:
    """A frontend and what it sent to the engine."""

    def __init__(self, latencies: Any = None) -> None:
        self.sent: list[ToEngine] = []
        self.frontend = Frontend(self.sent.append, latencies)

    def reply(self, *chunks: OutputChunk) -> None:
        self.frontend.on_message(Chunks(list(chunks)))

    def aborts(self) -> list[str | None]:
        return [message.rid for message in self.sent if isinstance(message, Abort)]


def run(test: Callable[[Link], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(Link()), 5)

    asyncio.run(limited())


def hold() -> Callable[[], Awaitable[dict[str, Any]]]:
    """An ASGI receive of a client that stays."""

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    return receive


def test_chunks_reach_their_ticket_and_end_it() -> None:
    async def body(link: Link) -> None:
        async with link.frontend.open([request("a"), request("b")]) as ticket:
            assert [m.request.rid for m in link.sent if isinstance(m, Submit)] == ["a", "b"]
            link.reply(chunk("b", 7), chunk("a", 5, 6))
            assert [(u.index, u.ids) for u in await ticket.updates()] == [(1, [7]), (0, [5, 6])]
            link.reply(chunk("a", finish=STOP))
            (update,) = await ticket.updates()
            assert update.chunk.finish == STOP
            assert not ticket.finished
            link.reply(chunk("b", 8, finish=STOP))
            assert [u.ids for u in await ticket.updates()] == [[8]]
            assert ticket.finished
            assert await ticket.updates() == []
        assert link.aborts() == []
        assert link.frontend.open_requests == 0

    run(body)


def test_a_slow_reader_gets_merged_chunks() -> None:
    async def body(link: Link) -> None:
        async with link.frontend.open([request("a")]) as ticket:
            for token in range(5):
                link.reply(chunk("a", token))
            link.reply(chunk("a", 9, finish=STOP))
            (update,) = await ticket.updates()
            assert update.ids == [0, 1, 2, 3, 4, 9]
            assert update.chunk.finish == STOP

    run(body)


def test_updates_wait_for_the_engine() -> None:
    async def body(link: Link) -> None:
        async with link.frontend.open([request("a")]) as ticket:
            asyncio.get_running_loop().call_later(0.02, link.reply, chunk("a", 1, finish=STOP))
            assert [u.ids for u in await ticket.updates()] == [[1]]

    run(body)


def test_names_in_use_are_refused_until_the_engine_has_let_go() -> None:
    async def body(link: Link) -> None:
        for clash in ([request("a")], [request("b"), request("a")]):
            async with link.frontend.open([request("a")]):
                with pytest.raises(InvalidRequestError, match='rid "a" is already in use'):
                    link.frontend.open(clash)
            with pytest.raises(InvalidRequestError, match="already in use"):
                link.frontend.open(clash)  # aborted, but not yet ended
            link.reply(chunk("a", finish=ABORTED))
        with pytest.raises(InvalidRequestError, match="must differ within a batch"):
            link.frontend.open([request("c"), request("c")])
        assert link.frontend.open_requests == 0
        link.frontend.open([request("a")])

    run(body)


def test_group_names_share_the_space_of_rids() -> None:
    async def body(link: Link) -> None:
        link.frontend.open([request("g-0"), request("g-1")], "g")
        for rid, group in (("g", None), ("g-1", None), ("x", "g"), ("x", "g-0")):
            with pytest.raises(InvalidRequestError, match="already in use"):
                link.frontend.open([request(rid)], group)
        link.reply(chunk("g-0", finish=STOP))
        link.frontend.abort("g")
        assert link.aborts() == ["g-1"], "only what still runs"
        link.reply(chunk("g-1", finish=ABORTED))
        link.frontend.open([request("g")])

    run(body)


def test_abort_of_one_of_all_and_of_nobody() -> None:
    async def body(link: Link) -> None:
        link.frontend.open([request("a")])
        link.frontend.abort("nobody")
        link.frontend.abort("a")
        link.frontend.abort(None)
        assert link.aborts() == ["a", None]

    run(body)


def test_leaving_early_aborts_once_and_keeps_the_rest_quiet() -> None:
    async def body(link: Link) -> None:
        async with link.frontend.open([request("a"), request("b")]) as ticket:
            link.reply(chunk("a", 1, finish=STOP), chunk("b", 1))
            await ticket.updates()
        link.frontend.leave(ticket)
        assert link.aborts() == ["b"]
        link.reply(chunk("b", 2))
        link.reply(chunk("b", finish=ABORTED))
        assert link.frontend.open_requests == 0

    run(body)


def test_a_disconnect_wakes_the_reader_and_aborts() -> None:
    async def body(link: Link) -> None:
        gone = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async with link.frontend.open([request("a")]) as ticket:
            ticket.watch(receive)
            asyncio.get_running_loop().call_later(0.02, gone.set)
            with pytest.raises(ClientGone):
                await ticket.updates()
        assert link.aborts() == ["a"]
        assert link.frontend.open_requests == 1, "the engine still owes the terminal chunk"

    run(body)


def test_watching_ends_with_the_call() -> None:
    async def body(link: Link) -> None:
        async with link.frontend.open([request("a")]) as ticket:
            ticket.watch(hold())
            link.reply(chunk("a", finish=STOP))
            await ticket.updates()
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) <= 2, "the watcher must not outlive the call"

    run(body)


def test_engine_death_answers_everybody() -> None:
    async def body(link: Link) -> None:
        frontend = link.frontend
        async with frontend.open([request("a"), request("b")]) as ticket:
            left = frontend.open([request("c")])
            frontend.leave(left)
            call = asyncio.create_task(frontend.control("state"))
            await asyncio.sleep(0)
            link.reply(chunk("a", 4))
            frontend.fail_all("gone")
            updates = await ticket.updates()
            assert [u.ids for u in updates] == [[4], []]
            for update in updates:
                assert update.chunk.finish == FinishReason(kind="abort", message="gone", status=503)
            assert ticket.finished
            with pytest.raises(EngineDeadError, match="gone"):
                await call
        assert frontend.open_requests == 0
        with pytest.raises(EngineDeadError, match="gone"):
            frontend.open([request("d")])
        with pytest.raises(EngineDeadError, match="gone"):
            await frontend.control("state")

    run(body)


def test_draining_refuses_the_new_and_waits_for_the_old() -> None:
    async def body(link: Link) -> None:
        frontend = link.frontend
        assert await frontend.drained(0.01), "idle at once"
        async with frontend.open([request("a")]) as ticket:
            frontend.refuse_new()
            with pytest.raises(UnavailableError, match="shutting down"):
                frontend.open([request("b")])
            assert not await frontend.drained(0.02)
            link.reply(chunk("a", 1, finish=STOP))
            assert await frontend.drained(1)
            assert [u.ids for u in await ticket.updates()] == [[1]]
        frontend.shut_engine_down()
        assert link.sent[-1] == Shutdown()

    run(body)


def test_control_calls_get_their_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend_module, "CONTROL_TIMEOUT_S", 0.02)

    async def body(link: Link) -> None:
        first = asyncio.create_task(link.frontend.control("flush_cache"))
        second = asyncio.create_task(link.frontend.state())
        await asyncio.sleep(0)
        one, two = (m for m in link.sent if isinstance(m, Control))
        assert (one.op, two.op) == ("flush_cache", "state")
        state = EngineState(running=1, queued=2, used_tokens=3, cached_tokens=4, free_tokens=5)
        link.frontend.on_message(ControlReply(two.call_id, True, data=msgspec.to_builtins(state)))
        link.frontend.on_message(ControlReply(one.call_id, False, "busy"))
        assert (await first).message == "busy"
        assert await second == state
        with pytest.raises(UnavailableError, match="did not answer"):
            await link.frontend.control("state")
        link.frontend.on_message(ControlReply(one.call_id, True))  # too late: nobody waits

    run(body)


def test_a_chunk_for_nobody_is_reported_and_harmless(caplog: pytest.LogCaptureFixture) -> None:
    async def body(link: Link) -> None:
        link.reply(chunk("ghost", 1))

    run(body)
    assert "'ghost', which is not open" in caplog.text


class Times:
    """Records what a `Latencies` is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def first_token(self, seconds: float) -> None:
        self.told.append(("first", 1))

    def next_tokens(self, seconds: float, count: int) -> None:
        assert seconds >= 0
        self.told.append(("next", count))

    def finished(self, seconds: float, last: OutputChunk) -> None:
        self.told.append(("finished", last.completion_tokens))


def test_latencies_are_told_of_tokens_not_of_empty_chunks() -> None:
    async def body(_: Link) -> None:
        times = Times()
        link = Link(times)
        link.frontend.open([request("a")])
        for ids in ((), (1,), (2, 3, 4), ()):
            link.reply(chunk("a", *ids))
        link.reply(chunk("a", finish=STOP))
        link.frontend.open([request("b"), request("c")])
        link.reply(chunk("b", 5, 6, finish=STOP), chunk("c", 7, finish=STOP))
        assert times.told == [
            *(("first", 1), ("next", 3), ("finished", 0)),
            *(("finished", 2), ("first", 1), ("finished", 1)),
        ]

    run(body)
