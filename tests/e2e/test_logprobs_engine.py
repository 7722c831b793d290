"""Log-probabilities are those that transformers gives the same text in one forward: with any
drafter, chunk and page, prefix hits and retractions."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import real_prompts
import torch
from drafting import drafter_options
from reference import Reference
from scoring import check

from sgl_spec import LLM, LogprobParams

NEW = 16
ASK = LogprobParams(logprob_start_len=0, top_logprobs_num=3, token_ids_logprob=(9, 500, 2))

Make = Callable[..., LLM]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On so small a model a second thread only costs, the more so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make(tiny_model_dir: Path) -> Make:
    """`make(drafter, **flags)`: an engine that verifies whole trees, whatever that costs."""

    def build(drafter: str, **flags: Any) -> LLM:
        sizes = {"max_total_tokens": 8192, "max_running_requests": 16}
        llm = LLM(str(tiny_model_dir), **(sizes | drafter_options(drafter, tiny_model_dir) | flags))
        scheduler = llm.engine.scheduler
        scheduler.worker.asked = None  # type: ignore[attr-defined]
        scheduler.limits = dataclasses.replace(scheduler.limits, check_every_step=True)
        return llm

    return build


@pytest.fixture(scope="module")
def tiny(tiny_model_dir: Path) -> Reference:
    return Reference(tiny_model_dir)


def make_prompts() -> list[list[int]]:
    """Lengths around chunks and pages; some share a beginning, some repeat themselves."""
    rng = random.Random(5)
    shared = [rng.randrange(3, 512) for _ in range(70)]
    loop = [*range(40, 53)] * 3
    fresh = [[rng.randrange(3, 512) for _ in range(n)] for n in (1, 17, 65)]
    return [*fresh, [*shared, 7, 8], shared + [9] * 5, loop, loop[:20] + shared[:30] + loop]


SLOW = pytest.mark.slow
CUTS = [(16, 1), (-1, 16), pytest.param(16, 16, marks=SLOW), pytest.param(-1, 1, marks=SLOW)]


def test_every_start(make: Make, tiny: Reference) -> None:
    """From each position of a prompt that is cut into chunks of five, cached or not."""
    prompt = make_prompts()[1]
    for cached in (False, True):
        llm = make("NGRAM", chunked_prefill_size=5, disable_radix_cache=not cached)
        asks = [LogprobParams(logprob_start_len=s) for s in range(-1, len(prompt))]
        sampling = {"max_new_tokens": 3, "temperature": 0}
        for ask, one in zip(asks, llm.generate([prompt] * 18, sampling, asks), strict=True):
            check(tiny, prompt, one, ask)


# --- the embedded model ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "drafter", ["NGRAM", *(pytest.param(name, marks=SLOW) for name in ("none", "SELF", "JUNK"))]
)
def test_smollm2(smollm2_dir: Path, smollm2: Reference, drafter: str) -> None:
    """Real text at temperature 0 and 1, scored from the first token, in small chunks."""
    llm = LLM(
        str(smollm2_dir),
        **drafter_options(drafter, smollm2_dir),
        chunked_prefill_size=48,
        max_total_tokens=4000,
        max_running_requests=8,
        context_length=512,
    )
    texts = [*real_prompts.texts()[:2], "one, two, three, four, one, two, three, four, one, two,"]
    prompts = [llm.encode(text)[:120] for text in texts] * 2
    sampling = [{"temperature": float(i >= 3), "seed": i, "max_new_tokens": 24} for i in range(6)]
    ask = LogprobParams(logprob_start_len=0, top_logprobs_num=5, token_ids_logprob=(9, 49151))
    for i, one in enumerate(llm.generate(prompts, sampling, ask)):
        check(smollm2, prompts[i], one, ask, tolerance=1e-3)
        assert one.logprobs is not None
        if i < 3:
            assert [best[0] for best in one.logprobs.top_ids] == one.output_ids


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> Reference:
    return Reference(smollm2_dir)
