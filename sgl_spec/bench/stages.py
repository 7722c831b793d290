"""Where the time of a round goes: the engine's own functions, wrapped while a round is measured.

Stages nest, and a stage's time leaves out that of the stages inside it, so that the times of a
round add up to the round. What forwards read from memory is counted, which says how fast a stage
could be at best: by linear layer and attention on a CPU, by forward on a device (`device_stages`).
Nothing in the engine knows of this; without a measurement it runs unchanged.

A round that is captured as a graph calls its functions once. Its marks are captured with it, and
every replay sets them anew.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sgl_spec.engine.engine import Engine
from sgl_spec.layers.attention import plan_attention, store_and_attend
from sgl_spec.layers.context import AttnBatch
from sgl_spec.layers.linear import Linear
from sgl_spec.models import layer
from sgl_spec.models.layer import total_bytes
from sgl_spec.speculative.grow import GrownTrees
from sgl_spec.speculative.model_drafter import ModelDrafter

HOST = "host rest"
STAGES = (
    "draft extend",
    "draft steps",
    "tree build",
    "drafting",
    "trim and constrain",
    "verify",
    "output layer",
    "sample and follow",
    "compaction",
    "log-probabilities",
    "tell the drafter",
    "row state",
    HOST,
)
PARTS = ("", ": linear", ": attention")


class Clock(Protocol):
    """Marks moments, and says later how far two of them lie apart; a mark may be an event that has
    not happened yet."""

    def mark(self) -> Any:
        """Now."""

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks; called when all work is done."""

    def captures(self) -> bool:
        """Whether marks go into a graph now, to be set by its replays."""


class HostClock:
    """The clock of the CPU, whose work is done when a call returns."""

    def mark(self) -> float:
        """Seconds."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """The difference."""
        return end - start

    def captures(self) -> bool:
        """Never."""
        return False


class EventClock:
    """The clock of a CUDA device: events on the current stream. Where the device waits for the
    host, its time is the host's."""

    def mark(self) -> torch.cuda.Event:
        """An event that happens when all work before it is done."""
        event = torch.cuda.Event(enable_timing=True, external=self.captures())  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Waits for the later one."""
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def captures(self) -> bool:
        """Whether the current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()


@dataclass(slots=True)
class _Span:
    """A stage that ran. parent: its index, -1 for none. read: bytes; kv: bytes for each token that
    the requests of the round hold."""

    name: str
    parent: int
    captured: bool
    start: Any
    end: Any = None
    read: int = 0
    kv: int = 0


@dataclass(slots=True)
class RoundTimes:
    """Of one round, by stage: seconds without inner stages, bytes read. calls: how often."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    bytes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> float:
        """Seconds of the whole round."""
        return sum(self.seconds.values())


class Recorder:
    """Collects the spans of one round at a time."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.kv_tokens = 0  # that each attention of the running forward sees
        self._spans: list[_Span] = []
        self._open: list[int] = []
        self._graphs: dict[int, list[_Span]] = {}
        self._replayed: list[list[_Span]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A stage inside those that are open."""
        parent = self._open[-1] if self._open else -1
        self._open.append(len(self._spans))
        span = _Span(name, parent, self.clock.captures(), self.clock.mark())
        self._spans.append(span)
        try:
            yield
        finally:
            span.end = self.clock.mark()
            self._open.pop()

    @contextmanager
    def part(self, name: str, read: int) -> Iterator[None]:
        """A part of the innermost stage, and the bytes that it reads."""
        if not self._open:
            yield
            return
        with self.stage(self._spans[self._open[-1]].name + name):
            self.reads(read)
            yield

    def reads(self, read: int, kv: int = 0) -> None:
        """The innermost stage reads so many bytes, and `kv` for each token that is held."""
        if self._open:
            span = self._spans[self._open[-1]]
            span.read += read
            span.kv += kv

    @contextmanager
    def capture(self, graph: object) -> Iterator[None]:
        """A round is run once, then captured as `graph`."""
        spans, open_ = self._spans, self._open
        self._spans, self._open = [], []
        try:
            yield
        finally:
            made, self._spans, self._open = self._spans, spans, open_
        before = sum(not span.captured for span in made)
        kept = made[before:]
        assert all(span.captured for span in kept), "stages before the capture come first"
        for span in kept:
            span.parent = max(-1, span.parent - before)
        self._graphs[id(graph)] = kept

    def replay(self, graph: object) -> None:
        """A round that was captured while it was watched runs."""
        self._replayed.append(self._graphs[id(graph)])

    def round(self, held: int = 0) -> RoundTimes:
        """The spans since the last call. held: tokens in the KV cache of the requests."""
        times = RoundTimes()
        self._add(times, self._spans, held)
        for spans in self._replayed:
            self._add(times, spans, held)
            outer = [span for span in spans if span.parent < 0]
            times.seconds[HOST] -= sum(self._seconds(span) for span in outer)
        self._spans, self._replayed = [], []
        return times

    def _add(self, times: RoundTimes, spans: list[_Span], held: int) -> None:
        for span in spans:
            took = self._seconds(span)
            times.seconds[span.name] += took
            times.calls[span.name] += 1
            if span.parent >= 0:
                times.seconds[spans[span.parent].name] -= took
            if read := span.read + span.kv * held:
                times.bytes[span.name] += read

    def _seconds(self, span: _Span) -> float:
        return self.clock.seconds(span.start, span.end)


class Wrapped:
    """A callable that is a stage; its other attributes are those of what it wraps."""

    def __init__(self, recorder: Recorder, name: str, inner: Callable[..., Any]) -> None:
        self._recorder = recorder
        self._name = name
        self._inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._recorder.stage(self._name):
            return self._inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


Replacement = tuple[Any, str, Callable[..., Any]]


@contextmanager
def watched(engine: Engine, recorder: Recorder) -> Iterator[None]:
    """The engine with every stage wrapped; as it was afterwards."""
    with replaced([*_stages(engine, recorder), *_parts(recorder)]):
        yield


@contextmanager
def replaced(places: Iterable[Replacement]) -> Iterator[None]:
    """Attributes of objects, classes or modules, replaced for a while."""
    undo: list[Callable[[], None]] = []
    try:
        for owner, name, new in places:
            undo.append(_undoing(owner, name))
            setattr(owner, name, new)
        yield
    finally:
        for put_back in reversed(undo):
            put_back()


def _stages(engine: Engine, recorder: Recorder) -> Iterator[Replacement]:
    """What stands in for the functions that are stages."""
    worker: Any = engine.scheduler.worker
    places: list[tuple[Any, str, str]] = [
        (worker, "_plan_tree", "trim and constrain"),
        (worker, "rule", "sample and follow"),
        (worker, "_keep_path", "compaction"),
        (worker, "observe", "tell the drafter"),
        (worker.logprobs, "of_emitted", "log-probabilities"),
        (engine.model, "logits", "output layer"),
        (engine.model, "forward", "verify"),
        (engine.model, "forward_features", "verify"),
    ]
    if isinstance(engine.drafter, ModelDrafter):
        inside = {"propose": "draft steps", "_extend": "draft extend", "_learn": "draft extend"}
        places += [(engine.drafter, name, stage) for name, stage in inside.items()]
    elif engine.drafter is not None:
        places.append((engine.drafter, "propose", "drafting"))
    for owner, name, stage in places:
        yield owner, name, Wrapped(recorder, stage, getattr(owner, name))
    for name in ("expand", "frontier", "finish"):
        yield GrownTrees, name, as_stage(recorder, "tree build", getattr(GrownTrees, name))


def _undoing(owner: Any, name: str) -> Callable[[], None]:
    if name in vars(owner):
        before = vars(owner)[name]
        return lambda: setattr(owner, name, before)
    return lambda: delattr(owner, name)


def as_stage(recorder: Recorder, stage: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is a stage; also for methods, set on their class."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        with recorder.stage(stage):
            return inner(*args, **kwargs)

    return timed


def _parts(recorder: Recorder) -> Iterator[Replacement]:
    """Linear layers and attention as parts of the stage that runs them."""

    def linear(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def timed(self: Linear, *args: Tensor) -> Tensor:
            with recorder.part(": linear", total_bytes(self.tensors())):
                return inner(self, *args)

        return timed

    def attend(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
        read = 2 * recorder.kv_tokens * k.shape[1] * k.shape[2] * k.element_size()
        with recorder.part(": attention", read):
            return store_and_attend(q, k, *rest)

    def plan(batch: AttnBatch, *rest: Any) -> Any:
        columns = 0 if batch.tree_lens is None else int(batch.tree_lens.sum())
        recorder.kv_tokens = int(batch.prefix_lens.sum()) + columns + int(batch.q_starts[-1])
        return plan_attention(batch, *rest)

    yield Linear, "__call__", linear(Linear.__call__)
    yield Linear, "add_to", linear(Linear.add_to)
    yield layer, "store_and_attend", attend
    yield layer, "plan_attention", plan
