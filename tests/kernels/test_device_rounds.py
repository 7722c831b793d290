"""Rounds that live on the device, in the interpreter: the same texts as the CPU engine's.

A tiny target, batches that are filled up, prompts in chunks, drafts by a head, by a model and by
the host; instead of graphs there are records (`taped`). On a GPU `tests/gpu` runs the same with
graphs and longer texts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_rig import finished, make_draft, shape_options
from drafting import PLUGINS
from kernel_runs import INTERPRETED
from reference import Reference
from scoring import rescore
from taped import tape
from tiny import MIN_VOCAB, make_tiny

from sgl_spec import LLM
from sgl_spec.engine.batch import IntArray
from sgl_spec.engine.control import Decision, Load
from sgl_spec.engine.cuda import round as round_module
from sgl_spec.engine.cuda.model_rounds import ModelRounds, tree_shapes
from sgl_spec.engine.cuda.model_trees import kept_by
from sgl_spec.engine.cuda.round import KINDS, RoundKind
from sgl_spec.engine.cuda.running import RunningRound
from sgl_spec.engine.cuda.worker import DeviceWorker
from sgl_spec.request import DraftRound

pytestmark = pytest.mark.usefixtures("few_programs")

PLUGIN = {
    "speculative_drafter_module": PLUGINS,
    "speculative_algorithm": "JUNK",
    "speculative_num_draft_tokens": 4,
}
SHARED = [40, 41, 42, 43, 44, 45, 46]
PROMPTS = [[7], [*SHARED, 9], [*SHARED, 11, 12]]
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 1.0, "seed": 5}
FILTERED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 6}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("target"), vocab=MIN_VOCAB)


@pytest.fixture(scope="module")
def drafts(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    head = make_draft("EAGLE3", tmp_path_factory.mktemp("head"), target)
    return {"EAGLE3": head, "STANDALONE": target}


def options_of(kind: str, drafts: dict[str, Path]) -> dict[str, Any]:
    if kind == "none":
        return {}
    if kind == "NGRAM":
        return {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
    path = str(drafts[kind])
    return {
        "speculative_algorithm": kind,
        "speculative_draft_model_path": path,
        **shape_options(2, 2, 4),
    }


def make(target: Path, **options: Any) -> LLM:
    return LLM(
        str(target), max_total_tokens=512, max_running_requests=4, context_length=64, **options
    )


def texts(llm: LLM, sampling: list[dict[str, Any]]) -> list[list[int]]:
    base = {"max_new_tokens": 4, "ignore_eos": True}
    done = llm.generate(PROMPTS, [{**base, **one} for one in sampling])
    return [one.output_ids for one in done]


@pytest.fixture
def taped(target: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """Makes engines whose rounds are recorded and replayed, filled up to four requests."""

    def of(**options: Any) -> LLM:
        llm = make(target, attention_backend="triton", **options)
        tape(llm, (4,), monkeypatch)
        return llm

    return of


MIXED = [GREEDY, SAMPLED, FILTERED]


@pytest.fixture(scope="module")
def expected(target: Path) -> list[list[int]]:
    return texts(make(target), MIXED)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Draft models rest, and draft with each of their shapes, in turn. Which option each round
    had."""
    options: list[int] = []

    def decide(rounds: ModelRounds, size: int, kind: RoundKind) -> Decision:
        rounds.shapes = tree_shapes(rounds.drafter.shape)
        options.append(len(options) % (1 + len(rounds.shapes)))
        return Decision(Load(size, kind), options[-1], 0.0)

    monkeypatch.setattr(ModelRounds, "_decide", decide)
    return options


@INTERPRETED
# Rows that fill a forward up compute with whatever lies in memory.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("kind", "page"), [("none", 1), ("EAGLE3", 4), ("STANDALONE", 1), ("NGRAM", 4)]
)
def test_texts_are_the_cpu_engines(
    taped: Callable[..., LLM],
    drafts: dict[str, Path],
    expected: list[list[int]],
    turns: list[int],
    kind: str,
    page: int,
) -> None:
    llm = taped(
        page_size=page,
        chunked_prefill_size=8,
        speculative_verify_whole_trees=kind != "none",
        **options_of(kind, drafts),
    )
    assert texts(llm, MIXED) == expected
    if kind in drafts:
        assert set(turns) == {0, 1, 2}, "rounds of every kind were asked for"
    if kind == "STANDALONE":  # the target drafts for itself
        counters = llm.engine.counters
        assert counters.emitted > counters.verify_ct
    finished(llm)


@INTERPRETED
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_a_round_tells_what_smaller_trees_would_have_brought(
    taped: Callable[..., LLM],
    drafts: dict[str, Path],
    turns: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The target drafts for itself, so a chain would have brought what the tree did."""
    found: list[tuple[int, int]] = []

    def collected(
        rounds: ModelRounds, launched: RunningRound, lengths: IntArray, given: IntArray
    ) -> list[int]:
        if launched.facts is not None:
            facts, counts = launched.facts.wait().numpy(), given[: launched.size, 0]
            found.append((kept_by(rounds.shapes[0], facts, counts), int(counts.sum())))
        return launched.proposed

    monkeypatch.setattr(ModelRounds, "_told", lambda rounds, kind, option: option > 1)
    monkeypatch.setattr(ModelRounds, "collected", collected)
    llm = taped(speculative_verify_whole_trees=True, **options_of("STANDALONE", drafts))
    texts(llm, [{**GREEDY, "max_new_tokens": 8}] * 3)
    assert all(kept == brought for kept, brought in found)
    assert max(brought for _, brought in found) > len(PROMPTS)
    finished(llm)


@INTERPRETED
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("kind", "timed"), [("none", 8), ("NGRAM", 8), ("EAGLE3", 0), ("plugin", 8)]
)
def test_rounds_that_are_shown(
    taped: Callable[..., LLM],
    target: Path,
    drafts: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    timed: int,
) -> None:
    """The trees are those that gave the text, with the probabilities that one forward of
    transformers has. Rounds are captured in parts, or as a whole."""
    monkeypatch.setattr(round_module, "TIMED_REQUESTS", timed)
    options = options_of(kind, drafts) if kind != "plugin" else PLUGIN
    llm = taped(speculative_verify_whole_trees=kind != "none", **options)
    prompts = [PROMPTS[1], SHARED[:3] * 3]  # n-grams find the second one
    base = {"max_new_tokens": 4, "ignore_eos": True}
    asked = [{**base, **GREEDY}, {**base, **FILTERED}]
    unseen = llm.generate(prompts, asked)
    done = llm.generate(prompts, asked, draft_trees=True)
    assert [one.output_ids for one in done] == [one.output_ids for one in unseen]
    reference, drafted = Reference(target), 0
    for prompt, one in zip(prompts, done, strict=True):
        assert one.draft_trees is not None
        emitted = [token for each in one.draft_trees for token in each.emitted]
        assert emitted == one.output_ids[1:]
        for each in one.draft_trees:
            before = [*prompt, *one.output_ids[: each.start]]
            assert each.tokens[0] == before[-1]
            assert [each.tokens[node] for node in each.path] == each.emitted[: len(each.path)]
            drafted += check_probs(reference, before, each)
            assert len(each.scores) in (len(each.tokens), 0 if kind == "plugin" else -1)
    assert (drafted > 0) == (kind != "none")
    finished(llm)


def check_probs(reference: Reference, before: list[int], shown: DraftRound) -> int:
    """How many nodes of the round have the probability that they should have."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(shown.tokens[1:], shown.parents[1:], strict=True):
        paths.append([*paths[parent], token])
    found = list(zip(paths[1:], shown.probs[1:], strict=True))
    emitted = [shown.emitted[: i + 1] for i in range(len(shown.emitted))]
    found += zip(emitted, shown.emitted_probs, strict=True)
    for path, prob in found:
        row = rescore(reference, before + path)[-2]
        assert abs(float(row[path[-1]].exp()) - prob) < 1e-4
    return len(paths) - 1


@INTERPRETED
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_what_the_device_has_read_is_drafted(
    taped: Callable[..., LLM], drafts: dict[str, Path]
) -> None:
    llm = taped(**options_of("NGRAM", drafts))
    first = texts(llm, [GREEDY] * 3)
    counters = llm.engine.counters
    emitted, rounds = counters.emitted, counters.verify_ct
    assert texts(llm, [GREEDY] * 3) == first
    # A second time each text but its last token is copied: the first token comes with the prompt.
    assert counters.verify_ct - rounds == len(PROMPTS)
    assert counters.emitted - emitted == 3 * len(PROMPTS)
    # Rounds with settings ask the same index.
    penalised = {**GREEDY, "frequency_penalty": 1e-6, "presence_penalty": 1e-6}
    emitted, rounds = counters.emitted, counters.verify_ct
    assert texts(llm, [penalised] * 3) == first
    assert counters.emitted - emitted > counters.verify_ct - rounds
    assert texts(llm, [GREEDY] * 3) == first
    finished(llm)
    stats = llm.engine.worker.drafter_stats()
    assert stats["index_tokens"] == stats["match_rate"] == 0


@INTERPRETED
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("kind", ["NGRAM", "EAGLE3"])
def test_what_sampled_batches_need_is_made_before_they_come(
    taped: Callable[..., LLM], drafts: dict[str, Path], expected: list[list[int]], kind: str
) -> None:
    llm = taped(**options_of(kind, drafts))
    texts(llm, [GREEDY] * 3)
    worker = llm.engine.scheduler.worker
    assert isinstance(worker, DeviceWorker)
    before = len(worker.rounds)
    while llm.engine.prepare_more():
        pass
    made = len(worker.rounds)
    sizes = 2 if kind == "NGRAM" else 1  # with drafts and without
    assert made == before + (len(KINDS) - 1) * sizes
    made_for = worker.rounds._made.items()
    rounds = [one.program for key, one in made_for if key[0] != "prefill"]
    cuts = [one.acceptance.cuts for one in rounds if one.acceptance.cuts is not None]
    assert len(cuts) == 3 * sizes, "filtered, with settings, and masked"
    spaces = {one.heads.keys.data_ptr() for one in cuts}
    assert len(spaces) == 1, "rounds run one after the other and share their work space"
    assert texts(llm, MIXED) == expected
    assert len(worker.rounds) == made


@INTERPRETED
def test_where_memory_ends_nothing_more_is_prepared(target: Path) -> None:
    llm = LLM(str(target), max_total_tokens=128, attention_backend="triton")
    worker = llm.engine.scheduler.worker
    assert isinstance(worker, DeviceWorker)

    def ends() -> None:
        raise torch.OutOfMemoryError("none is left")

    worker._later = [ends, ends]
    assert llm.engine.prepare_more()
    assert not llm.engine.prepare_more()
