"""Batches that the host judges, whose drafts rest where they do not pay and come back: on the
device path in the interpreter, by a clock of our own."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from draft_rig import finished, small_trees
from kernel_runs import INTERPRETED
from taped import tape
from tiny import MIN_VOCAB, make_tiny

from sgl_spec import LLM
from sgl_spec.engine.batch import DecodeBatch, StepOutput
from sgl_spec.engine.cuda import seam_trees, tree_ledger
from sgl_spec.engine.cuda.seam_trees import SeamTrees
from sgl_spec.engine.cuda.worker import DeviceWorker
from sgl_spec.engine.worker import Worker
from sgl_spec.speculative import model_drafter
from sgl_spec.speculative.model_drafter import ModelDrafter

# Attention leaves rows that no request owns as the memory was.
pytestmark = [
    INTERPRETED,
    pytest.mark.usefixtures("few_shapes"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

PLAIN = {"temperature": 0.0, "max_new_tokens": 12}
PENALTY = {"temperature": 0.7, "seed": 4, "frequency_penalty": 0.4, "max_new_tokens": 9}
REGEX = {"temperature": 0.8, "seed": 3, "regex": "[a-z]{12,16}", "max_new_tokens": 8}
BIASED = {"temperature": 0.0, "logit_bias": {50: -100.0}, "max_new_tokens": 5}
# Two at a time: a batch that the host judges, one that lives on the device, and the first kind
# again. The grammar is waited for, so it comes last.
MIXED: list[dict[str, Any]] = [BIASED, PLAIN, PLAIN | {"max_new_tokens": 3}, PENALTY, REGEX]
PROMPTS = [[7], [40, 41, 42, 9], [40, 41, 42, 11], [12, 13], [5, 9, 5, 9, 5]]
DRAFTERS = ("NGRAM", "EAGLE3")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("target"), vocab=MIN_VOCAB)


@pytest.fixture(scope="module")
def expected(target: Path) -> list[list[int]]:
    return texts(make(target))


def make(target: Path, **options: Any) -> LLM:
    return LLM(
        str(target), max_total_tokens=512, max_running_requests=2, context_length=64, **options
    )


def drafting(target: Path, drafter: str, directory: Path, **options: Any) -> LLM:
    options |= small_trees(drafter, target, directory)
    llm = make(target, attention_backend="triton", **options)
    worker_of(llm).rounds.sizes = (2,)  # so that forwards are filled up
    return llm


def worker_of(llm: LLM) -> DeviceWorker:
    worker = llm.engine.scheduler.worker
    assert isinstance(worker, DeviceWorker)
    return worker


def texts(llm: LLM, sampling: list[dict[str, Any]] = MIXED) -> list[list[int]]:
    done = llm.generate(PROMPTS[: len(sampling)], [{"ignore_eos": True} | s for s in sampling])
    return [one.output_ids for one in done]


@dataclass(frozen=True)
class At:
    """A place in time, in seconds."""

    now: float

    def ms_until(self, later: At) -> float:
        return (later.now - self.now) * 1e3


class Clock:
    """Rounds without drafts take a second. drafted_s: those with. asked: of each round."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch, drafted_s: float) -> None:
        self.now, self.drafted_s = 0.0, drafted_s
        self.asked: list[bool] = []
        decode, worker = Worker._decode, worker_of(llm)

        def timed(self_: Worker, batch: DecodeBatch) -> StepOutput:
            drafts = bool((batch.max_nodes > 1).any())
            self.asked.append(drafts)
            self.now += self.drafted_s if drafts else 1.0
            return decode(self_, batch)

        monkeypatch.setattr(Worker, "_decode", timed)
        worker.seam_trees = SeamTrees(lambda: len(worker.rounds), lambda: At(self.now))


def turns(of: list[bool]) -> int:
    """How often one is followed by another."""
    return sum(one != other for one, other in pairwise(of))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_texts_stay_while_drafts_rest_and_come_back(
    target: Path,
    expected: list[list[int]],
    drafter: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seam_trees, "FIRST", 1)
    monkeypatch.setattr(tree_ledger, "SHARE", 1.0)
    monkeypatch.setattr(tree_ledger, "LIMIT", 0.2)
    monkeypatch.setattr(model_drafter, "WAITING_ROWS", 3)
    monkeypatch.setattr(model_drafter, "EXTENDED_ROWS", 2)
    rounds: list[bool] = []  # whether on the device
    others = marks = 0  # batches that are no rounds of the host's, and those told of
    launch, passed = DeviceWorker.launch, SeamTrees.passed

    def watched(self: DeviceWorker, batch: Any) -> Any:
        nonlocal others
        if isinstance(batch, DecodeBatch):
            rounds.append(self._kinds.simple(batch.rows))
        others += not isinstance(batch, DecodeBatch) or rounds[-1]
        return launch(self, batch)

    def told(self: SeamTrees) -> None:
        nonlocal marks
        marks += 1
        passed(self)

    monkeypatch.setattr(DeviceWorker, "launch", watched)
    monkeypatch.setattr(SeamTrees, "passed", told)
    llm = drafting(target, drafter, tmp_path / "draft")
    tape(llm, (2,), monkeypatch)
    clock = Clock(llm, monkeypatch, drafted_s=3.0)
    assert texts(llm) == expected
    assert turns(rounds) >= 2, "rounds on the device come in between"
    assert turns(clock.asked) >= 4, "drafts rest and come back"
    assert marks == others
    worker = worker_of(llm)
    if isinstance(worker.drafter, ModelDrafter):
        assert worker.drafter.stats()["catch_ups"] > 0
    finished(llm)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_that_do_not_pay_rest(
    target: Path, drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = drafting(target, drafter, tmp_path / "draft")
    clock = Clock(llm, monkeypatch, drafted_s=9.0)
    texts(llm, [PENALTY | {"max_new_tokens": 24}])
    assert 2 <= sum(clock.asked) <= 5
    assert not any(clock.asked[-10:])
    stats = worker_of(llm).drafter_stats()
    assert stats["seam_rest"] == 1
    assert stats["seam_asked"] == sum(clock.asked)
    assert stats["seam_left"] == len(clock.asked) - sum(clock.asked)


def test_drafts_that_pay_are_made(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target drafts for itself."""
    llm = drafting(target, "STANDALONE", tmp_path / "draft")
    clock = Clock(llm, monkeypatch, drafted_s=1.2)
    texts(llm, [BIASED | {"max_new_tokens": 24}])
    assert all(clock.asked[8:])
    assert len(clock.asked) < 20, "they were accepted"
    worker = worker_of(llm)
    assert worker.drafter_stats()["seam_rest"] == 0
    assert isinstance(worker.drafter, ModelDrafter)


def test_drafts_are_made_between_prompts_in_chunks(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly every round comes behind a chunk, and the accounts are kept all the same."""
    monkeypatch.setattr(seam_trees, "FIRST", 1)
    llm = drafting(target, "NGRAM", tmp_path / "draft", chunked_prefill_size=4)
    clock = Clock(llm, monkeypatch, drafted_s=0.9)
    prompts = [[20 + i, *range(40, 50)] for i in range(5)]
    llm.generate(prompts, BIASED | {"max_new_tokens": 6, "ignore_eos": True})
    assert len(clock.asked) > 10
    assert sum(clock.asked) > len(clock.asked) // 2
