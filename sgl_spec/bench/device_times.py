"""What a CUDA device can do, and which of its kernels take the time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

_BYTES = 1 << 30  # many times any cache
_RUNS = 20


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second, best of several runs. copy: those read and those written."""

    read: float
    copy: float


def bandwidth(device: torch.device) -> Bandwidth:
    """Of this device now."""
    source = torch.ones(_BYTES // 4, device=device)
    into = torch.empty_like(source)
    return Bandwidth(
        read=_BYTES / _best(lambda: source.sum()),
        copy=2 * _BYTES / _best(lambda: into.copy_(source)),
    )


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest run."""
    best = float("inf")
    for _ in range(_RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A kernel by name: milliseconds and calls per round."""

    kernel: str
    ms: float
    calls: float


def kernel_rows(work: Callable[[], object], rounds: int) -> list[KernelRow]:
    """The device's kernels, copies included, while `work` runs `rounds` rounds; the longest
    first."""
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        work()
        torch.cuda.synchronize()
    total: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for event in traced.key_averages():
        micros = float(event.self_device_time_total)
        if micros > 0:
            total[event.key] += micros
            calls[event.key] += event.count
    names = sorted(total, key=lambda name: -total[name])
    return [KernelRow(n, total[n] / 1e3 / rounds, calls[n] / rounds) for n in names]
