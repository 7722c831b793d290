"""A request means the same with any drafter and in any batch, whatever its settings.

The table holds every setting alone and with every other. What the text should be is decoded step by
step by `plain`, which shares no code with the engine.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import plain
import pytest
import settings_table
from fakes import EOS, VOCAB, OracleDrafter, RandomDrafter, SumModel
from rig import NODES, Rig
from tokenizers import Tokenizer, decoders, models

from sgl_spec.engine.batch import DecodeBatch
from sgl_spec.engine.req import make_req
from sgl_spec.messages import OutputChunk
from sgl_spec.request import SamplingParams, Speculation, TokenizedRequest
from sgl_spec.speculative import penalties, sampling
from sgl_spec.speculative.base import DraftBatch, DrafterContext, build_drafter
from sgl_spec.speculative.ngram import register
from sgl_spec.speculative.tree import TokenTree
from sgl_spec.text import StopMatcher

NEW = 20
LETTERS = [chr(33 + i) for i in range(VOCAB)]
TOKENIZER = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(LETTERS)}, merges=[]))
TOKENIZER.decoder = decoders.ByteLevel()


@dataclass(frozen=True)
class Case:
    """A row of the table. Its prompt begins with two tokens that no other row's begins with."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams
    expected: tuple[int, ...]


def text_of(ids: list[int]) -> str:
    return "".join(LETTERS[i] for i in ids)


@functools.cache
def table() -> tuple[list[Case], list[Case]]:
    """The settings alone, and in pairs."""
    rng = random.Random(8)
    both = ([], [])  # type: tuple[list[Case], list[Case]]
    serial = 0
    for cases, rows in zip(both, (settings_table.SINGLE, settings_table.pairs()), strict=True):
        for name, setting in rows.items():
            serial += 1
            head = (1 + serial // 60, 1 + serial % 60)
            prompt = (*head, *(rng.randrange(1, VOCAB) for _ in range(rng.randint(0, 9))))
            fields: dict[str, Any] = {"seed": serial, "max_new_tokens": NEW}
            params = SamplingParams(**(fields | setting))
            expected = plain.decode(logits_after, prompt, params, [EOS], text_of)
            cases.append(Case(name, prompt, params, tuple(expected)))
    return both


MODEL = SumModel()


def logits_after(ids: list[int]) -> list[float]:
    return MODEL.next_logits(ids)[0].tolist()


class Chain(RandomDrafter):
    """Each node hangs from the one before; `next_token` says what it holds."""

    def _grow(self, i, tokens, parents, counts, most, ids):  # type: ignore[no-untyped-def]
        ids = list(ids)
        while counts[i] < min(most, self.nodes):
            token = self.next_token(ids)
            tokens[i, counts[i]], parents[i, counts[i]] = token, counts[i] - 1
            counts[i] += 1
            ids.append(token)

    def next_token(self, ids: list[int]) -> int:
        return int(self.rng.integers(VOCAB))


class SelfChain(Chain):
    """The target is its own draft model."""

    def next_token(self, ids: list[int]) -> int:
        return int(MODEL.next_logits(ids).argmax())


class Prophet(Chain):
    """Knows the text, and is right nine times in ten: whole paths are accepted, also of requests
    whose text the bare target would never write."""

    def next_token(self, ids: list[int]) -> int:
        case = by_head()[tuple(ids[:2])]
        at = len(ids) - len(case.prompt)
        if at < len(case.expected) and self.rng.random() < 0.9:
            return case.expected[at]
        return super().next_token(ids)


class ProphetTree(Prophet):
    """The same beside a wrong sibling at every level."""

    def _grow(self, i, tokens, parents, counts, most, ids):  # type: ignore[no-untyped-def]
        ids, parent = list(ids), 0
        while counts[i] < min(most, self.nodes):
            true = self.next_token(ids)
            for token in [(true + 1) % VOCAB, true][-(most - int(counts[i])) :]:
                tokens[i, counts[i]], parents[i, counts[i]] = token, parent
                counts[i] += 1
            parent = int(counts[i]) - 1
            ids.append(true)


@functools.cache
def by_head() -> dict[tuple[int, ...], Case]:
    return {case.prompt[:2]: case for cases in table() for case in cases}


def ngram(rows: int) -> Any:
    register()
    options: dict[str, object] = {"ngram_max_trie_depth": 6}
    return build_drafter(
        "NGRAM",
        DrafterContext(
            num_rows=rows, width=120, draft_tokens=NODES, vocab_size=VOCAB, options=options
        ),
    )


DRAFTERS: dict[str, Callable[[int], Any] | None] = {
    "none": None,
    "NGRAM": ngram,
    "self chain": lambda rows: SelfChain(NODES),
    "self tree": lambda rows: OracleDrafter(NODES, MODEL),
    "random chain": lambda rows: Chain(NODES),
    "random tree": lambda rows: RandomDrafter(NODES),
    "knowing chain": lambda rows: Prophet(NODES),
    "knowing tree": lambda rows: ProphetTree(NODES),
}


def rig_with(drafter: str, rows: int, **options: Any) -> Rig:
    make = DRAFTERS[drafter]
    rig = Rig(drafter="none" if make is None else "random", rows=rows, **options)
    if make is not None:
        rig.scheduler.worker.drafter = rig.drafter = make(rows)  # type: ignore[attr-defined]
        if drafter == "NGRAM":
            rig.drafter = None  # the rig would look for its rows
    return rig


def submit(rig: Rig, case: Case) -> None:
    request = TokenizedRequest(rid=case.name, input_ids=list(case.prompt), sampling=case.params)
    stops = StopMatcher(TOKENIZER, case.params.stop) if case.params.stop else None
    rig.sampling[case.name] = case.params
    rig.scheduler.submit(make_req(request, [EOS], stops))


def check(rig: Rig, cases: list[Case]) -> None:
    wrong = {c.name: rig.outputs[c.name] for c in cases if rig.outputs[c.name] != list(c.expected)}
    assert not wrong, wrong


def forget(rig: Rig) -> None:
    rig.outputs.clear()
    rig.ends.clear()
    rig.chunks.clear()


def run_alone(rig: Rig, cases: list[Case]) -> None:
    """One after the other; nothing is forgotten in between."""
    for case in cases:
        submit(rig, case)
        while rig.scheduler.has_work:
            rig.step()


def test_the_table_is_what_it_claims_to_be() -> None:
    single, double = table()
    assert len(single) >= 20
    assert len(double) >= 250
    assert {c.prompt[:2] for c in single + double} == set(by_head())
    assert len(by_head()) == len(single) + len(double)
    lengths = Counter(len(c.expected) for c in single + double)
    assert lengths[NEW] > 100, "most texts are long"
    assert sum(lengths[n] for n in range(NEW)) > 50, "many end earlier"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_settings_alone(drafter: str) -> None:
    single, double = table()
    cases = single + double[:: 1 + len(double) // 40]
    assert len(cases) >= 60
    rig = rig_with(drafter, rows=1)
    run_alone(rig, cases)
    check(rig, cases)
    if drafter.startswith("knowing"):
        assert rig.counters.emitted > 2 * rig.counters.verify_ct, "drafts were not accepted"
    if drafter == "NGRAM":
        forget(rig)
        run_alone(rig, cases)  # now it has seen the texts
        check(rig, cases)
        assert rig.counters.emitted > 1.5 * rig.counters.verify_ct, "drafts were not accepted"


@pytest.mark.parametrize(
    ("drafter", "page"), list(zip(DRAFTERS, itertools.cycle((1, 4)), strict=False))
)
def test_settings_in_a_mixed_batch(drafter: str, page: int) -> None:
    single, double = table()
    cases = single + double
    random.Random(page).shuffle(cases)
    rig = rig_with(drafter, rows=16, page=page)
    for case in cases:
        submit(rig, case)
    while rig.scheduler.has_work:
        rig.step()
    check(rig, cases)
    if drafter == "NGRAM":
        forget(rig)
        for case in cases:
            submit(rig, case)
        rig.run()
        check(rig, cases)
        assert rig.counters.accepted > 0


@pytest.mark.parametrize("drafter", ["none", "knowing chain", "random tree"])
def test_settings_survive_retraction(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts are taken anew from the text of a request that resumes."""
    monkeypatch.setattr("sgl_spec.engine.policy.GROWTH_TOKENS", 2)
    single, double = table()
    cases = [c for c in single + double if c.params.penalised and len(c.expected) == NEW]
    rig = rig_with(drafter, rows=8, slots=150)
    for case in cases:
        submit(rig, case)
    while rig.scheduler.has_work:
        rig.step()
    assert rig.counters.retracted >= 10, "the pool was meant to run out"
    check(rig, cases)


WRONG: dict[str, Callable[..., None]] = {
    "penalise": lambda x, rows, path: penalties.penalise(x, rows, None),
    "add_bias": lambda x, rows: None,
    "hold_extremes": lambda x, rows: None,
    "_mask_enders": lambda x, rows, positions: None,
}


@pytest.mark.parametrize("step", WRONG)
def test_the_table_notices_a_step_left_out(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For penalties: the tokens between the root and the node, which other servers leave out."""
    monkeypatch.setattr(sampling, step, WRONG[step])
    single, double = table()
    cases = single + [case for case in double if "minimum" in case.name]
    rig = rig_with("knowing chain", rows=1)
    run_alone(rig, cases)
    with pytest.raises(AssertionError):
        check(rig, cases)


# --- speculation per request ----------------------------------------------------------------------


def proposed_sizes(rig: Rig) -> dict[int, set[int]]:
    """Row to sizes of its verified trees, filled while the rig runs."""
    sizes: dict[int, set[int]] = {}
    worker = rig.scheduler.worker
    launch = worker.launch

    def spying(batch: Any) -> Any:
        launched = launch(batch)
        if isinstance(batch, DecodeBatch):
            proposed = worker.collect(launched).proposed
            for row, drafted in zip(batch.rows.tolist(), proposed, strict=True):
                sizes.setdefault(row, set()).add(drafted)
        return launched

    worker.launch = spying  # type: ignore[method-assign]
    return sizes


class Careless(SelfChain):
    """Drafts as much as it can, whatever it is told."""

    def propose(self, batch: DraftBatch) -> TokenTree:
        return super().propose(replace(batch, max_nodes=np.full_like(batch.max_nodes, NODES)))


WISHES: list[bool | Speculation | None] = [
    None,
    False,
    *(Speculation(max_draft_tokens=k) for k in (0, 1, 2, NODES - 2, NODES - 1, 10**6)),
]


@pytest.mark.parametrize("drafter", ["self chain", "self tree", "careless"])
def test_each_request_drafts_as_much_as_it_may(drafter: str) -> None:
    rig = rig_with("self chain" if drafter == "careless" else drafter, rows=len(WISHES))
    if drafter == "careless":
        rig.scheduler.worker.drafter = rig.drafter = Careless(NODES)  # type: ignore[attr-defined]
    sizes = proposed_sizes(rig)
    rows = {}
    for i, wish in enumerate(WISHES):
        rig.submit(str(i), [i + 1, 2], max_new_tokens=40, ignore_eos=True, speculation=wish)
    while rig.scheduler.has_work:
        rig.step()
        rows |= {req.rid: req.held.row for req in rig.scheduler.running}
    for i, wish in enumerate(WISHES):
        params = SamplingParams(
            temperature=0.0, seed=1, max_new_tokens=40, ignore_eos=True, speculation=wish
        )
        assert rig.outputs[str(i)] == plain.decode(logits_after, [i + 1, 2], params)
        assert max(sizes[rows[str(i)]]) == params.max_nodes(NODES) - 1
        check_figures(rig.ends[str(i)], params.max_nodes(NODES) - 1)


def check_figures(end: OutputChunk, most: int) -> None:
    """Greedy self drafts are always right: what is reported follows from the budget."""
    spec = end.spec
    assert spec is not None
    assert spec.emitted == end.completion_tokens - 1, "the token that prefill drew counts nowhere"
    assert spec.accepted + spec.verify_ct >= spec.emitted
    assert sum(spec.histogram) == spec.verify_ct
    assert sum(i * n for i, n in enumerate(spec.histogram)) == spec.accepted
    assert len(spec.histogram) <= most + 1
    if most == 0:
        assert (spec.proposed, spec.accepted, spec.verify_ct) == (0, 0, spec.emitted)
    else:
        assert spec.verify_ct < spec.emitted


def test_a_batch_without_any_wish_for_drafts_asks_for_none() -> None:
    class Unasked(RandomDrafter):
        def propose(self, batch: DraftBatch) -> TokenTree:
            raise AssertionError("nobody wants a draft")

    rig = rig_with("random tree", rows=4)
    rig.scheduler.worker.drafter = rig.drafter = Unasked(NODES)  # type: ignore[attr-defined]
    for i in range(4):
        rig.submit(str(i), [i + 1], max_new_tokens=10, ignore_eos=True, speculation=False)
    rig.run()


def test_the_ngram_drafter_learns_from_requests_that_do_not_speculate() -> None:
    """A later request copies their text."""
    rig = rig_with("NGRAM", rows=2)
    for speculation in (False, None):
        rig.submit(
            str(speculation),
            [5, 6, 7],
            max_new_tokens=40,
            ignore_eos=True,
            speculation=speculation,
        )
        while rig.scheduler.has_work:
            rig.step()
    first, second = rig.ends["False"].spec, rig.ends["None"].spec
    assert first is not None
    assert second is not None
    assert rig.outputs["False"] == rig.outputs["None"]
    assert (first.proposed, first.verify_ct) == (0, 39)
    assert second.verify_ct < 20, "it copies most of the first one's text"
