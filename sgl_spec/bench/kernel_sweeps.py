"""Which cuts of the products and which constants of attention are best: for whoever tunes them.

Products are swept at as many rows as the tensor cores take at a time; what wins there is then set
against torch at every row count, and only what is faster goes into `skinny_gemm.TUNED`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from sgl_spec.bench.kernel_cases import (
    LINEARS,
    MIXED,
    NORMED,
    TREES,
    Call,
    Case,
    attention,
    attention_mixed,
    chunk,
    layer,
    norm,
    rand,
)
from sgl_spec.bench.report import say
from sgl_spec_kernels import chain, rms_norm, tree_attn
from sgl_spec_kernels.skinny_gemm import GemmShape, gemm_work, skinny_gemm

BUCKETS = (16, 32, 64)
_AHEAD = (0, 4, 16)

Timer = Callable[[list[Call]], float]


def cuts(outputs: int, inputs: int, rows: int) -> Iterator[GemmShape]:
    """Those that fill the card and fit into shared memory."""
    tiles = ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128))
    for (block_n, block_k), split, stages in product(tiles, (1, 2, 3, 4, 6, 8), (3, 4, 6)):
        programs = -(-outputs // block_n) * split
        shared = stages * block_k * (block_n + rows) * 2
        steps = -(-inputs // block_k) // split
        if 120 <= programs <= 1100 and shared <= 200_000 and steps >= 2:
            yield GemmShape(block_n, block_k, split, stages=stages)


def sweep_linears(timed: Timer) -> list[dict[str, Any]]:
    """For each product and bucket: torch's time, and those of the best cuts."""
    found = []
    for name, (outputs, inputs) in LINEARS.items():
        sets = max(2, (1 << 28) // (2 * outputs * inputs))
        weights = [rand(outputs, inputs) for _ in range(sets)]
        for rows in BUCKETS:
            times = _sweep_cuts(timed, weights, rows)
            best = min(times, key=lambda shape: times[shape])
            for ahead in _AHEAD:
                times |= _sweep_cuts(timed, weights, rows, [replace(best, ahead=ahead)])
            ranked = sorted(times.items(), key=lambda item: item[1])[:6]
            x = rand(rows, inputs)
            theirs = timed([_linear(x, weight) for weight in weights])
            say(f"{name} x {rows}: torch {theirs:.2f}; {ranked[0][1]:.2f} {ranked[0][0]}")
            found.append(
                {"layer": name, "rows": rows, "torch_us": theirs}
                | {"best": [{"shape": repr(shape), "us": us} for shape, us in ranked]}
            )
    return found


def _linear(x: Tensor, weight: Tensor) -> Call:
    return lambda: F.linear(x, weight)


def _sweep_cuts(
    timed: Timer, weights: list[Tensor], rows: int, shapes: list[GemmShape] | None = None
) -> dict[GemmShape, float]:
    outputs, inputs = weights[0].shape
    x, work = rand(rows, inputs), gemm_work([(outputs, inputs)], rows, weights[0].device)
    out = rand(rows, outputs)

    def call(weight: Tensor, shape: GemmShape) -> Call:
        return lambda: skinny_gemm(x, weight, work, None, None, out, shape)

    candidates = shapes or list(cuts(outputs, inputs, rows))
    return {shape: timed([call(w, shape) for w in weights]) for shape in candidates}


_TILES = [
    *product((32, 64), (4,), (3, 4, 5)),
    *product((128,), (4, 8), (2, 3)),
    *product((64,), (8,), (3, 4)),
    (64, 4, 2),
]


def sweep_attention(timed: Timer) -> list[dict[str, Any]]:
    """Times under other constants of `tree_attn`."""
    found: list[dict[str, Any]] = []
    names = ("MIN_SPLIT", "_PROGRAMS", "LONG_SPLIT", "FAIR_PROGRAMS")
    before = dict(tree_attn.TILES), [getattr(tree_attn, name) for name in names]
    few = [attention(*shape) for shape in TREES if shape[0] < 8]
    many = [attention(*shape) for shape in TREES if shape[0] >= 8]
    many += [attention_mixed(*shape) for shape in MIXED]
    for tile, min_split, programs in product(_TILES, (64, 128), (264, 528)):
        tree_attn.TILES["split"] = tile
        tree_attn.MIN_SPLIT, tree_attn._PROGRAMS = min_split, programs
        constants = {"tile": tile, "min_split": min_split, "programs": programs}
        found += [{"kernel": case.name, "us": _timed(timed, case, 8)} | constants for case in few]
    tree_attn._PROGRAMS = before[1][1]
    for tile, programs in product(_TILES, (200, 264, 317, 396)):
        tree_attn.TILES |= {"long": tile, "long, wide": tile}
        tree_attn.FAIR_PROGRAMS = programs
        constants = {"tile": tile, "programs": programs}
        found += [{"kernel": case.name, "us": _timed(timed, case, 8)} | constants for case in many]
    for tokens, tile in product((512, 2048, 8192), _TILES):
        tree_attn.TILES["chunk"] = tile
        case = chunk(tokens)
        found.append({"kernel": case.name, "us": _timed(timed, case, 2), "tile": tile})
    tree_attn.TILES.update(before[0])
    for name, value in zip(names, before[1], strict=True):
        setattr(tree_attn, name, value)
    for name in dict.fromkeys(row["kernel"] for row in found):
        rows = [row for row in found if row["kernel"] == name]
        say(str(sorted(rows, key=lambda row: float(row["us"]))[:3]))
    return found


def _timed(timed: Timer, case: Case, sets: int) -> float:
    """Infinite where a tile does not fit into shared memory."""
    try:
        return timed([case.prepare() for _ in range(sets)])
    except OutOfResources:
        return math.inf


def sweep_chaining(timed: Timer) -> list[dict[str, Any]]:
    """A layer with and without programmatic dependent launches."""
    found = []
    for shape in ((1, 1, 600), (1, 8, 600), (8, 8, 600), (48, 1, 600)):
        case = layer(*shape)
        row: dict[str, Any] = {"kernel": case.name}
        for chain.ENABLED in (False, True):
            row["chained" if chain.ENABLED else "apart"] = timed([case.prepare() for _ in "ab"])
        torch.cuda.empty_cache()
        say(str(row))
        found.append(row)
    return found


def sweep_norm(timed: Timer) -> list[dict[str, Any]]:
    """The norm with other numbers of warps to a row."""
    found: list[dict[str, Any]] = []
    before = rms_norm.COLUMNS_OF_A_WARP
    for rows, columns in product(NORMED, (256, 512, 1024, 2048)):
        rms_norm.COLUMNS_OF_A_WARP = columns
        us = timed([norm(rows).prepare() for _ in range(20)])
        found.append({"rows": rows, "columns of a warp": columns, "us": us})
        say(str(found[-1]))
    rms_norm.COLUMNS_OF_A_WARP = before
    return found


SWEEPS: dict[str, Callable[[Timer], list[dict[str, Any]]]] = {
    "linears": sweep_linears,
    "attention": sweep_attention,
    "layers": sweep_chaining,
    "norms": sweep_norm,
}
