"""Ctrl-C as something to look at between steps, so that a run ends with its weights whole."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAID = b"Stopping: this step is finished and saved; a second time stops at once.\n"


class StopRequest:
    """A context in which the first signal that would raise KeyboardInterrupt sets `asked` instead;
    the second raises it. Signals with other handlers keep them, and only the main thread has
    any."""

    def __init__(self) -> None:
        self.asked = False
        self._taken: list[signal.Signals] = []

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is signal.default_int_handler:
                    signal.signal(number, self._note)
                    self._taken.append(number)
        return self

    def __exit__(self, *_: object) -> None:
        while self._taken:
            signal.signal(self._taken.pop(), signal.default_int_handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True
        self.__exit__()
        os.write(2, _SAID)  # a buffered stream may be in the middle of a write
