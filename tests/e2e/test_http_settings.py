"""Penalties, biases and speculation through the OpenAI routes, and what the replies report."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from serving import Launch, Server
from solo import Solo
from talk import Reply, drained, generate, stream_events, together

PROMPT = "The harbour master kept a ledger. The harbour master kept a ledger. The harbour"
LOOP = list(range(60, 73)) * 3
SETTINGS: dict[str, Any] = {
    "frequency_penalty": 0.7,
    "presence_penalty": -0.4,
    "temperature": 0.9,
    "seed": 12,
}
OURS: dict[str, Any] = {"repetition_penalty": 1.2, "top_k": 60, "min_p": 0.001, "min_tokens": 5}


@pytest.fixture(scope="module")
def server(launch_shared: Launch) -> Server:
    # A forward of the tiny model takes hardly longer than asking for drafts.
    drafts = ("--speculative-algorithm", "NGRAM", "--speculative-verify-whole-trees")
    return launch_shared(*drafts, "--max-total-tokens", "16000")


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def solo(tiny_model_dir: Path) -> Solo:
    return Solo(tiny_model_dir)


@pytest.fixture(autouse=True)
def _drained(server: Server) -> Iterator[None]:
    yield
    drained(server)


class TestOpenAI:
    def plain(self, solo: Solo, **extra: Any) -> str:
        given = {"max_new_tokens": 40, **SETTINGS, **OURS, **extra}
        given["min_new_tokens"] = given.pop("min_tokens")
        return solo.run(PROMPT, **given).text

    @pytest.mark.parametrize("speculation", [None, False, {"max_draft_tokens": 2}])
    def test_completions(self, client: OpenAI, solo: Solo, speculation: Any) -> None:
        bias = {"70": 3.5, "1": -100, "2": -2}
        reply = client.completions.create(
            model="default",
            prompt=PROMPT,
            max_tokens=40,
            logit_bias=bias,  # type: ignore[arg-type]
            extra_body=OURS | {"speculation": speculation},
            **SETTINGS,
        )
        assert reply.choices[0].text == self.plain(solo, logit_bias=bias)
        assert reply.choices[0].text != self.plain(solo)

    def test_chat_and_its_stream(self, client: OpenAI) -> None:
        options: dict[str, Any] = {
            "model": "default",
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 40,
            "extra_body": OURS,
            **SETTINGS,
        }
        whole = client.chat.completions.create(**options)
        parts = client.chat.completions.create(stream=True, **options)
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert text == whole.choices[0].message.content
        free = client.chat.completions.create(**(options | {"frequency_penalty": -2}))
        assert free.choices[0].message.content != text


class TestReports:
    """What finished choices tell beside OpenAI's fields, when asked."""

    def test_meta_info_repeats_a_seedless_answer(self, client: OpenAI) -> None:
        options: dict[str, Any] = {"model": "default", "prompt": PROMPT, "max_tokens": 20}
        first = client.completions.create(**options, n=3, extra_body={"return_meta_info": True})
        for choice in first.choices:
            assert choice.model_extra is not None
            meta = choice.model_extra["meta_info"]
            assert meta["seed"] == choice.model_extra["seed"]
            assert meta["completion_tokens"] == 20
            again = client.completions.create(**options, seed=meta["seed"])
            assert again.choices[0].text == choice.text
        plain = client.completions.create(**options)
        assert "meta_info" not in (plain.choices[0].model_extra or {})

    def test_speculation_details(self, client: OpenAI, server: Server) -> None:
        generate(server, PROMPT, temperature=0, max_new_tokens=60, ignore_eos=True)
        asked = {"ignore_eos": True, "return_spec_tokens_details": True}
        options: dict[str, Any] = {"model": "default", "prompt": PROMPT, "max_tokens": 60}
        reply = client.completions.create(**options, temperature=0, n=2, extra_body=asked)
        assert reply.model_extra is not None
        details = reply.model_extra["sglext"]["spec_tokens_details"]
        assert len(details) == 2
        for one in details:
            self.check(one, 60)
        request = options | asked | {"temperature": 0, "stream": True, "return_meta_info": True}
        *open_events, last = stream_events(server, request, "/v1/completions")
        self.check(last["sglext"]["spec_tokens_details"], 60)
        meta = last["choices"][0]["meta_info"]
        assert meta["spec_verify_ct"] == last["sglext"]["spec_tokens_details"]["spec_verify_ct"]
        assert not any("sglext" in event for event in open_events)

    def check(self, details: dict[str, Any], tokens: int) -> None:
        assert details["spec_verify_ct"] < tokens - 1, "drafts were accepted"
        emitted = details["spec_accept_length"] * details["spec_verify_ct"]
        assert round(emitted) == tokens - 1, "the token that prefill drew counts nowhere"


@pytest.mark.parametrize("route", ["/generate", "/v1/completions"])
def test_a_stream_may_come_in_longer_chunks(server: Server, route: str) -> None:
    """Every chunk but the last is a whole interval; chunks that a slow reader is late for may be
    one, so counts are looked at and not their differences."""
    own: dict[str, Any] = {"temperature": 0, "stream_interval": 7, "speculation": False}
    own["ignore_eos"] = True
    request: dict[str, Any] = {"stream": True}
    if route == "/generate":
        request |= {"text": PROMPT, "sampling_params": own | {"max_new_tokens": 40}}
    else:
        usage = {"include_usage": True, "continuous_usage_stats": True}
        request |= own | {"prompt": PROMPT, "max_tokens": 40, "stream_options": usage}
    events = stream_events(server, request, route)
    tokens = {
        (event["meta_info"] if route == "/generate" else event["usage"])["completion_tokens"]
        for event in events
    }
    assert tokens <= {1, 8, 15, 22, 29, 36, 40}
    assert len(tokens) > 3


def test_one_request_without_drafts_among_others_that_have_them(server: Server, solo: Solo) -> None:
    """Texts are the same whatever each may draft, and the figures tell who drafted."""
    base: dict[str, Any] = {"temperature": 0, "max_new_tokens": 120, "ignore_eos": True}
    wishes: list[Any] = [None, False, {"max_draft_tokens": 0}, {"max_draft_tokens": 3}] * 3
    calls = [functools.partial(generate, server, LOOP, speculation=w, **base) for w in wishes]
    replies: list[Reply] = together(calls)
    expected = solo.ids(LOOP, **base)
    figures: dict[str, set[int]] = {}
    for wish, reply in zip(wishes, replies, strict=True):
        assert reply["output_ids"] == expected
        meta = reply["meta_info"]
        most = max(i for i, n in enumerate(meta["spec_correct_drafts_histogram"]) if n)
        figures.setdefault(json.dumps(wish), set()).add(most)
        if wish in (False, {"max_draft_tokens": 0}):
            assert meta["spec_verify_ct"] == 119
            assert meta["spec_num_proposed_drafts"] == meta["spec_num_correct_drafts"] == 0
            assert meta["spec_accept_length"] == 1
            assert meta["spec_accept_rate"] == 0
    assert figures["false"] == figures['{"max_draft_tokens": 0}'] == {0}
    assert figures['{"max_draft_tokens": 3}'] == {3}
    assert max(figures["null"]) > 3, "the others drafted more"
