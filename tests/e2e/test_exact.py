"""One text per request and seed: no drafter, tree, chunk, page, cache, batch or retraction changes
it, and log-probabilities are those of the text.

What a text has to be is worked out by `oracle`, which shares no code with the engine. CI runs as
many engines as it takes for every two settings to meet; `make slow` runs all.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_rig import SHAPES, Steps, Watch, finished, make_draft, shape_options
from draft_rig import Reference as DraftReference
from drafting import PLUGINS
from fixed_costs import STEEP, fix_costs
from oracle import ASKED, Case, Oracle
from pairs import Row, every, name_of, paired
from serving import Launch
from talk import accepted, drained, generate, together

from sgl_spec import LLM, Completion, SamplingParams
from sgl_spec.request import Speculation
from sgl_spec.speculative import model_drafter

MODELS = ("EAGLE", "EAGLE3", "STANDALONE", "TARGET")  # TARGET drafts for itself
KINDS = ("none", "NGRAM", *MODELS, "SELF", "JUNK")

AXES: dict[str, tuple[Any, ...]] = {
    "kind": KINDS,
    "shape": tuple(SHAPES),
    "page": (1, 4, 16),
    "chunk": (16, 64, -1),
    "asked": ASKED,
    "way": ("twice", "uncached", "pool", "leave", "rest"),
    "costs": ("none", "steep"),
}


def fits(row: Row) -> bool:
    """Whether the setting means something there."""
    drafts = row["kind"] != "none"
    shaped = row["kind"] in ("NGRAM", *MODELS)
    return (
        (shaped or row["shape"] == "chain")
        and (drafts or row["costs"] == "none")
        and (drafts or row["way"] != "rest")
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class World:
    """The target, its drafts, what texts have to be, and what drafts have to say."""

    def __init__(self, target: Path, directory: Path) -> None:
        self.oracle = Oracle(target)
        self.target = target
        kinds = MODELS[:-1]
        self.drafts = {kind: make_draft(kind, directory / kind, target) for kind in kinds}
        self.drafts["TARGET"] = target

    @functools.cache  # noqa: B019, one world for all tests
    def reference(self, kind: str) -> DraftReference:
        name = "STANDALONE" if kind == "TARGET" else kind
        reference = DraftReference(name, self.target, self.drafts[kind])
        known: dict[tuple[int, ...], torch.Tensor] = {}
        logits = reference.logits

        def remembered(text: list[int]) -> torch.Tensor:
            if tuple(text) not in known:
                known[tuple(text)] = logits(text)
            return known[tuple(text)]

        reference.logits = remembered  # type: ignore[method-assign]
        return reference

    def options(self, row: Row) -> dict[str, Any]:
        """The flags of an engine."""
        steps, topk, nodes = SHAPES[row["shape"]]
        flags: dict[str, Any] = {
            "page_size": row["page"],
            "chunked_prefill_size": row["chunk"],
            "disable_radix_cache": row["way"] == "uncached",
            "max_total_tokens": 8192,
            "max_running_requests": 16,
        }
        if row["way"] == "pool":
            flags["max_total_tokens"] = 560 if row["page"] < 16 else 704
        return flags | self.drafter(row["kind"], steps, topk, nodes) | whole(row)

    def drafter(self, kind: str, steps: int, topk: int, nodes: int) -> dict[str, Any]:
        """Those of its drafter."""
        if kind in MODELS:
            name = "STANDALONE" if kind == "TARGET" else kind
            path = {"speculative_draft_model_path": str(self.drafts[kind])}
            return {"speculative_algorithm": name} | path | shape_options(steps, topk, nodes)
        flags: dict[str, Any] = {"speculative_algorithm": kind}
        if kind == "NGRAM":
            flags["speculative_num_draft_tokens"] = nodes
        elif kind != "none":
            flags |= {
                "speculative_drafter_module": PLUGINS,
                "speculative_draft_model_path": str(self.target),
            }
        return flags


def whole(row: Row) -> dict[str, Any]:
    drafts = row["kind"] != "none" and row["costs"] == "none"
    return {"speculative_verify_whole_trees": True} if drafts else {}


@pytest.fixture(scope="module")
def world(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tiny_model_dir, tmp_path_factory.mktemp("drafts"))


# --- the ways in which requests come --------------------------------------------------------------

Way = Callable[[LLM, Row, World, list[Case], pytest.MonkeyPatch], list[Completion]]


def run(llm: LLM, world: World, cases: list[Case]) -> list[Completion]:
    """All at once."""
    asks = [case.ask for case in cases]
    done = llm.generate([c.prompt for c in cases], [c.params for c in cases], asks)
    world.oracle.check(cases, done)
    return done


def twice(
    llm: LLM, row: Row, world: World, cases: list[Case], patch: pytest.MonkeyPatch
) -> list[Completion]:
    """Together, then some of them alone, of whose prompts the cache now holds what it can."""
    done = run(llm, world, cases)
    for case in cases[::3]:
        (one,) = run(llm, world, [case])
        done.append(one)
        length = len(case.prompt)
        reused = length - 1 if case.ask is None else case.ask.logprob_start_len % length
        hit = reused // row["page"] * row["page"] if row["way"] == "twice" else 0
        assert one.cached_tokens == hit, len(case.prompt)
    return done


def small_pool(
    llm: LLM, row: Row, world: World, cases: list[Case], patch: pytest.MonkeyPatch
) -> list[Completion]:
    """Requests are retracted in the middle and resume."""
    patch.setattr("sgl_spec.engine.policy.GROWTH_TOKENS", 2)
    done = run(llm, world, cases * (2 if row["asked"] == "plain" else 1))
    if row["asked"] == "plain":
        assert llm.engine.counters.retracted > 0, "the pool was meant to run out"
    return done


def some_leave(
    llm: LLM, row: Row, world: World, cases: list[Case], patch: pytest.MonkeyPatch
) -> list[Completion]:
    """They come one by one, and some are aborted while they wait, are prefilled or decode."""
    rng, steps = random.Random(11), Steps(llm)
    for i, case in enumerate(cases):
        steps.submit(case.prompt, case.params)
        steps.steps(rng.randrange(4))
        if i % 4 == 3:
            llm.engine.abort(str(rng.choice([r for r in range(i + 1) if r not in steps.ends])))
    steps.finish()
    for i, case in enumerate(cases):
        text, left = steps.outputs[i], steps.ends[i] == "abort"
        assert text == (case.output[: len(text)] if left else case.output), case.params
    assert sum(kind == "abort" for kind in steps.ends.values()) > 2
    return []


def some_rest(
    llm: LLM, row: Row, world: World, cases: list[Case], patch: pytest.MonkeyPatch
) -> list[Completion]:
    """Each is drafted for now and then; what a draft model has not read waits, and is bounded."""
    patch.setattr(model_drafter, "EXTENDED_ROWS", 9)
    rng = random.Random(4)
    few = [1] * 9 + [2, 3]
    patch.setattr(SamplingParams, "max_nodes", lambda self, most: rng.choice([*few, most]))
    done = run(llm, world, cases)
    if row["kind"] in MODELS:
        assert llm.engine.control("state")[0]["drafter"]["catch_ups"] > 10
    return done


WAYS: dict[str, Way] = {
    "twice": twice,
    "uncached": twice,
    "pool": small_pool,
    "leave": some_leave,
    "rest": some_rest,
}


def drafts_were_tried(kind: str, done: list[Completion]) -> None:
    """The drafter did what it is there to do in these tests."""
    stats = [one.spec for one in done if one.spec is not None]
    helped, rounds = sum(one.accepted for one in stats), sum(one.verify_ct for one in stats)
    if kind == "none":
        assert not stats
        return
    assert sum(one.proposed for one in stats) > rounds / 2
    assert sum(one.emitted for one in stats) >= rounds
    if kind in ("NGRAM", "SELF", "TARGET"):
        assert helped > 0.1 * rounds
    if kind == "TARGET":
        assert helped > 0.5 * rounds


def check(world: World, row: Row, patch: pytest.MonkeyPatch) -> None:
    """Run an engine through its requests; a draft model's logits are right at every root, too."""
    if row["costs"] == "steep":
        fix_costs(patch, STEEP)
    if row["way"] == "rest":
        patch.setattr(model_drafter, "WAITING_ROWS", 6)
    llm, cases = LLM(str(world.target), **world.options(row)), world.oracle.cases(row["asked"])
    scheduler = llm.engine.scheduler
    scheduler.limits = dataclasses.replace(scheduler.limits, check_every_step=True)
    watch = Watch(llm) if row["kind"] in MODELS else None
    done = WAYS[row["way"]](llm, row, world, cases, patch)
    if row["way"] in ("twice", "uncached") and row["costs"] == "none":
        drafts_were_tried(row["kind"], done)
    if row["asked"] == "plain":  # what the cache holds of answers is used, and right
        turns = world.oracle.next_turns()
        hits = [one.cached_tokens for one in run(llm, world, turns)]
        assert (max(hits) > 0) == (row["way"] != "uncached")
        cases = [*cases, *turns]
    if watch is not None:
        watch.check(world.reference(row["kind"]), [case.prompt + case.output for case in cases])
    finished(llm)


@pytest.mark.parametrize("row", paired(AXES, fits), ids=name_of)
def test_every_pair(world: World, row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    check(world, row, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "way"), sorted({(row["kind"], row["way"]) for row in every(AXES, fits)})
)
def test_everything(world: World, kind: str, way: str) -> None:
    for row in every(AXES | {"kind": (kind,), "way": (way,)}, fits):
        print(name_of(row))
        with pytest.MonkeyPatch.context() as patch:
            check(world, row, patch)


def test_a_seed_decides_and_no_seed_is_reported(world: World) -> None:
    """Without a seed texts vary, and the seed that is reported gives the same text again."""
    llm = LLM(str(world.target), speculative_algorithm="NGRAM", max_total_tokens=8192)
    sampling = {"temperature": 1.0, "max_new_tokens": 24}
    free = llm.generate([[5, 6, 7]] * 20, sampling)
    assert len({tuple(one.output_ids) for one in free}) >= 15
    again = llm.generate([[5, 6, 7]] * 20, [sampling | {"seed": one.seed} for one in free])
    assert [one.output_ids for one in again] == [one.output_ids for one in free]


# --- over HTTP ------------------------------------------------------------------------------------


def as_json(params: SamplingParams) -> dict[str, Any]:
    """`sampling_params` of /generate: what differs from the defaults."""
    default = SamplingParams()
    names = SamplingParams.__struct_fields__
    given = {n: getattr(params, n) for n in names if getattr(params, n) != getattr(default, n)}
    if "logit_bias" in given:
        given["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if isinstance(params.speculation, Speculation):
        given["speculation"] = {"max_draft_tokens": params.speculation.max_draft_tokens}
    return given


def test_settings_over_http(launch: Launch, world: World) -> None:
    """The crowd twice, so that NGRAM can copy in the second; from a pool too small for all."""
    flags = ("--speculative-algorithm", "NGRAM", "--speculative-verify-whole-trees")
    server = launch(*flags, "--max-total-tokens", "900", "--max-running-requests", "16")
    cases = [*world.oracle.cases("settings"), *world.oracle.cases("plain")] * 2
    calls = [functools.partial(generate, server, c.prompt, **as_json(c.params)) for c in cases]
    replies = together(calls)
    for case, reply in zip(cases, replies, strict=True):
        assert reply["output_ids"] == case.output, case.params
        meta = reply["meta_info"]
        assert meta["seed"] == case.params.seed
        most = case.params.max_nodes(12) - 1
        assert meta.get("spec_num_proposed_drafts", 0) <= most * meta.get("spec_verify_ct", 0)
        assert len(meta.get("spec_correct_drafts_histogram", [])) <= most + 1
    assert sum(map(accepted, replies)) > len(replies)
    drained(server)
