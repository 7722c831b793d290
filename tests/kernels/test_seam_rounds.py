"""Batches that the host judges, on the device path and with their forwards filled up: the texts of
the CPU engine. In the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from draft_rig import finished, small_trees
from kernel_runs import INTERPRETED
from taped import tape
from tiny import MIN_VOCAB, make_tiny

from sgl_spec import LLM, LogprobParams
from sgl_spec.engine.cuda.forwards import PaddedForward
from sgl_spec.engine.cuda.graphs import Replayed
from sgl_spec.engine.cuda.growth import Growth

# Attention leaves rows that no request owns as the memory was.
pytestmark = [
    pytest.mark.usefixtures("few_shapes"),
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
        {"temperature": 0.9, "top_k": 30, "seed": 7},
        REGEX,
    ],
}
BASE = {"max_new_tokens": 3, "ignore_eos": True}
ASKED = [None, LogprobParams(logprob_start_len=0), None]
DRAFTERS = ("none", "NGRAM", "EAGLE3", "STANDALONE")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("target"), vocab=MIN_VOCAB)


def make(target: Path, **options: Any) -> LLM:
    return LLM(
        str(target), max_total_tokens=512, max_running_requests=4, context_length=64, **options
    )


def texts(llm: LLM, kind: str) -> list[Any]:
    return llm.generate(PROMPTS, [BASE | one for one in SAMPLING[kind]], ASKED)


@pytest.fixture(scope="module")
def expected(target: Path) -> dict[str, list[Any]]:
    return {kind: texts(make(target), kind) for kind in SAMPLING}


@INTERPRETED
@pytest.mark.parametrize("kind", SAMPLING)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_texts_are_the_cpu_engines(
    target: Path,
    expected: dict[str, list[Any]],
    drafter: str,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    causal: set[bool] = set()
    grown = 0
    replay = Replayed.run

    def watched(self: Replayed) -> None:
        if isinstance(self.program, PaddedForward):
            causal.add(self.program.batch.mask_words is None)
        nonlocal grown
        grown += isinstance(self.program, Growth)
        replay(self)

    monkeypatch.setattr(Replayed, "run", watched)
    options = {}
    if drafter != "none":
        options = small_trees(drafter, target, tmp_path / "draft")
        options["speculative_verify_whole_trees"] = True
    llm = make(target, attention_backend="triton", **options)
    tape(llm, (4,), monkeypatch)  # so that forwards are filled up
    done = texts(llm, kind)
    assert causal == {True, False}, "forwards of prompts and of trees were filled up"
    assert bool(grown) == (drafter in ("EAGLE3", "STANDALONE"))
    if drafter == "STANDALONE":  # the target drafts for itself
        assert llm.engine.counters.emitted > llm.engine.counters.verify_ct
    for one, other in zip(done, expected[kind], strict=True):
        assert one.output_ids == other.output_ids
        for mine, theirs in (
            (one.logprobs, other.logprobs),
            (one.prompt_logprobs, other.prompt_logprobs),
        ):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert mine.values == pytest.approx(theirs.values, abs=1e-4)
    finished(llm)
