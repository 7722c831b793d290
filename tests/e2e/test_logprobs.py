"""Log-probabilities are those that transformers gives the same text in one forward.

With any drafter, chunk and page, prefix hits, retractions, streamed or not, read by the `openai`
client.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import real_prompts
import torch
from drafting import DRAFTERS, drafter_options
from reference import Reference
from serving import Launch, Server
from talk import drained, stream_events
from torch import Tensor

from sgl_spec import LLM, Completion, LogprobParams
from sgl_spec.request import Logprobs
from sgl_spec.speculative.prune import CostTable

NEW = 20
TOLERANCE = 1e-4  # fp32 rounding between ways of batching, on the tiny model
ASK = LogprobParams(logprob_start_len=0, top_logprobs_num=3, token_ids_logprob=(9, 500, 2))

Make = Callable[..., LLM]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path) -> Make:
    """`make(drafter, **flags)`: an engine that verifies whole trees, as if rows were free."""
    flat = CostTable(rows=(1,), ms=(1.0,))
    monkeypatch.setattr("sgl_spec.engine.engine.measure_costs", lambda *_, **__: flat)

    def build(drafter: str, **flags: Any) -> LLM:
        sizes = {"max_total_tokens": 8192, "max_running_requests": 16}
        llm = LLM(str(tiny_model_dir), **(sizes | drafter_options(drafter, tiny_model_dir) | flags))
        scheduler = llm.engine.scheduler
        scheduler.limits = dataclasses.replace(scheduler.limits, check_every_step=True)
        return llm

    return build


@pytest.fixture(scope="module")
def tiny(tiny_model_dir: Path) -> Reference:
    return Reference(tiny_model_dir)


@torch.inference_mode()
def rescore(reference: Reference, ids: Sequence[int]) -> Tensor:
    """[len(ids), V]: row p is the distribution of what follows ids[: p + 1]."""
    logits: Tensor = reference.model(torch.tensor([list(ids)])).logits[0]
    return logits.float().log_softmax(-1)


def agree(
    found: Logprobs, ids: Sequence[int], rows: Tensor, ask: LogprobParams, tolerance: float
) -> None:
    """`found` of `ids`, which `rows` predict."""
    wanted = rows.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert len(found.values) == len(ids)
    assert max(found.values) <= 0
    near(found.values, wanted, tolerance)
    if top := ask.top_logprobs_num:
        near(found.top_values, rows.topk(top).values, tolerance)
        near(found.top_values, rows.gather(1, torch.tensor(found.top_ids)), tolerance)
        assert all(len(set(best)) == top for best in found.top_ids)
    else:
        assert found.top_ids == found.top_values == []
    if ask.token_ids_logprob:
        near(found.id_values, rows[:, list(ask.token_ids_logprob)], tolerance)
    else:
        assert found.id_values == []


def near(found: list[Any], wanted: Tensor, tolerance: float) -> None:
    assert torch.tensor(found).shape == wanted.shape
    assert float((torch.tensor(found) - wanted).abs().max()) <= tolerance


def check(
    reference: Reference,
    prompt: Sequence[int],
    done: Completion,
    ask: LogprobParams | None,
    tolerance: float = TOLERANCE,
) -> None:
    """A completion's log-probabilities against one forward over all of its text."""
    if ask is None:
        assert done.logprobs is done.prompt_logprobs is None
        return
    assert done.logprobs is not None
    assert done.prompt_logprobs is not None
    ids = [*prompt, *done.output_ids]
    rows = rescore(reference, ids)
    start = len(prompt) - 1 if ask.logprob_start_len == -1 else ask.logprob_start_len
    if start < len(prompt) - 1:
        within = ids[start + 1 : len(prompt)]
        agree(done.prompt_logprobs, within, rows[start : len(prompt) - 1], ask, tolerance)
    else:
        assert len(done.prompt_logprobs) == 0
    agree(done.logprobs, done.output_ids, rows[len(prompt) - 1 : -1], ask, tolerance)


def make_prompts() -> list[list[int]]:
    """Lengths around chunks and pages; some share a beginning, some repeat themselves."""
    rng = random.Random(5)
    shared = [rng.randrange(3, 512) for _ in range(70)]
    loop = [*range(40, 53)] * 3
    fresh = [[rng.randrange(3, 512) for _ in range(n)] for n in (1, 17, 65)]
    return [*fresh, [*shared, 7, 8], shared + [9] * 5, loop, loop[:20] + shared[:30] + loop]


def requests() -> list[tuple[list[int], dict[str, Any], LogprobParams | None]]:
    """Every prompt greedily and sampled, asking for everything, for something, for nothing."""
    rng = random.Random(6)
    found: list[tuple[list[int], dict[str, Any], LogprobParams | None]] = []
    for i, prompt in enumerate(make_prompts() * 2):
        start = rng.choice([-1, 0, rng.randrange(len(prompt)), len(prompt) - 1])
        ask = rng.choice([ASK, ASK, LogprobParams(logprob_start_len=start, top_logprobs_num=1)])
        sampling = {"temperature": float(i % 2), "seed": i, "max_new_tokens": NEW}
        found.append((prompt, {**sampling, "ignore_eos": True}, None if i % 5 == 4 else ask))
    return found


SLOW = pytest.mark.slow
CUTS = [(16, 1), (-1, 16), pytest.param(16, 16, marks=SLOW), pytest.param(-1, 1, marks=SLOW)]


@pytest.mark.parametrize(("chunk", "page"), CUTS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_values_and_ids(
    make: Make, tiny: Reference, texts: list[list[int]], drafter: str, chunk: int, page: int
) -> None:
    """All at once, and again alone, when most of each prompt is cached."""
    llm = make(drafter, chunked_prefill_size=chunk, page_size=page)
    prompts, sampling, asks = zip(*requests(), strict=True)
    crowd = llm.generate(prompts, sampling, asks)
    alone = [llm.generate(*one)[0] for one in zip(prompts, sampling, asks, strict=True)]
    for done in (crowd, alone):
        assert [one.output_ids for one in done] == texts
        for one, prompt, ask in zip(done, prompts, asks, strict=True):
            check(tiny, prompt, one, ask)
    for one, prompt, ask in zip(alone, prompts, asks, strict=True):
        start = len(prompt) - 1 if ask is None else ask.logprob_start_len % len(prompt)
        assert one.cached_tokens == start // page * page
    assert llm.engine.scheduler.flush()


@pytest.fixture(scope="module")
def texts(tiny_model_dir: Path) -> list[list[int]]:
    """The texts of the plain engine when nobody asks for log-probabilities."""
    llm = LLM(str(tiny_model_dir), max_total_tokens=8192, max_running_requests=16)
    prompts, sampling, _ = zip(*requests(), strict=True)
    return [one.output_ids for one in llm.generate(prompts, sampling)]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_pool_that_runs_out(make: Make, tiny: Reference, drafter: str) -> None:
    """A request that is put back and resumes reports each token once, the prompt's too."""
    llm = make(drafter, max_total_tokens=560, chunked_prefill_size=40)
    prompts, sampling, asks = zip(*(requests() * 2), strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sgl_spec.engine.policy.GROWTH_TOKENS", 2)
        done = llm.generate(prompts, [one | {"max_new_tokens": 60} for one in sampling], asks)
    assert llm.engine.counters.retracted > 0, "the pool was meant to run out"
    for one, prompt, ask in zip(done, prompts, asks, strict=True):
        check(tiny, prompt, one, ask)


def test_every_start(make: Make, tiny: Reference) -> None:
    """From each position of a prompt that is cut into chunks of five, cached or not."""
    prompt = make_prompts()[1]
    for cached in (False, True):
        llm = make("NGRAM", chunked_prefill_size=5, disable_radix_cache=not cached)
        asks = [LogprobParams(logprob_start_len=s) for s in range(-1, len(prompt))]
        sampling = {"max_new_tokens": 3, "temperature": 0}
        for ask, one in zip(asks, llm.generate([prompt] * 18, sampling, asks), strict=True):
            check(tiny, prompt, one, ask)


# --- the embedded model ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "drafter", ["NGRAM", *(pytest.param(name, marks=SLOW) for name in ("none", "SELF", "JUNK"))]
)
def test_smollm2(smollm2_dir: Path, smollm2: Reference, drafter: str) -> None:
    """Real text at temperature 0 and 1, scored from the first token, in small chunks."""
    llm = LLM(
        str(smollm2_dir),
        **drafter_options(drafter, smollm2_dir),
        chunked_prefill_size=48,
        max_total_tokens=4000,
        max_running_requests=8,
        context_length=512,
    )
    texts = [*real_prompts.texts()[:2], "one, two, three, four, one, two, three, four, one, two,"]
    prompts = [llm.encode(text)[:120] for text in texts] * 2
    sampling = [{"temperature": float(i >= 3), "seed": i, "max_new_tokens": 24} for i in range(6)]
    ask = LogprobParams(logprob_start_len=0, top_logprobs_num=5, token_ids_logprob=(9, 49151))
    for i, one in enumerate(llm.generate(prompts, sampling, ask)):
        check(smollm2, prompts[i], one, ask, tolerance=1e-3)
        assert one.logprobs is not None
        if i < 3:
            assert [best[0] for best in one.logprobs.top_ids] == one.output_ids


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> Reference:
    return Reference(smollm2_dir)


# --- over HTTP ------------------------------------------------------------------------------------

PROMPT = "The harbour master kept a ledger of every boat that came in"
GREEDY = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "seed": 4, "max_new_tokens": NEW, "stop": ["e"]}
WORDS = {"temperature": 1.0, "seed": 5, "max_new_tokens": NEW, "regex": "( [a-z]{2,5}){9}"}


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


def close(found: Any, wanted: Any) -> None:
    """The same lists; numbers may differ by rounding."""
    assert type(found) is type(wanted)
    if isinstance(found, dict):
        assert found.keys() == wanted.keys()
        found, wanted = list(found.values()), [wanted[name] for name in found]
    if isinstance(found, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            close(one, other)
    elif isinstance(found, float):
        assert abs(found - wanted) <= TOLERANCE
    else:
        assert found == wanted


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


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"top_logprobs_num": -1}, "top_logprobs_num"),
        ({"top_logprobs_num": 129}, "top_logprobs_num"),
        ({"top_logprobs_num": 3, "return_logprob": False}, "top_logprobs_num"),
        ({"token_ids_logprob": [512]}, "token_ids_logprob"),
        ({"logprob_start_len": 3}, "logprob_start_len"),
        ({"logprob_start_len": -2}, "logprob_start_len"),
        ({"return_logprob": "yes"}, "return_logprob"),
    ],
)
def test_bad_ranges(server: Server, body: dict[str, Any], field: str) -> None:
    request = {"input_ids": [5, 6, 7], "return_logprob": True} | body
    reply = server.client.post("/generate", json=request)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field


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


def test_bad_ranges_of_openai(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    for extra in ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="default", messages=messages, **extra)  # type: ignore[call-overload]
        assert caught.value.param == "top_logprobs"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="default", prompt="x", logprobs=21)
    assert caught.value.param == "logprobs"
