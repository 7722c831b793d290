"""Grammars, penalties, biases, minimum lengths and log-probabilities in rounds on the device: the
texts and values of the CPU engine. In the interpreter, with records instead of graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from draft_rig import finished, small_trees
from kernel_runs import INTERPRETED
from taped import tape
from tiny import MIN_VOCAB, make_tiny

from sgl_spec import LLM, LogprobParams

# Rows that fill a forward up compute with whatever lies in memory.
pytestmark = [
    pytest.mark.usefixtures("few_programs"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

PROMPTS = [[7], [40, 41, 42, 9], [40, 41, 42, 11]]
REGEX = {"temperature": 0.8, "regex": "[a-z]{3,9}", "seed": 3}
SAMPLING: dict[str, list[dict[str, Any]]] = {
    "moved": [
        REGEX,
        {"temperature": 0.0, "frequency_penalty": 0.5, "logit_bias": {50: -100.0}},
        {"temperature": 1.0, "seed": 5},
    ],
    "masked": [
        {"temperature": 0.0, "min_new_tokens": 2, "ignore_eos": False},
        {"temperature": 0.9, "top_k": 30, "repetition_penalty": 1.5, "seed": 7},
        REGEX,
    ],
    "settings": [
        {"temperature": 0.0, "presence_penalty": -2.0, "frequency_penalty": -1.0},
        {"temperature": 0.7, "logit_bias": {60: 100.0, 61: 100.0}, "seed": 8},
        {"temperature": 0.0},
    ],
}
BASE = {"max_new_tokens": 4, "ignore_eos": True}
ASKED = [
    LogprobParams(top_logprobs_num=3),
    LogprobParams(logprob_start_len=0, token_ids_logprob=(5, 50)),
    None,
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("target"), vocab=MIN_VOCAB)


def make(target: Path, **options: Any) -> LLM:
    return LLM(
        str(target), max_total_tokens=512, max_running_requests=4, context_length=64, **options
    )


def answers(llm: LLM, kind: str) -> list[Any]:
    return llm.generate(PROMPTS, [BASE | one for one in SAMPLING[kind]], ASKED)


@pytest.fixture(scope="module")
def expected(target: Path) -> dict[str, list[Any]]:
    return {kind: answers(make(target), kind) for kind in SAMPLING}


def check(mine: Any, theirs: Any) -> None:
    """Log-probabilities, of which the first of a prompt has no value."""
    assert (mine is None) == (theirs is None)
    if mine is None:
        return
    assert mine.top_ids == theirs.top_ids
    for name in ("values", "top_values", "id_values"):
        rows, others = getattr(mine, name), getattr(theirs, name)
        assert len(rows) == len(others)
        for row, other in zip(rows, others, strict=True):
            assert row == pytest.approx(other, abs=1e-4)


@INTERPRETED
@pytest.mark.parametrize("drafter", ["none", "NGRAM", "EAGLE3", "STANDALONE"])
def test_answers_are_the_cpu_engines(
    target: Path,
    expected: dict[str, list[Any]],
    drafter: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {}
    if drafter != "none":
        options = small_trees(drafter, target, tmp_path / "draft")
        options["speculative_verify_whole_trees"] = True
    llm = make(target, attention_backend="triton", chunked_prefill_size=4, **options)
    tape(llm, (4,), monkeypatch)
    for kind in SAMPLING:
        for one, other in zip(answers(llm, kind), expected[kind], strict=True):
            assert one.output_ids == other.output_ids
            check(one.logprobs, other.logprobs)
            check(one.prompt_logprobs, other.prompt_logprobs)
    if drafter == "STANDALONE":  # the target drafts for itself
        assert llm.engine.counters.emitted > llm.engine.counters.verify_ct
    finished(llm)
