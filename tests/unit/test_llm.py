"""What the offline API promises beside the texts."""

from __future__ import annotations

import asyncio
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from sgl_spec import LLM, LogprobParams
from sgl_spec.errors import ConfigError, EngineDeadError, InvalidRequestError, SglSpecError
from sgl_spec.request import derive_seed

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
        ("", GREEDY, "prompts cannot be empty"),
        ([[]], GREEDY, "prompts cannot be empty"),
        (["a", ""], GREEDY, r"prompts\[1\] cannot be empty"),
        (["a", [1, 10**6]], GREEDY, r"prompts\[1\] must hold ids from 0"),
        ("a\ud83d", GREEDY, r"prompts must be text, got .*surrogates not allowed at 1"),
        (["a", [1, "b"]], GREEDY, r"prompts\[1\] must be a text or a sequence of token ids"),
        ([[512]], GREEDY, "from 0 to 511, got 512"),
        ("a", {"temperature": -1}, "temperature"),
        ("a", {"surprise": 1}, r"'surprise' is not one of .*, ebnf, n, sampling_seed\.$"),
        ("a", {"grammar_field": "x"}, "'grammar_field' is not one of"),
        ("a", {"max_tokens": 9}, r"did you mean max_new_tokens\?"),
        ("a", {"max_new_tokens": "ten"}, "max_new_tokens"),
        ("a", {"max_new_tokens": 2048}, "context of 2048"),
        (["a", "b"], [GREEDY], "1 entries for 2 prompts"),
        ("a", {"n": 0}, "n must be an integer from 1 to 128, got 0"),
        ("a", {"n": True}, "n must be an integer, got True"),
        ("a", {"seed": 1, "sampling_seed": 2}, "seed and sampling_seed mean the same and differ"),
    ],
)
def test_what_cannot_be_served_is_named_before_anything_runs(
    llm: LLM, prompts: object, sampling: object, named: str
) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        llm.generate(prompts, sampling)  # type: ignore[arg-type]
    assert not llm.engine.has_work


def test_sampling_has_sglang_s_names_too(llm: LLM) -> None:
    (ours,) = llm.generate("The harbour", {"seed": 5, "max_new_tokens": 12, "stop": ("q",)})
    for also in ({}, {"seed": 5}):
        given = {"sampling_seed": 5, "max_new_tokens": 12, "stop": "q", **also}
        (theirs,) = llm.generate("The harbour", sampling_params=given)
        assert (theirs.output_ids, theirs.seed) == (ours.output_ids, 5)
    with pytest.raises(InvalidRequestError, match="sampling and sampling_params mean the same"):
        llm.generate("a", GREEDY, sampling_params=GREEDY)


def test_n_completions_have_the_seeds_they_have_over_http(llm: LLM) -> None:
    prompts = ["The harbour", "Nobody"]
    found = llm.generate(prompts, {"n": 3, "seed": 42, "max_new_tokens": 12})
    assert [one.seed for one in found] == [derive_seed(42, i) for i in range(3)] * 2
    for prompt, ones in zip(prompts, (found[:3], found[3:]), strict=True):
        for one in ones:
            (again,) = llm.generate(prompt, {"seed": one.seed, "max_new_tokens": 12})
            assert again.output_ids == one.output_ids
    several = llm.generate(prompts, [{"n": 2, "max_new_tokens": 4}, {"max_new_tokens": 5}])
    assert [len(one.output_ids) for one in several] == [4, 4, 5]


def test_after_shutdown_the_engine_is_gone(tiny_model_dir: Path) -> None:
    with LLM(str(tiny_model_dir), max_total_tokens=200) as llm:
        kept = weakref.ref(llm.engine.model)
        assert len(llm.generate("a", {"max_new_tokens": 2})[0].output_ids) == 2
    gc.collect()
    assert kept() is None
    llm.shutdown()
    with pytest.raises(RuntimeError, match="was shut down"):
        llm.generate("a", GREEDY)


def test_flags_of_sglang_are_taken_as_on_the_command_line(tiny_model_dir: Path) -> None:
    with LLM(str(tiny_model_dir), max_total_tokens=200, dp_size=1, disable_cuda_graph=True) as llm:
        assert len(llm.generate("a", {"max_new_tokens": 1})) == 1
    with pytest.raises(ConfigError, match="--dp-size 2 is not supported"):
        LLM(str(tiny_model_dir), dp_size=2)


def test_weights_and_pool_share_the_memory_that_is_given(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(available=40_000_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with LLM(str(tiny_model_dir), mem_fraction_static=0.5) as llm:
        memory, weights = llm.engine.info["memory"], llm.engine.model.weight_bytes
        one_more = llm.engine.model.kv_bytes_per_token / 1e9
    assert memory["weight"] + memory["kvcache"] <= 0.02
    assert memory["weight"] + memory["kvcache"] + one_more > 0.02
    free.available = weights
    with pytest.raises(ConfigError, match=r"holds only 0 KV slots.*larger --mem-fraction-static"):
        LLM(str(tiny_model_dir), mem_fraction_static=0.9)


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


def test_rounds_are_shown_where_asked_for(llm: LLM) -> None:
    asked = {"temperature": 0, "max_new_tokens": 9, "ignore_eos": True}
    (done,) = llm.generate("Nobody ever asked", asked, draft_trees=True)
    (other,) = llm.generate("Nobody ever asked", asked)
    assert other.draft_trees is None
    assert done.draft_trees is not None
    emitted = [token for one in done.draft_trees for token in one.emitted]
    assert done.output_ids[1:] == emitted == other.output_ids[1:]


def test_a_stream_tells_the_same(llm: LLM) -> None:
    prompts = [[5, 6, 7], "The harbour master"]
    sampling = {"temperature": 0, "max_new_tokens": 20, "n": 2}
    ask = LogprobParams(top_logprobs_num=2)
    whole = llm.generate(prompts, sampling, ask)
    pieces = list(llm.generate(prompts, sampling, ask, stream=True))
    assert len(pieces) > 20, "it came bit by bit"
    for index, expected in enumerate(whole):
        mine = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.text for piece in mine) == expected.text
        assert [i for piece in mine for i in piece.output_ids] == expected.output_ids
        ended = [piece.completion for piece in mine if piece.completion is not None]
        assert [one.output_ids for one in ended] == [expected.output_ids]
        assert ended[0].text == expected.text
        assert ended[0].logprobs == expected.logprobs


def test_a_stream_that_is_left_drops_its_request(llm: LLM) -> None:
    stream = llm.generate([5, 6, 7], {"max_new_tokens": 1500, "ignore_eos": True}, stream=True)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    llm.generate([5], GREEDY)  # waits until the engine is free
    assert llm.engine.counters.generated < 1500
    assert not llm.engine.has_work


def test_calls_of_asyncio_share_a_batch(llm: LLM) -> None:
    expected = [llm.generate([i + 3, 9, 8], GREEDY)[0].output_ids for i in range(6)]
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, len(llm.engine.scheduler.running))
            await asyncio.sleep(0.001)

    async def run() -> list[list[int]]:
        watcher = asyncio.create_task(watch())
        calls = [llm.async_generate([i + 3, 9, 8], GREEDY) for i in range(6)]
        found = [(await call)[0].output_ids for call in asyncio.as_completed(calls)]
        pieces = [p async for p in await llm.async_generate([3, 9, 8], GREEDY, stream=True)]
        assert [i for piece in pieces for i in piece.output_ids] == expected[0]
        watcher.cancel()
        return found

    assert sorted(asyncio.run(run())) == sorted(expected)
    assert most > 1, "they ran together"


def test_a_fault_reaches_those_that_follow(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = LLM(str(tiny_model_dir), max_total_tokens=2000, max_running_requests=2)
    monkeypatch.setattr(own.engine.scheduler, "step", lambda: 1 // 0)
    with pytest.raises(SglSpecError, match="division"):
        list(own.generate([5], GREEDY, stream=True))
    with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
        own.generate([5], GREEDY)


def test_a_bar_counts_the_requests(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([[5], [6], [7]], GREEDY, use_tqdm=True)
    assert "3/3" in capsys.readouterr().err
    llm.generate([[5]], GREEDY)
    assert capsys.readouterr().err == ""
