"""Requests of `LLM` that are followed while they run: streams, and calls of asyncio programs.

One thread steps the engine as long as some stream is open; streams that come meanwhile join the
batch. It ends when nothing runs.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from sgl_spec.errors import SglSpecError
from sgl_spec.messages import OutputChunk
from sgl_spec.request import TokenizedRequest

News = OutputChunk | BaseException
Deliver = Callable[[News], None]


class Streams:
    """The open requests of one `LLM`, by rid. alone: entered while the engine is stepped, so that
    other calls wait. submit, abort, step, has_work: the engine's."""

    def __init__(
        self,
        alone: Any,
        submit: Callable[[TokenizedRequest], None],
        abort: Callable[[str], None],
        step: Callable[[], list[OutputChunk]],
        has_work: Callable[[], bool],
    ) -> None:
        self._alone, self._submit, self._abort = alone, submit, abort
        self._step, self._has_work = step, has_work
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._open: dict[str, Deliver] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def open(self, requests: Sequence[TokenizedRequest], deliver: Deliver) -> None:
        """Run these. deliver: is given all their chunks, or what broke the engine off; called in
        the thread that steps."""
        with self._lock:
            for request in requests:
                self._open[request.rid] = deliver
                self._asked.put(lambda request=request: self._submit(request))  # type: ignore[misc]
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="streams", daemon=True)
                self._thread.start()

    def close(self, requests: Sequence[TokenizedRequest]) -> None:
        """Nobody listens to these any more: end those that run."""
        with self._lock:
            for request in requests:
                if self._open.pop(request.rid, None) is not None:
                    self._asked.put(lambda rid=request.rid: self._abort(rid))  # type: ignore[misc]

    def _run(self) -> None:
        with self._alone:
            while self._goes_on():
                try:
                    while not self._asked.empty():
                        self._asked.get()()
                    chunks = self._step() if self._has_work() else []
                except BaseException as error:  # noqa: BLE001 - whoever waits must hear of it
                    self._fail(error)
                    return
                for chunk in chunks:
                    self._tell(chunk)

    def _goes_on(self) -> bool:
        """Whether there is something to do; else the thread is no longer there for new streams."""
        with self._lock:
            if not self._asked.empty() or self._has_work():
                return True
            self._thread = None
            return False

    def _tell(self, chunk: OutputChunk) -> None:
        with self._lock:
            found = self._open.get(chunk.rid)
            if chunk.finish is not None:
                self._open.pop(chunk.rid, None)
        if found is not None:
            found(chunk)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            listeners = set(self._open.values())
            self._open.clear()
            self._asked = queue.SimpleQueue()
            self._thread = None
        for deliver in listeners:
            deliver(error)


def joined(chunks: Sequence[OutputChunk]) -> OutputChunk:
    """All that a request gave, as its last chunk would tell it if it were the only one."""
    *before, last = chunks
    if not before:
        return last
    ids = [token for chunk in chunks for token in chunk.ids]
    logprobs = None
    for chunk in chunks:
        if chunk.logprobs is not None:
            logprobs = chunk.logprobs if logprobs is None else _extended(logprobs, chunk.logprobs)
    prompt = next((c.prompt_logprobs for c in chunks if c.prompt_logprobs is not None), None)
    return msgspec.structs.replace(last, ids=ids, logprobs=logprobs, prompt_logprobs=prompt)


def _extended(first: Any, second: Any) -> Any:
    first.extend(second)
    return first


def followed(deliveries: queue.SimpleQueue[News], count: int) -> Iterator[OutputChunk]:
    """Chunks as they come, until so many requests have ended."""
    while count:
        news = deliveries.get()
        if isinstance(news, BaseException):
            raise news if isinstance(news, SglSpecError) else SglSpecError(str(news))
        count -= news.finish is not None
        yield news
