"""An engine process without a model, for tests of the API process: it repeats the prompt.

It speaks the real messages over the real sockets. The output of a request is its prompt's ids over
and over, cut where the engine's own rules cut: stop ids, stop strings, length. `script.json` in the
model directory sets the pace and the faults; see `Script`.

Run as a script it starts the real server around itself: `python tests/scripted_engine.py FLAGS`.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import time
from collections import deque
from pathlib import Path

import msgspec
import zmq
from tokenizers import Tokenizer

from sgl_spec.args import ResolvedArgs
from sgl_spec.messages import (
    Abort,
    Chunks,
    Control,
    ControlReply,
    EngineState,
    Failed,
    OutputChunk,
    Ready,
    Shutdown,
    Submit,
    ToEngine,
    decode_to_engine,
    encode,
)
from sgl_spec.request import FinishReason, SpecStats, TokenizedRequest
from sgl_spec.text import StopMatcher

CONTEXT = 2048


class Script(msgspec.Struct, kw_only=True):
    """step_s: time of a step. tokens: given out per step and request. load_s: until Ready.

    fail, config_error: what to send as `Failed` in place of Ready. generation_defaults: as a
    checkpoint would bring them. deaf: ignore Shutdown and SIGTERM. hangs: on this many prompt ids
    it never returns from C code that holds the interpreter.
    """

    step_s: float = 0.01
    tokens: int = 3
    load_s: float = 0.0
    fail: str | None = None
    config_error: bool = False
    generation_defaults: dict[str, float] = {}
    deaf: bool = False
    hangs: int | None = None


class Running:
    """One request on its way."""

    def __init__(self, request: TokenizedRequest, tokenizer: Tokenizer, eos: int) -> None:
        sampling = request.sampling
        self.request = request
        self.spec = SpecStats()
        self.done = 0
        self._ids = itertools.cycle(request.input_ids)
        self._stops = StopMatcher(
            tokenizer,
            sampling.stop,
            skip_special_tokens=sampling.skip_special_tokens,
            prompt_tail=request.input_ids[-8:],
        )
        self._stop_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (eos,))}

    def step(self, tokens: int) -> OutputChunk:
        """Up to `tokens` more; the first step is the prefill and gives one."""
        ids: list[int] = []
        finish = self._length()
        while finish is None and len(ids) < (tokens if self.done else 1):
            ids.append(next(self._ids))
            finish = self._stop(ids[-1], self.done + len(ids)) or self._length(len(ids))
        if self.done and ids:
            self.spec.add_round(proposed=tokens + 1, accepted=len(ids) - 1, emitted=len(ids))
        self.done += len(ids)
        return self.chunk(ids, finish)

    def _length(self, new: int = 0) -> FinishReason | None:
        full = self.done + new >= self.request.sampling.max_new_tokens
        return FinishReason(kind="length") if full else None

    def _stop(self, token: int, count: int) -> FinishReason | None:
        text = self._stops.push(token)
        if count < self.request.sampling.min_new_tokens:
            return None
        if token in self._stop_ids:
            return FinishReason(kind="stop", matched=token)
        return None if text is None else FinishReason(kind="stop", matched=text)

    def chunk(self, ids: list[int], finish: FinishReason | None) -> OutputChunk:
        """The message for `ids`."""
        return OutputChunk(
            rid=self.request.rid,
            ids=ids,
            prompt_tokens=len(self.request.input_ids),
            completion_tokens=self.done,
            cached_tokens=2,
            finish=finish,
            spec=self.spec,
        )


class ScriptedEngine:
    """Receives, steps and replies as `Script` says."""

    def __init__(self, args: ResolvedArgs, to_engine: str, from_engine: str) -> None:
        self.args = args
        self.directory = Path(args.model_path)
        self.script = msgspec.json.decode(
            (self.directory / "script.json").read_bytes(), type=Script
        )
        self.tokenizer = Tokenizer.from_file(str(self.directory / "tokenizer.json"))
        self.eos = self.tokenizer.token_to_id("<|im_end|>")
        context = zmq.Context()
        self.inbox, self.outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self.inbox.connect(to_engine)
        self.outbox.connect(from_engine)
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self.counts = {"requests_total": 0, "prompt_tokens_total": 0, "aborted_total": 0}
        self.counts |= {"generation_tokens_total": 0, "spec_verify_total": 0}
        self.ending = False

    def run(self) -> int:
        """Until Shutdown; the exit code."""
        time.sleep(self.script.load_s)
        if self.script.fail is not None:
            failed = Failed(self.script.fail, config_error=self.script.config_error)
            self.outbox.send(encode(failed))
            return 2
        self.outbox.send(encode(Ready(self.info())))
        while not self.ending or self.running:
            due = time.monotonic() + self.script.step_s
            while self.inbox.poll(max(0, int(1000 * (due - time.monotonic())))):
                self.handle(decode_to_engine(self.inbox.recv()))
            self.step()
        return 0

    def step(self) -> None:
        """One step of everything that runs."""
        self.admit()
        chunks = [item.step(self.script.tokens) for item in self.running]
        self.counts["generation_tokens_total"] += sum(len(chunk.ids) for chunk in chunks)
        self.counts["spec_verify_total"] += len(chunks)
        done = {chunk.rid for chunk in chunks if chunk.finish is not None}
        self.running = [item for item in self.running if item.request.rid not in done]
        if chunks:
            self.outbox.send(encode(Chunks(chunks)))

    def admit(self) -> None:
        """Start what waits, as far as there is room."""
        while self.waiting and len(self.running) < self.args.max_running_requests:
            self.running.append(self.waiting.popleft())

    def handle(self, message: ToEngine) -> None:
        """Take one message."""
        match message:
            case Submit(request):
                if len(request.input_ids) == self.script.hangs:
                    hang()
                self.submit(Running(request, self.tokenizer, self.eos))
            case Abort(rid):
                self.abort(rid)
            case Control(call_id, "state"):
                reply = ControlReply(call_id, True, "", msgspec.to_builtins(self.state()))
                self.outbox.send(encode(reply))
            case Control(call_id, _):
                idle = not self.running and not self.waiting
                text = (
                    "Cache flushed." if idle else "The cache was not flushed: requests are running."
                )
                self.outbox.send(encode(ControlReply(call_id, idle, text)))
            case Shutdown():
                self.ending = not self.script.deaf

    def submit(self, item: Running) -> None:
        """Queue a request, or refuse it when the queue is full."""
        self.counts["requests_total"] += 1
        self.counts["prompt_tokens_total"] += len(item.request.input_ids)
        self.admit()
        limit = self.args.max_queued_requests
        if limit is not None and len(self.waiting) >= limit:
            full = FinishReason(kind="abort", message="The request queue is full.", status=503)
            self.outbox.send(encode(Chunks([item.chunk([], full)])))
        else:
            self.waiting.append(item)

    def abort(self, rid: str | None) -> None:
        """End one request, or all."""
        found = [i for i in (*self.running, *self.waiting) if rid in (None, i.request.rid)]
        self.running = [item for item in self.running if item not in found]
        self.waiting = deque(item for item in self.waiting if item not in found)
        self.counts["aborted_total"] += len(found)
        reason = FinishReason(kind="abort", message="Aborted")
        if found:
            self.outbox.send(encode(Chunks([item.chunk([], reason) for item in found])))

    def state(self) -> EngineState:
        """Counts; slots are pretended."""
        held = sum(len(item.request.input_ids) + item.done for item in self.running)
        return EngineState(
            running=len(self.running),
            queued=len(self.waiting),
            used_tokens=held,
            cached_tokens=0,
            free_tokens=100_000 - held,
            spec_emitted_total=self.counts["generation_tokens_total"],
            **self.counts,
        )

    def info(self) -> dict[str, object]:
        """`Ready.info`."""
        return {
            "model_dir": str(self.directory),
            "tokenizer_dir": str(self.directory),
            "model_path": self.args.model_path,
            "vocab_size": self.tokenizer.get_vocab_size(),
            "context_length": self.args.context_length or CONTEXT,
            "max_req_input_len": (self.args.context_length or CONTEXT) - 1,
            "max_request_tokens": self.args.context_length or CONTEXT,
            "max_total_tokens": 100_000,
            "max_running_requests": self.args.max_running_requests,
            "eos_token_ids": [self.eos],
            "generation_defaults": self.script.generation_defaults,
            "architectures": ["ScriptedForCausalLM"],
            "model_type": "scripted",
            "dtype": "float32",
            "device": "cpu",
            "device_name": "scripted",
            "attention_backend": "torch",
            "strict": False,
            "chunked_prefill_size": 8192,
            "page_size": 1,
            "speculative_algorithm": self.args.speculative_algorithm,
            "draft_tokens": 12,
            "acceptance_rule": "follow",
            "memory": {"weight": 0.0, "kvcache": 0.0, "token_capacity": 100_000},
        }


def hang() -> None:
    """Sleep in C without letting go of the interpreter."""
    ctypes.PyDLL(None).sleep(600)


def main(args: ResolvedArgs, to_engine: str, from_engine: str) -> int:
    """The entry point of the engine process."""
    engine = ScriptedEngine(args, to_engine, from_engine)
    if engine.script.deaf:
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        return engine.run()
    finally:
        engine.outbox.close(linger=2000)


if __name__ == "__main__":
    from sgl_spec.server.launch import run

    sys.exit(run(sys.argv[1:], "scripted_engine:main"))
