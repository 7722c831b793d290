"""How memory is shared out: weights, KV pools, and on a GPU work space and CUDA graphs.

A CPU server takes a part of what is free at start. A GPU is taken to be the server's own: a share
of all its memory is planned for, and the rest is left to CUDA itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import psutil
import torch

from sgl_spec.args import MEM_FRACTION_CUDA, ResolvedArgs
from sgl_spec.engine.kv_pool import ceil_page, floor_page
from sgl_spec.engine.policy import tree_reserve
from sgl_spec.errors import ConfigError
from sgl_spec.models.config import ModelConfig
from sgl_spec.speculative.sampling import DEVICE_ELEMENTS

POOL_FRACTION = 0.25  # of the memory that is free at start, for the KV pool of a CPU server
_SPARE = 512 << 20  # of a GPU's free memory: what the libraries allocate by themselves
_GRAPH = 16 << 20  # a captured graph's own launches
CAPTURED_ROWS = 2048  # of a captured forward; larger ones keep the card busy anyway
ROUND_KINDS = 5  # `cuda.round.KINDS`: each size of a round has graphs for each
_ATTENTION = 288 << 20  # parts of split attention
_SETTINGS = 9  # bytes an entry of the vocabulary: marks, counts and biases of a row
_FOUND = 1 << 15  # bytes of an emitted token's log-probabilities and what finds them
_SAMPLED = 64  # bytes an entry while logits are filtered and sorted


def row_counts(most: int) -> tuple[int, ...]:
    """Rows of the prompt chunks whose forwards are captured, up to at least `most`: the steps waste
    a few percent, and are whole tiles of a matrix product."""
    counts: list[int] = []
    while not counts or counts[-1] < most:
        last = counts[-1] if counts else 0
        step = 64 if last < 512 else 128
        counts.append(last + step)
    return tuple(counts)


@dataclass(frozen=True, slots=True)
class Shapes:
    """The largest forwards. prompt_rows: of a prefill. requests: that decode at once. nodes: rows
    of each in a verify. captured: target layers whose rows a head reads. draft_columns: of a draft
    model's logits, 0 without one. graphs: to be captured."""

    prompt_rows: int
    requests: int
    nodes: int
    captured: int = 0
    draft_columns: int = 0
    graphs: int = 0


def work_bytes(config: ModelConfig, itemsize: int, shapes: Shapes) -> int:
    """What forwards and sampling need beside weights and KV, CUDA graphs included. An upper bound:
    everything a layer computes counts as alive at once."""
    tree_rows = shapes.requests * shapes.nodes
    row = _row_bytes(config, itemsize, shapes.captured)
    logits = tree_rows * config.vocab_size * (itemsize + 4)
    drafted = tree_rows * shapes.draft_columns * (itemsize + 8)
    sampled = min(shapes.requests * config.vocab_size, DEVICE_ELEMENTS) * _SAMPLED
    rounds = shapes.requests * _SETTINGS * config.vocab_size + tree_rows * (
        config.vocab_size * 4  # adjusted logits
        + config.vocab_size // 8  # masks
        + 2 * config.vocab_size * itemsize  # what masked rounds keep, of all sizes
        + _FOUND
    )
    eager = max(shapes.prompt_rows, tree_rows) * row + logits + drafted + sampled
    graphs = 0
    if shapes.graphs:
        rows = max(tree_rows, CAPTURED_ROWS) * row
        graphs = rows + logits + drafted + shapes.graphs * _GRAPH
    return eager + rounds + graphs + _ATTENTION


def _row_bytes(config: ModelConfig, itemsize: int, captured: int) -> int:
    """What a row is on its way through a layer, and captured ones until they are fused."""
    heads = config.num_heads + 2 * config.num_kv_heads
    widths = 4 * config.hidden_size + 4 * heads * config.head_dim + 3 * config.intermediate_size
    return (widths + 2 * captured * config.hidden_size) * itemsize


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes. total: of the card. free: of it now. used: by the tensors that are there already."""

    total: int
    free: int
    used: int

    @classmethod
    def read(cls, device: torch.device) -> GpuMemory:
        """As it is now."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, torch.cuda.memory_reserved(device))

    def room(self, fraction: float | None, work: int) -> int:
        """Bytes for the KV pools. work: what forwards need later. `ConfigError` where a fraction
        that was asked for is not there."""
        asked = int(self.total * (fraction or MEM_FRACTION_CUDA)) - self.used
        there = self.free - _SPARE
        if fraction is not None and asked > there:
            raise ConfigError(
                f"--mem-fraction-static {fraction:g} of {_gb(self.total)} GB is more than the GPU "
                f"has left: {_gb(self.free)} GB are free beside {_gb(self.used)} GB of weights; "
                f"at most {math.floor(100 * (self.used + there) / self.total) / 100:g} works.",
                param="mem_fraction_static",
            )
        return min(asked, there) - work

    def check_slots(self, slots: int, per_token: int, work: int) -> None:
        """`ConfigError` unless so many slots of `per_token` bytes fit beside the work space."""
        there = self.free - _SPARE - work
        if slots * per_token > there:
            raise ConfigError(
                f"--max-total-tokens {slots} takes {_gb(slots * per_token)} GB for the KV pools; "
                f"{_gb(max(0, there))} GB are left beside {_gb(self.used)} GB of weights and "
                f"{_gb(work)} GB of work space, so at most {max(0, there // per_token)} works.",
                param="max_total_tokens",
            )

    def fraction_for(self, pool: int, work: int) -> float:
        """The least --mem-fraction-static that leaves `pool` bytes to the KV pools."""
        return math.ceil(100 * (self.used + work + pool) / self.total) / 100


def cpu_room(args: ResolvedArgs, free_at_start: int, weights: int) -> int:
    """Bytes for the KV pools of a CPU server."""
    fraction = args.mem_fraction_static
    if fraction is None:
        return int(psutil.virtual_memory().available * POOL_FRACTION)
    return int(free_at_start * fraction) - weights


def pool_slots(
    args: ResolvedArgs, room: int, per_token: int, width: int, hint: str | None = None
) -> int:
    """Slots of the KV pool, in whole pages. room: bytes for them; per_token: bytes of a slot in all
    caches; width: most slots of a request. hint: what to do where they do not suffice."""
    page = args.page_size
    if args.max_total_tokens is not None:
        return ceil_page(args.max_total_tokens, page)
    most = max(0, room // per_token)
    slots = floor_page(min(most, args.max_running_requests * width), page)
    if slots < least_slots(args, width):
        raise ConfigError(
            f"The free memory holds only {most} KV slots of {per_token} bytes; "
            + (
                hint
                or "free some, or give --max-total-tokens, a larger --mem-fraction-static or a "
                "shorter --context-length."
            )
        )
    return slots


def least_slots(args: ResolvedArgs, width: int) -> int:
    """Slots without which a pool is of no use."""
    return min(width, 2 * args.page_size + tree_reserve(args.round_slots))


def gpu_hint(memory: GpuMemory, work: int, pool: int) -> str:
    """How to make a pool of `pool` bytes fit."""
    needs = (
        f"{_gb(memory.used)} GB are weights, {_gb(work)} GB work space of forwards and CUDA graphs"
    )
    least = memory.fraction_for(pool, work)
    if least < 1 and (least * memory.total - memory.used) <= memory.free - _SPARE:
        return f"{needs}. Give --mem-fraction-static {least:g} or more."
    return (
        f"{needs}, of {_gb(memory.total)} GB, {_gb(memory.free)} GB of them free. Lower "
        "--max-running-requests, --chunked-prefill-size or --context-length, or free memory."
    )


def _gb(amount: int) -> str:
    return f"{amount / 1e9:.2f}"
