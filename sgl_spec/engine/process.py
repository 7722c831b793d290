"""The engine as a process: messages in, steps, messages out."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
from functools import partial

import torch
import zmq

from sgl_spec.args import ServerArgs
from sgl_spec.engine.engine import Engine
from sgl_spec.errors import ConfigError, SglSpecError
from sgl_spec.messages import (
    Abort,
    Chunks,
    Control,
    ControlReply,
    Failed,
    FromEngine,
    Ready,
    Shutdown,
    Submit,
    ToEngine,
    decode_to_engine,
    encode,
)

logger = logging.getLogger(__name__)

IDLE_POLL_MS = 500  # how soon an idle engine notices that its parent is gone


def main(args: ServerArgs, to_engine_addr: str, from_engine_addr: str) -> int:
    """Serve until `Shutdown` or until the parent process is gone. Returns the exit code.

    A failure, at start-up or later, is reported as `Failed` before the process ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the group; the API process drains
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.connect(to_engine_addr)
    outbox.connect(from_engine_addr)
    torch.set_grad_enabled(False)  # here, not in the engine: an offline user may be training too
    engine: Engine | None = None
    try:
        engine = Engine.start(args, partial(fail_at_once, from_engine_addr))
        gc.collect()
        gc.freeze()  # libraries and weights: looking through them stalls all streams for 0.2 s
        outbox.send(encode(Ready(info=engine.info)))
        EngineLoop(engine, inbox, outbox).run()
        return 0
    except ConfigError as error:
        outbox.send(encode(Failed(message=error.message, config_error=True)))
        return 2
    except Exception as error:
        # The boundary of the process: whatever broke, the API process must hear of it and not wait.
        message = None if engine is None else engine.party.failure()
        if message is None:
            logger.exception("The engine failed")
            known = isinstance(error, SglSpecError)
            message = str(error) if known else f"{type(error).__name__}: {error}"
        outbox.send(encode(Failed(message=message)))
        return 1
    finally:
        if engine is not None:
            engine.close()
        outbox.close(linger=2000)
        inbox.close(linger=0)
        context.term()


def give_memory_back() -> None:
    """Have glibc return what is free in its heap. Between the tensors of one batch and those of the
    next stay small things that live on, so that free memory never ends the heap by itself, and a
    process would grow with every new mix of batches."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def fail_at_once(from_engine_addr: str, failed: Failed) -> None:
    """Another rank has ended: report it and end this process, whatever its main thread does. It may
    wait on a device for what never comes."""
    context = zmq.Context()
    outbox = context.socket(zmq.PUSH)
    outbox.connect(from_engine_addr)
    outbox.send(encode(failed))
    outbox.close(linger=1000)
    context.term()
    os._exit(2 if failed.config_error else 1)


class EngineLoop:
    """Receives, steps and replies until told to end."""

    def __init__(self, engine: Engine, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
        self.engine = engine
        self.inbox = inbox
        self.outbox = outbox
        self._ending = False
        self._idle = False
        self._stepped = False  # since memory was given back
        self._parent = os.getppid()

    def run(self) -> None:
        """The loop."""
        while not (self._ending and not self.engine.has_work):
            if os.getppid() != self._parent:
                logger.error("The API process is gone; the engine ends.")
                return
            self._receive()
            if self.engine.has_work:
                self._send_chunks()

    def _receive(self) -> None:
        """Take every message that has come; wait for one only when there is nothing to do, and
        when that has lasted, get ready for what may come."""
        nothing = not (self.engine.has_work or self._ending)
        if nothing and self._idle and not self.inbox.poll(0) and self._prepare():
            return
        wait = IDLE_POLL_MS if nothing else 0
        self._idle = nothing
        while self.inbox.poll(wait):
            self._handle(decode_to_engine(self.inbox.recv()))
            wait, self._idle = 0, False

    def _prepare(self) -> bool:
        """Use a moment without work; whether there may be more to do in the next."""
        if self.engine.prepare_more():
            return True
        if self._stepped:
            self._stepped = False
            give_memory_back()
        return False

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Submit(request):
                self.engine.submit(request)
            case Abort(rid):
                self.engine.abort(rid)
            case Control():
                self._send(self._control(message))
            case Shutdown():
                self._ending = True
                self.engine.abort(None)

    def _control(self, call: Control) -> ControlReply:
        try:
            data, message = self.engine.control(call.op, call.args)
        except SglSpecError as error:
            return ControlReply(
                call_id=call.call_id, ok=False, message=error.message, param=error.param
            )
        return ControlReply(call_id=call.call_id, ok=True, message=message, data=data)

    def _send_chunks(self) -> None:
        self._stepped = True
        chunks = self.engine.step()
        if chunks:
            self._send(Chunks(chunks=chunks))

    def _send(self, message: FromEngine) -> None:
        self.outbox.send(encode(message))
