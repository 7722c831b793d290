"""Log-probabilities over HTTP: speculation on and off, streamed or not, and read by the `openai`
client."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from reference import Reference
from scoring import TOLERANCE, close, near, rescore
from serving import Launch, Server
from talk import drained, stream_events

NEW = 20
PROMPT = "The harbour master kept a ledger of every boat that came in"
GREEDY = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "seed": 4, "max_new_tokens": NEW, "stop": ["e"]}
WORDS = {"temperature": 1.0, "seed": 5, "max_new_tokens": NEW, "regex": "( [a-z]{2,5}){9}"}


@pytest.fixture(scope="module")
def tiny(tiny_model_dir: Path) -> Reference:
    return Reference(tiny_model_dir)


@pytest.fixture(scope="module")
def server(launch_shared: Launch) -> Iterator[Server]:
    server = launch_shared("--speculative-algorithm", "NGRAM", "--page-size", "16")
    yield server
    drained(server)


@pytest.fixture(scope="module")
def plain(launch_shared: Launch) -> Server:
    """Without speculation, and with streams that carry what is new."""
    return launch_shared("--speculative-algorithm", "none", "--incremental-streaming-output")


def post(server: Server, **body: Any) -> Any:
    reply = server.client.post("/generate", json={"return_logprob": True} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


FULL = {
    "logprob_start_len": 0,
    "top_logprobs_num": 2,
    "token_ids_logprob": [9, 500],
    "return_text_in_logprobs": True,
}
STREAM = {"stream": True, "return_logprob": True}
LISTS = [f"{a}_{b}_logprobs" for a in ("input", "output") for b in ("token", "top", "token_ids")]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, WORDS], ids=["greedy", "stop", "regex"])
def test_generate(server: Server, plain: Server, tiny: Reference, sampling: dict[str, Any]) -> None:
    """Speculation on and off, whole, cumulative and incremental: the same lists, of the ids."""
    body = {"text": PROMPT, "sampling_params": sampling, **FULL}
    whole = post(server, **body)
    for other in (post(plain, **body), stream_events(server, {**body, **STREAM})[-1]):
        assert other["output_ids"] == whole["output_ids"]
        for name in LISTS:
            close(other["meta_info"][name], whole["meta_info"][name])
    events = stream_events(plain, {**body, **STREAM})
    for name in LISTS:
        parts = [e["meta_info"][name] for e in events]
        pieces = parts[-1] if name.startswith("input") else list(itertools.chain(*parts))
        close(pieces, whole["meta_info"][name])
    prompt, meta = tiny.encode(PROMPT), whole["meta_info"]
    assert [e[1] for e in meta["input_token_logprobs"]] == prompt
    assert [e[1] for e in meta["output_token_logprobs"]] == whole["output_ids"]
    assert meta["output_token_logprobs_length"] == len(whole["output_ids"])
    assert "".join(e[2] for e in meta["input_token_logprobs"]) == PROMPT
    rows = rescore(tiny, prompt + whole["output_ids"])
    tokens = meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]
    near(
        [e[0] for e in tokens],
        torch.stack([r[e[1]] for r, e in zip(rows, tokens, strict=False)]),
        TOLERANCE,
    )


def test_generate_batches(server: Server) -> None:
    """List forms: one value per prompt, and a prompt that does not ask has no keys."""
    batch = post(
        server,
        input_ids=[[5, 6, 7], [8, 9], [10, 11, 12, 13]],
        sampling_params={"temperature": 0, "max_new_tokens": 4, "n": 2},
        return_logprob=[True, False, True],
        logprob_start_len=[0, -1, 2],
        top_logprobs_num=[2, 0, 0],
        token_ids_logprob=[[], [], [3, 4]],
    )
    metas = [reply["meta_info"] for reply in batch]
    assert ["output_token_logprobs" in meta for meta in metas] == [True] * 2 + [False] * 2 + [
        True
    ] * 2
    assert [[e[1] for e in metas[i]["input_token_logprobs"]] for i in (0, 1, 4, 5)] == [
        [5, 6, 7],
        [5, 6, 7],
        [12, 13],
        [12, 13],
    ]
    assert [len(top) for top in metas[0]["output_top_logprobs"]] == [2] * 4
    assert "input_top_logprobs" not in metas[4]
    assert [[e[1] for e in one] for one in metas[4]["output_token_ids_logprobs"]] == [[3, 4]] * 4


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def test_completions(server: Server, client: openai.OpenAI, tiny: Reference) -> None:
    """Whole and streamed, with the prompt echoed; offsets point at the tokens."""
    request: dict[str, Any] = {"model": "default", "prompt": PROMPT, "max_tokens": NEW}
    request |= {"temperature": 0, "logprobs": 2, "echo": True}
    (choice,) = client.completions.create(**request).choices
    found = choice.logprobs
    assert found is not None
    prompt = tiny.encode(PROMPT)
    assert len(found.tokens or ()) == len(prompt) + NEW
    assert found.token_logprobs is not None
    assert found.token_logprobs[0] is None
    generated = post(server, text=PROMPT, sampling_params=GREEDY)["output_ids"]
    rows = rescore(tiny, prompt + generated)
    following = torch.tensor(prompt[1:] + generated)
    near(found.token_logprobs[1:], rows[:-1].gather(1, following[:, None])[:, 0], TOLERANCE)
    pairs = zip(found.tokens or (), found.text_offset or (), strict=True)
    whole = [(token, at) for token, at in pairs if not token.startswith("bytes:")]
    assert all(choice.text[at : at + len(token)] == token for token, at in whole)
    assert len(whole) > len(prompt)
    tops = zip(found.tokens or (), found.top_logprobs or (), strict=True)
    for token, top in list(tops)[len(prompt) :]:
        assert max(top, key=lambda name: top[name]) == token, "greedy"
    parts = [
        c for chunk in client.completions.create(stream=True, **request) for c in chunk.choices
    ]
    assert "".join(part.text for part in parts) == choice.text
    for name in ("tokens", "text_offset", "top_logprobs", "token_logprobs"):
        joined = [x for p in parts if p.logprobs for x in getattr(p.logprobs, name)]
        close(joined, getattr(found, name))


@pytest.mark.parametrize("stream", [False, True])
def test_scoring(client: openai.OpenAI, tiny: Reference, stream: bool) -> None:
    """`echo` with `max_tokens` 0 scores texts and generates nothing."""
    texts = [PROMPT, "Nobody", "and on"]
    request: dict[str, Any] = {"model": "default", "prompt": texts, "max_tokens": 0}
    reply = client.completions.create(echo=True, logprobs=0, stream=stream, **request)
    chunks = list(reply) if stream else [reply]
    choices = [c for chunk in chunks for c in chunk.choices if c.logprobs is not None]
    assert [c.text for c in sorted(choices, key=lambda c: c.index)] == texts
    for choice in choices:
        ids = tiny.encode(texts[choice.index])
        found = choice.logprobs
        assert found is not None
        assert "".join(found.tokens or ()) == texts[choice.index]
        values = found.token_logprobs or []
        assert values[0] is None
        wanted = rescore(tiny, ids)[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
        near(values[1:], wanted, TOLERANCE)
        assert [len(top) for top in (found.top_logprobs or [])[1:]] == [1] * (len(ids) - 1)


def test_chat(client: openai.OpenAI) -> None:
    """Entries spell the text in bytes; streamed they add up to the same."""
    request: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": "Where is the boat? 🚢"}],
        "max_tokens": NEW,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
    }
    reply = client.chat.completions.create(**request)
    (choice,) = reply.choices
    assert choice.logprobs is not None
    entries = choice.logprobs.content
    assert entries is not None
    assert reply.usage is not None
    assert len(entries) == reply.usage.completion_tokens == NEW
    text = bytes(byte for entry in entries for byte in entry.bytes or ()).decode(errors="replace")
    assert text == choice.message.content
    for entry in entries:
        assert entry.logprob <= 0
        assert [entry.token, entry.logprob] == [
            entry.top_logprobs[0].token,
            entry.top_logprobs[0].logprob,
        ]
        assert len(entry.top_logprobs) == 3
    chunks = client.chat.completions.create(stream=True, **request)
    parts = [c.logprobs.content or [] for k in chunks for c in k.choices if c.logprobs]
    streamed = list(itertools.chain(*parts))
    assert [e.token for e in streamed] == [e.token for e in entries]
    near([e.logprob for e in streamed], torch.tensor([e.logprob for e in entries]), TOLERANCE)
