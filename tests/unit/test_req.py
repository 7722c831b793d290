"""Where a request ends within the tokens it is given, and when it reports them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_spec.engine.replies import chunk_of, is_due
from sgl_spec.engine.req import Req, TreeRecord, make_req
from sgl_spec.request import (
    MAX_DRAFT_ROUNDS,
    DraftRound,
    RoundTimes,
    SamplingParams,
    TokenizedRequest,
)
from sgl_spec.text import StopMatcher


class Silent(StopMatcher):
    """Stop strings that never occur."""

    def __init__(self) -> None: ...

    def push(self, token: int) -> str | None:
        return None


def request(sampling: SamplingParams, stops: StopMatcher | None) -> Req:
    asked = TokenizedRequest(rid="r", input_ids=[9, 9], sampling=sampling)
    return make_req(asked, [0], stops)


@given(
    rounds=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=5),
    longest=st.integers(1, 8),
    least=st.integers(0, 8),
    own=st.sets(st.integers(0, 3), max_size=2),
    ignore_eos=st.booleans(),
)
def test_the_short_way_ends_where_the_long_one_does(
    rounds: list[list[int]], longest: int, least: int, own: set[int], ignore_eos: bool
) -> None:
    """Without stop strings and grammar a round's tokens are looked at in one go."""
    sampling = SamplingParams(
        max_new_tokens=longest,
        min_new_tokens=min(least, longest),
        stop_token_ids=tuple(own),
        ignore_eos=ignore_eos,
    )
    short, long = request(sampling, None), request(sampling, Silent())
    for tokens in rounds:
        assert short.append(tokens) == long.append(tokens)
        assert (short.ids, short.finish) == (long.ids, long.finish)
        if long.finish is not None:
            break


@pytest.mark.parametrize(
    ("own", "server", "sizes"),
    [
        (None, 3, [1, 3, 3, 3]),
        (2, 3, [1, 2, 2, 2, 2, 2]),
        (5, 3, [1, 5, 5]),
        (1, 3, [1] * 12),
    ],
)
def test_a_requests_own_stream_interval_goes_first(
    own: int | None, server: int, sizes: list[int]
) -> None:
    """Shorter than the server's or longer; the first token comes at once in any case."""
    sampling = SamplingParams(max_new_tokens=100, stream_interval=own)
    asked = TokenizedRequest(rid="r", input_ids=[9, 9], sampling=sampling, stream=True)
    req, found = make_req(asked, [0], None), []
    for token in range(1, 13):
        req.append([token])
        if is_due(req, server):
            found.append(len(chunk_of(req).ids))
    assert found == sizes


def test_rounds_that_are_shown_have_a_bound() -> None:
    """Taking some to the client makes no room for more."""
    record = TreeRecord()
    one = DraftRound(
        tokens=[7], parents=[-1], scores=[], probs=[1.0], path=[], emitted=[8],
        emitted_probs=[0.5], requests=1, option=None, times=RoundTimes(),
    )  # fmt: skip
    for _ in range(MAX_DRAFT_ROUNDS - 1):
        record.add(one)
    assert len(record.take()) == MAX_DRAFT_ROUNDS - 1
    record.add(one)
    record.add(one)
    assert record.take() == [one]
    assert record.take() == []
