"""The OpenAI routes and the small ones: the `openai` package must work unmodified."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from scripted import MODEL, Scripted, Start, starter, tokenizer

PROMPT = "The harbour master kept a ledger"
CHAT: list[Any] = [{"role": "user", "content": "Where is the boat? 🚢"}]
KEY = "sesame"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    with starter(tmp_path_factory.mktemp("openai")) as begin:
        yield begin


@pytest.fixture(scope="module")
def server(start: Start) -> Scripted:
    server = start(
        *("--api-key", KEY, "--enable-metrics", "--enable-cache-report"),
        *("--speculative-algorithm", "NGRAM"),
        generation_defaults={"temperature": 0.25, "top_k": 7},
    )
    server.client.headers["Authorization"] = f"Bearer {KEY}"
    return server


@pytest.fixture(scope="module")
def client(server: Scripted) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def repeated(ids: list[int], tokens: int) -> str:
    return tokenizer().decode((ids * (tokens // len(ids) + 1))[:tokens])


def chat_ids(message: str) -> list[int]:
    text = f"<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer().encode(text, add_special_tokens=False).ids


def until_running(server: Scripted, count: int) -> None:
    deadline = time.monotonic() + 5
    while (running := server.state()["running"]) != count:
        assert time.monotonic() < deadline, f"{running} run, not {count}"
        time.sleep(0.01)


class TestCompletions:
    def test_a_reply(self, client: openai.OpenAI) -> None:
        reply = client.completions.create(model=MODEL, prompt=PROMPT)
        ids = tokenizer().encode(PROMPT).ids
        assert reply.choices[0].text == repeated(ids, 16), "max_tokens is 16 unless given"
        assert reply.choices[0].finish_reason == "length"
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == len(ids)
        assert reply.usage.completion_tokens == 16
        assert reply.usage.prompt_tokens_details is not None
        assert reply.usage.prompt_tokens_details.cached_tokens == 2
        assert reply.model == MODEL

    def test_prompts_times_n_with_echo(self, client: openai.OpenAI) -> None:
        prompts = ["one boat", "two"]
        reply = client.completions.create(
            model="default", prompt=prompts, n=2, max_tokens=5, echo=True, seed=11
        )
        encode = tokenizer().encode
        assert [c.text for c in reply.choices] == [
            prompt + repeated(encode(prompt).ids, 5) for prompt in prompts for _ in range(2)
        ]
        assert [c.index for c in reply.choices] == [0, 1, 2, 3]
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == sum(len(encode(p).ids) for p in prompts)
        assert reply.usage.completion_tokens == 20
        seeds = [c.model_extra["seed"] for c in reply.choices if c.model_extra]
        assert seeds[0] == seeds[2] == 11
        assert seeds[1] == seeds[3] != 11
        assert float(seeds[1]) == seeds[1] < 2**53, "a client in JavaScript can send it back"

    def test_what_an_abort_ends(self, server: Scripted, client: openai.OpenAI) -> None:
        """One name by itself, and the name of the call all that still run."""
        named = {"rid": "job", "ignore_eos": True}
        with ThreadPoolExecutor() as pool:
            reply = pool.submit(
                client.completions.create,
                model=MODEL,
                prompt="a boat",
                max_tokens=1500,
                n=3,
                extra_body=named,
            )
            until_running(server, 3)
            for rid, left in (("job-1", 2), ("job", 0)):
                assert server.client.post("/abort_request", json={"rid": rid}).status_code == 200
                until_running(server, left)
            choices = reply.result(timeout=5).choices
        assert [choice.finish_reason for choice in choices] == ["abort"] * 3
        assert reply.result().id == "job"

    def test_stream_equals_whole(self, client: openai.OpenAI) -> None:
        ids = tokenizer().encode(PROMPT).ids
        text, usage = "", None
        stream = client.completions.create(
            model=MODEL,
            prompt=ids,
            max_tokens=33,
            echo=True,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            text += "".join(choice.text for choice in chunk.choices)
            usage = chunk.usage or usage
        assert text == PROMPT + repeated(ids, 33)
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), 33)

    def test_stop_and_extras(self, client: openai.OpenAI) -> None:
        reply = client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            stop=["master", "never"],
            extra_body={"top_k": 5, "min_p": 0.1, "min_tokens": 1, "ignore_eos": True},
        )
        assert reply.choices[0].text == "The harbour "
        assert reply.choices[0].finish_reason == "stop"
        assert reply.choices[0].model_extra is not None
        assert reply.choices[0].model_extra["matched_stop"] == "master"


class TestChat:
    def test_a_reply_takes_the_context_that_is_left(self, client: openai.OpenAI) -> None:
        ids = chat_ids(CHAT[0]["content"])
        reply = client.chat.completions.create(
            model=MODEL, messages=CHAT, extra_body={"ignore_eos": True}
        )
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == len(ids)
        assert reply.usage.total_tokens == 2048
        assert reply.choices[0].message.role == "assistant"
        assert reply.choices[0].message.content == repeated(ids, 2048 - len(ids))

    def test_end_of_turn_stops(self, client: openai.OpenAI) -> None:
        reply = client.chat.completions.create(model=MODEL, messages=CHAT)
        assert reply.choices[0].finish_reason == "stop"
        assert reply.choices[0].message.content == f"user\n{CHAT[0]['content']}"

    @pytest.mark.parametrize("n", [1, 3])
    def test_stream(self, client: openai.OpenAI, n: int) -> None:
        chunks = list(
            client.chat.completions.create(
                model=MODEL, messages=CHAT, n=n, max_completion_tokens=30, stream=True
            )
        )
        for index in range(n):
            mine = [c for chunk in chunks for c in chunk.choices if c.index == index]
            assert mine[0].delta.role == "assistant"
            assert [c.finish_reason for c in mine[:-1]] == [None] * (len(mine) - 1)
            assert mine[-1].finish_reason == "stop"
            text = "".join(c.delta.content or "" for c in mine)
            assert text == f"user\n{CHAT[0]['content']}"
        assert all(chunk.usage is None for chunk in chunks)
        assert len({chunk.id for chunk in chunks}) == 1

    def test_continuous_usage(self, client: openai.OpenAI) -> None:
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        chunks = list(
            client.chat.completions.create(
                model=MODEL, messages=CHAT, max_tokens=9, stream=True, stream_options=options
            )
        )
        counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
        assert len(counts) == len(chunks)
        assert counts == sorted(counts)
        assert counts[-1] == 9

    def test_parts_continuation_and_template_arguments(self, server: Scripted) -> None:
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "The boat"},
        ]
        reply = server.client.post(
            "/v1/chat/completions",
            json={
                "messages": messages,
                "continue_final_message": True,
                "chat_template_kwargs": {"enable_thinking": False},
                "max_tokens": 1,
            },
        ).json()
        text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nThe boat"
        expected = len(tokenizer().encode(text, add_special_tokens=False).ids)
        assert reply["usage"]["prompt_tokens"] == expected

    def test_async_client(self, server: Scripted) -> None:
        async def ask() -> list[str | None]:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
                replies = await asyncio.gather(
                    *(
                        client.chat.completions.create(
                            model=MODEL, messages=[{"role": "user", "content": f"boat {i}"}]
                        )
                        for i in range(10)
                    )
                )
            return [reply.choices[0].message.content for reply in replies]

        assert asyncio.run(ask()) == [f"user\nboat {i}" for i in range(10)]


class TestErrors:
    def test_bad_requests(self, client: openai.OpenAI) -> None:
        with pytest.raises(
            openai.BadRequestError, match="top_p must be less than or equal to 1, got"
        ) as caught:
            client.chat.completions.create(model=MODEL, messages=CHAT, top_p=3)
        assert caught.value.param == "top_p"
        body: Any = caught.value.body
        assert body["type"] == "BadRequestError"
        with pytest.raises(openai.BadRequestError, match="functions is not supported"):
            client.chat.completions.create(model=MODEL, messages=CHAT, functions=[{"name": "f"}])

    def test_other_classes(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="does not exist here"):
            client.chat.completions.create(model="gpt", messages=CHAT)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()

    def test_the_key_guards_everything_but_health(self, server: Scripted) -> None:
        import httpx

        with httpx.Client(base_url=server.url, trust_env=False) as nobody:
            for path in ("/health", "/health_generate", "/metrics"):
                assert nobody.get(path).status_code == 200
            for path in ("/server_info", "/v1/models", "/flush_cache", "/docs", "/nowhere"):
                assert nobody.get(path).status_code == 401, path
            reply = nobody.post("/generate", json={"text": "x"}, headers={"Authorization": KEY})
            assert reply.status_code == 401
            assert reply.json()["error"]["type"] == "AuthenticationError"


class TestOtherRoutes:
    def test_models(self, client: openai.OpenAI) -> None:
        (card,) = client.models.list().data
        assert card.id == MODEL
        assert client.models.retrieve(MODEL).id == MODEL
        assert client.models.retrieve("default").id == MODEL
        with pytest.raises(openai.NotFoundError, match="model may be"):
            client.models.retrieve("gpt/4")

    def test_infos_under_both_names(self, server: Scripted) -> None:
        get = server.client.get
        assert get("/model_info").json() == get("/get_model_info").json()
        assert get("/model_info").json()["architectures"] == ["ScriptedForCausalLM"]
        info = get("/server_info").json()
        assert get("/get_server_info").json().keys() == info.keys()
        assert info["speculative_algorithm"] == "NGRAM"
        assert info["max_running_requests"] == 48
        assert info["max_req_input_len"] == 2047
        assert info["internal_states"][0]["effective_max_running_requests"] == 48
        assert info["sampling_default_values"]["temperature"] == 0.25
        assert info["sampling_default_values"]["top_k"] == 7
        assert KEY not in json.dumps(info)

    def test_tokenize_there_and_back(self, server: Scripted) -> None:
        post = server.client.post
        one = post("/tokenize", json={"prompt": PROMPT}).json()
        ids = tokenizer().encode(PROMPT).ids
        assert one == {"tokens": ids, "count": len(ids), "max_model_len": 2048}
        two = post("/v1/tokenize", json={"prompt": ["a", PROMPT]}).json()
        assert two["tokens"][1] == ids
        assert post("/detokenize", json={"tokens": ids}).json() == {"text": PROMPT}
        both = post("/v1/detokenize", json={"tokens": [[2, *ids], ids]}).json()
        assert both == {"text": [PROMPT, PROMPT]}
        kept = post("/detokenize", json={"tokens": [2], "skip_special_tokens": False}).json()
        assert kept == {"text": "<|im_end|>"}

    def test_flush_cache(self, server: Scripted) -> None:
        for method in ("GET", "POST"):
            reply = server.client.request(method, "/flush_cache")
            assert (reply.status_code, reply.text) == (200, "Cache flushed.\n")
        long = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 150}}
        with server.client.stream("POST", "/generate", json=long) as reply:
            lines = reply.iter_lines()
            next(lines)
            assert server.client.post("/flush_cache").status_code == 400
            waited = server.client.post("/flush_cache?timeout=5")
            assert waited.status_code == 200, "once the request has ended"
        assert server.client.get("/flush_cache?timeout=soon").status_code == 400

    def test_metrics_reconcile_with_replies(self, server: Scripted) -> None:
        def scrape() -> dict[str, float]:
            reply = server.client.get("/metrics")
            assert reply.headers["content-type"].startswith("text/plain")
            lines = [line for line in reply.text.splitlines() if not line.startswith("#")]
            return {line.split("{")[0].split()[0]: float(line.split()[-1]) for line in lines}

        before = scrape()
        tokens = 0
        for count in (1, 5, 20):
            request = {"text": PROMPT, "sampling_params": {"max_new_tokens": count}}
            reply = server.client.post("/generate", json=request).json()
            tokens += reply["meta_info"]["completion_tokens"]
        after = scrape()
        grown = {name: after[name] - before[name] for name in after}
        assert grown["sglang:generation_tokens_total"] == tokens == 26
        assert grown["sglang:num_requests_total"] == 3
        assert grown["sglang:prompt_tokens_total"] == 3 * len(tokenizer().encode(PROMPT).ids)
        assert grown["sglang:time_to_first_token_seconds_count"] == 3
        assert grown["sglang:e2e_request_latency_seconds_count"] == 3
        assert grown["sglang:inter_token_latency_seconds_count"] == tokens - 3
        assert grown["sglang:spec_verify_calls_total"] > 0
        for name in ("num_running_reqs", "num_queue_reqs", "token_usage", "gen_throughput"):
            assert after[f"sglang:{name}"] == 0
        text = server.client.get("/metrics").text
        assert 'sglang:finished_requests_total{finish_reason="length"' in text
        assert 'sglang:http_responses_total{endpoint="/generate",method="POST"' in text
        assert "sglang:cache_hit_rate" in after
        assert "sglang:spec_accept_length" in after
