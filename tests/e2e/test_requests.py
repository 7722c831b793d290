"""Faults that users of servers with speculation have reported: text, sampling, cache, fields."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from serving import Launch, Server
from solo import Solo
from talk import (
    Canary,
    Reply,
    accepted,
    body,
    drained,
    flush,
    generate,
    in_both_modes,
    speculated,
    together,
)

VOCAB = 512
TEXT = "The harbour master kept a ledger of every boat. The harbour master kept a"


@pytest.fixture(scope="module")
def server(launch_shared: Launch) -> Server:
    """One server with NGRAM for this file; every test must leave it drained."""
    flags = ("--max-total-tokens", "24000", "--enable-metrics", "--max-running-requests", "48")
    # A forward of the tiny model takes hardly longer than asking for drafts.
    drafts = ("--speculative-algorithm", "NGRAM", "--speculative-verify-whole-trees")
    return launch_shared(*drafts, *flags)


@pytest.fixture(autouse=True)
def _drained(server: Server) -> Iterator[None]:
    canary = Canary(server, TEXT)
    flush(server)
    yield
    canary.alive()
    drained(server)


@pytest.fixture(scope="module")
def solo(tiny_model_dir: Path) -> Solo:
    return Solo(tiny_model_dir)


def some(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(count)]


def mixed_prompts(rng: random.Random) -> list[list[int]]:
    """Eight each that repeat a paragraph, loop, are free, and are very short."""
    prompts = []
    for i in range(8):
        paragraph = some(rng, 40)
        prompts.append([*some(rng, 3), *paragraph, *paragraph, *paragraph[:5]])
        prompts.append([*some(rng, 3), *list(range(60 + i, 66 + i)) * 6])
        prompts.append(some(rng, rng.randint(10, 60)))
        prompts.append(some(rng, 1 + i % 3))
    return prompts


GREEDY = {"temperature": 0, "ignore_eos": True}


def test_rows_are_not_mixed_up_when_draft_lengths_differ(server: Server, solo: Solo) -> None:
    """32 requests at once, some drafted for and some not, in five orders: each as if alone."""
    rng = random.Random(1)
    prompts = mixed_prompts(rng)
    replies: list[Reply] = []
    for _ in range(5):
        rng.shuffle(prompts)
        calls = [
            functools.partial(generate, server, p, max_new_tokens=96, **GREEDY) for p in prompts
        ]
        crowd = together(calls, 32)
        for prompt, reply in zip(prompts, crowd, strict=True):
            assert reply["output_ids"] == solo.ids(prompt, max_new_tokens=96, **GREEDY)
        replies += crowd
    assert speculated(replies)


def test_prefix_hits_over_scattered_slots(server: Server, solo: Solo) -> None:
    """Hits on a long prefix equal cold runs, also after other requests have scattered the slots."""
    rng = random.Random(2)
    shared = some(rng, 670)
    questions = [some(rng, 9) for _ in range(3)]
    generate(server, some(rng, 50), max_new_tokens=8, **GREEDY)
    sampling = {"max_new_tokens": 48, **GREEDY}
    first, *later = [generate(server, shared + q, **sampling) for q in questions]
    assert first["meta_info"]["cached_tokens"] == 0
    churn = [
        functools.partial(generate, server, some(rng, rng.randint(1, 200)), max_new_tokens=n)
        for n in range(1, 40)
    ]
    again = [
        functools.partial(generate, server, shared + q, **sampling) for q in questions for _ in "ab"
    ]
    calls = churn[:20] + again + churn[20:]
    later += together(calls, 12)[20:26]
    for reply in later:
        assert reply["meta_info"]["cached_tokens"] >= 670
    flush(server)
    for i, question in enumerate(questions):
        cold = generate(server, shared + question, **sampling)
        expected = solo.ids(shared + question, **sampling)
        assert cold["output_ids"] == expected
        assert cold["meta_info"]["cached_tokens"] == 0 if i == 0 else True
    texts = [solo.ids(shared + q, **sampling) for q in questions]
    found = [reply["output_ids"] for reply in [first, *later]]
    assert found == [texts[0], texts[1], texts[2], *[t for t in texts for _ in "ab"]]


@pytest.mark.parametrize("narrow", [{"min_p": 1.0}, {"top_k": 1}, {"top_p": 1e-6}])
def test_filters_that_leave_one_token_are_greedy(
    server: Server, solo: Solo, narrow: dict[str, Any]
) -> None:
    """Filters hold for every token of a block, not for the first one of a round."""
    replies = []
    for prompt in (TEXT, [7, 8, 9], list(range(50, 60)) * 4):
        reply = in_both_modes(
            server, prompt, temperature=1.5, max_new_tokens=120, ignore_eos=True, **narrow
        )
        assert reply["output_ids"] == solo.ids(prompt, max_new_tokens=120, **GREEDY)
        replies.append(reply)
    assert sum(map(accepted, replies)) > 0


def test_without_a_seed_texts_vary(server: Server) -> None:
    calls = [functools.partial(generate, server, TEXT, max_new_tokens=32) for _ in range(20)]
    replies = together(calls)
    assert len({tuple(reply["output_ids"]) for reply in replies}) >= 15
    assert len({reply["meta_info"]["seed"] for reply in replies}) == 20
    for reply in replies[:5]:
        again = generate(server, TEXT, max_new_tokens=32, seed=reply["meta_info"]["seed"])
        assert again["output_ids"] == reply["output_ids"]


def test_each_request_has_its_own_settings(server: Server, solo: Solo) -> None:
    """Greedy rows in a hot batch stay greedy, whoever comes first."""
    rng = random.Random(3)
    kinds: list[dict[str, Any]] = [{"temperature": 0}] * 6
    kinds += [{"temperature": 1.3}] * 4 + [{"temperature": 1, "top_k": 1}] * 3
    kinds += [{"temperature": 0.7, "top_p": 0.5}] * 3
    prompts = {i: [i + 3, *some(rng, 12)] for i in range(16)}
    hot: dict[int, set[tuple[int, ...]]] = {}
    order = list(range(16))
    for _ in range(10):
        rng.shuffle(order)
        calls = [
            functools.partial(
                generate, server, prompts[i], max_new_tokens=40, ignore_eos=True, **kinds[i]
            )
            for i in order
        ]
        for i, reply in zip(order, together(calls), strict=True):
            if kinds[i]["temperature"] == 0 or "top_k" in kinds[i]:
                assert reply["output_ids"] == solo.ids(prompts[i], max_new_tokens=40, **GREEDY)
            else:
                hot.setdefault(i, set()).add(tuple(reply["output_ids"]))
    assert all(len(hot[i]) > 5 for i in range(6, 10)), "temperature 1.3 did not vary"


def test_greedy_requests_join_a_hot_batch(server: Server, solo: Solo) -> None:
    rng = random.Random(4)
    hot = [
        functools.partial(
            generate, server, some(rng, 9), temperature=1.3, max_new_tokens=300, ignore_eos=True
        )
        for _ in range(6)
    ]
    cold = [some(rng, 5) for _ in range(24)]
    calls = [functools.partial(generate, server, p, max_new_tokens=30, **GREEDY) for p in cold]
    replies = together([*hot, *calls], 10)[6:]
    for prompt, reply in zip(cold, replies, strict=True):
        assert reply["output_ids"] == solo.ids(prompt, max_new_tokens=30, **GREEDY)


class TestPenaltiesAndBias:
    """They hold for every token of a block: the text is the plain engine's, and it changes."""

    LOOP = list(range(60, 73)) * 3  # the tiny model goes on with it, which penalties must end

    def check(self, server: Server, solo: Solo, **sampling: Any) -> list[int]:
        given = {"max_new_tokens": 48, **GREEDY, **sampling}
        reply = in_both_modes(server, self.LOOP, **given)
        # JSON has no integer keys, so the plain engine gets them as integers.
        bias = {int(token): value for token, value in given.pop("logit_bias", {}).items()}
        plain = solo.llm.generate([self.LOOP], {**given, "logit_bias": bias})[0]
        assert reply["output_ids"] == plain.output_ids
        ids: list[int] = reply["output_ids"]
        return ids

    @pytest.mark.parametrize("temperature", [0, 1])
    def test_penalties(self, server: Server, solo: Solo, temperature: int) -> None:
        base = {"temperature": temperature, "seed": 4}
        neutral, high, low, presence, repetition = [
            self.check(server, solo, **base, **one)
            for one in (
                {},
                {"frequency_penalty": 2},
                {"frequency_penalty": -2},
                {"presence_penalty": 2},
                {"repetition_penalty": 1.3},
            )
        ]
        assert high not in (neutral, low)
        assert neutral not in (presence, repetition)
        assert len(set(high)) > len(set(low))

    def test_a_banned_token_never_shows_up(self, server: Server, solo: Solo) -> None:
        text = self.check(server, solo, max_new_tokens=200)
        common = [token for token, _ in Counter(text).most_common(3)]
        bias = {str(token): -100 for token in common}
        assert not set(common) & set(self.check(server, solo, max_new_tokens=200, logit_bias=bias))

    def test_a_forced_token_is_all_there_is(self, server: Server, solo: Solo) -> None:
        assert self.check(server, solo, logit_bias={"77": 100}) == [77] * 48


class TestSeedsAndChoices:
    def test_a_seed_repeats(self, server: Server, solo: Solo) -> None:
        sampling = {"temperature": 1, "max_new_tokens": 64, "ignore_eos": True}
        runs = [generate(server, TEXT, seed=42, **sampling)["output_ids"] for _ in range(5)]
        assert runs == [solo.ids(TEXT, seed=42, **sampling)] * 5
        assert generate(server, TEXT, seed=43, **sampling)["output_ids"] != runs[0]
        spelled = generate(server, TEXT, sampling_seed=42, **sampling)
        assert spelled["output_ids"] == runs[0]

    @pytest.mark.parametrize("temperature", [0, 1])
    def test_n_gives_n_choices(self, server: Server, solo: Solo, temperature: int) -> None:
        sampling = {"temperature": temperature, "max_new_tokens": 24, "seed": 5}
        native = server.client.post("/generate", json=body(TEXT, n=4, **sampling)).json()
        plain = solo.run(TEXT, **sampling)
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        name = client.models.list().data[0].id
        options: dict[str, Any] = {"temperature": temperature, "n": 4, "seed": 5}
        texts = client.completions.create(model=name, prompt=TEXT, max_tokens=24, **options)
        chat = client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": TEXT}], max_tokens=24, **options
        )
        chats = [choice.message.content for choice in chat.choices]
        assert native[0]["output_ids"] == plain.output_ids
        assert [choice.text for choice in texts.choices] == [reply["text"] for reply in native]
        for choices in (texts.choices, chat.choices):
            assert [choice.index for choice in choices] == [0, 1, 2, 3]
        for reply in (texts, chat):
            assert reply.usage is not None
            assert reply.usage.completion_tokens == 4 * 24
        different = 1 if temperature == 0 else 4
        assert len({reply["text"] for reply in native}) == len(set(chats)) == different


class TestMetrics:
    def scrape(self, server: Server) -> dict[str, float]:
        """Samples by name, those of a name added up."""
        lines = server.client.get("/metrics").text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
        found: dict[str, float] = {}
        for name, value in pairs:
            if "le=" not in name:
                short = name.partition("{")[0]
                found[short] = found.get(short, 0) + float(value)
        return found

    def test_counters_reconcile_with_replies(self, server: Server) -> None:
        """100 known requests: every counter rises by what the replies add up to."""
        rng = random.Random(9)
        prompts = (mixed_prompts(rng) * 4)[:100]
        before = self.scrape(server)
        # Every other request is stopped by an id, many of them inside a block.
        stops = [rng.sample(range(3, VOCAB), 30) if i % 2 else [] for i in range(100)]
        calls = [
            functools.partial(
                generate,
                server,
                prompt,
                max_new_tokens=rng.randint(1, 60),
                stop_token_ids=stop,
                **GREEDY,
            )
            for prompt, stop in zip(prompts, stops, strict=True)
        ]
        metas = [reply["meta_info"] for reply in together(calls)]
        after = self.scrape(server)
        rises = {name: after[name] - before[name] for name in before}
        assert all(rises[name] >= 0 for name in rises if name.endswith(("_total", "_count")))
        for name, key in {
            "generation_tokens": "completion_tokens",
            "prompt_tokens": "prompt_tokens",
            "cached_tokens": "cached_tokens",
            "spec_verify_calls": "spec_verify_ct",
            "spec_proposed_tokens": "spec_num_proposed_drafts",
            "spec_accepted_tokens": "spec_num_correct_drafts",
            "num_retractions": "num_retractions",
        }.items():
            assert rises[f"sglang:{name}_total"] == sum(m.get(key, 0) for m in metas), name
        assert rises["sglang:num_requests_total"] == 100
        assert rises["sglang:e2e_request_latency_seconds_count"] == 100
        assert rises["sglang:generation_tokens_histogram_sum"] == sum(
            m["completion_tokens"] for m in metas
        )
        assert rises["sglang:spec_accepted_tokens_total"] > 0

    def test_speculation_figures_follow_from_each_other(self, server: Server) -> None:
        """On text that repeats, for every reply of two tokens or more."""
        nodes = server.client.get("/server_info").json()["draft_tokens"]
        replies = [
            generate(server, list(range(70, 80)) * 5, max_new_tokens=n, **GREEDY)
            for n in (1, 2, 3, 10, 50, 120)
        ]
        assert "spec_verify_ct" not in replies[0]["meta_info"]
        for reply in replies[1:]:
            meta = reply["meta_info"]
            rounds, tokens = meta["spec_verify_ct"], meta["completion_tokens"]
            assert 1 <= rounds <= tokens
            assert meta["spec_accept_length"] == pytest.approx((tokens - 1) / rounds)
            assert meta["spec_accept_length"] <= nodes
            assert 0 <= meta["spec_accept_rate"] <= 1
            rate = meta["spec_num_correct_drafts"] / max(1, meta["spec_num_proposed_drafts"])
            assert meta["spec_accept_rate"] == pytest.approx(rate)
            assert meta["spec_num_proposed_drafts"] <= (nodes - 1) * rounds
        assert accepted(replies[-1]) > 0

    def test_the_next_turn_finds_the_last_one_cached(self, server: Server) -> None:
        ids: list[int] = [9, 8, 7, 6]
        for _ in range(3):
            reply = generate(server, ids, max_new_tokens=30, **GREEDY)
            ids = [*ids, *reply["output_ids"], 5, 4]
            later = generate(server, ids, max_new_tokens=1, **GREEDY)
            # All but the two new tokens and the last one of the answer, whose KV is never computed.
            assert later["meta_info"]["cached_tokens"] >= len(ids) - 3
