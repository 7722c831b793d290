"""Log-probabilities: the model's own, one per token that is given out, whatever else happens."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from fakes import VOCAB, SumModel
from hypothesis import given
from hypothesis import strategies as st
from rig import Rig
from torch import Tensor

from sgl_spec.errors import InvalidRequestError
from sgl_spec.request import (
    MAX_LOGPROB_IDS,
    MAX_PROMPT_LOGPROBS,
    MAX_TOP_LOGPROBS,
    LogprobParams,
    Logprobs,
)
from sgl_spec.speculative import logprobs as logprobs_module
from sgl_spec.speculative.logprobs import Span, read_logprobs
from sgl_spec.speculative.rules import ThresholdRule

DRAFTERS = ["none", "random", "oracle"]
OUTPUT = LogprobParams()
ALL = LogprobParams(logprob_start_len=0, top_logprobs_num=3, token_ids_logprob=(7, 0, 7))


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl_spec.engine.policy.GROWTH_TOKENS", 2)


def sum_logits(model: SumModel, ids: list[int]) -> Tensor:
    """[n, V]: row p holds the logits after ids[: p + 1]; the fake model from scratch."""
    return torch.cat([model.next_logits(ids[: p + 1]) for p in range(len(ids))])


def expected(logits: Tensor, ids: list[int], first: int, end: int, ask: LogprobParams) -> Logprobs:
    """Log-probabilities of ids[first:end], by the definition."""
    rows = logits[first - 1 : end - 1]
    values = rows.log_softmax(1)
    found = Logprobs([float(row[t]) for row, t in zip(values, ids[first:end], strict=True)])
    if ask.top_logprobs_num:
        order = sorted_ids(rows)[:, : ask.top_logprobs_num]
        found.top_ids, found.top_values = order.tolist(), values.gather(1, order).tolist()
    if ask.token_ids_logprob:
        found.id_values = values[:, list(ask.token_ids_logprob)].tolist()
    return found


def sorted_ids(rows: Tensor) -> Tensor:
    return torch.tensor(
        [sorted(range(len(row)), key=lambda t: (-row[t], t)) for row in rows.tolist()]
    ).view(rows.shape)


def same(found: Logprobs, wanted: Logprobs) -> None:
    assert found.top_ids == wanted.top_ids
    for name in ("values", "top_values", "id_values"):
        got, want = getattr(found, name), getattr(wanted, name)
        assert torch.tensor(got).shape == torch.tensor(want).shape, name
        assert torch.allclose(torch.tensor(got), torch.tensor(want), atol=1e-5, rtol=0), name


def reported(rig: Rig, rid: str) -> tuple[Logprobs, Logprobs]:
    """The prompt's and the output's, put together from all chunks of a request."""
    first, *others = rig.chunks[rid]
    assert first.prompt_logprobs is not None
    assert all(chunk.prompt_logprobs is None for chunk in others), "sent twice"
    output = Logprobs()
    for chunk in rig.chunks[rid]:
        assert chunk.logprobs is not None
        assert len(chunk.logprobs) == len(chunk.ids)
        output.extend(chunk.logprobs)
    return first.prompt_logprobs, output


def check(rig: Rig, rid: str, prompt: list[int], ask: LogprobParams | None) -> None:
    """What was reported is what the model says about the text that was given out."""
    if ask is None:
        assert all(c.logprobs is c.prompt_logprobs is None for c in rig.chunks[rid])
        return
    ids = prompt + rig.outputs[rid]
    logits = sum_logits(rig.model, ids)
    in_prompt, output = reported(rig, rid)
    same(output, expected(logits, ids, len(prompt), len(ids), ask))
    start = len(prompt) if ask.logprob_start_len == -1 else ask.logprob_start_len + 1
    same(in_prompt, expected(logits, ids, start, len(prompt), ask))


def asks(rng: random.Random, prompt: list[int]) -> LogprobParams | None:
    """Nothing, output only, from the first token, from the last, from anywhere."""
    start = rng.choice([-1, 0, len(prompt) - 1, rng.randrange(len(prompt))])
    ids = tuple(rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 4])))
    ask = LogprobParams(
        logprob_start_len=start, top_logprobs_num=rng.choice([0, 0, 1, 5]), token_ids_logprob=ids
    )
    return rng.choice([None, ask, ask])


def traffic(rig: Rig, rng: random.Random, count: int, **params: Any) -> None:
    """`count` requests of every kind together, some of which share a beginning; then checked."""
    head = [rng.randrange(1, VOCAB) for _ in range(33)]
    sent: dict[str, tuple[list[int], LogprobParams | None]] = {}
    for i in range(count):
        tail = [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 12))]
        prompt = head[: rng.choice([0, 33])] + tail
        ask = asks(rng, prompt)
        sent[str(i)] = (prompt, ask)
        given = {"temperature": float(i % 2), "seed": i, "max_new_tokens": rng.randint(0, 30)}
        rig.submit(str(i), prompt, stream=i % 3 == 0, logprobs=ask, **(given | params))
        if i % 4 == 3:
            rig.step()
    rig.run()
    for rid, (prompt, ask) in sent.items():
        check(rig, rid, prompt, ask)
        assert rig.outputs[rid] == rig.model.reference(prompt, rig.sampling[rid])


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("chunk", [5, 64])
def test_values_are_the_models(drafter: str, page: int, chunk: int) -> None:
    """Every drafter, page size, chunk size and prefix hit; the text is as without."""
    rig = Rig(drafter=drafter, page=page, chunk=chunk)
    traffic(rig, random.Random(page + chunk), 12)


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("page", [1, 4])
def test_a_retracted_request_reports_every_token_once(drafter: str, page: int) -> None:
    rig = Rig(drafter=drafter, page=page, slots=190, rows=8, chunk=7)
    traffic(rig, random.Random(page), 16, max_new_tokens=40, ignore_eos=True)
    assert rig.counters.retracted > 0, "the pool was meant to run out"


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_stop_inside_a_block_cuts_them_with_the_ids(drafter: str) -> None:
    prompt = [2, 7, 1, 8]
    rig = Rig(drafter=drafter)
    rig.submit("whole", prompt, max_new_tokens=30, ignore_eos=True, logprobs=ALL)
    while rig.scheduler.has_work:
        rig.step()
    _, whole = reported(rig, "whole")
    ids = rig.outputs["whole"]
    cuts = [p for p in range(30) if ids[p] not in ids[:p]]
    for p in cuts:
        stop = {"stop_token_ids": (ids[p],), "ignore_eos": True, "max_new_tokens": 30}
        rig.submit(str(p), prompt, stream=p % 2 == 0, logprobs=ALL, **stop)
    rig.run()
    for p in cuts:
        _, output = reported(rig, str(p))
        same(output, whole.part(0, p + 1))


def test_a_greedy_token_is_the_most_likely_one() -> None:
    rig = Rig(drafter="oracle")
    rig.submit("a", [1, 2, 3], max_new_tokens=40, ignore_eos=True, logprobs=ALL)
    rig.run()
    _, output = reported(rig, "a")
    assert [ids[0] for ids in output.top_ids] == rig.outputs["a"]
    assert [values[0] for values in output.top_values] == output.values
    assert max(output.values) <= 0
    assert [[v[0], v[2]] for v in output.id_values] == [[v[0]] * 2 for v in output.id_values]


def test_what_a_request_samples_with_does_not_change_them() -> None:
    """Temperature, filters and masks come after the model's own distribution."""
    rig = Rig(spread=1.0)
    settings: list[dict[str, Any]] = [
        {"temperature": 0.5, "top_k": 4},
        {"temperature": 2.0, "top_p": 0.5, "min_p": 0.1},
        {"temperature": 1.0, "min_new_tokens": 20},
        {"temperature": 0.0, "frequency_penalty": 1.5, "repetition_penalty": 1.3},
        {"temperature": 1.0, "logit_bias": {5: 4.0}},
    ]
    for i, params in enumerate(settings):
        rig.submit(str(i), [4, 2], max_new_tokens=20, seed=i, logprobs=ALL, **params)
    rig.run()
    for i in range(len(settings)):
        check(rig, str(i), [4, 2], ALL)


@pytest.mark.parametrize("drafter", ["random", "oracle"])
def test_a_relaxed_rule_changes_the_text_and_not_what_is_said_about_it(drafter: str) -> None:
    """Each value is the target's at the node whose row gave the token, accepted or not."""
    rig = Rig(drafter=drafter, spread=2.0)
    rig.scheduler.worker.rule = ThresholdRule(0.02, 0.3)  # type: ignore[attr-defined]
    for i in range(6):
        given = {"max_new_tokens": 25, "temperature": 1.0, "seed": i, "ignore_eos": True}
        rig.submit(str(i), [i + 1, 6], logprobs=ALL, **given)
    rig.run()
    for i in range(6):
        check(rig, str(i), [i + 1, 6], ALL)
    plain = [rig.model.reference([i + 1, 6], rig.sampling[str(i)]) for i in range(6)]
    if drafter == "oracle":
        assert any(rig.outputs[str(i)] != plain[i] for i in range(6)), "the rule never fired"


def test_scoring_without_a_token_of_output() -> None:
    rig = Rig(chunk=4)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    rig.submit("score", prompt, max_new_tokens=0, stream=True, logprobs=ALL)
    rig.submit("short", [3], max_new_tokens=0, logprobs=ALL)
    rig.run()
    check(rig, "score", prompt, ALL)
    in_prompt, output = reported(rig, "score")
    assert (len(in_prompt), len(output)) == (len(prompt) - 1, 0)
    assert [len(part) for part in reported(rig, "short")] == [0, 0], "one token has no value"


@pytest.mark.parametrize("page", [1, 4])
def test_a_cached_prefix_is_used_up_to_the_first_position_asked_for(page: int) -> None:
    rig = Rig(page=page)
    prompt = [1 + i % 60 for i in range(41)]
    rig.submit("warm", prompt, max_new_tokens=1)
    while rig.scheduler.has_work:
        rig.step()
    starts = [-1, 0, 1, 8, 20, 40]
    for start in starts:
        ask = LogprobParams(logprob_start_len=start)
        rig.submit(str(start), prompt, max_new_tokens=2, logprobs=ask)
    rig.run()
    for start in starts:
        check(rig, str(start), prompt, LogprobParams(logprob_start_len=start))
        usable = 40 if start == -1 else start
        assert rig.ends[str(start)].cached_tokens == usable // page * page


def test_what_is_scored_is_not_computed_again() -> None:
    """A request that resumes may find all of its text in the cache but the last token."""
    rig = Rig(chunk=4)
    req = rig.submit("a", [5] * 10, max_new_tokens=8, ignore_eos=True, logprobs=ALL)
    assert (req.unscored, req.reusable) == (0, 0)
    rig.step()
    assert (req.unscored, req.reusable) == (4, 4)
    while req.output_len < 3:
        rig.step()
    assert (req.unscored, req.reusable) == (13, 12)
    rig.run()


def test_a_prompt_that_cannot_use_the_cache_waits_for_nobody() -> None:
    rig = Rig(chunk=1000)
    prompt = [1 + i % 60 for i in range(60)]
    for i in range(4):
        rig.submit(str(i), prompt, max_new_tokens=1, logprobs=ALL)
    rig.step()
    assert rig.model.forwards == 1
    assert not rig.scheduler.waiting
    rig.run()
    for i in range(4):
        check(rig, str(i), prompt, ALL)


def test_an_abort_reports_what_there_is() -> None:
    rig = Rig(chunk=8)
    prompt = [1 + i % 60 for i in range(40)]
    rig.submit("a", prompt, max_new_tokens=5, logprobs=LogprobParams(logprob_start_len=0))
    rig.submit("b", prompt, max_new_tokens=5, logprobs=OUTPUT)
    rig.step()
    rig.scheduler.abort(None)
    rig.run()
    in_prompt, output = reported(rig, "a")
    assert (len(in_prompt), len(output)) == (8, 0)
    assert [len(part) for part in reported(rig, "b")] == [0, 0]


def test_nobody_asking_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("log-probabilities were read")

    rig = Rig(drafter="oracle", chunk=8)
    rig.submit("before", [1] * 20, max_new_tokens=10, logprobs=ALL)
    while rig.scheduler.has_work:
        rig.step()
    monkeypatch.setattr("sgl_spec.engine.logprobs.read_logprobs", fail)
    for i in range(4):
        rig.submit(str(i), [1 + i] * 20, max_new_tokens=10)
    rig.run()


def test_only_rows_asked_for_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions of the prompt from the start on, and the rows on the walk: no node beside it."""
    seen: list[int] = []
    read = read_logprobs

    def count(logits_of: Any, index: Tensor, *rest: Any) -> Any:
        seen.append(len(index))
        return read(logits_of, index, *rest)

    monkeypatch.setattr("sgl_spec.engine.logprobs.read_logprobs", count)
    rig = Rig(drafter="random", chunk=64)
    ask = LogprobParams(logprob_start_len=30)
    rig.submit("a", [9] * 40, max_new_tokens=25, ignore_eos=True, logprobs=ask)
    rig.submit("b", [8] * 40, max_new_tokens=25, ignore_eos=True)
    rig.run()
    assert sum(seen) == 9 + 25


# --- reading --------------------------------------------------------------------------------------


@given(data=st.data())
def test_reading_in_slices(data: st.DataObject) -> None:
    """Any slice size gives the definition, ties in order of their ids; a slice is all there is."""
    counts = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    seed = data.draw(st.integers(0, 1000))
    size = data.draw(st.integers(1, 60))
    generator = torch.Generator().manual_seed(seed)
    total, vocab = sum(counts), 11
    logits = torch.randint(-3, 3, (total + 4, vocab), generator=generator).float()
    index = torch.randperm(total + 4, generator=generator)[:total]
    tokens = torch.randint(vocab, (total,), generator=generator)
    params = [
        LogprobParams(
            top_logprobs_num=data.draw(st.integers(0, vocab)),
            token_ids_logprob=tuple(data.draw(st.lists(st.integers(0, vocab - 1), max_size=3))),
        )
        for _ in counts
    ]

    def logits_of(part: Tensor) -> Tensor:
        assert len(part) <= max(1, size // vocab)
        return logits[part]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs_module, "SLICE_ELEMENTS", size)
        spans = [Span(p, n) for p, n in zip(params, counts, strict=True)]
        read = read_logprobs(logits_of, index, tokens, spans, vocab)
    assert [len(one) for one in read] == counts
    start = 0
    for one, ask, count in zip(read, params, counts, strict=True):
        part = slice(start, start + count)
        rows = torch.cat([torch.zeros(1, vocab), logits[index[part]]])
        ids = [0, 0, *tokens[part].tolist()]
        same(one, expected(rows, ids, 2, count + 2, ask))
        start += count


def test_a_certain_token_has_zero_and_no_value_is_positive() -> None:
    logits = torch.tensor([[0.0, 200.0, -50.0], [1e-6, 0.0, 0.0]])
    (read,) = read_logprobs(
        lambda part: logits[part],
        torch.tensor([0, 1]),
        torch.tensor([1, 0]),
        [Span(LogprobParams(top_logprobs_num=3), 2)],
        3,
    )
    assert read.values[0] == 0
    assert max(max(row) for row in read.top_values) <= 0
    assert read.top_ids == [[1, 0, 2], [0, 1, 2]]


# --- ranges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        ({"logprob_start_len": -2}, r"logprob_start_len must be -1 .* 0 to 9, got -2"),
        ({"logprob_start_len": 10}, r"logprob_start_len must be .*, got 10"),
        ({"top_logprobs_num": -1}, "top_logprobs_num must be an integer from 0 to 128, got -1"),
        ({"top_logprobs_num": MAX_TOP_LOGPROBS + 1}, "top_logprobs_num must be"),
        ({"token_ids_logprob": (3, -1)}, "token_ids_logprob must be ids from 0 to 999, got -1"),
        ({"token_ids_logprob": (1000,)}, "token_ids_logprob must be ids from 0 to 999, got 1000"),
        ({"token_ids_logprob": (0,) * (MAX_LOGPROB_IDS + 1)}, "token_ids_logprob must be at most"),
    ],
)
def test_ranges(ask: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        LogprobParams(**ask).check(1000, 10)
    assert caught.value.param == next(iter(ask))


def test_top_logprobs_of_a_small_vocabulary() -> None:
    LogprobParams(top_logprobs_num=50, logprob_start_len=9).check(50, 10)
    with pytest.raises(InvalidRequestError, match="from 0 to 50, got 51"):
        LogprobParams(top_logprobs_num=51).check(50, 10)


def test_the_size_of_a_reply_is_bounded() -> None:
    length = MAX_PROMPT_LOGPROBS // 128 + 1
    LogprobParams(logprob_start_len=1, top_logprobs_num=128).check(1000, length)
    with pytest.raises(InvalidRequestError, match="log-probabilities") as caught:
        LogprobParams(logprob_start_len=0, top_logprobs_num=128).check(1000, length)
    assert caught.value.param == "logprob_start_len"
