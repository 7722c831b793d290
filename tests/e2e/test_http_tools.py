"""Tools, reasoning and /v1/responses: the `openai` client, the embedded model, and speculation.

Grammars hold what must be a call, whatever the model thinks of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from serving import Launch, Server

ASK: list[Any] = [{"role": "user", "content": "What is the weather in Oslo and in Rome?"}]
MODEL = "default"


class City(BaseModel):
    name: str


class Weather(BaseModel):
    """Tells the weather."""

    city: City
    days: int


class Now(BaseModel):
    """Tells the time."""


TOOLS: list[Any] = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Now)]


@pytest.fixture(scope="module")
def server(launch_shared: Launch) -> Server:
    return launch_shared(
        *("--speculative-algorithm", "NGRAM", "--reasoning-parser", "qwen3"), model="smollm2"
    )


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, **how: Any) -> Any:
    how = {"model": MODEL, "messages": ASK, "tools": TOOLS, "max_tokens": 200, "seed": 1} | how
    return client.chat.completions.create(**how)


def calls(choice: Any) -> list[tuple[str, Any]]:
    return [
        (call.function.name, json.loads(call.function.arguments))
        for call in choice.message.tool_calls or []
    ]


def check(name: str, arguments: Any) -> None:
    {"Weather": Weather, "Now": Now}[name].model_validate(arguments)


@pytest.mark.parametrize("temperature", [0, 1])
def test_required_calls_follow_their_schemas(client: openai.OpenAI, temperature: float) -> None:
    reply = ask(
        client, tool_choice="required", parallel_tool_calls=False, temperature=temperature, n=3
    )
    for choice in reply.choices:
        assert choice.message.content is None
        if choice.finish_reason == "tool_calls":
            ((name, arguments),) = calls(choice)
            check(name, arguments)
        else:
            assert choice.finish_reason == "length"
    assert any(choice.finish_reason == "tool_calls" for choice in reply.choices)


def test_a_named_function_is_called(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "Now"}}
    (choice,) = ask(client, tool_choice=named).choices
    assert calls(choice) == [("Now", {})]
    assert choice.finish_reason == "tool_calls"


def test_the_client_parses_calls(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(
        model=MODEL, messages=ASK, tools=TOOLS[1:], tool_choice="required", seed=3, max_tokens=100
    )
    found = reply.choices[0].message.tool_calls
    assert found
    assert all(isinstance(call.function.parsed_arguments, Now) for call in found)


CALL = r'<tool_call>\n\{"name": "Now", "arguments": \{\}\}\n</tool_call>'


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_by_choice_in_the_models_form(client: openai.OpenAI, parallel: bool) -> None:
    """The regex stands for a model that knows tools; its form is that of the prompt."""
    how = {"extra_body": {"regex": rf"Look\. {CALL}\n{CALL}"}, "parallel_tool_calls": parallel}
    (choice,) = ask(client, **how).choices
    assert choice.message.content == "Look."
    assert calls(choice) == [("Now", {})] * (1 + parallel)
    stream = ask(client, stream=True, **how)
    deltas = [chunk.choices[0] for chunk in stream if chunk.choices]
    parts = [part for one in deltas for part in one.delta.tool_calls or ()]
    assert "".join(one.delta.content or "" for one in deltas) == "Look."
    assert [part.function.name for part in parts if part.id] == ["Now"] * (1 + parallel)
    assert {part.index for part in parts} == {*range(1 + parallel)}
    assert "".join(part.function.arguments for part in parts) == "{}" * (1 + parallel)
    assert deltas[-1].finish_reason == "tool_calls"


def test_a_stream_of_required_calls_is_the_whole_reply(client: openai.OpenAI) -> None:
    how = {"tool_choice": "required", "temperature": 0, "parallel_tool_calls": False}
    whole = ask(client, **how).choices[0].message.tool_calls[0].function
    parts = [
        part
        for chunk in ask(client, stream=True, **how)
        for one in chunk.choices
        for part in one.delta.tool_calls or ()
    ]
    assert parts[0].function.name == whole.name
    assert "".join(part.function.arguments for part in parts) == whole.arguments


def test_none_hides_the_tools_and_the_history_may_hold_calls(client: openai.OpenAI) -> None:
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "Now", "arguments": "{}"}}
        ],
    }
    chat = [*ASK, called, {"role": "tool", "tool_call_id": "1", "content": "noon"}]
    with_none = ask(client, messages=chat, tool_choice="none", max_tokens=8)
    assert with_none.choices[0].message.tool_calls is None
    shown = ask(client, messages=chat, max_tokens=8)
    assert shown.usage.prompt_tokens > with_none.usage.prompt_tokens + 100


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "Weathr"}}},
        "tool_choice.function.name",
    ),
    ({"tool_choice": "required", "extra_body": {"regex": "a"}}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    (
        {
            "tool_choice": "required",
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"type": "object", "not": {}}},
                }
            ],
        },
        "tools",
    ),
]


@pytest.mark.parametrize(("how", "param"), BAD)
def test_what_cannot_be_called(client: openai.OpenAI, how: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **how)
    assert caught.value.body["param"] == param  # type: ignore[index, call-overload]


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_apart_from_content(client: openai.OpenAI, stream: bool) -> None:
    text = {"regex": "<think>\\nHm, yes\\.\\n</think>\\n\\nYes\\."}
    reply = ask(client, tools=[], extra_body=text, stream=stream)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in reply]
        thought = "".join(getattr(one, "reasoning_content", None) or "" for one in deltas)
        assert (thought, "".join(one.content or "" for one in deltas)) == ("Hm, yes.", "Yes.")
    else:
        message = reply.choices[0].message
        assert (message.reasoning_content, message.content) == ("Hm, yes.", "Yes.")
        whole = ask(client, tools=[], extra_body=text | {"separate_reasoning": False})
        assert whole.choices[0].message.content == "<think>\nHm, yes.\n</think>\n\nYes."


FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]


def respond(client: openai.OpenAI, **how: Any) -> Any:
    how = {"model": MODEL, "input": "Say something.", "max_output_tokens": 12} | how
    return client.responses.create(**how)


def test_a_response_is_the_chats_answer(client: openai.OpenAI) -> None:
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi."}]
    text = ask(client, messages=chat, tools=[], temperature=0, max_tokens=12)
    reply = respond(client, instructions="Be kind.", input="Hi.", temperature=0)
    assert reply.output_text == text.choices[0].message.content
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in reply.output] == ["incomplete"]
    assert reply.usage.input_tokens == text.usage.prompt_tokens
    assert reply.usage.total_tokens == text.usage.total_tokens
    assert (reply.store, reply.model, reply.instructions) == (False, text.model, "Be kind.")


def test_a_response_is_parsed_into_a_model(client: openai.OpenAI) -> None:
    reply = client.responses.parse(
        model=MODEL, input="Paris", text_format=City, max_output_tokens=200, temperature=0
    )
    assert isinstance(reply.output_parsed, City)
    assert reply.status == reply.output[0].status == "completed"


def test_responses_call_and_take_results(client: openai.OpenAI) -> None:
    named = {"type": "function", "name": "Now"}
    first = respond(client, tools=FLAT, tool_choice=named, temperature=0)
    (call,) = first.output
    assert (call.type, call.name, call.status) == ("function_call", "Now", "completed")
    assert json.loads(call.arguments) == {}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    history = [{"role": "user", "content": "When?"}, *first.output, result]
    second = respond(client, tools=FLAT, input=history)
    assert second.output[0].type == "message"
    third = [*history, *second.output, {"role": "user", "content": "Thanks."}]
    assert respond(client, input=third).output_text


def test_the_events_of_a_response(client: openai.OpenAI) -> None:
    """The client itself adds them up, and checks their order."""
    named = {"type": "function", "name": "Now"}
    said = {"type": "json_schema", "name": "x", "schema": {"const": "One, two."}}
    for how in (
        {"text": {"format": said}},
        {"temperature": 0, "tools": FLAT, "tool_choice": named},
    ):
        whole = respond(client, **how)
        with client.responses.stream(
            model=MODEL, input="Say something.", max_output_tokens=12, **how
        ) as stream:
            events = list(stream)
            final = stream.get_final_response()
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == f"response.{whole.status}"
        assert [event.sequence_number for event in events] == [*range(len(events))]
        assert final.output_text == whole.output_text
        assert [item.type for item in final.output] == [item.type for item in whole.output]


BAD_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": [{"type": "image"}]}, "input"),
    ({"input": [{"role": "user", "content": "a", "x": 1}]}, "input[0].x"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"store": True}, "store"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"tools": [{"type": "web_search", "name": "a"}]}, "tools[0].type"),
    (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
        "text.format",
    ),
]


@pytest.mark.parametrize(("how", "param"), BAD_RESPONSES)
def test_what_no_response_can_hold(client: openai.OpenAI, how: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, **how)
    assert caught.value.body["param"] == param  # type: ignore[index, call-overload]
