"""What a device is said to wait for the host in rounds that need it: by a clock of our own."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton")

from sgl_spec.engine.cuda.seam import SeamClock
from sgl_spec.engine.cuda.timing import Stopwatch

ROWS = np.array([0, 2])


class Device:
    """Time passes as it is told, in ms; whoever reads what it has not come to fails."""

    def __init__(self) -> None:
        self.now = 0.0
        self.clock = SeamClock(self.started)
        self.tenancy = np.zeros(4, np.int64)

    def started(self) -> Stopwatch:
        return Watch(self)  # type: ignore[return-value]

    def batch(self, *forwards: float, waits: float = 0.0, rows: np.ndarray = ROWS) -> None:
        """Forwards that take so long, the device waiting before each."""
        self.clock.enter(rows, self.tenancy)
        for took in forwards:
            self.now += waits
            with self.clock.forward():
                self.now += took

    def round(self, *forwards: float, waits: float = 0.0, rows: np.ndarray = ROWS) -> float:
        self.batch(*forwards, waits=waits, rows=rows)
        self.clock.round_over()
        return self.clock.wait_ms


class Watch:
    def __init__(self, device: Device) -> None:
        self.device, self.start, self.end = device, device.now, -1.0

    def stop(self) -> None:
        self.end = self.device.now

    def ms_until(self, later: Watch) -> float:
        assert self.end >= 0
        assert later.end >= 0, "the device has not come to it"
        return later.start - self.end


def test_what_lies_between_two_forwards_is_waited() -> None:
    device = Device()
    assert device.round(5.0, waits=3.0) == 0.0, "nothing came before it"
    assert device.round(5.0, waits=2.0) == 2.0
    assert device.round(5.0, waits=18.0) == 2.0 + 16.0 / 16, "blended"


def test_the_drafts_forwards_are_no_waiting() -> None:
    device = Device()
    device.round(5.0)
    assert device.round(1.0, 1.0, 5.0, waits=0.5) == 1.5


def test_chunks_of_prompts_between_rounds_count_with_the_next_round() -> None:
    device = Device()
    device.round(5.0)
    device.batch(20.0, waits=1.0, rows=np.array([3]))
    assert device.round(5.0, waits=1.0) == 2.0


def test_a_device_without_work_does_not_wait() -> None:
    """All requests of the batch before have ended."""
    device = Device()
    device.round(5.0)
    device.tenancy[ROWS] += 1
    device.now += 5000
    assert device.round(5.0, waits=1.0) == 0.0
    device.tenancy[2] += 1  # one goes on
    assert device.round(5.0, waits=1.0, rows=ROWS[:1]) == 1.0


def test_other_rounds_between_are_no_waiting() -> None:
    device = Device()
    device.round(5.0)
    device.clock.leave()
    for _ in range(4):  # rounds that the device runs by itself, a draft model catching up
        with device.clock.forward():
            device.now += 2.0
    assert len(device.clock._watches) == 1, "nothing piles up"
    assert device.round(5.0, waits=1.0) == 0.0
    assert device.round(5.0, waits=1.0) == 1.0


def test_a_round_with_a_capture_does_not_count() -> None:
    device = Device()
    device.round(5.0)
    device.batch(1.0)  # the draft's
    device.clock.restart()
    device.now += 90.0
    assert device.round(5.0, waits=1.0) == 0.0
    assert device.round(5.0, waits=1.0) == 1.0


def test_a_kernel_that_is_compiled_is_no_waiting() -> None:
    device = Device()
    device.round(5.0)
    assert device.round(5.0, waits=2000.0) == 0.0
    assert device.round(5.0, waits=1.0) == 1.0
