"""Which product a CPU computes fastest, by the shape of the weight.

| layout | product |
|---|---|
| packed | oneDNN's, over its own blocks |
| transposed | MKL's, `x @ W^T` with the transposed weight stored row by row |
| plain | MKL's, `F.linear` |

With many rows the packed one is the fastest, with one row it takes up to 1.5 times as long as the
others on an Intel Xeon. So the first start on a machine measures, and later starts go by that: sums
of float32 depend on the product, and a seed should give the same text tomorrow.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_spec.kept import cpu_name, measured_once

Layout = Literal["plain", "packed", "transposed"]

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
ROWS = (1, 2, 4, 8)
FEW = (1, 2, 4)  # rows up to which a second copy may be multiplied
SMALL = 1 << 20  # bytes of a weight that stays in the cache, where there is little to gain
SAMPLE = 128 << 20  # bytes of a layout; all of them together come from memory, not from a cache
SECOND_COPY = 32 << 20  # most bytes of a weight that may be held in two layouts
PAYS = 0.93  # of the packed layout's time, for which another one is worth it
TWO_PAY = 0.97  # of the time of one copy, for which a second one is worth its memory
PASSES = 5
BUDGET_S = 0.4  # of a shape, after which no further pass begins
LEAST_PASSES = 2  # that tell anything
NOISE = 1.2  # the second least time over the least, at most, in the median

logger = logging.getLogger(__name__)

_packed: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default


@dataclass(frozen=True, slots=True)
class Form:
    """How a weight is held. few: up to so many rows a second copy is multiplied, held as
    `few_layout`; 0: there is none."""

    layout: Layout
    few: int = 0
    few_layout: Layout = "plain"

    def __str__(self) -> str:
        return (
            f"{self.layout}, {self.few_layout} up to {self.few} rows" if self.few else self.layout
        )

    def layout_at(self, rows: int) -> Layout:
        """Which copy is multiplied."""
        return self.few_layout if rows <= self.few else self.layout


PLAIN, PACKED = Form("plain"), Form("packed")


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can hold this weight in its own blocked layout and multiply by it natively."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


def form_of(weight: Tensor) -> Form:
    """The form for a weight [out, in]."""
    if not can_pack(weight):
        return PLAIN
    if weight.nbytes < SMALL:
        return PACKED
    out, inner = weight.shape
    return _measured_form(out, inner, weight.dtype, torch.get_num_threads())


@cache
def _measured_form(out: int, inner: int, dtype: torch.dtype, threads: int) -> Form:
    found = measured_once(
        "products",
        (torch.__version__, cpu_name(), threads, str(dtype), out, inner),
        lambda: _best_measured(out, inner, dtype),
        read=lambda kept: Form(**kept),
        write=lambda form: asdict(form or PACKED),
        worth_keeping=lambda form: form is not None,
    )
    if found is None:
        logger.warning(
            "This machine is too busy to tell how it multiplies fastest by weights of %d x %d: "
            "oneDNN does it this time, and the next start measures again.",
            *(out, inner),
        )
    return found or PACKED


def _best_measured(out: int, inner: int, dtype: torch.dtype) -> Form | None:
    """None where the machine is too busy to tell."""
    passes = measure(out, inner, dtype)
    ordered = [sorted(times) for times in passes.values()]
    if min(map(len, ordered)) < LEAST_PASSES:
        return None
    if statistics.median(times[1] / times[0] for times in ordered) > NOISE:
        return None
    times = {key: min(each) for key, each in passes.items()}
    return best_form(times, twice=out * inner * dtype.itemsize <= SECOND_COPY)


def best_form(times: Mapping[tuple[Layout, int], float], *, twice: bool) -> Form:
    """The form that is fastest over all of `ROWS`, each weighed alike. times: by layout and rows.
    twice: whether two copies may be held. One copy that is slower than the packed one with the most
    rows is none: batches, trees and prompts have more still."""
    best = {rows: min(times[layout, rows] for layout in LAYOUTS) for rows in ROWS}

    def cost(form: Form) -> float:
        return sum(times[form.layout_at(rows), rows] / best[rows] for rows in ROWS)

    enough = times["packed", ROWS[-1]]
    singles = [Form(layout) for layout in LAYOUTS if times[layout, ROWS[-1]] <= enough]
    single = min(singles, key=cost)
    found = single if cost(single) < PAYS * cost(PACKED) else PACKED
    if not twice:
        return found
    pairs = [Form("packed", few, "plain") for few in FEW]
    pairs += [Form("packed", few, "transposed") for few in FEW]
    pair = min(pairs, key=cost)
    return pair if cost(pair) < TWO_PAY * cost(found) else found


@torch.inference_mode()
def measure(out: int, inner: int, dtype: torch.dtype) -> dict[tuple[Layout, int], list[float]]:
    """Seconds of each product by layout and rows, in several passes over all of them."""
    bytes_of_row = inner * dtype.itemsize
    out = min(out, max(SAMPLE // bytes_of_row, 1))  # a part of a larger weight tells as much
    copies = max(SAMPLE // (out * bytes_of_row), 1)
    weights = {
        layout: [hold(torch.full((out, inner), 0.5, dtype=dtype), layout) for _ in range(copies)]
        for layout in LAYOUTS
    }
    inputs = {rows: torch.full((rows, inner), 0.5, dtype=dtype) for rows in ROWS}
    passes: dict[tuple[Layout, int], list[float]] = defaultdict(list)
    begun = time.perf_counter()
    for number in range(PASSES):
        if number and time.perf_counter() - begun > BUDGET_S:
            break
        for rows, x in inputs.items():
            for layout, held in weights.items():
                passes[layout, rows].append(_time(layout, x, held))
    return passes


def _time(layout: Layout, x: Tensor, weights: Iterable[Tensor]) -> float:
    start = time.perf_counter()
    for weight in weights:
        product(layout, x, weight, None)
    return time.perf_counter() - start


def hold(weight: Tensor, layout: Layout) -> Tensor:
    """A weight [out, in] in a layout."""
    if layout == "packed":
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        return packed
    return weight.t().contiguous() if layout == "transposed" else weight


def padded_rows(rows: int) -> int:
    """How many rows a packed product is given. oneDNN compiles a program for every number of rows,
    which takes milliseconds and 0.7 MB for each weight's shape, and keeps up to 1024 of them; trees
    and prompts have any number of rows."""
    step = 1 if rows <= 8 else 8 if rows <= 64 else 16 if rows <= 256 else 64
    return -(-rows // step) * step


def product(layout: Layout, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b of a weight in that layout. x: [rows, in] -> [rows, out]."""
    if layout == "packed":
        rows = len(x)
        if fill := padded_rows(rows) - rows:
            return _packed(F.pad(x, (0, 0, 0, fill)), weight, bias, "none", [], "")[:rows]
        return _packed(x, weight, bias, "none", [], "")
    if layout == "transposed":
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
    return F.linear(x, weight, bias)
