"""Random requests at random moments in random engines: every text is the plain engine's.

Each engine checks, after each step, that every slot has one owner. A failure names its seed.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from drafting import DRAFTERS, drafter_options
from fixed_costs import FLAT, STEEP, fix_costs
from tiny import end_on, make_tiny

from sgl_spec import LLM, Completion, SamplingParams
from sgl_spec.messages import OutputChunk
from sgl_spec.request import TokenizedRequest

VOCAB = 512
MOST_STEPS = 20_000

Case = tuple[list[int], dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return end_on(make_tiny(tmp_path_factory.mktemp("fuzz")), range(4, VOCAB, 41))


@pytest.fixture(scope="module")
def plain(model: Path) -> LLM:
    return LLM(str(model), max_total_tokens=40_000, max_running_requests=64)


def some(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def random_case(rng: random.Random, shared: list[int], plain: LLM) -> Case:
    """A prompt and sampling parameters, most of them at their defaults."""
    prompt = some(rng, rng.randint(1, 70))
    if rng.random() < 0.4:
        prompt = shared[: rng.randint(1, len(shared))] + prompt
    if rng.random() < 0.3:
        prompt = list(range(60, 73)) * 3 + prompt[: rng.randint(0, 3)]
    budget = rng.choice([0, 1, 2, 5, 20, 40, 100])
    sampling: dict[str, Any] = {
        "seed": rng.randrange(1000),
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.0]),
        "max_new_tokens": budget,
        "ignore_eos": rng.random() < 0.7,
    }
    letters = plain.engine.tokenizer.decode([rng.randrange(259, VOCAB)])
    extras: dict[str, Any] = {
        "top_k": rng.choice([1, 5, 50]),
        "top_p": rng.choice([0.5, 0.9]),
        "min_p": rng.choice([0.05, 0.3]),
        "stop": (letters,),
        "stop_token_ids": tuple(rng.sample(range(3, VOCAB), 10)),
        "min_new_tokens": rng.randint(0, budget),
        "frequency_penalty": rng.choice([-1.0, 1.5]),
        "presence_penalty": rng.choice([-1.0, 1.5]),
        "repetition_penalty": rng.choice([0.8, 1.3]),
        "logit_bias": {rng.randrange(VOCAB): rng.choice([-100.0, 3.0]) for _ in range(5)},
        "speculation": rng.choice([False, {"max_draft_tokens": rng.randint(0, 5)}]),
    }
    return prompt, sampling | {name: value for name, value in extras.items() if rng.random() < 0.2}


def random_options(rng: random.Random, model: Path) -> dict[str, Any]:
    """The engine's flags: any drafter, page, chunk, and pools that hold one request or all."""
    drafter, page = rng.choice(DRAFTERS), rng.choice([1, 2, 4, 16, 32])
    options: dict[str, Any] = {
        "page_size": page,
        "chunked_prefill_size": rng.choice([page * rng.randint(1, 8), -1]),
        "max_total_tokens": rng.choice([320, 400, 600, 3000]),
        "max_running_requests": rng.choice([1, 3, 8, 16]),
        "disable_radix_cache": rng.random() < 0.3,
        **drafter_options(drafter, model),
    }
    if not options["disable_radix_cache"]:
        options["schedule_policy"] = rng.choice(["fcfs", "fcfs", "lpm"])
    if drafter == "STANDALONE":
        steps, topk, nodes = rng.choice([(1, 1, 2), (3, 1, 4), (3, 4, 12), (5, 4, 40)])
        options |= {"speculative_num_steps": steps, "speculative_eagle_topk": topk}
        options["speculative_num_draft_tokens"] = nodes
        options["speculative_verify_whole_trees"] = rng.random() < 0.5
    elif drafter != "none":
        options["speculative_num_draft_tokens"] = rng.choice([2, 4, 12, 12, 40])
    return options


class Run:
    """One engine and the requests that come to it."""

    def __init__(self, rng: random.Random, llm: LLM, cases: list[Case]) -> None:
        self.rng = rng
        self.engine = llm.engine
        self.cases = cases
        self.outputs: dict[str, list[int]] = {str(i): [] for i in range(len(cases))}
        self.ends: dict[str, OutputChunk] = {}

    def all(self) -> None:
        """Submit, abort and step at random until all requests have ended."""
        todo = iter(range(len(self.cases)))
        for _ in range(MOST_STEPS):
            self._submit(todo)
            if self.rng.random() < 0.03:
                self.engine.abort(str(self.rng.randrange(len(self.cases))))
            if self.engine.has_work:
                self._step()
            if len(self.ends) == len(self.cases):
                return
        raise AssertionError("no progress")

    def _submit(self, todo: Iterator[int]) -> None:
        while self.rng.random() < 0.5 and (i := next(todo, None)) is not None:
            prompt, sampling = self.cases[i]
            self.engine.submit(
                TokenizedRequest(
                    rid=str(i),
                    input_ids=prompt,
                    sampling=msgspec.convert(sampling, SamplingParams),
                    stream=self.rng.random() < 0.5,
                )
            )

    def _step(self) -> None:
        for chunk in self.engine.step():
            assert chunk.rid not in self.ends, "a chunk after the last one"
            self.outputs[chunk.rid] += chunk.ids
            if chunk.finish is not None:
                self.ends[chunk.rid] = chunk

    def check(self, i: int, expected: Completion) -> None:
        """Request `i` ended as the plain engine's did, or was aborted on the way there."""
        ids, end = self.outputs[str(i)], self.ends[str(i)]
        assert end.finish is not None
        assert end.completion_tokens == len(ids)
        if end.finish.kind == "abort":
            assert ids == expected.output_ids[: len(ids)], self.cases[i]
        else:
            assert ids == expected.output_ids, self.cases[i]
            assert end.finish == expected.finish


def fuzz(seed: int, model: Path, plain: LLM) -> None:
    rng = random.Random(seed)
    options = random_options(rng, model)
    with pytest.MonkeyPatch.context() as patch:
        costs = rng.choice([FLAT, FLAT, STEEP])
        fix_costs(patch, costs)
        patch.setattr("sgl_spec.engine.policy.GROWTH_TOKENS", rng.choice([2, 64]))
        llm = LLM(str(model), **options)
        scheduler = llm.engine.scheduler
        scheduler.limits = dataclasses.replace(scheduler.limits, check_every_step=True)
        shared = some(rng, 60)
        cases = [random_case(rng, shared, plain) for _ in range(rng.choice([5, 20, 30]))]
        most = scheduler.limits.max_request_tokens
        cases = [c for c in cases if len(c[0]) + c[1]["max_new_tokens"] <= most]
        run = Run(rng, llm, cases)
        run.all()
    print(f"seed {seed}: {options}")
    free = [{k: v for k, v in sampling.items() if k != "speculation"} for _, sampling in cases]
    for i, expected in enumerate(plain.generate([prompt for prompt, _ in cases], free)):
        run.check(i, expected)
    assert scheduler.flush()
    assert llm.engine.slots.pages.free_slots == llm.engine.slots.pages.total


@pytest.mark.parametrize("seed", range(5))
def test_random_engines(model: Path, plain: LLM, seed: int) -> None:
    fuzz(seed, model, plain)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1300))
def test_many_random_engines(model: Path, plain: LLM, seed: int) -> None:
    fuzz(seed, model, plain)
