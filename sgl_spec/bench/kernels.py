"""Time every device kernel beside its floor and torch's equivalent. The floor is the longer of
bytes / measured bandwidth and floating-point operations / the card's rate of products in bfloat16.

python -m sgl_spec.bench kernels [--sweep [WHAT ...]] [--only WORD] [--json FILE]

Times are of one call inside a CUDA graph that goes round many sets of inputs, so that what a call
reads lies in no cache; least of several replays, by CUDA events. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from sgl_spec.bench.kernel_cases import Call, Case, model_cases
from sgl_spec.bench.kernel_sweeps import SWEEPS
from sgl_spec.bench.report import provenance, say, table, write_row
from sgl_spec.bench.tree_cases import tree_cases
from sgl_spec.errors import ConfigError
from sgl_spec_kernels import tree_attn
from sgl_spec_kernels.skinny_gemm import TUNED

_COLD_BYTES = 1 << 28  # what the sets of inputs hold together: several times the L2 cache
_MOST_SETS = 48
_LEAST_CALLS = 32
_REPLAYS = 7
_BF16_FLOPS = 790e12  # of an H200, a product of 8192 x 8192 by torch


def cold_time_us(case_bytes: int, prepare: Callable[[], Call]) -> float:
    """Microseconds of a call, launched by a graph."""
    sets = min(max(_COLD_BYTES // max(case_bytes, 1), 2), _MOST_SETS)
    return time_us([prepare() for _ in range(sets)])


def time_us(calls: list[Call]) -> float:
    """Microseconds of a call of these, which a graph goes round."""
    rounds = max(_LEAST_CALLS // len(calls), 1)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles kernels, makes handles
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls * rounds:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(_REPLAYS):
        start, stop = _event(), _event()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return min(times) * 1e3 / (len(calls) * rounds)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def read_bandwidth() -> float:
    """Bytes per second at which a large buffer is read."""
    size = 1 << 30

    def prepare() -> Call:
        buffer = torch.randn(size // 4, device="cuda")
        return lambda: buffer.sum()

    return size / cold_time_us(size, prepare) * 1e6


def measure(case: Case, bandwidth: float) -> dict[str, Any]:
    """One row of the result."""
    ours = cold_time_us(case.bytes, case.prepare)
    theirs = None if case.baseline is None else cold_time_us(case.bytes, case.baseline)
    floor = max(case.bytes / bandwidth, case.flops / _BF16_FLOPS) * 1e6
    say(f"{case.name}: {ours:.2f} us, floor {floor:.2f}")
    return {
        "kernel": case.name,
        "us": ours,
        "floor_us": floor,
        "over_floor": ours / floor,
        "tb_per_s": case.bytes / ours / 1e6,
        "torch_us": theirs,
    }


def main(argv: Sequence[str]) -> None:
    """Run the benchmark; see the module."""
    parser = argparse.ArgumentParser(prog="python -m sgl_spec.bench kernels")
    parser.add_argument("--only", default="", help="kernels whose name holds this word")
    parser.add_argument(
        "--sweep", nargs="*", choices=SWEEPS, help="time other constants too, all or these"
    )
    parser.add_argument("--json", help="append one JSON row to this file")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise ConfigError("bench kernels needs a CUDA device; torch sees none.")
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    cases = chain(model_cases(), tree_cases())
    rows = [measure(case, bandwidth) for case in cases if options.only in case.name]
    header = ("kernel", "us", "floor", "x floor", "TB/s", "torch us")
    print(table(header, [["-" if v is None else v for v in row.values()] for row in rows]))
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s, {torch.cuda.get_device_name()}")
    result = {
        "bench": "kernels",
        "conditions": provenance(["python", "-m", "sgl_spec.bench", "kernels", *argv], seed=0),
        "bandwidth": bandwidth,
        "constants": {
            "attention": [tree_attn.TILES, asdict(tree_attn.attn_grid(48, 8, 4, 4))],
            "products": {str(size): repr(shapes) for size, shapes in TUNED.items()},
        },
        "rows": rows,
    }
    if options.sweep is not None:
        result |= {name: SWEEPS[name](time_us) for name in options.sweep or SWEEPS}
    if options.json:
        write_row(Path(options.json), result)
