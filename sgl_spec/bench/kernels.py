"""Time every device kernel beside its floor (bytes / measured bandwidth) and torch's equivalent.

python -m sgl_spec.bench kernels [--sweep] [--only WORD] [--output FILE]

Times are of one call inside a CUDA graph that goes round many sets of inputs, so that what a call
reads lies in no cache; least of several replays, by CUDA events. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from sgl_spec.bench.kernel_cases import LINEARS, Call, Case, all_cases, attention, linear
from sgl_spec.bench.report import provenance, say, table, write_row
from sgl_spec.errors import ConfigError
from sgl_spec_kernels import tree_attn
from sgl_spec_kernels.skinny_gemm import GemmShape

_COLD_BYTES = 1 << 28  # what the sets of inputs hold together: several times the L2 cache
_MOST_SETS = 48
_LEAST_CALLS = 32
_REPLAYS = 7


def cold_time_us(case_bytes: int, prepare: Callable[[], Call]) -> float:
    """Microseconds of a call, launched by a graph."""
    sets = min(max(_COLD_BYTES // max(case_bytes, 1), 2), _MOST_SETS)
    calls = [prepare() for _ in range(sets)]
    rounds = max(_LEAST_CALLS // sets, 1)
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
    return min(times) * 1e3 / (sets * rounds)


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
    floor = case.bytes / bandwidth * 1e6
    say(f"{case.name}: {ours:.2f} us, floor {floor:.2f}")
    return {
        "kernel": case.name,
        "us": ours,
        "floor_us": floor,
        "over_floor": ours / floor,
        "tb_per_s": case.bytes / ours / 1e6,
        "torch_us": theirs,
    }


def sweep_linears() -> list[dict[str, Any]]:
    """The best cut of each dense layer at 1 to 16 rows: entries for `skinny_gemm.TUNED`."""
    found: list[dict[str, Any]] = []
    for name, (outputs, inputs) in LINEARS.items():
        shapes = product((64, 128), (64, 128, 256), (1, 2, 4, 8), (4,), (3, 5))
        for shape in (GemmShape(*cut) for cut in shapes):
            if not _is_sensible(shape, outputs, inputs):
                continue
            times = []
            for rows in (1, 16):
                case = linear(name, rows, outputs, inputs, shape)
                times.append(cold_time_us(case.bytes, case.prepare))
            found.append({"layer": name, "shape": shape, "us_1": times[0], "us_16": times[1]})
        best = min((row for row in found if row["layer"] == name), key=lambda row: row["us_16"])
        say(
            f"({outputs}, {inputs}): {best['shape']}, {best['us_1']:.2f} and {best['us_16']:.2f} us"
        )
    return [row | {"shape": repr(row["shape"])} for row in found]


def _is_sensible(shape: GemmShape, outputs: int, inputs: int) -> bool:
    """Whether it fills the card once or a few times, and its stages fit into shared memory."""
    programs = -(-outputs // shape.block_n) * shape.split_k
    shared = shape.stages * shape.block_k * (shape.block_n + 16) * 2
    steps = inputs // shape.block_k // shape.split_k
    return bool(100 <= programs <= 1200 and shared <= 200_000 and steps >= 2)


def sweep_attention() -> list[dict[str, Any]]:
    """Times under other constants of `tree_attn`."""
    names = ("BLOCK_N", "MIN_SPLIT", "_PROGRAMS")
    before = [getattr(tree_attn, name) for name in names]
    found: list[dict[str, Any]] = []
    for values in product((32, 64, 128), (64, 128, 256), (132, 264, 528, 1056)):
        for name, value in zip(names, values, strict=True):
            setattr(tree_attn, name, value)
        for shape in ((1, 8, 500), (1, 8, 16000), (8, 8, 1000), (48, 8, 500)):
            case = attention(*shape)
            took = cold_time_us(case.bytes, case.prepare)
            found.append({"kernel": case.name, "us": took} | dict(zip(names, values, strict=True)))
    for name, value in zip(names, before, strict=True):
        setattr(tree_attn, name, value)
    for kernel in dict.fromkeys(row["kernel"] for row in found):
        say(str(min((row for row in found if row["kernel"] == kernel), key=lambda row: row["us"])))
    return found


def main(argv: Sequence[str]) -> None:
    """Run the benchmark; see the module."""
    parser = argparse.ArgumentParser(prog="python -m sgl_spec.bench kernels")
    parser.add_argument("--only", default="", help="kernels whose name holds this word")
    parser.add_argument("--sweep", action="store_true", help="also time other cuts and constants")
    parser.add_argument("--output", type=Path, help="append the result to this file, a JSON line")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise ConfigError("bench kernels needs a CUDA device; torch sees none.")
    torch.manual_seed(0)
    bandwidth = read_bandwidth()
    rows = [measure(case, bandwidth) for case in all_cases() if options.only in case.name]
    header = ("kernel", "us", "floor", "x floor", "TB/s", "torch us")
    print(table(header, [["-" if v is None else v for v in row.values()] for row in rows]))
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s, {torch.cuda.get_device_name()}")
    result = {
        "bench": "kernels",
        "conditions": provenance(["python", "-m", "sgl_spec.bench", "kernels", *argv], seed=0),
        "bandwidth": bandwidth,
        "rows": rows,
    }
    if options.sweep:
        result |= {"linears": sweep_linears(), "attention": sweep_attention()}
    if options.output is not None:
        write_row(options.output, result)
