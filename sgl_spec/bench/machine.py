"""What this machine can read per second, and which operations take a stretch of work's time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

_BYTES = 1 << 30  # many times any cache
_RUNS = 7


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second that are read from the device's memory, all threads together; best of
    several runs."""
    source = torch.ones(_BYTES // 4, device=device)
    best = 0.0
    for _ in range(_RUNS):
        _wait(device)
        start = time.perf_counter()
        source.sum()
        _wait(device)
        best = max(best, _BYTES / (time.perf_counter() - start))
    del source
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class PartRow:
    """An operation, a kernel or a mark by name: milliseconds and calls per round."""

    name: str
    ms: float
    calls: float


@dataclass(frozen=True, slots=True)
class Parts:
    """Of a stretch of work, the longest first. marks: `record_function` ranges with all that they
    hold; operations: kernels of a GPU (copies included), or operators of a CPU without those that
    they call."""

    marks: list[PartRow]
    operations: list[PartRow]


def parts_of(work: Callable[[], object], rounds: int, device: torch.device) -> Parts:
    """What `work` spends its time on; it runs `rounds` rounds."""
    gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with profile(activities=activities) as traced:
        work()
        _wait(device)
    marks, operations = [], []
    for event in traced.key_averages():
        micros = event.self_device_time_total if gpu else event.self_cpu_time_total
        if event.is_user_annotation:
            marks.append(
                PartRow(event.key, event.cpu_time_total / 1e3 / rounds, event.count / rounds)
            )
        elif micros > 0:
            operations.append(PartRow(event.key, micros / 1e3 / rounds, event.count / rounds))
    longest = [sorted(rows, key=lambda row: -row.ms) for rows in (marks, operations)]
    return Parts(*longest)
