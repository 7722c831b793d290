"""Whose slots texts may share: keyed by tokens, or by pairs where KV depends on the next token."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_spec.engine.req import Req, make_req
from sgl_spec.engine.slots import SlotManager
from sgl_spec.request import SamplingParams, TokenizedRequest

SHARED = list(range(100, 112))  # 12 tokens


def manager(page: int, *, ahead: bool) -> SlotManager:
    slots = SlotManager(num_slots=256, page_size=page, num_rows=4, width=64, use_cache=True)
    slots.reads_ahead = ahead
    return slots


def request(ids: list[int]) -> Req:
    asked = TokenizedRequest(rid="r", input_ids=ids, sampling=SamplingParams(seed=1))
    return make_req(asked, [], None)


def admit(slots: SlotManager, ids: list[int]) -> Req:
    req = request(ids)
    assert slots.cached_len(req) == slots.pin_prefix(req)
    slots.open(req, len(ids))
    return req


def fill(req: Req) -> None:
    req.held.committed_len = len(req.ids)


@pytest.mark.parametrize(("page", "hit"), [(1, 11), (2, 10), (4, 8)])
def test_a_reader_ahead_shares_all_but_the_last_common_token(page: int, hit: int) -> None:
    """Its KV there was computed with another next token."""
    slots = manager(page, ahead=True)
    first = admit(slots, [*SHARED, 1, 2])
    fill(first)
    slots.publish(first, len(first.ids))
    other = admit(slots, [*SHARED, 7, 8])
    assert other.held.shared_len == hit
    slots.check([first, other])


@pytest.mark.parametrize("ahead", [False, True])
def test_live_requests_keep_their_own_slot_where_they_part(ahead: bool) -> None:
    """Both ran without a hit. The one that publishes later adopts the other's slots only where both
    models' KV is the same, and what it publishes is its own from there on."""
    slots = manager(1, ahead=ahead)
    one, two = admit(slots, [*SHARED, 1, 2]), admit(slots, [*SHARED, 7, 8])
    own = slots.table.slots(two.held.row, 0, 14)
    for req in (one, two):
        fill(req)
        slots.publish(req, 14)
    after = slots.table.slots(two.held.row, 0, 14)
    same = 11 if ahead else 12
    assert (after[:same] == slots.table.slots(one.held.row, 0, same)).all()
    assert (after[same:] == own[same:]).all()
    slots.check([one, two])
    third = admit(slots, [*SHARED, 7, 9])
    parted = 12 if ahead else 13  # the pair (7, 8) is not (7, 9)
    assert third.held.shared_len == parted
    assert (slots.table.slots(third.held.row, 0, parted) == after[:parted]).all()
    slots.check([one, two, third])


def test_a_reader_ahead_publishes_up_to_its_last_token() -> None:
    """The KV of the last known token depends on one that is not known yet."""
    slots = manager(1, ahead=True)
    req = admit(slots, SHARED)
    fill(req)
    slots.publish(req, 12)
    assert req.held.shared_len == 11
    req.ids.append(5)
    slots.publish(req, 12)
    assert req.held.shared_len == 12
    again = request([*SHARED, 5, 6])
    assert slots.cached_len(again) == 12
    again = request([*SHARED, 6])
    assert slots.cached_len(again) == 11


def test_the_largest_ids_make_distinct_keys() -> None:
    slots = manager(1, ahead=True)
    top = 2**31 - 1
    req = admit(slots, [top, top, 0, top])
    fill(req)
    slots.publish(req, 4)
    assert slots.cached_len(request([top, top, 0, top])) == 3
    assert slots.cached_len(request([top, 0, 0, top])) == 0
    assert np.array_equal(slots.table.slots(req.held.row, 0, 3), slots.cache.all_slots())
