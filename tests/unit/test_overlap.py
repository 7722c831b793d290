"""Batches launched before the one ahead of them is collected: the text, the slots and the counts
are those of one batch at a time."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest
from fake_grammar import compile_counting
from fakes import VOCAB
from late import LateWorker
from rig import NODES, Rig

from sgl_spec.engine.compiling import Compiling
from sgl_spec.engine.grammar_jobs import GrammarJobs
from sgl_spec.engine.worker import Worker
from sgl_spec.request import LogprobParams, SamplingParams
from sgl_spec.speculative.ngram import IndexSize, NgramDrafter, NgramOptions


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission keeps hardly any room, so that a small pool runs out within a test's few tokens."""
    monkeypatch.setattr("sgl_spec.engine.policy.GROWTH_TOKENS", 2)


def late(rig: Rig) -> LateWorker:
    assert isinstance(rig.worker, LateWorker)
    return rig.worker


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, VOCAB) for _ in range(count)]


@pytest.mark.parametrize("haste", [0.0, 0.5])
@pytest.mark.parametrize("drafter", ["none", "oracle"])
@pytest.mark.parametrize("page", [1, 16])
def test_text_is_the_plain_text(page: int, drafter: str, haste: float) -> None:
    rig = Rig(drafter=drafter, page=page, worker=partial(LateWorker, haste=haste))
    rng = random.Random(page)
    asked = {}
    for i in range(16):
        params = {"temperature": float(i % 2), "seed": i, "max_new_tokens": rng.randint(1, 50)}
        asked[str(i)] = _ids(rng, rng.randint(1, 40)), params
        rig.submit(str(i), asked[str(i)][0], **params)
    rig.run()
    for rid, (prompt, params) in asked.items():
        assert rig.outputs[rid] == rig.model.reference(prompt, SamplingParams(**params))
    worker = late(rig)
    assert worker.behind > 0.8 * worker.rounds, "batches did not run ahead"
    assert 1 <= worker.most_behind <= (1 if drafter == "none" else NODES)


def test_plain_decoding_to_a_length_computes_no_round_for_nothing() -> None:
    rig = Rig(worker=LateWorker, chunk=64)
    for i in range(6):
        rig.submit(str(i), [1 + i, 2, 3], max_new_tokens=20, ignore_eos=True)
    rig.run()
    assert late(rig).dropped == 0
    assert late(rig).rounds == rig.counters.rounds == 19


def test_what_is_computed_behind_an_end_is_dropped_and_not_counted() -> None:
    """Stops in the middle of accepted blocks, known one round late."""
    rig = Rig(drafter="oracle", rows=4, worker=LateWorker)
    prompt = [2, 7, 1, 8]
    params = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True, seed=1)
    whole = rig.model.reference(prompt, params)
    cuts = [p for p in range(1, 40) if whole[p] not in whole[:p]]
    for p in cuts:
        rig.submit(
            str(p),
            prompt,
            max_new_tokens=40,
            ignore_eos=True,
            stop_token_ids=(whole[p],),
            logprobs=LogprobParams(),
        )
    rig.run()
    verified = 0
    for p in cuts:
        end = rig.ends[str(p)]
        assert rig.outputs[str(p)] == whole[: p + 1]
        assert end.spec.emitted == p, "all but the first token come of rounds"
        assert sum(end.spec.histogram) == end.spec.verify_ct
        assert sum(i * n for i, n in enumerate(end.spec.histogram)) == end.spec.accepted
        logprobs = [one for chunk in rig.chunks[str(p)] for one in chunk.logprobs.values]
        assert len(logprobs) == p + 1
        verified += end.spec.verify_ct
    assert late(rig).dropped > len(cuts)
    assert rig.counters.verify_ct == verified
    assert rig.counters.emitted == sum(cuts)
    assert rig.counters.rounds < late(rig).rounds, "a round of nobody is none"


def test_a_batch_in_flight_is_work_until_it_is_collected() -> None:
    rig = Rig(worker=LateWorker)
    rig.submit("a", [1, 2, 3], max_new_tokens=40, stop_token_ids=tuple(range(VOCAB)))
    rig.step()
    assert "a" not in rig.ends
    rig.step()
    assert rig.ends["a"].finish.kind == "stop"
    rig.submit("b", [1, 2, 3], max_new_tokens=40, ignore_eos=True)
    for _ in range(4):
        rig.step()
    rig.scheduler.abort("b")
    rig.step()
    assert rig.ends["b"].finish.kind == "abort"
    rig.run()


def test_a_flush_right_after_the_last_reply_is_not_refused() -> None:
    rig = Rig(worker=LateWorker)
    stop = rig.model.reference([1, 2, 3], SamplingParams(temperature=0, seed=1, max_new_tokens=9))
    rig.submit("a", [1, 2, 3], max_new_tokens=40, stop_token_ids=(stop[-1],))
    while "a" not in rig.ends:
        rig.step()
    assert rig.scheduler.has_work, "the round behind its end is in flight"
    assert rig.slots.table.free_rows == rig.slots.table.num_rows - 1
    assert rig.scheduler.flush()
    assert not rig.scheduler.has_work
    rig.drained()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_an_abort_is_answered_at_once_and_gives_everything_back(phase: str) -> None:
    rig = Rig(worker=LateWorker, chunk=8)
    req = rig.submit("a", list(range(1, 41)), max_new_tokens=40, ignore_eos=True)
    for _ in range(3 if phase == "prefill" else 12):
        rig.step()
    rig.submit("b", list(range(2, 12)), max_new_tokens=20, ignore_eos=True)
    assert req.in_flight
    assert req.phase.value == phase
    rig.scheduler.abort("a")
    rig.step()
    assert rig.ends["a"].finish.message == "Aborted"
    rig.submit("c", [9, 9], max_new_tokens=5, ignore_eos=True)
    rig.run()
    most = len(rig.outputs["a"])
    params = SamplingParams(seed=1, temperature=0, max_new_tokens=most, ignore_eos=True)
    assert rig.outputs["a"] == rig.model.reference(list(range(1, 41)), params)
    assert len(rig.outputs["b"]) == 20


def test_without_overlap_nothing_is_in_flight_between_steps() -> None:
    rig = Rig(worker=LateWorker, overlap=False)
    rig.submit("a", [1, 2, 3], max_new_tokens=10, ignore_eos=True, stream=True)
    for tokens in range(1, 11):
        rig.step()
        assert len(rig.outputs["a"]) == tokens
    assert late(rig).behind == 0
    assert not rig.scheduler.has_work


def test_a_batch_with_a_seam_is_collected_before_the_next_is_planned() -> None:
    """Its replies go out while the next one runs."""
    rig = Rig(worker=partial(LateWorker, ahead=lambda req: req.rid != "seam"))
    rig.submit("seam", [1, 2, 3], max_new_tokens=10, ignore_eos=True, stream=True)
    for tokens in range(10):
        rig.step()
        assert len(rig.outputs.get("seam", [])) == tokens
    rig.submit("free", [1, 2, 3, 4], max_new_tokens=30, ignore_eos=True)
    rig.run()
    assert late(rig).most_behind == 1, "the other one went on ahead by itself"
    assert len(rig.outputs["free"]) == 30


def test_a_grammar_is_never_run_ahead_of() -> None:
    """The next mask depends on the tokens under way, and this device makes it at once."""
    rig = Rig(drafter="random", worker=partial(LateWorker, haste=1.0))
    rig.scheduler.compiling = Compiling(GrammarJobs(compile_counting, VOCAB))
    asked = {}
    for i in range(12):
        grammar = "3,9" if i % 3 == 0 else None
        asked[str(i)] = [1 + i, 5], {"regex": grammar, "seed": i, "temperature": 1.0}
        rig.submit(str(i), asked[str(i)][0], max_new_tokens=4 + 3 * i, **asked[str(i)][1])
    rig.run()
    alone = Rig(drafter="random")
    alone.scheduler.compiling = Compiling(GrammarJobs(compile_counting, VOCAB))
    for i in range(12):
        alone.submit(str(i), asked[str(i)][0], max_new_tokens=4 + 3 * i, **asked[str(i)][1])
    alone.run()
    assert rig.outputs == alone.outputs
    assert late(rig).behind > 0, "the others run ahead once the grammars have ended"


def test_a_burst_with_one_prompt_computes_it_once() -> None:
    rig = Rig(worker=LateWorker, rows=16, slots=4000, chunk=64)
    prompt = [1 + i % 60 for i in range(50)]
    for i in range(16):
        rig.submit(str(i), prompt, max_new_tokens=12, temperature=1.0, seed=i, ignore_eos=True)
    rig.run()
    for i in range(16):
        params = SamplingParams(temperature=1.0, seed=i, max_new_tokens=12, ignore_eos=True)
        assert rig.outputs[str(i)] == rig.model.reference(prompt, params)
    assert sorted(end.cached_tokens for end in rig.ends.values()) == [0] + [49] * 15


def test_the_next_turn_finds_what_ended_a_moment_ago() -> None:
    """An ended request's tokens are reusable although a round of it is still in flight."""
    rig = Rig(drafter="oracle", worker=LateWorker)
    prompt = [5, 6, 7, 8]
    whole = rig.model.reference(
        prompt, SamplingParams(temperature=0, seed=1, max_new_tokens=20, ignore_eos=True)
    )
    end = next(i for i in range(10, 20) if whole[i] not in whole[:i])
    rig.submit("1", prompt, max_new_tokens=40, ignore_eos=True, stop_token_ids=(whole[end],))
    while "1" not in rig.ends:
        rig.step()
    assert rig.scheduler.has_work
    full = prompt + rig.outputs["1"]
    rig.submit("2", [*full, 9], max_new_tokens=8)
    rig.run()
    assert rig.ends["2"].cached_tokens >= len(full) - 1
    params = SamplingParams(temperature=0, seed=1, max_new_tokens=8)
    assert rig.outputs["2"] == rig.model.reference([*full, 9], params)


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize(
    ("page", "drafter", "count"), [(1, "random", 1200), (16, "none", 600), (4, "oracle", 200)]
)
def test_a_soak_of_everything_gives_every_slot_back(page: int, drafter: str, count: int) -> None:
    """Requests that share prefixes, come in bursts, have seams, stop, are aborted at any moment and
    do not fit the pool. Every step checks who owns what."""
    rng = random.Random(page)
    # One request in ten has a seam.
    worker = partial(LateWorker, ahead=lambda req: int(req.rid) % 10 > 0, haste=0.3)
    rig = Rig(drafter=drafter, page=page, slots=280, rows=6, max_queued=40, worker=worker)
    head = _ids(rng, 16)
    waiting = list(range(count))
    asked: dict[str, tuple[list[int], dict[str, object]]] = {}
    aborted: set[str] = set()

    def submit(prompt: list[int]) -> None:
        rid = str(waiting.pop())
        params: dict[str, object] = {
            "temperature": rng.choice([0.0, 0.7]),
            "seed": int(rid),
            "max_new_tokens": rng.choice([0, 1, 2, *rng.choices(range(50), k=5)]),
            "stop_token_ids": (rng.randrange(VOCAB),),
            "frequency_penalty": rng.choice([0.0, 0.0, 0.5]),
        }
        rig.submit(rid, prompt, stream=rng.random() < 0.5, **params)
        asked[rid] = prompt, params

    while waiting or rig.scheduler.has_work:
        if waiting and rng.random() < 0.2:
            shared = head[: rng.choice([0, 8, 16])]
            prompt = shared + _ids(rng, rng.randint(1, 40))
            copies = 16 if rng.random() < 0.03 else rng.randint(1, 3)
            for _ in range(min(copies, len(waiting))):
                submit(prompt)
        alive = [req.rid for req in (*rig.scheduler.running, *rig.scheduler.waiting)]
        if alive and rng.random() < 0.05:
            victim = rng.choice(alive)
            rig.scheduler.abort(victim)
            aborted.add(victim)
        rig.step()
    rig.drained()
    ends = Counter(end.finish.kind for end in rig.ends.values())
    assert sum(ends.values()) == count
    assert ends["abort"] < 0.4 * count, ends
    assert rig.counters.retracted > 0
    assert late(rig).dropped > count / 40
    assert late(rig).behind > late(rig).rounds / 4
    assert aborted == {rid for rid, end in rig.ends.items() if end.finish.message == "Aborted"}
    for rid, end in rig.ends.items():
        prompt, params = asked[rid]
        expect = rig.model.reference(prompt, SamplingParams(**params))  # type: ignore[arg-type]
        got = rig.outputs.get(rid, [])
        assert got == (expect[: len(got)] if end.finish.kind == "abort" else expect)


@pytest.mark.parametrize("defers", [False, True])
def test_a_drafter_may_learn_behind_the_next_round(defers: bool) -> None:
    """The text does not depend on it, and hardly anything is lost of what is accepted."""
    rig = Rig(drafter="random", rows=4)
    options = NgramOptions(num_draft_tokens=NODES, capacity=50_000)
    drafter = NgramDrafter(4, options, IndexSize.of(50_000, 200, 4))
    worker = rig.worker
    assert isinstance(worker, Worker)
    worker.drafter, worker.defers, rig.drafter = drafter, defers, None
    for wave in range(4):
        for i in range(8):
            rig.submit(f"{wave} {i}", [1 + i, 2, 3], max_new_tokens=40, ignore_eos=True)
        while rig.scheduler.has_work:
            rig.step()
        for i in range(8):
            params = SamplingParams(seed=1, temperature=0, max_new_tokens=40, ignore_eos=True)
            assert rig.outputs[f"{wave} {i}"] == rig.model.reference([1 + i, 2, 3], params)
    rig.drained()
    assert rig.counters.accepted > 500
