"""Constrained output over HTTP, on the tiny model: a model without sense must write what was asked
for, beside requests that are free, and speculation must not change a token of either."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from grammar_checks import ASKED, Follower, check_text
from grammars import LURES, REGEXES, SCHEMAS
from openai import BadRequestError, OpenAI
from serving import Launch, Server
from solo import Solo
from talk import Canary, accepted, body, drained, generate, in_both_modes, state, together
from tiny import IM_END, make_tokenizer

VOCAB = 512
TEXT = "The harbour master kept a ledger of every boat. The harbour master kept a"
TESTS = Path(__file__).parents[1]
MODULES = {"NGRAM": TESTS / "free_rows.py", "SELF": TESTS / "plugin_drafters.py"}
MOST = 160


@pytest.fixture(scope="module", params=["NGRAM", "SELF"])
def server(request: pytest.FixtureRequest, launch_shared: Launch, tiny_model_dir: Path) -> Server:
    flags = ["--speculative-algorithm", request.param, "--max-total-tokens", "24000"]
    flags += ["--max-running-requests", "24", "--enable-metrics"]
    flags += ["--speculative-drafter-module", str(MODULES[request.param])]
    # A forward of the tiny model takes hardly longer than asking for drafts.
    flags.append("--speculative-verify-whole-trees")
    if request.param == "SELF":
        flags += ["--speculative-draft-model-path", str(tiny_model_dir)]
    return launch_shared(*flags)


@pytest.fixture(autouse=True)
def _drained(server: Server) -> Iterator[None]:
    canary = Canary(server, TEXT)
    yield
    canary.alive()
    drained(server)


@pytest.fixture(scope="module")
def solo(tiny_model_dir: Path) -> Solo:
    return Solo(tiny_model_dir)


@pytest.fixture(scope="module")
def follower() -> Follower:
    return Follower(make_tokenizer(VOCAB), VOCAB, [IM_END])


@pytest.mark.parametrize("temperature", [0, 1])
def test_every_grammar_beside_free_requests(
    server: Server, solo: Solo, follower: Follower, temperature: int
) -> None:
    """Streamed and not, alone in the plain engine and in a crowd that speculates: the same ids."""
    common = {"temperature": temperature, "max_new_tokens": MOST}
    asked = [{**grammar, **common, "seed": i} for i, grammar in enumerate(ASKED.values())]
    free = [{**common, "seed": i, "ignore_eos": True, "max_new_tokens": 200} for i in range(8)]
    prompts = [[TEXT, *LURES][i % 5] for i in range(len(asked))]
    calls = [functools.partial(generate, server, TEXT, **one) for one in free]
    calls += [
        functools.partial(in_both_modes, server, prompt, **one)
        for prompt, one in zip(prompts, asked, strict=True)
    ]
    replies = together(calls, 24)
    for one, reply in zip(free, replies[:8], strict=True):
        assert reply["output_ids"] == solo.ids(TEXT, **one)
    stopped = 0
    for prompt, one, (name, grammar), reply in zip(
        prompts, asked, ASKED.items(), replies[8:], strict=True
    ):
        assert reply["output_ids"] == solo.ids(prompt, **one), name
        follower.check(grammar, reply)
        stopped += reply["meta_info"]["finish_reason"]["type"] == "stop"
    assert stopped > len(asked) / 2
    assert sum(map(accepted, replies[8:])) > 30, "speculation was not exercised"


@pytest.mark.parametrize("temperature", [0, 1])
def test_cut_by_length_at_every_place(
    server: Server, solo: Solo, follower: Follower, temperature: int
) -> None:
    """n tokens asked for: n tokens, or fewer where the grammar ends, and all runs are prefixes."""
    grammar = {"json_schema": SCHEMAS["nested object"]}
    common = {**grammar, "temperature": temperature, "seed": 3}
    longest = generate(server, TEXT, max_new_tokens=MOST, **common)["output_ids"]
    calls = [
        functools.partial(generate, server, TEXT, max_new_tokens=n, **common) for n in range(1, 30)
    ]
    for n, reply in enumerate(together(calls), 1):
        assert reply["output_ids"] == longest[:n]
        follower.check(grammar, reply)


def test_ends(server: Server, solo: Solo) -> None:
    """A grammar that has ended ends the request, whatever else is asked for; one that may go on
    does so until EOS is drawn, or for good with ignore_eos. Stops cut before."""
    fixed = {"regex": "sgl-spec", "temperature": 0}
    for extra in ({}, {"ignore_eos": True}, {"min_new_tokens": 20}, {"stop_token_ids": [IM_END]}):
        reply = in_both_modes(server, TEXT, **fixed, **extra)
        assert reply["text"] == "sgl-spec"
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": None}
    stop = in_both_modes(server, TEXT, **fixed, stop=["-s"])
    assert (stop["text"], stop["meta_info"]["finish_reason"]["matched"]) == ("sgl", "-s")
    open_end = {"regex": "[a-z ]+", "temperature": 1, "max_new_tokens": 60}
    for seed in range(3):
        held = generate(server, TEXT, **open_end, seed=seed, ignore_eos=True)
        assert held["meta_info"]["finish_reason"]["type"] == "length"
        least = generate(server, TEXT, **open_end, seed=seed, min_new_tokens=9)
        assert least["meta_info"]["completion_tokens"] >= 9
        assert least["output_ids"] == solo.ids(TEXT, **open_end, seed=seed, min_new_tokens=9)
    ending = {"stop_token_ids": [IM_END], "ignore_eos": True}  # stop ids end it like EOS does
    forced = {**open_end, **ending, "logit_bias": {str(IM_END): 100}, "seed": 1}
    reply = generate(server, TEXT, **forced)
    assert reply["output_ids"][-1] == IM_END
    assert len(reply["output_ids"]) == 2, "not as the first token: the text may not be empty"


def test_penalties_bias_and_filters_stay_inside(
    server: Server, solo: Solo, follower: Follower
) -> None:
    settings: list[dict[str, Any]] = [
        {"frequency_penalty": 2.0, "presence_penalty": -1.0, "repetition_penalty": 1.5},
        {"logit_bias": {str(i): 100 for i in range(60, 70)}},
        {"logit_bias": {str(i): -100 for i in range(3, 400)}},
        {"top_k": 1},
        {"top_k": 5, "top_p": 0.5, "min_p": 0.1},
    ]
    names = ("nested object", "enum", "regex mail", "ebnf nested", "unicode keys")
    asked = [
        {**ASKED[name], **extra, "temperature": 1, "seed": 4, "max_new_tokens": MOST}
        for name, extra in zip(names * 5, [s for s in settings for _ in names], strict=True)
    ]
    replies = together([functools.partial(generate, server, TEXT, **one) for one in asked])
    for name, one, reply in zip(names * 5, asked, replies, strict=True):
        assert reply["output_ids"] == solo.ids(TEXT, **one)
        follower.check(ASKED[name], reply)


def test_choices_of_one_request(server: Server) -> None:
    request = body(TEXT, n=6, json_schema=json.dumps(SCHEMAS["array of objects"]), seed=2)
    replies = server.client.post("/generate", json=request).json()
    for reply in replies:
        if reply["meta_info"]["finish_reason"]["type"] == "stop":
            check_text({"json_schema": SCHEMAS["array of objects"]}, reply["text"])
    assert len({reply["text"] for reply in replies}) > 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_response_format_through_the_openai_client(
    server: Server, stream: bool, chat: bool
) -> None:
    schema = SCHEMAS["array of objects"]
    strict = {"name": "rows", "schema": schema, "strict": True}
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    formats: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"response_format": {"type": "json_schema", "json_schema": strict}}, schema),
        ({"extra_body": {"json_schema": schema}}, schema),
        ({"response_format": {"type": "json_object"}, "temperature": 0.3}, {"type": "object"}),
    ]
    for options, expected in formats:
        text, reason = ask(client, chat, stream, seed=5, max_tokens=MOST, **options)
        if reason == "stop":
            jsonschema.validate(json.loads(text), expected)
        else:
            assert (reason, text[:1]) == ("length", "{")
    plain = ask(client, chat, stream, seed=5, max_tokens=9, response_format={"type": "text"})
    assert plain == ask(client, chat, stream, seed=5, max_tokens=9)
    for extra in ({"regex": REGEXES["date"]}, {"ebnf": 'root ::= "a" | "b" root'}):
        text, reason = ask(client, chat, stream, seed=5, max_tokens=MOST, extra_body=extra)
        assert reason == "stop"
        check_text(extra, text)


def ask(client: OpenAI, chat: bool, stream: bool, **options: Any) -> tuple[str, str]:
    """The text and the finish reason."""
    if "response_format" in options and not chat:  # the client knows it for chats only
        given = {"response_format": options.pop("response_format")}
        options["extra_body"] = given | options.get("extra_body", {})
    name = client.models.list().data[0].id
    if chat:
        messages = [{"role": "user", "content": TEXT}]
        reply: Any = client.chat.completions.create(
            model=name, messages=messages, stream=stream, **options
        )
    else:
        reply = client.completions.create(model=name, prompt=TEXT, stream=stream, **options)
    if not stream:
        (choice,) = reply.choices
        return (choice.message.content if chat else choice.text), choice.finish_reason
    choices = [chunk.choices[0] for chunk in reply if chunk.choices]
    parts = [(c.delta.content if chat else c.text) or "" for c in choices]
    return "".join(parts), choices[-1].finish_reason


BAD: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": "{"}, "json_schema cannot be compiled: EOF"),
    ({"json_schema": {"type": "strin"}}, "json_schema cannot be compiled: Invalid type: strin"),
    ({"json_schema": {"uniqueItems": True}}, "compiled: uniqueItems is not supported."),
    ({"json_schema": {"$ref": "#"}}, "json_schema cannot be compiled: it allows no text."),
    ({"regex": "("}, "regex cannot be compiled: unclosed group."),
    ({"regex": ""}, "regex must be 1 to "),
    ({"regex": "a" * 300_000}, "regex must be 1 to 262144 characters, got 300000."),
    ({"ebnf": "root ::= x"}, "ebnf cannot be compiled: line 1, column 10: there is no rule"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "regex and sampling_params.ebnf cannot both be given"),
    ({"json_schema": "{}", "regex": "a"}, "json_schema and sampling_params.regex cannot both be"),
    ({"structural_tag": "{}"}, "structural_tag is not supported"),
]


def test_broken_grammars_are_refused_beside_good_requests(server: Server, solo: Solo) -> None:
    """Each by name, streamed or not, while others decode and do not notice."""
    sampling = {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True}
    with ThreadPoolExecutor(4) as pool:
        good = [pool.submit(generate, server, TEXT, **sampling) for _ in range(4)]
        for given, message in BAD * 2:
            for streamed in (False, True):
                request = body(TEXT, stream=streamed, **given)
                refusal = server.client.post("/generate", json=request)
                assert refusal.status_code == 400, (given, refusal.text)
                error = refusal.json()["error"]
                assert message in error["message"]
                assert error["param"].removeprefix("sampling_params.") in given
        assert all(reply.result()["output_ids"] == solo.ids(TEXT, **sampling) for reply in good)
    assert state(server)["grammar_queued"] == 0


def test_the_openai_routes_name_response_format(server: Server) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    broken = {"name": "x", "schema": {"type": "strin"}}
    wanted = {"type": "json_schema", "json_schema": broken}
    with pytest.raises(BadRequestError, match="response_format cannot be compiled: Invalid type"):
        ask(client, True, False, response_format=wanted)
    with pytest.raises(BadRequestError, match=r"response_format\.type must be"):
        ask(client, True, False, response_format={"type": "structural_tag"})
    with pytest.raises(BadRequestError, match="response_format and ebnf cannot both"):
        ask(
            client,
            True,
            False,
            response_format={"type": "json_object"},
            extra_body={"ebnf": 'root ::= "a"'},
        )


def test_a_client_that_leaves_a_constrained_stream(server: Server) -> None:
    request = body(TEXT, stream=True, regex="[a-z ]+", ignore_eos=True, max_new_tokens=1500)
    for _ in range(6):
        with server.client.stream("POST", "/generate", json=request) as answer:
            next(answer.iter_lines())
    drained(server)


def test_metrics_know_the_grammar_queue(server: Server) -> None:
    assert "sglang:num_grammar_queue_reqs{" in server.client.get("/metrics").text
