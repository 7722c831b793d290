"""Scheduler, slots, worker and verification over a model whose text depends on every KV slot."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from fakes import EOS, VOCAB, RandomDrafter
from rig import CONTEXT, NODES, Rig

from sgl_spec.engine.policy import TRIED_PER_STEP
from sgl_spec.request import SamplingParams


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission keeps hardly any room, so that a small pool runs out within a test's few tokens."""
    monkeypatch.setattr("sgl_spec.engine.policy.GROWTH_TOKENS", 2)


def _prompts(count: int, rng: random.Random, shared: int = 0) -> list[list[int]]:
    head = [rng.randrange(1, VOCAB) for _ in range(shared)]
    return [
        head + [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(count)
    ]


@pytest.mark.parametrize("drafter", ["none", "random", "oracle"])
@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_the_plain_text(drafter: str, page: int, temperature: float) -> None:
    """Any drafter, any page size, greedy and seeded: the text of step-by-step decoding."""
    rng = random.Random(page)
    rig = Rig(drafter=drafter, page=page)
    prompts = _prompts(12, rng)
    settings = [
        {"temperature": temperature, "seed": i, "max_new_tokens": rng.randint(1, 50)}
        for i in range(len(prompts))
    ]
    for i, (prompt, params) in enumerate(zip(prompts, settings, strict=True)):
        rig.submit(str(i), prompt, **params)
    rig.run()
    for i, (prompt, params) in enumerate(zip(prompts, settings, strict=True)):
        assert rig.outputs[str(i)] == rig.model.reference(prompt, SamplingParams(**params))
    if drafter == "oracle" and temperature == 0:
        assert rig.counters.emitted >= 1.5 * rig.counters.verify_ct, "speculation was not exercised"


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("drafter", ["none", "oracle", "random"])
@pytest.mark.parametrize("page", [1, 4])
def test_retraction_changes_no_text(drafter: str, page: int) -> None:
    rng = random.Random(7)
    rig = Rig(drafter=drafter, page=page, slots=200, rows=8)
    prompts = _prompts(16, rng)
    settings = [
        {"temperature": float(i % 2), "seed": i, "max_new_tokens": 40, "ignore_eos": True}
        for i in range(16)
    ]
    for i, prompt in enumerate(prompts):
        rig.submit(str(i), prompt, **settings[i])
    rig.run()
    assert rig.counters.retracted > 0, "the pool was meant to run out"
    for i, prompt in enumerate(prompts):
        assert rig.outputs[str(i)] == rig.model.reference(prompt, SamplingParams(**settings[i]))
    retracted = sum(chunk.retractions for chunk in rig.ends.values())
    assert retracted == rig.counters.retracted


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("drafter", ["none", "oracle"])
def test_prefix_hits_change_no_text(page: int, drafter: str) -> None:
    rng = random.Random(3)
    rig = Rig(drafter=drafter, page=page, slots=600)
    prompts = _prompts(20, rng, shared=32)
    rig.submit("first", prompts[0], max_new_tokens=5)
    while rig.scheduler.has_work:
        rig.step()
    for i, prompt in enumerate(prompts):
        rig.submit(str(i), prompt, max_new_tokens=20)
    rig.run()
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, seed=1, max_new_tokens=20)
        assert rig.outputs[str(i)] == rig.model.reference(prompt, params)
    hits = [rig.ends[str(i)].cached_tokens for i in range(20)]
    assert min(hits) >= 32 - page, hits


def test_a_burst_with_one_system_prompt_computes_it_once() -> None:
    rng = random.Random(4)
    rig = Rig(chunk=256)
    prompts = _prompts(8, rng, shared=40)
    for i, prompt in enumerate(prompts):
        rig.submit(str(i), prompt, max_new_tokens=4)
    rig.run()
    assert sorted(rig.ends[str(i)].cached_tokens >= 40 for i in range(8)) == [False] + [True] * 7


def test_committed_output_is_reusable_by_the_next_turn() -> None:
    rig = Rig(drafter="oracle")
    prompt = [5, 6, 7, 8]
    rig.submit("turn 1", prompt, max_new_tokens=30, ignore_eos=True)
    while rig.scheduler.has_work:
        rig.step()
    full = prompt + rig.outputs["turn 1"]
    rig.submit("turn 2", [*full, 9], max_new_tokens=3)
    rig.run()
    # All but the last output token: its KV was never computed.
    assert rig.ends["turn 2"].cached_tokens >= len(full) - 1


@pytest.mark.parametrize("drafter", ["oracle", "random", "none"])
def test_counts_are_exact(drafter: str) -> None:
    """n tokens asked for, n tokens delivered; the shorter runs are prefixes of the longest."""
    rig = Rig(drafter=drafter)
    for n in range(41):
        rig.submit(str(n), [3, 1, 4, 1, 5], max_new_tokens=n, ignore_eos=True)
    rig.run()
    for n in range(41):
        assert rig.outputs[str(n)] == rig.outputs["40"][:n]
        assert rig.ends[str(n)].completion_tokens == n
        assert rig.ends[str(n)].finish.kind == "length"


def test_stop_in_the_middle_of_an_accepted_block_ends_there() -> None:
    rig = Rig(drafter="oracle", rows=4)
    prompt = [2, 7, 1, 8]
    whole = rig.model.reference(
        prompt, SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True, seed=1)
    )
    cuts = [p for p in range(1, 40) if whole[p] not in whole[:p]]
    for p in cuts:
        rig.submit(str(p), prompt, max_new_tokens=40, ignore_eos=True, stop_token_ids=(whole[p],))
    rig.run()
    for p in cuts:
        end = rig.ends[str(p)]
        assert rig.outputs[str(p)] == whole[: p + 1]
        assert (end.finish.kind, end.finish.matched) == ("stop", whole[p])
        assert end.completion_tokens == p + 1
        assert end.spec is not None
        assert end.spec.emitted == p, "tokens after the stop are not counted"
        assert sum(end.spec.histogram) == end.spec.verify_ct
        assert sum(i * n for i, n in enumerate(end.spec.histogram)) == end.spec.accepted
    inside = [
        p for p in cuts if rig.ends[str(p)].spec.accepted + rig.ends[str(p)].spec.verify_ct != p
    ]
    assert inside, "no stop fell inside a block"


@pytest.mark.parametrize("drafter", ["none", "oracle"])
def test_minimum_length_holds_back_the_end(drafter: str) -> None:
    rig = Rig(drafter=drafter, spread=2.0)
    for i in range(40):
        rig.submit(
            str(i), [i + 1, 9], max_new_tokens=60, min_new_tokens=20, temperature=1.0, seed=i
        )
    rig.run()
    for i in range(40):
        params = SamplingParams(temperature=1.0, seed=i, max_new_tokens=60, min_new_tokens=20)
        assert rig.outputs[str(i)] == rig.model.reference([i + 1, 9], params)
        assert EOS not in rig.outputs[str(i)][:19]
    assert {rig.ends[str(i)].finish.kind for i in range(40)} == {"stop", "length"}


def test_prompts_and_outputs_up_to_the_last_token_of_the_context() -> None:
    rig = Rig(drafter="oracle", rows=4)
    for left in range(1, 2 * NODES + 2):
        prompt = [1 + (i * 7 + left) % (VOCAB - 1) for i in range(CONTEXT - left)]
        rig.submit(str(left), prompt, max_new_tokens=left, ignore_eos=True)
    rig.run()
    for left in range(1, 2 * NODES + 2):
        assert len(rig.outputs[str(left)]) == left
    rig.submit("over", [1] * CONTEXT, max_new_tokens=1)
    rig.run()
    assert rig.ends["over"].finish.status == 400


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("page", [1, 16])
def test_a_soak_of_everything_gives_every_slot_back(page: int) -> None:
    """500 requests with stops, aborts at every moment and a pool that runs out."""
    rng = random.Random(11)
    rig = Rig(drafter="random", page=page, slots=320, rows=6, max_queued=40)
    pending = [(str(i), prompt) for i, prompt in enumerate(_prompts(500, rng, shared=8))]
    params: dict[str, dict[str, object]] = {}
    aborted: Counter[str] = Counter()
    while pending or rig.scheduler.has_work:
        while pending and rng.random() < 0.3:
            rid, prompt = pending.pop()
            params[rid] = {
                "temperature": rng.choice([0.0, 0.7]),
                "seed": int(rid),
                "max_new_tokens": rng.randint(0, 45),
                "stop_token_ids": (rng.randrange(VOCAB),),
            }
            rig.submit(rid, prompt, stream=rng.random() < 0.5, **params[rid])
            params[rid]["prompt"] = prompt
        if params and rng.random() < 0.1:
            victim = rng.choice(list(params))
            if victim not in rig.ends:
                rig.scheduler.abort(victim)
                aborted[victim] += 1
        rig.step()
    rig.drained()
    assert len(rig.ends) == 500
    assert rig.counters.retracted > 0
    full = [rid for rid, end in rig.ends.items() if end.finish.status == 503]
    assert set(aborted) == {rid for rid, end in rig.ends.items() if end.finish.message == "Aborted"}
    for rid, end in rig.ends.items():
        given = dict(params[rid])
        prompt = given.pop("prompt")
        expect = rig.model.reference(prompt, SamplingParams(**given))  # type: ignore[arg-type]
        got = rig.outputs.get(rid, [])
        if end.finish.kind == "abort":
            assert got == expect[: len(got)]
        else:
            assert got == expect
    assert len(full) < 400


def test_a_full_queue_refuses_by_name_and_keeps_the_rest() -> None:
    rig = Rig(rows=1, max_queued=2)
    for i in range(5):
        rig.submit(str(i), [1, 2, 3], max_new_tokens=2)
    rig.run()
    refused = [rid for rid, end in rig.ends.items() if end.finish.status == 503]
    assert refused == ["3", "4"], "one may run and two may wait"
    assert rig.ends["3"].finish.message == "The request queue is full."
    assert (rig.counters.requests, rig.counters.refused, rig.counters.aborted) == (5, 2, 0)
    waits = [rig.ends[rid].queued_s for rid in "01234"]
    assert waits[3:] == [None, None]
    assert 0 <= waits[0] < waits[1] < waits[2]


def test_streams_report_every_interval_and_the_first_token_at_once() -> None:
    rig = Rig(stream_interval=5)
    rig.submit("a", [1, 2, 3], stream=True, max_new_tokens=12, ignore_eos=True)
    sizes = []
    while rig.scheduler.has_work:
        before = len(rig.outputs.get("a", []))
        rig.step()
        grown = len(rig.outputs.get("a", [])) - before
        if grown:
            sizes.append(grown)
    assert sizes == [1, 5, 5, 1]


def test_decoding_goes_on_while_a_long_prompt_is_prefilled() -> None:
    rig = Rig(chunk=4, rows=2)
    rig.submit("short", [1, 2], stream=True, max_new_tokens=30, ignore_eos=True)
    rig.step()
    rig.submit("long", [1 + i % 60 for i in range(60)], max_new_tokens=1)
    steps = 0
    while "long" not in rig.ends:
        rig.step()
        steps += 1
    assert steps <= 2 * (60 // 4) + 2
    assert len(rig.outputs["short"]) >= 60 // 4 - 1
    rig.run()


def test_lpm_runs_the_cached_prompt_first() -> None:
    rig = Rig(rows=1, schedule_policy="lpm")
    known = [9, 8, 7, 6, 5, 4, 3, 2]
    rig.submit("warm", known, max_new_tokens=1)
    while rig.scheduler.has_work:
        rig.step()
    rig.submit("cold", [1, 1, 1, 1], max_new_tokens=1)
    rig.submit("hit", [*known, 1], max_new_tokens=1)
    rig.run()
    assert list(rig.ends) == ["warm", "hit", "cold"]


@pytest.mark.usefixtures("tight")
def test_the_drafter_sees_each_token_once_across_retractions() -> None:
    seen: dict[int, int] = {}

    class Counting(RandomDrafter):
        def begin(self, row: int, tokens: np.ndarray, known: int) -> None:
            super().begin(row, tokens, known)
            seen[int(tokens[0])] = seen.get(int(tokens[0]), 0) + len(tokens) - known

        def observe(self, batch, tree, accepted):  # type: ignore[no-untyped-def]
            super().observe(batch, tree, accepted)
            for row, count in zip(batch.rows, accepted.counts.tolist(), strict=True):
                seen[int(batch.tokens[row, 0])] += count

    rig = Rig(drafter="random", slots=150, rows=6)
    rig.drafter = rig.scheduler.worker.drafter = Counting(NODES)  # type: ignore[attr-defined]
    for i in range(8):
        rig.submit(str(i), [i + 1, 50, 51], max_new_tokens=40, ignore_eos=True)
    rig.run()
    assert rig.counters.retracted > 0
    assert seen == {i + 1: 43 for i in range(8)}


def test_a_wrong_mask_or_slot_would_be_noticed() -> None:
    """The fake model really depends on every slot: corrupt one and the text differs."""
    rig = Rig()
    rig.submit("a", [1, 2, 3, 4], max_new_tokens=10, ignore_eos=True)
    rig.step()
    worker = rig.scheduler.worker
    slot = worker.table.host[rig.scheduler.running[0].held.row, 1]  # type: ignore[attr-defined]
    for tensor in (worker.kv.k, worker.kv.v):  # type: ignore[attr-defined]
        tensor[0, slot] += torch.tensor(1)
    rig.run()
    params = SamplingParams(temperature=0.0, seed=1, max_new_tokens=10, ignore_eos=True)
    assert rig.outputs["a"] != rig.model.reference([1, 2, 3, 4], params)


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_long_queue_costs_those_that_run_nothing(policy: str) -> None:
    """A step in which nobody can be let in does not look at the queue."""
    rig = Rig(rows=1, schedule_policy=policy)
    for i in range(300):
        rig.submit(str(i), [1 + i % 60, 2, 3], max_new_tokens=4, ignore_eos=True)
    looks = 0

    def count(name: str) -> None:
        plain = getattr(rig.slots.cache, name)

        def counted(*args: object) -> object:
            nonlocal looks
            looks += 1
            return plain(*args)

        setattr(rig.slots.cache, name, counted)

    count("peek")
    count("match")
    rig.step()
    assert 0 < looks <= TRIED_PER_STEP + 4
    assert len(rig.scheduler.running) == 1
    looks = 0
    for _ in range(2):
        rig.step()
    assert looks <= 2, "publishing what was computed"
    rig.run()
    assert len(rig.ends) == 300
