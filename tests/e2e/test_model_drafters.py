"""EAGLE, EAGLE3 and STANDALONE in the engine, with random drafts for a tiny target.

Whatever happens to a request, its text is the text without speculation, and what the draft model
says at the root of every round is what it says when it is run alone over the text.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from draft_rig import (
    KINDS,
    SHAPES,
    Steps,
    Watch,
    World,
    disturbed,
    drafted,
    finished,
    ids,
    settings,
    whole,
)

from sgl_spec import SamplingParams
from sgl_spec.speculative import model_drafter

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def world(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tiny_model_dir, tmp_path_factory.mktemp("drafts"))


# --- the text, and what the draft model is fed ----------------------------------------------------


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_logits(world: World, kind: str, shape: str, page: int) -> None:
    """Prompts cut into chunks, alone and together, then prompts that share their beginnings and
    ends: what the cache holds of them is used, and the drafts' KV in it is right."""
    rng = random.Random(5)
    shared = ids(rng, 70)
    first = [ids(rng, n) for n in (1, 2, 17, 33)] + [shared]
    again = [[*shared[:n], *ids(rng, 3)] for n in (16, 17, 32, 47, 48, 64, 70)] + [shared]
    llm = world.engine(kind, shape, page_size=page, chunked_prefill_size=16)
    watch = Watch(llm)
    texts = []
    for prompts in (first, again):
        sampling = settings(len(prompts), 40)
        done = llm.generate(prompts, sampling)
        assert [one.output_ids for one in done] == world.texts(prompts, sampling)
        texts += whole(prompts, done)
    hits = [one.cached_tokens for one in done]
    # A head's KV before the first differing token is another text's.
    ahead = kind != "STANDALONE"
    assert hits[:-1] == [(n - ahead) // page * page for n in (16, 17, 32, 47, 48, 64, 70)]
    assert hits[-1] == 69 // page * page
    assert watch.check(world.reference(kind), texts) > 100
    assert watch.shared > 70
    finished(llm)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_generation(world: World, kind: str) -> None:
    """Hundreds of rounds, far past the position limit of the heads' configs."""
    prompts = [ids(random.Random(2), 30)]
    sampling = settings(1, 400)
    llm = world.engine(kind, "chain")
    watch = Watch(llm)
    done = llm.generate(prompts, sampling)
    assert [one.output_ids for one in done] == world.texts(prompts, sampling)
    assert watch.check(world.reference(kind), whole(prompts, done)) > 100
    finished(llm)


@pytest.mark.parametrize("kind", KINDS)
def test_two_live_requests_part_after_a_shared_prefix(world: World, kind: str) -> None:
    """The second comes while the first runs, and differs in the token behind what they share."""
    rng = random.Random(7)
    shared = ids(rng, 40)
    prompts = [[*shared, 100, *ids(rng, 5)], [*shared, 200, *ids(rng, 5)], [*shared, 200, 201]]
    sampling = settings(3, 60)
    llm = world.engine(kind)
    watch = Watch(llm)
    run = Steps(llm)
    for i, prompt in enumerate(prompts):
        run.submit(prompt, sampling[i])
        run.steps(4)
    run.finish()
    assert run.outputs == world.texts(prompts, sampling)
    assert run.cached == [0, 39, 40] if kind != "STANDALONE" else [0, 40, 41]
    texts = [p + out for p, out in zip(prompts, run.outputs, strict=True)]
    watch.check(world.reference(kind), texts)
    finished(llm)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_retraction(world: World, kind: str, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that runs out: who gives way resumes with the same text and a draft KV without
    holes."""
    monkeypatch.setattr("sgl_spec.engine.policy.GROWTH_TOKENS", 2)
    rng = random.Random(3)
    prompts = [ids(rng, rng.randint(1, 40)) for _ in range(10)]
    sampling = settings(10, 40)
    llm = world.engine(kind, page_size=page, max_total_tokens=400 if page == 1 else 480)
    watch = Watch(llm)
    done = llm.generate(prompts, sampling)
    assert [one.output_ids for one in done] == world.texts(prompts, sampling)
    assert llm.engine.counters.retracted > 0, "the pool was meant to run out"
    watch.check(world.reference(kind), whole(prompts, done))
    finished(llm)


@pytest.mark.parametrize("kind", KINDS)
def test_skipped_rounds(world: World, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are drafted for now and then; what waits stays bounded and leaves no holes."""
    monkeypatch.setattr(model_drafter, "WAITING_ROWS", 6)
    monkeypatch.setattr(model_drafter, "EXTENDED_ROWS", 9)
    rng = random.Random(4)
    monkeypatch.setattr(
        SamplingParams, "max_nodes", lambda self, most: rng.choice([1] * 9 + [2, 3, most])
    )
    prompts = [ids(rng, n) for n in (3, 20, 21, 50)]
    sampling = settings(4, 120)
    llm = world.engine(kind)
    watch = Watch(llm)
    done = llm.generate(prompts, sampling)
    assert llm.engine.control("state")[0]["drafter"]["catch_ups"] > 10
    monkeypatch.undo()
    assert [one.output_ids for one in done] == world.texts(prompts, sampling)
    assert watch.check(world.reference(kind), whole(prompts, done)) > 20
    finished(llm)


@pytest.mark.parametrize("kind", KINDS)
def test_where_prompts_are_cut_does_not_matter(world: World, kind: str) -> None:
    """The drafts are the same too: as many rounds with every chunk size."""
    rng = random.Random(6)
    prompts = [ids(rng, n) for n in (15, 16, 17, 31, 32, 33, 100)]
    sampling = settings(7, 20)
    expected = world.texts(prompts, sampling)
    rounds = []
    for chunk in (16, 17, 32, -1):
        llm = world.engine(kind, chunked_prefill_size=chunk)
        done = llm.generate(prompts, sampling)
        assert [one.output_ids for one in done] == expected
        rounds.append([one.spec and one.spec.verify_ct for one in done])
        finished(llm)
    assert all(counts == rounds[0] for counts in rounds)


# --- acceptance -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("steps", [1, 3, 7])
def test_the_target_as_its_own_draft(
    world: World, steps: int, temperature: float, page: int
) -> None:
    """Every token is accepted: a round that the end does not cut emits steps + 1."""
    flags = {"speculative_num_steps": steps, "speculative_num_draft_tokens": steps + 1}
    llm = drafted(world.target, "STANDALONE", world.target, "chain", page_size=page, **flags)
    prompts = [ids(random.Random(n), n) for n in (1, 5, 40)]
    sampling = [
        {"temperature": temperature, "seed": i, "max_new_tokens": 50, "ignore_eos": True}
        for i in range(3)
    ]
    done = llm.generate(prompts, sampling)
    assert [one.output_ids for one in done] == world.texts(prompts, sampling)
    for one in done:
        assert one.spec is not None
        assert one.spec.verify_ct == -(-49 // (steps + 1)), one.spec
    finished(llm)


@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE3"])
def test_a_random_head_accepts_little(world: World, kind: str) -> None:
    prompts = [ids(random.Random(n), 20) for n in range(4)]
    done = world.engine(kind, "wide").generate(prompts, settings(4, 60))
    specs = [one.spec for one in done if one.spec is not None]
    assert sum(spec.accepted for spec in specs) < 0.2 * sum(spec.verify_ct for spec in specs)
    assert sum(spec.proposed for spec in specs) > 20 * sum(spec.verify_ct for spec in specs)


def test_shared_noise_finds_more_than_the_most_probable_tokens(
    world: World, tmp_path: Path
) -> None:
    """At temperature 1, with a draft that is nearly the target."""
    near = disturbed(world.target, tmp_path / "near", 0.1)
    prompts = [ids(random.Random(n), 20) for n in range(8)]
    sampling = [
        {"temperature": 1.0, "seed": i, "max_new_tokens": 80, "ignore_eos": True} for i in range(8)
    ]
    rounds = {}
    for how in ("shared-noise", "topk"):
        llm = drafted(world.target, "STANDALONE", near, speculative_draft_sampling=how)
        done = llm.generate(prompts, sampling)
        rounds[how] = sum(one.spec.verify_ct for one in done if one.spec is not None)
    assert rounds["shared-noise"] < 0.95 * rounds["topk"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rule", "topk"), [("rejection", 1), ("rejection", 2), ("block", 1)])
def test_sampled_drafts(world: World, kind: str, rule: str, topk: int) -> None:
    """Trees of a fixed shape, drawn from the draft's distribution: the roots' logits are right, a
    greedy text is the target's, and a seed repeats a sampled one."""
    name = {"rejection": "use_rejection_sampling", "block": "use_block_verification"}[rule]
    flags = {
        f"speculative_{name}": True,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": 4 if topk == 1 else 8,
    }
    prompts = [ids(random.Random(n), 20) for n in range(6)]
    sampling = settings(6, 50)
    texts = []
    for _ in range(2):
        llm = world.engine(kind, "chain", **flags)
        watch = Watch(llm)
        done = llm.generate(prompts, sampling)
        texts.append([one.output_ids for one in done])
        watch.check(world.reference(kind), whole(prompts, done))
        finished(llm)
    assert texts[0] == texts[1]
    assert texts[0][::2] == world.texts(prompts, sampling)[::2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampled_from_the_target_itself_everything_is_accepted(
    world: World, temperature: float
) -> None:
    flags = {"speculative_use_rejection_sampling": True, "speculative_num_steps": 5}
    flags["speculative_num_draft_tokens"] = 6
    llm = drafted(world.target, "STANDALONE", world.target, "chain", **flags)
    sampling = {"temperature": temperature, "seed": 1, "max_new_tokens": 61, "ignore_eos": True}
    (one,) = llm.generate([[5, 6, 7]], sampling)
    assert one.spec is not None
    assert one.spec.verify_ct == 10
