"""What the OpenAI routes take bodies for, and where absent sampling values come from."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_spec.errors import InvalidRequestError, NotFoundError
from sgl_spec.server.openai_protocol import OpenAICall, read_chat, read_completions
from sgl_spec.server.sampling import SamplingDefaults

NO_DEFAULTS = SamplingDefaults({})
SERVED = ("smollm2", "default")


def chat(body: dict[str, Any]) -> OpenAICall:
    return read_chat(body, NO_DEFAULTS, SERVED, lambda prompt: repr(prompt.messages))


def completions(body: dict[str, Any]) -> OpenAICall:
    return read_completions(body, NO_DEFAULTS, SERVED, lambda ids, where: f"{where}: {ids}")


def test_completions_prompts_and_echo() -> None:
    assert [a.prompt for a in completions({"prompt": ["a", "b"]}).asked] == ["a", "b"]
    assert [a.prompt for a in completions({"prompt": [1, 2]}).asked] == [[1, 2]]
    assert completions({"prompt": [[1], [2]], "echo": True}).echo == [
        "prompt[0]: [1]",
        "prompt[1]: [2]",
    ]
    assert completions({"prompt": "a"}).asked[0].sampling["max_new_tokens"] == 16


USER = {"role": "user", "content": "hi"}
BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages cannot be empty"),
    ({"top_logprobs": 2}, "top_logprobs must be 0 .* unless logprobs is true"),
    ({"continue_final_message": True}, "continue_final_message needs"),
    (
        {"response_format": {"type": "json_object"}, "regex": "a"},
        "response_format and regex cannot both be given",
    ),
]


@pytest.mark.parametrize(("extra", "message"), BAD_CHAT)
def test_what_chats_cannot_ask_for(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        chat({"messages": [USER]} | extra)


@pytest.mark.parametrize("prompt", ["", []])
def test_completions_need_a_prompt(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompt cannot be empty"):
        completions({"prompt": prompt})


def test_chat_budget_and_roles() -> None:
    call = chat({"messages": [{"role": "developer", "content": "be kind"}, USER]})
    assert "'role': 'system'" in call.asked[0].prompt
    assert call.asked[0].sampling["max_new_tokens"] is None
    assert not call.asked[0].add_special_tokens
    assert chat({"messages": [USER], "max_tokens": 5}).asked[0].sampling["max_new_tokens"] == 5


def test_unknown_models_are_not_found() -> None:
    for name in SERVED:
        chat({"messages": [USER], "model": name})
    with pytest.raises(NotFoundError, match=r'"gpt" does not exist here; model may be "smollm2"'):
        chat({"messages": [USER], "model": "gpt"})


class TestDefaults:
    def test_the_model_decides_what_the_client_leaves_out(self) -> None:
        model = {"temperature": 0.6, "top_k": 20, "do_sample": True, "repetition_penalty": 1.1}
        defaults = SamplingDefaults(model)
        body = {"messages": [USER], "top_k": 3, "temperature": None}
        call = read_chat(body, defaults, SERVED, lambda _: "x")
        sampling = call.asked[0].sampling
        assert (sampling["temperature"], sampling["top_k"], sampling["top_p"]) == (0.6, 3, 1.0)
        assert sampling["repetition_penalty"] == 1.1
        call = read_chat(body | {"repetition_penalty": 1}, defaults, SERVED, lambda _: "x")
        assert call.asked[0].sampling["repetition_penalty"] == 1
        assert completions({"prompt": "a"}).asked[0].sampling["repetition_penalty"] == 1

    @pytest.mark.parametrize(("theirs", "ours"), [(0, -1), (20.0, 20), (50, 50), (None, -1)])
    def test_top_k_in_their_spelling(self, theirs: Any, ours: int) -> None:
        top_k = SamplingDefaults({"top_k": theirs}).values["top_k"]
        assert (top_k, type(top_k)) == (ours, int)

    @pytest.mark.parametrize(
        "broken",
        [
            {"top_p": 1.5},
            {"temperature": "hot"},
            {"top_k": 2.5},
            {"min_p": True},
            {"repetition_penalty": 0},
        ],
    )
    def test_broken_defaults_do_not_break_requests(
        self, broken: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        assert SamplingDefaults(broken).values == SamplingDefaults({}).values
        assert f"{next(iter(broken))} must be" in caplog.text

    def test_what_cannot_be_honoured_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        SamplingDefaults({"no_repeat_ngram_size": 3, "typical_p": 1.0})
        assert [r.getMessage() for r in caplog.records] == [
            "The model's generation_config asks for no_repeat_ngram_size=3, which is not "
            "supported and has no effect."
        ]


SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
FORMATS: list[tuple[dict[str, Any], str | None]] = [
    ({"type": "text"}, None),
    ({"type": "json_object"}, '{"type":"object"}'),
    (
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
        '{"type":"object","properties":{"b":{},"a":{}}}',
    ),
    (
        {"type": "json_schema", "json_schema": {"schema": {}, "strict": None, "description": "d"}},
        "{}",
    ),
]


@pytest.mark.parametrize(("asked", "schema"), FORMATS)
def test_response_format_is_a_schema_on_both_routes(
    asked: dict[str, Any], schema: str | None
) -> None:
    calls = [
        completions({"prompt": "a", "response_format": asked}),
        chat({"messages": [{"role": "user", "content": "a"}], "response_format": asked}),
    ]
    for call in calls:
        sampling = call.asked[0].sampling
        assert sampling.get("json_schema") == schema
        assert sampling.get("grammar_field") == (None if schema is None else "response_format")
