"""EAGLE, EAGLE3 and STANDALONE among other requests, at the ends of texts, and at the start."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from draft_rig import (
    KINDS,
    Watch,
    World,
    drafted,
    finished,
    ids,
    make_draft,
    settings,
    whole,
)
from tiny import make_tiny

from sgl_spec.errors import ConfigError
from sgl_spec.request import Speculation
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


# --- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_batch(world: World, kind: str) -> None:
    """Requests that may not be drafted for, or only a little, beside others: each has its text and
    its bound, and the draft model runs tree nodes for those that want them only."""
    rng = random.Random(9)
    prompts = [ids(rng, rng.randint(1, 50)) for _ in range(16)]
    bounds = [None, False, Speculation(max_draft_tokens=1), Speculation(max_draft_tokens=3)]
    sampling = settings(16, 30)
    for i, one in enumerate(sampling):
        one["speculation"] = bounds[i // 2 % 4]
    llm = world.engine(kind, page_size=4)
    watch = Watch(llm)
    done = llm.generate(prompts, sampling)
    assert [one.output_ids for one in done] == world.texts(prompts, sampling)
    for i, one in enumerate(done):
        assert one.spec is not None
        most = [7, 0, 1, 3][i // 2 % 4]
        assert one.spec.proposed <= most * one.spec.verify_ct
        assert (one.spec.proposed > 0) == (most > 0)
    watch.check(world.reference(kind), whole(prompts, done))
    finished(llm)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_without_speculation_cost_no_draft_steps(world: World, kind: str) -> None:
    """Their text still enters the draft's KV, in few forwards."""
    llm = world.engine(kind)
    watch = Watch(llm)
    llm.generate([[5, 6, 7], [8, 9]], settings(2, 150, speculation=False))
    stats = llm.engine.control("state")[0]["drafter"]
    assert stats["tree_forwards"] == 0
    assert watch.forwards <= 1 + 2 * (150 // model_drafter.WAITING_ROWS)
    (again,) = llm.generate([[5, 6, 7, *llm.generate([[5, 6, 7]], settings(1, 150))[0].output_ids]])
    assert again.cached_tokens > 100
    finished(llm)


@pytest.mark.parametrize("kind", ["STANDALONE", "EAGLE3"])
def test_stops_inside_a_block(world: World, kind: str) -> None:
    """The text ends at the stop wherever it lies in what was accepted, and the next turn finds the
    KV of what was kept."""
    draft = {"STANDALONE": world.target}.get(kind, world.drafts[kind])
    llm = drafted(world.target, kind, draft)
    prompt = [5, 6, 7, 8]
    (plain,) = world.texts([prompt], settings(1, 60))
    cuts = [i for i in range(1, 60) if plain[i] not in plain[:i]][:12]
    sampling = [
        {
            "temperature": 0.0,
            "max_new_tokens": 60,
            "ignore_eos": True,
            "stop_token_ids": (plain[i],),
        }
        for i in cuts
    ]
    done = llm.generate([prompt] * len(cuts), sampling)
    assert [one.output_ids for one in done] == [plain[: i + 1] for i in cuts]
    turn = [[*prompt, *plain[: i + 1], 300, 301] for i in cuts]
    again = llm.generate(turn, settings(len(turn), 20))
    assert [one.output_ids for one in again] == world.texts(turn, settings(len(turn), 20))
    finished(llm)


# --- the rest -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_counted(world: World, kind: str) -> None:
    llm = world.engine(kind)
    engine, draft = llm.engine, llm.engine.draft_model
    assert draft is not None
    memory = engine.info["memory"]
    slots = engine.num_slots
    assert memory["draft_weight"] == draft.weight_bytes / 1e9 > 0
    assert memory["draft_kvcache"] == pytest.approx(slots * draft.kv_bytes_per_token / 1e9)
    both = engine.model.kv_bytes_per_token + draft.kv_bytes_per_token
    assert memory["kvcache"] == pytest.approx(slots * both / 1e9)
    assert memory["weight"] == (engine.model.weight_bytes + draft.weight_bytes) / 1e9


def test_the_draft_takes_part_of_the_pool(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the same free memory, fewer slots."""

    class Memory:
        available = 64 << 20

    monkeypatch.setattr("psutil.virtual_memory", Memory)
    plain = drafted(world.target, None, max_total_tokens=None).engine
    own = drafted(world.target, "STANDALONE", world.target, max_total_tokens=None).engine
    assert own.num_slots == pytest.approx(plain.num_slots / 2, rel=0.01)


def test_room_for_draft_steps(world: World) -> None:
    """Draft steps may write more slots than the tree has nodes."""
    llm = drafted(
        world.target,
        "STANDALONE",
        world.drafts["STANDALONE"],
        speculative_num_steps=8,
        speculative_eagle_topk=8,
        speculative_num_draft_tokens=4,
    )
    assert llm.engine.scheduler.limits.round_slots == 64
    watch = Watch(llm)
    prompts = [ids(random.Random(1), 20)]
    done = llm.generate(prompts, settings(1, 40))
    assert [one.output_ids for one in done] == world.texts(prompts, settings(1, 40))
    watch.check(world.reference("STANDALONE"), whole(prompts, done))
    assert llm.engine.slots.table.width >= 2048 + 128
    finished(llm)


def test_the_end_of_the_context(tmp_path: Path) -> None:
    """Drafts reach beyond the last position; nothing is written outside the row."""
    target = make_tiny(tmp_path / "short", max_position_embeddings=64)
    plain = drafted(target, None)
    for kind in KINDS:
        llm = drafted(target, kind, make_draft(kind, tmp_path / kind, target), "wide")
        for length in (1, 40, 62, 63):
            sampling = {"temperature": 0.0, "max_new_tokens": 64 - length, "ignore_eos": True}
            prompt = ids(random.Random(length), length)
            (one,) = llm.generate([prompt], sampling)
            assert one.output_ids == plain.generate([prompt], sampling)[0].output_ids
        finished(llm)


def test_plug_ins_can_follow_the_kv(world: World) -> None:
    """A drafter registered from outside that keeps KV in the target's slots."""
    module = str(ROOT / "tests" / "kv_drafters.py")
    llm = drafted(world.target, None, speculative_algorithm="TWIN", max_total_tokens=2048,
                  speculative_drafter_module=module, speculative_num_draft_tokens=5,
                  speculative_verify_whole_trees=True)  # fmt: skip
    prompts = [ids(random.Random(n), 20) for n in range(4)]
    run = functools.partial(llm.generate, prompts, settings(4, 41))
    for done in (run(), run()):
        assert [one.output_ids for one in done] == world.texts(prompts, settings(4, 41))
        assert all(one.spec is not None and one.spec.verify_ct <= 9 for one in done)
    finished(llm)


def test_a_draft_that_does_not_fit_stops_the_start(world: World, tmp_path: Path) -> None:
    other = make_tiny(tmp_path, vocab=300)
    with pytest.raises(ConfigError, match="tokenizer"):
        drafted(world.target, "STANDALONE", other)
    with pytest.raises(ConfigError, match="EAGLE3"):
        drafted(world.target, "EAGLE", world.drafts["EAGLE3"])
