"""What the offline API promises beside the texts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sgl_spec import LLM
from sgl_spec.errors import InvalidRequestError

GREEDY = {"temperature": 0, "max_new_tokens": 20}


@pytest.fixture(scope="module")
def llm(tiny_model_dir: Path) -> LLM:
    return LLM(str(tiny_model_dir), max_total_tokens=4000, max_running_requests=8)


def test_prompts_are_texts_or_ids_one_or_several(llm: LLM) -> None:
    text = "The harbour master"
    (one,) = llm.generate(text, GREEDY)
    (ids,) = llm.generate(llm.encode(text), GREEDY)
    first, second = llm.generate([text, [5, 6, 7]], [GREEDY, {"temperature": 0}])
    assert one.output_ids == ids.output_ids == first.output_ids
    assert one.text == first.text == llm.engine.tokenizer.decode(one.output_ids)
    assert len(second.output_ids) == 128
    assert llm.generate([], GREEDY) == []


def test_calls_from_threads_do_not_mix(llm: LLM) -> None:
    prompts = [[i + 3, 9, 8, 7] for i in range(12)]
    expected = [one.output_ids for one in llm.generate(prompts, GREEDY)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda prompt: llm.generate(prompt, GREEDY), prompts))
    assert [one.output_ids for (one,) in found] == expected


@pytest.mark.parametrize(
    ("prompts", "sampling", "named"),
    [
        ("", GREEDY, "prompt is empty"),
        ([[]], GREEDY, "prompt is empty"),
        ([[512]], GREEDY, "from 0 to 511, got 512"),
        ("a", {"temperature": -1}, "temperature"),
        ("a", {"surprise": 1}, "surprise"),
        ("a", {"max_new_tokens": "ten"}, "max_new_tokens"),
        ("a", {"max_new_tokens": 2048}, "context of 2048"),
        (["a", "b"], [GREEDY], "1 entries for 2 prompts"),
    ],
)
def test_what_cannot_be_served_is_named_before_anything_runs(
    llm: LLM, prompts: object, sampling: object, named: str
) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        llm.generate(prompts, sampling)  # type: ignore[arg-type]
    assert not llm.engine.has_work


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("drafter", ["none", "NGRAM"])
def test_a_request_may_fill_the_pool(tiny_model_dir: Path, drafter: str, page: int) -> None:
    """To its last slot, in a queue of others that do the same; one token more is refused."""
    small = LLM(
        str(tiny_model_dir),
        speculative_algorithm=drafter,
        max_total_tokens=150,
        page_size=page,
    )
    most = small.engine.scheduler.limits.max_request_tokens
    assert 100 < most <= 160
    prompts = [[5], [7] * (most - 1), [9] * (most // 2), [11, 12]]
    budgets = [most - len(prompt) for prompt in prompts]
    sampling = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in budgets]
    done = small.generate(prompts, sampling)
    assert [len(one.output_ids) for one in done] == budgets
    with pytest.raises(InvalidRequestError, match=f"the {most} that max_total_tokens leaves"):
        small.generate([[5], [7] * most], {"max_new_tokens": 1})
    assert not small.engine.has_work
