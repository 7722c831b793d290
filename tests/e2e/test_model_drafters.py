"""EAGLE, EAGLE3 and STANDALONE in the engine, with random drafts for a tiny target.

Whatever happens to a request, its text is the text without speculation, and what the draft model
says at the root of every round is what it says when it is run alone over the text.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_rig import KINDS, SHAPES, Reference, Watch, disturbed, drafted, finished, make_draft
from tiny import make_tiny

from sgl_spec import LLM, Completion, SamplingParams
from sgl_spec.errors import ConfigError
from sgl_spec.request import Speculation, TokenizedRequest
from sgl_spec.speculative import model_drafter

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class World:
    """The target, a draft of each kind, and texts without speculation."""

    def __init__(self, target: Path, directory: Path) -> None:
        self.target = target
        self.drafts = {kind: make_draft(kind, directory / kind, target) for kind in KINDS}
        self.plain = drafted(target, None)
        self._references: dict[str, Reference] = {}

    def engine(self, kind: str, shape: str = "tree", **flags: Any) -> LLM:
        return drafted(self.target, kind, self.drafts[kind], shape, **flags)

    def reference(self, kind: str) -> Reference:
        if kind not in self._references:
            self._references[kind] = Reference(kind, self.target, self.drafts[kind])
        return self._references[kind]

    def texts(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[dict[str, Any]]
    ) -> list[list[int]]:
        return [one.output_ids for one in self.plain.generate(prompts, sampling)]


@pytest.fixture(scope="module")
def world(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tiny_model_dir, tmp_path_factory.mktemp("drafts"))


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 512) for _ in range(count)]


def settings(count: int, new: int, **more: Any) -> list[dict[str, Any]]:
    """Greedy and seeded requests in turn."""
    return [
        {"temperature": float(i % 2), "seed": i, "max_new_tokens": new, "ignore_eos": True, **more}
        for i in range(count)
    ]


def whole(prompts: Sequence[list[int]], done: Sequence[Completion]) -> list[list[int]]:
    return [prompt + one.output_ids for prompt, one in zip(prompts, done, strict=True)]


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


class Steps:
    """An engine driven step by step, requests coming and going in between."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.engine
        self.found: list[list[int]] = []
        self.hits: list[int] = []
        self.ends: dict[int, str] = {}

    def submit(self, prompt: list[int], sampling: dict[str, Any]) -> int:
        rid = len(self.found)
        self.found.append([])
        self.hits.append(0)
        params = SamplingParams(**sampling)
        self.engine.submit(TokenizedRequest(rid=str(rid), input_ids=prompt, sampling=params))
        return rid

    def steps(self, count: int) -> None:
        for _ in range(count):
            for chunk in self.engine.step():
                rid = int(chunk.rid)
                self.found[rid] += chunk.ids
                self.hits[rid] = chunk.cached_tokens
                if chunk.finish is not None:
                    assert rid not in self.ends
                    self.ends[rid] = chunk.finish.kind

    def finish(self) -> None:
        while self.engine.has_work:
            self.steps(1)

    @property
    def outputs(self) -> list[list[int]]:
        return self.found

    @property
    def cached(self) -> list[int]:
        return self.hits


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_leave(world: World, kind: str, page: int) -> None:
    """Aborted while they wait, are prefilled, or decode: nobody else's text changes, rows and slots
    that others take over hold no rests."""
    rng = random.Random(11)
    shared = ids(rng, 30)
    llm = world.engine(kind, page_size=page, chunked_prefill_size=16, max_running_requests=5)
    watch = Watch(llm)
    run = Steps(llm)
    prompts, sampling, gone = [], [], set()
    for i in range(30):
        prompts.append(shared[: rng.randrange(31)] + ids(rng, rng.randint(1, 30)))
        sampling += [dict(settings(2, rng.randint(1, 40))[i % 2], seed=i)]
        run.submit(prompts[i], sampling[i])
        run.steps(rng.randrange(4))
        if i % 3 == 2:
            victim = rng.choice([rid for rid in range(i + 1) if rid not in run.ends])
            gone.add(victim)
            llm.engine.abort(str(victim))
    run.finish()
    expected = world.texts(prompts, sampling)
    for i, text in enumerate(run.outputs):
        if run.ends[i] == "abort":
            assert i in gone
            assert text == expected[i][: len(text)]
        else:
            assert text == expected[i]
    assert sum(kind == "abort" for kind in run.ends.values()) > 4
    watch.check(world.reference(kind), [p + e for p, e in zip(prompts, expected, strict=True)])
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
                  speculative_drafter_module=module, speculative_num_draft_tokens=5)  # fmt: skip
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
