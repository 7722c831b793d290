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
