"""What a verify costs on this machine, measured at start-up, so that drafting can know its
price."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from sgl_spec.engine.batch import starts_of
from sgl_spec.layers.context import ForwardBatch, KVCache
from sgl_spec.speculative.prune import CostTable
from sgl_spec.speculative.tree import MAX_TREE_NODES

if TYPE_CHECKING:
    from sgl_spec.models.decoder import Decoder

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)
REPEATS = 3
PREFIX = 64
SLOW_S = 0.2  # a forward that takes longer is measured once


@torch.inference_mode()
def measure_costs(model: Decoder, kv: KVCache, max_rows: int) -> CostTable:
    """Forward time (ms, logits included) by rows, best of a few runs.

    It writes into the pool's first slots, so it must run before anything is served. Counts beyond
    the last measured one are extrapolated by the table.
    """
    counts = [n for n in ROW_COUNTS if n <= max(max_rows, 2)]
    times = []
    for rows in counts:
        batch = _dummy_batch(rows, kv.k.shape[1])
        best = _time_forward(model, kv, batch)
        for _ in range(REPEATS - 1 if best < SLOW_S else 0):
            best = min(best, _time_forward(model, kv, batch))
        times.append(best * 1e3)
    return CostTable(tuple(counts), tuple(times))


def _time_forward(model: Decoder, kv: KVCache, batch: ForwardBatch) -> float:
    start = time.perf_counter()
    model.logits(model.forward(batch, kv))
    return time.perf_counter() - start


def _dummy_batch(rows: int, num_slots: int) -> ForwardBatch:
    """Trees of up to MAX_TREE_NODES chain nodes over a short prefix, all in the pool's first
    slots."""
    prefix = min(PREFIX, num_slots - 1)
    lens = [MAX_TREE_NODES] * (rows // MAX_TREE_NODES)
    lens += [rows % MAX_TREE_NODES] if rows % MAX_TREE_NODES else []
    q_lens = torch.tensor(lens)
    within = torch.cat([torch.arange(n) for n in lens])
    width = prefix + max(lens)
    table = (torch.arange(width, dtype=torch.int32) % num_slots).expand(len(lens), -1).contiguous()
    positions = prefix + within
    full = torch.ones_like(within) << within
    return ForwardBatch(
        tokens=torch.zeros(rows, dtype=torch.int64),
        positions=positions,
        slots=table[0].long()[positions],
        req_to_token=table,
        rows=torch.arange(len(lens)),
        prefix_lens=torch.full((len(lens),), prefix),
        q_starts=starts_of(q_lens),
        mask_words=full | (full - 1),
    )
