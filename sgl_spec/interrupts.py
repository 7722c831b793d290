"""Ctrl-C between two steps of the engine and not within one, which it would leave half done."""

from __future__ import annotations

import inspect
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

IMPATIENT_S = 2.0  # a second Ctrl-C so long after the first is not kept waiting


class Interrupts:
    """While the block lasts, SIGINT waits for `deliver`; the program's own handler then has it, and
    what that raises (as a rule `KeyboardInterrupt`) is raised there.

    A second one, `IMPATIENT_S` after the first and before it was delivered, goes to that handler at
    once: a step that hangs can be left, with the engine in whatever state it is in. Nothing is
    changed outside the main thread, which alone is given signals, and where no Python handler
    stands.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self._since: float | None = None  # when the one came that waits

    def __enter__(self) -> Self:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._handler = handler
            signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handler is not None and self._stands():
            signal.signal(signal.SIGINT, self._handler)
        self._hand_on()

    def deliver(self) -> None:
        """Hand on the interrupt that waits, if one does."""
        try:
            self._hand_on()
        finally:
            self._adopt()

    def _hand_on(self) -> None:
        if self._since is not None and self._handler is not None:
            self._since = None
            self._handler(signal.SIGINT, inspect.currentframe())

    def _adopt(self) -> None:
        """A handler that has set another one for the next time is taken at its word."""
        if self._handler is None or self._stands():
            return
        handler = signal.getsignal(signal.SIGINT)
        self._handler = handler if callable(handler) else None
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._take)

    def _stands(self) -> bool:
        return signal.getsignal(signal.SIGINT) == self._take

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._since is None:
            self._since = time.monotonic()
        elif time.monotonic() - self._since >= IMPATIENT_S:
            self.deliver()
