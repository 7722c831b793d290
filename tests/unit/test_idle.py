"""An engine without work gets ready for what may come, and hears of it all the same."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import zmq

from sgl_spec.engine import process
from sgl_spec.messages import Control, ControlReply, Shutdown, decode_from_engine, encode


class Engine:
    """Has no work; what it did, in order."""

    has_work = False

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.did: list[str] = []

    def prepare_more(self) -> bool:
        self.did.append("prepare")
        self.rounds -= 1
        return self.rounds >= 0

    def control(self, op: str, args: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        self.did.append(op)
        return {}, ""

    def abort(self, rid: str | None) -> None:
        self.did.append("abort")


def talk(engine: Engine, monkeypatch: pytest.MonkeyPatch, pause_s: float) -> list[str]:
    """A question, a pause, another question, the end."""
    monkeypatch.setattr(process, "IDLE_POLL_MS", 50)
    context = zmq.Context()
    sockets = [context.socket(kind) for kind in (zmq.PUSH, zmq.PULL, zmq.PULL, zmq.PUSH)]
    to, inbox, back, outbox = sockets
    inbox.bind("inproc://in")
    to.connect("inproc://in")
    back.bind("inproc://out")
    outbox.connect("inproc://out")
    loop = process.EngineLoop(engine, inbox, outbox)  # type: ignore[arg-type]
    thread = threading.Thread(target=loop.run)
    try:
        to.send(encode(Control(call_id=1, op="first", args={})))
        thread.start()
        for call_id, op in ((1, "second"), (2, None)):
            assert back.poll(10_000)
            reply = decode_from_engine(back.recv())
            assert isinstance(reply, ControlReply)
            assert reply.call_id == call_id
            if op is not None:
                threading.Event().wait(pause_s)
                to.send(encode(Control(call_id=2, op=op, args={})))
        to.send(encode(Shutdown()))
        thread.join(10)
        assert not thread.is_alive()
    finally:
        for socket in sockets:
            socket.close(linger=0)
        context.term()
    return engine.did


def test_gets_ready_once_nothing_has_come_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    did = talk(Engine(rounds=3), monkeypatch, pause_s=1.0)
    assert did[0] == "first"
    between = did[1 : did.index("second")]
    assert between[:4] == ["prepare"] * 4, "three rounds, and the answer that there are no more"
    assert did[-1] == "abort"


def test_questions_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    did = talk(Engine(rounds=10**9), monkeypatch, pause_s=0.3)
    assert did.index("second") < len(did) - 1
    assert did[-1] == "abort"
