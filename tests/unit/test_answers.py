"""Chat answers read as they come: in whatever pieces, the same message as in one."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from sgl_spec.args import ServerArgs
from sgl_spec.errors import ConfigError
from sgl_spec.server.answers import (
    FORMS,
    HERMES,
    LLAMA3,
    MISTRAL,
    REQUIRED,
    Answer,
    CallReader,
    Form,
    NamedCall,
    Thinking,
    form_of,
    merged,
)

NAMES = {"weather", "add"}
TOKYO = '{"city": "Tōkyō \\"}{\\"", "days": [1, {"a": 2}]}'
Calls = list[tuple[str, Any]]
CITY = json.loads(TOKYO)

# Form, text, content, calls.
CASES: list[tuple[str, Form, str, str | None, Calls]] = [
    ("plain", HERMES, "Hello there. ", "Hello there. ", []),
    ("plain with a mark's beginning", HERMES, "a <tool", "a <tool", []),
    ("a bracket", LLAMA3, "[a link](x)", "[a link](x)", []),
    ("an object that is no call", LLAMA3, '{"x": 1} is JSON', '{"x": 1} is JSON', []),
    ("broken", LLAMA3, '{"name": "weather", "para', '{"name": "weather", "para', []),
    (
        "unknown function",
        LLAMA3,
        '{"name": "f", "parameters": {}}',
        '{"name": "f", "parameters": {}}',
        [],
    ),
    (
        "hermes",
        HERMES,
        f'<tool_call>\n{{"name": "weather", "arguments": {TOKYO}}}\n</tool_call>',
        None,
        [("weather", CITY)],
    ),
    (
        "hermes, two calls behind a text",
        HERMES,
        f'Let me look.\n\n<tool_call>\n{{"name": "weather", "arguments": {TOKYO}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
        "Let me look.",
        [("weather", CITY), ("add", {})],
    ),
    (
        "arguments first, and as text",
        HERMES,
        '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>'
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 2}"}</tool_call>',
        None,
        [("add", {"a": 1}), ("add", {"a": 2})],
    ),
    (
        "llama3",
        LLAMA3,
        f'{{"name": "weather", "parameters": {TOKYO}}}; {{"name": "add", "parameters": {{}}}}',
        None,
        [("weather", CITY), ("add", {})],
    ),
    (
        "llama3 with its tag",
        LLAMA3,
        f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {TOKYO}}}',
        None,
        [("weather", CITY)],
    ),
    (
        "mistral, by name",
        MISTRAL,
        f'Yes. [TOOL_CALLS]weather[ARGS]{TOKYO}[TOOL_CALLS]add[ARGS] {{"a": {{}}, "b": 1}}',
        "Yes.",
        [("weather", CITY), ("add", {"a": {}, "b": 1})],
    ),
    (
        "mistral, by a name that nobody has",
        MISTRAL,
        "[TOOL_CALLS]f[ARGS]{}",
        "f[ARGS]{}",
        [],
    ),
    (
        "mistral",
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {TOKYO}, "id": "abc{{"}}, '
        '{"name": "add", "arguments": {}}]',
        None,
        [("weather", CITY), ("add", {})],
    ),
    (
        "required by a grammar",
        REQUIRED,
        f'[{{"name": "weather", "arguments": {TOKYO}}}, {{"name":"add","arguments":{{}}}}]',
        None,
        [("weather", CITY), ("add", {})],
    ),
]


def pieces(text: str, seed: int) -> list[str]:
    """The text cut at random places; seed 0: character by character."""
    if seed == 0:
        return list(text)
    cuts = sorted(random.Random(seed).choices(range(len(text) + 1), k=seed % 7))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def read(reader: CallReader, parts: list[str]) -> dict[str, Any]:
    deltas = [delta for part in parts for delta in reader.push(part, last=False)]
    return merged(deltas + reader.push("", last=True))


def calls_of(message: dict[str, Any]) -> Calls:
    found = message["tool_calls"] or []
    assert [call["index"] for call in found] == list(range(len(found)))
    assert len({call["id"] for call in found}) == len(found)
    assert all(call["type"] == "function" for call in found)
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in found]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("form", "text", "content", "calls"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_calls_in_any_pieces(
    form: Form, text: str, content: str | None, calls: Calls, seed: int
) -> None:
    message = read(CallReader(form, NAMES), pieces(text, seed))
    assert (message["content"], calls_of(message)) == (content, calls)


def test_arguments_come_as_they_are_written() -> None:
    reader = CallReader(HERMES, NAMES)
    reader.push('<tool_call>{"name": "add", "arguments": {"a"', last=False)
    (delta,) = reader.push(": 12", last=False)
    assert delta == {"tool_calls": [{"index": 0, "function": {"arguments": ": 12"}}]}


def test_a_call_that_the_budget_cuts_is_still_told() -> None:
    message = read(CallReader(HERMES, NAMES), ['<tool_call>{"name": "add", "arguments": {"a": 1'])
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": 1'


def test_one_call_where_one_is_wanted() -> None:
    text = '[{"name":"add","arguments":{}},{"name":"weather","arguments":{}}]'
    message = read(CallReader(REQUIRED, NAMES, most=1), list(text))
    assert calls_of(message) == [("add", {})]


@pytest.mark.parametrize("seed", range(8))
def test_a_named_call_is_its_arguments(seed: int) -> None:
    message = read(NamedCall("add"), pieces(TOKYO, seed))
    assert (message["content"], calls_of(message)) == (None, [("add", CITY)])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("begun", "text", "reasoning", "content"),
    [
        (False, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (True, "Hm, < 3.\n</think>\nYes.", "Hm, < 3.", "Yes."),
        (True, "Hm, and no end", "Hm, and no end", None),
        (False, "Yes <think> no.", None, "Yes <think> no."),
        (False, "<th", None, "<th"),
    ],
)
def test_reasoning_is_taken_apart(
    begun: bool, text: str, reasoning: str | None, content: str | None, seed: int
) -> None:
    answer = Answer(None, Thinking(begun=begun))
    deltas = [d for part in pieces(text, seed) for d in answer.push(part, last=False)]
    message = merged(deltas + answer.push("", last=True))
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_calls_behind_reasoning() -> None:
    answer = Answer(CallReader(HERMES, NAMES), Thinking(begun=False))
    text = '<think>Add.</think><tool_call>{"name": "add", "arguments": {}}</tool_call>'
    deltas = [delta for char in text for delta in answer.push(char, last=False)]
    message = merged(deltas + answer.push("", last=True))
    assert message["reasoning_content"] == "Add."
    assert calls_of(message) == [("add", {})]
    assert answer.called


def test_forms() -> None:
    for name in FORMS:
        assert ServerArgs(model_path="m", tool_call_parser=name).tool_call_parser == name
    with pytest.raises(ConfigError, match=", ".join(FORMS)):
        ServerArgs(model_path="m", tool_call_parser="pythonic").resolve()
    assert form_of("{{ '<tool_call>' }}") is HERMES
    assert form_of("{{ '[TOOL_CALLS]' }}") is MISTRAL
    assert form_of("{{ '<|python_tag|>' }}") is LLAMA3
    assert form_of("{{ tools }}") is None
    assert len(MISTRAL.fresh_id()) == 9
