"""First tokens of a burst, in a world of its own time: how long forwards take is given, and the
scheduler is the real one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from fakes import VOCAB

from sgl_spec.args import CHUNK_TOKENS
from sgl_spec.engine.batch import Batch, Launched, PrefillBatch, StepOutput
from sgl_spec.engine.limits import Limits
from sgl_spec.engine.metrics import EngineCounters
from sgl_spec.engine.req import Req, make_req
from sgl_spec.engine.scheduler import Scheduler
from sgl_spec.engine.slots import SlotManager
from sgl_spec.request import SamplingParams, TokenizedRequest

TOKEN_S = 14.8e9 / 600e12  # an 8B model's prompt token on a GPU that computes 600 TFLOP/s
ROUND_S = 0.005
HOST_S = 0.001


@dataclass(frozen=True, slots=True)
class Timed(Launched):
    """done: when the device has computed it."""

    done: float
    output: StepOutput


class Clock:
    """A worker that tells what time it is."""

    def __init__(self) -> None:
        self.now = self._free = 0.0
        self.chunks: list[int] = []  # tokens of each prefill forward
        self.idle = 0.0  # time in which the device had nothing to do

    def runs_ahead(self, reqs: Sequence[Req]) -> bool:
        return True

    def launch(self, batch: Batch) -> Launched:
        self.now += HOST_S
        if isinstance(batch, PrefillBatch):
            self.chunks.append(int(batch.takes.sum()))
            seconds = max(ROUND_S, self.chunks[-1] * TOKEN_S)
            tokens = [[1] if final else [] for final in batch.finals]
        else:
            seconds, tokens = ROUND_S, [[1] for _ in batch.rows]
        self.idle += max(0.0, self.now - self._free)
        self._free = max(self.now, self._free) + seconds
        return Timed(self._free, StepOutput(tokens, [0] * len(tokens)))

    def collect(self, launched: Launched) -> StepOutput:
        assert isinstance(launched, Timed)
        self.now = max(self.now, launched.done)
        return launched.output

    def shareable(self, req: Req) -> int:
        return req.held.committed_len

    def open(self, req: Req) -> None: ...
    def begin(self, req: Req) -> None: ...
    def settle(self) -> None: ...
    def resume(self, launched: Launched) -> Launched:
        return launched

    def observe(self, taken: list[int]) -> None: ...
    def close(self, row: int) -> None: ...
    def flush(self) -> None: ...


def first_tokens(lens: list[int], **limits: object) -> tuple[np.ndarray, Clock]:
    """Milliseconds to the first tokens of prompts that come all at once."""
    count = len(lens)
    slots = SlotManager(num_slots=100_000, page_size=1, num_rows=count, width=2100, use_cache=False)
    options: dict[str, object] = {
        "max_running": count,
        "max_queued": None,
        "max_request_tokens": 2000,
        "prefill_budget": CHUNK_TOKENS["cuda"],
        "chunked": True,
        "draft_tokens": 1,
        "round_slots": 1,
    }
    clock = Clock()
    scheduler = Scheduler(clock, slots, Limits(**(options | limits)), EngineCounters())  # type: ignore[arg-type]
    rng = random.Random(1)
    for i, length in enumerate(lens):
        ids = [rng.randrange(VOCAB) for _ in range(length)]
        sampling = SamplingParams(temperature=0.0, max_new_tokens=20)
        asked = TokenizedRequest(rid=str(i), input_ids=ids, sampling=sampling, stream=True)
        scheduler.submit(make_req(asked, [], None))
    first: dict[str, float] = {}
    while scheduler.has_work:
        for chunk in scheduler.step():
            first.setdefault(chunk.rid, clock.now * 1e3)
    return np.array([first[str(i)] for i in range(count)]), clock


def test_a_burst_is_packed_into_few_forwards() -> None:
    """48 prompts of 300 tokens, six to a forward, none of them cut."""
    times, clock = first_tokens([300] * 48)
    assert clock.chunks == [1800] * 8
    assert np.array_equal(times, np.sort(times)), "equal prompts go as they came"
    assert times.max() < 1e3 * (48 * 300 * TOKEN_S + 7 * ROUND_S + 10 * HOST_S)


def test_a_forward_takes_no_more_prompts_than_it_is_made_for() -> None:
    """48 short prompts that would fit into one."""
    _, clock = first_tokens([40] * 48, prefill_requests=16)
    assert clock.chunks == [640] * 3


def test_most_first_tokens_do_not_wait_for_a_few_long_prompts() -> None:
    """One prompt in three is long, as where documents are summarised between questions."""
    lens = [800 if i % 3 == 0 else 100 for i in range(48)]
    times, clock = first_tokens(lens)
    alone = sum(lens) * TOKEN_S * 1e3
    assert np.median(times) < 100 < 0.3 * alone + 10
    assert times.max() < alone + 100
    assert max(clock.chunks) <= CHUNK_TOKENS["cuda"]


def test_streams_wait_for_small_chunks_once_they_are_as_many_as_the_prompts() -> None:
    _, clock = first_tokens([300] * 48, pause_tokens=640)
    first = clock.chunks.index(600)
    assert clock.chunks[:first] == [1800] * first, "few streams, many prompts"
    assert first > 0
    assert set(clock.chunks[first:]) == {600}
    assert 6 * first >= 24, "half of the prompts were through"


def test_a_long_prompt_is_not_passed_over_for_ever() -> None:
    """Short prompts that keep coming: all were there first, so that it would be the last."""
    lens = [2000, *[1000] * 60]
    times, _ = first_tokens(lens, max_request_tokens=2100)
    assert (times < times[0]).sum() <= 16, "two a forward went first"


@pytest.mark.parametrize("overlap", [True, False])
def test_the_device_waits_for_the_host_only_where_it_must(overlap: bool) -> None:
    _, clock = first_tokens([300] * 8, overlap=overlap)
    steps = 2 + 19
    assert clock.idle < 4 * HOST_S if overlap else clock.idle > steps * HOST_S * 0.9
