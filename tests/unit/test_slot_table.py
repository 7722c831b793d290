"""The slot table whose device has a memory of its own: what forwards read is what was written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_spec.engine.kv_pool import SlotTable
from sgl_spec.engine.req import make_req
from sgl_spec.engine.slots import GROW_AHEAD, SlotManager
from sgl_spec.request import SamplingParams, TokenizedRequest

ROWS, WIDTH, SLOTS, SCRATCH = 5, 300, 1000, 8


def mirrored() -> SlotTable:
    return SlotTable(ROWS, WIDTH, num_slots=SLOTS, scratch=SCRATCH)


def test_without_scratch_slots_there_is_one_memory() -> None:
    table = SlotTable(ROWS, WIDTH)
    table.write(2, 5, np.arange(7))
    assert table.device[2, 5:12].tolist() == list(range(7))
    table.device[2, 5] = 9
    assert table.host[2, 5] == 9
    table.sync()


def test_the_filler_names_scratch_slots_alone() -> None:
    table = mirrored()
    assert tuple(table.device.shape) == (ROWS + 1, WIDTH)
    filler = table.device[table.filler]
    assert filler.min() == SLOTS
    assert filler.max() == SLOTS + SCRATCH - 1
    assert len(filler[:SCRATCH].unique()) == SCRATCH  # a short tree's rows do not meet


def test_what_was_written_arrives_with_sync_and_not_before() -> None:
    """Random spans: overlapping, repeated, of every length around the one from which on only what
    changed is sent, several between two syncs."""
    rng = np.random.default_rng(4)
    table = mirrored()
    before = table.device.clone()
    for _ in range(60):
        for _ in range(rng.integers(1, 6)):
            length = int(rng.choice([0, 1, 3, 63, 64, 65, 120]))
            row, start = int(rng.integers(ROWS)), int(rng.integers(WIDTH - length))
            slots = rng.integers(0, SLOTS, length)
            if rng.random() < 0.5:
                slots = table.slots(row, start, start + length)  # the same again, but for one
                slots[length // 2 : length // 2 + 1] = 7
            table.write(row, start, slots)
        assert torch.equal(table.device, before)
        table.sync()
        assert np.array_equal(table.device[:-1].numpy(), table.host)
        before = table.device.clone()
    assert torch.equal(before[-1], mirrored().device[-1])


def test_the_same_slots_again_are_not_sent() -> None:
    table = mirrored()
    slots = np.arange(100)
    table.write(0, 0, slots)
    table.sync()
    table.device.fill_(-1)
    table.write(0, 0, slots)
    table.sync()
    assert bool((table.device == -1).all())
    slots[40] = 999
    table.write(0, 0, slots)
    table.sync()
    assert (table.device[0] != -1).nonzero().flatten().tolist() == [40]


@pytest.mark.parametrize(("pool", "least", "most"), [(4096, 1, 3), (90, 20, 64)])
def test_a_device_is_sent_slots_once_in_a_while_where_they_are_plenty(
    pool: int, least: int, most: int
) -> None:
    """64 rounds of a token each; a pool that is nearly full gives every slot by itself."""
    slots = SlotManager(
        num_slots=pool, page_size=1, num_rows=2, width=200, use_cache=False, scratch=8
    )
    asked = TokenizedRequest(rid="r", input_ids=[1, 2, 3], sampling=SamplingParams(seed=0))
    req = make_req(asked, (), None)
    slots.pin_prefix(req)
    slots.open(req, 10)
    sent, before = 0, req.held.allocated_len
    for tokens in range(11, 75):
        slots.grow_all([req], [slots.shortfall(req, tokens)])
        assert req.held.allocated_len >= tokens
        sent, before = sent + (req.held.allocated_len > before), req.held.allocated_len
    assert least <= sent <= most, (sent, GROW_AHEAD)
    slots.check([req])
