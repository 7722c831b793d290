"""One text per request and seed: no drafter, chunk, page, cache, batch or retraction changes it."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import DRAFTERS, drafter_flags, drafter_options
from fixed_costs import FLAT, fix_costs
from reference import Reference
from serving import Launch, Server
from talk import Reply, accepted, drained, flush, generate, speculated, together

from sgl_spec import LLM, Completion, SamplingParams
from sgl_spec.speculative.sampling import build_rows, draw

NEW = 24

Make = Callable[..., LLM]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path) -> Make:
    """`make(drafter, **flags)`: an engine that verifies whole trees, as if rows were free, and
    checks every slot after every step."""
    fix_costs(monkeypatch, FLAT)

    def build(drafter: str, **flags: Any) -> LLM:
        sizes = {"max_total_tokens": 8192, "max_running_requests": 16}
        llm = LLM(str(tiny_model_dir), **(sizes | drafter_options(drafter, tiny_model_dir) | flags))
        scheduler = llm.engine.scheduler
        scheduler.limits = dataclasses.replace(scheduler.limits, check_every_step=True)
        return llm

    return build


def finished(llm: LLM) -> None:
    """Every slot is back."""
    assert llm.engine.scheduler.flush()
    pages = llm.engine.slots.pages
    assert pages.free_slots == pages.total


# --- what the text should be ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A request and its text, computed by transformers token by token, without any cache."""

    prompt: list[int]
    sampling: dict[str, Any]
    output: list[int]


@torch.inference_mode()
def sampled(model: Any, prompt: list[int], params: SamplingParams) -> list[int]:
    """The seeded draws over transformers' logits, each from a forward over the whole text."""
    rows = build_rows([params], [len(prompt)], [])
    ids = list(prompt)
    for _ in range(params.max_new_tokens):
        logits = model(torch.tensor([ids])).logits[:, -1]
        ids.append(int(draw(logits, rows, torch.tensor([len(ids)]))))
    return ids[len(prompt) :]


def make_prompts() -> list[list[int]]:
    """Lengths around chunks and pages; some share a beginning, some repeat themselves."""
    rng = random.Random(5)
    shared = [rng.randrange(3, 512) for _ in range(70)]
    loop = [*range(40, 53)] * 3
    fresh = [[rng.randrange(3, 512) for _ in range(n)] for n in (1, 17, 65)]
    return [*fresh, [*shared, 7, 8], shared + [9] * 5, loop, loop[:20] + shared[:30] + loop]


@pytest.fixture(scope="module")
def cases(tiny_model_dir: Path) -> list[Case]:
    """Every prompt greedily, at temperature 1, and with every filter."""
    reference = Reference(tiny_model_dir)
    prompts = make_prompts()
    base = {"max_new_tokens": NEW, "ignore_eos": True}
    greedy = reference.generate(prompts, NEW, batch=1)
    found = [
        Case(p, {**base, "temperature": 0.0}, out) for p, out in zip(prompts, greedy, strict=True)
    ]
    filters = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01}
    for i, prompt in enumerate(prompts):
        extra = filters if i % 3 == 2 else {"temperature": 1.0}
        sampling = {**base, **extra, "seed": i}
        output = sampled(reference.model, prompt, SamplingParams(**sampling))
        found.append(Case(prompt, sampling, output))
    return found


def check(cases: Sequence[Case], done: Sequence[Completion]) -> None:
    for case, one in zip(cases, done, strict=True):
        assert one.output_ids == case.output, (len(case.prompt), case.sampling)


def drafts_helped(drafter: str, done: Sequence[Completion]) -> None:
    """The drafter did what it is there to do in these tests."""
    stats = [one.spec for one in done if one.spec is not None]
    helped = sum(spec.accepted for spec in stats)
    emitted, rounds = sum(s.emitted for s in stats), sum(s.verify_ct for s in stats)
    if drafter == "none":
        assert not stats
    elif drafter == "JUNK":
        assert sum(spec.proposed for spec in stats) > rounds
    else:
        assert helped > 0.2 * rounds
        assert emitted == rounds + helped
    if drafter in ("SELF", "STANDALONE"):
        assert emitted >= 1.5 * rounds


# --- in this process ------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "nocache"])
@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("chunk", [16, 64, -1])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_cross_product(
    make: Make, cases: list[Case], drafter: str, chunk: int, page: int, cache: bool
) -> None:
    llm = make(drafter, chunked_prefill_size=chunk, page_size=page, disable_radix_cache=not cache)
    crowd = llm.generate([c.prompt for c in cases], [c.sampling for c in cases])
    check(cases, crowd)
    single = cases[::2]
    alone = [llm.generate(c.prompt, c.sampling)[0] for c in single]
    check(single, alone)
    drafts_helped(drafter, [*crowd, *alone])
    hits = [one.cached_tokens for one in alone]
    expected = [(len(c.prompt) - 1) // page * page if cache else 0 for c in single]
    assert hits == expected, "alone, everything was sent before"
    finished(llm)


@pytest.mark.parametrize("drafter", ["none", "NGRAM", "STANDALONE", "SELF"])
def test_chunks_that_end_anywhere(make: Make, drafter: str) -> None:
    """The text does not depend on where a long prompt is cut; compared over chunk sizes."""
    rng = random.Random(8)
    sizes = [63, 64, 65, 127, 128, 129, 130, 500] * 3
    prompts = [[rng.randrange(3, 512) for _ in range(n)] for n in sizes]
    sampling = [{"temperature": float(i % 2), "seed": i, "max_new_tokens": 12} for i in range(24)]
    texts = []
    for chunk in (64, 65, 128, -1):
        llm = make(drafter, chunked_prefill_size=chunk, max_total_tokens=20_000)
        done = llm.generate(prompts, sampling)
        texts.append([one.output_ids for one in done])
        finished(llm)
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_pool_that_runs_out(make: Make, cases: list[Case], drafter: str, page: int) -> None:
    """Requests are retracted in the middle and resume with the same text."""
    pool = 560 if page < 16 else 704
    llm = make(drafter, page_size=page, max_total_tokens=pool)
    many = cases * 2
    limits = llm.engine.scheduler.limits
    assert limits.max_running == 16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sgl_spec.engine.policy.GROWTH_TOKENS", 2)
        done = llm.generate([c.prompt for c in many], [c.sampling for c in many])
    check(many, done)
    assert llm.engine.counters.retracted > 0, "the pool was meant to run out"
    finished(llm)


def test_a_seed_decides_and_no_seed_is_reported(make: Make) -> None:
    """Without a seed texts vary, and the seed that is reported gives the same text again."""
    llm = make("NGRAM")
    sampling = {"temperature": 1.0, "max_new_tokens": NEW}
    free = llm.generate([[5, 6, 7]] * 20, sampling)
    assert len({tuple(one.output_ids) for one in free}) >= 15
    again = llm.generate([[5, 6, 7]] * 20, [sampling | {"seed": one.seed} for one in free])
    assert [one.output_ids for one in again] == [one.output_ids for one in free]


# --- over HTTP ------------------------------------------------------------------------------------

POOL = ("--max-total-tokens", "1000", "--max-running-requests", "16")


def http_cases() -> list[tuple[list[int], dict[str, Any]]]:
    """16 seeded requests at temperature 1, long enough to outgrow a small pool."""
    rng = random.Random(2)
    prompts = [[rng.randrange(3, 512) for _ in range(rng.randint(1, 60))] for _ in range(16)]
    base = {"temperature": 1.0, "ignore_eos": True}
    return [
        (p, {**base, "seed": 100 + i, "max_new_tokens": 100 + 4 * i}) for i, p in enumerate(prompts)
    ]


def ask_all(server: Server, clients: int) -> list[Reply]:
    asks = [functools.partial(generate, server, p, **sampling) for p, sampling in http_cases()]
    return together(asks, clients)


@pytest.fixture(scope="module")
def texts(launch_shared: Launch) -> list[list[int]]:
    """The texts of the plain server, one request at a time."""
    plain = launch_shared("--speculative-algorithm", "none")
    alone = [reply["output_ids"] for reply in ask_all(plain, 1)]
    flush(plain)
    assert [reply["output_ids"] for reply in ask_all(plain, 16)] == alone
    drained(plain)
    plain.stop()
    return alone


@pytest.mark.parametrize("algorithm", ["none", "NGRAM", "STANDALONE", "SELF"])
def test_one_seed_one_text(
    launch_shared: Launch, tiny_model_dir: Path, texts: list[list[int]], algorithm: str
) -> None:
    """With speculation and without, alone and 16 at once, from a pool too small for all."""
    flags = drafter_flags(algorithm, tiny_model_dir)
    if algorithm != "none":
        flags.append("--speculative-verify-whole-trees")  # a draft as dear as the target never pays
    server = launch_shared(*flags, *POOL)
    alone = ask_all(server, 1)
    crowded = ask_all(server, 16)
    assert [reply["output_ids"] for reply in alone] == texts
    assert [reply["output_ids"] for reply in crowded] == texts
    retracted = [reply for reply in crowded if reply["meta_info"]["num_retractions"] > 0]
    assert retracted, "the pool was meant to run out"
    assert not any(reply["meta_info"]["num_retractions"] for reply in alone)
    if algorithm != "none":
        assert sum(map(accepted, retracted)) > 0
    if algorithm in ("SELF", "STANDALONE"):
        assert speculated(alone)
    drained(server)
    server.stop()
