"""A row for every field that the schema declares: what it takes, refuses, and says of itself; and
docs/http.md tells every field with its default, and no other."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import time
from collections.abc import Callable
from typing import Any

import orjson
import pytest
import schema_tables
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from sgl_spec import request
from sgl_spec.errors import InvalidRequestError, NotFoundError
from sgl_spec.server import http, schema
from sgl_spec.server import openai_schema as openai
from sgl_spec.server import responses_schema as responses
from sgl_spec.server.app import BODIES, ServerState, build_app, router
from sgl_spec.server.body import Body
from sgl_spec.server.openai_protocol import read_chat, read_completions
from sgl_spec.server.protocol import read_generate
from sgl_spec.server.sampling import SamplingDefaults

USER = {"role": "user", "content": "hi"}
# A body of each model that is as small as can be.
LEAST: dict[type[Body], dict[str, Any]] = {
    schema.Generate: {"text": "a"},
    schema.Sampling: {},
    openai.Completions: {"prompt": "a"},
    openai.Chat: {"messages": [USER]},
    openai.Message: USER,
    openai.TextPart: {"type": "text", "text": "a"},
    openai.ToolCall: {"function": {"name": "f", "arguments": "{}"}},
    openai.Tool: {"type": "function", "function": {"name": "f"}},
    openai.Function: {"name": "f"},
    openai.ToolChoice: {"type": "function", "function": {"name": "f"}},
    openai.StreamOptions: {},
    responses.Responses: {"input": "a"},
    responses.ItemMessage: USER,
    responses.ItemText: {"type": "input_text", "text": "a"},
    responses.ItemCall: {
        "type": "function_call",
        "call_id": "1",
        "name": "f",
        "arguments": "{}",
    },
    responses.ItemResult: {"type": "function_call_output", "call_id": "1", "output": "a"},
    responses.ItemReasoning: {"type": "reasoning"},
    responses.FlatFunction: {"type": "function", "name": "f"},
    responses.FlatChoice: {"type": "function", "name": "f"},
    responses.TextFormat: {"type": "text"},
    responses.TextOptions: {},
    openai.ResponseFormat: {"type": "text"},
    openai.NamedSchema: {"schema": {}},
    schema.DraftLimit: {"max_draft_tokens": 1},
    schema.Tokenize: {"prompt": "a"},
    schema.Detokenize: {"tokens": [1]},
    schema.AbortRequest: {},
    schema.Profile: {},
}
VALUES: tuple[Any, ...] = (
    *(True, False, 0, 1, -1, 2, 7, 10**6, -(10**6), 0.5, 2.5, -2.5, 2.0, 1e40, "", "x", "text"),
    *([], ["x"], ["x", 1], [7], [[7]], [7.0], [7, "x"], [None], [True], [{}], [[]]),
    *({}, {"a": "x"}, {"5": 1}, {"5": True}, {"05": 1}, {"max_draft_tokens": 3}, USER, [USER]),
)
# Checks that JSON Schema cannot tell, or that look at two fields.
BEYOND_SCHEMA = {"logit_bias", "type", "json_schema", "arguments"}
FIELDS = [
    pytest.param(model, name, id=f"{model.__name__}.{name}")
    for model in LEAST
    for name in model.names()
]


@functools.cache
def models(model: type[Body]) -> Draft202012Validator:
    document = model.model_json_schema()
    Draft202012Validator.check_schema(document)
    return Draft202012Validator(document)


def refused(model: type[Body], body: dict[str, Any]) -> InvalidRequestError | None:
    try:
        model.read(body)
    except InvalidRequestError as error:
        return error
    return None


@pytest.mark.parametrize(("model", "name"), FIELDS)
def test_a_field_takes_what_its_schema_says(model: type[Body], name: str) -> None:
    """So /openapi.json is true; what is refused is named with the value; null is "not given"."""
    validator = models(model)
    for value in VALUES:
        body = LEAST[model] | {name: value}
        problem = refused(model, body)
        if problem is not None:
            assert re.match(r"[\w.\[\]]+(:| must| is| and)|Unknown field", problem.message)
            assert re.match(rf"{name}\b", str(problem.param))
        if name not in BEYOND_SCHEMA:
            assert (problem is None) == validator.is_valid(body), value
    if name not in LEAST[model] and model.model_fields.get(name) is not None:
        assert model.read(LEAST[model] | {name: None}) == model.read(LEAST[model])


@pytest.mark.parametrize("model", LEAST)
def test_required_fields(model: type[Body]) -> None:
    for name, field in model.model_fields.items():
        name = field.alias or name
        for body in (
            LEAST[model] | {name: None},
            {k: LEAST[model][k] for k in LEAST[model] if k != name},
        ):
            if field.is_required() or (model, name) == (openai.Message, "content"):
                with pytest.raises(InvalidRequestError, match=f"^{name} is required") as caught:
                    model.read(body)
                assert caught.value.param == name
            else:
                model.read(body)


UNSUPPORTED = [
    pytest.param(model, name, id=f"{model.__name__}.{name}")
    for model in LEAST
    for name in model.unsupported
]


@pytest.mark.parametrize(("model", "name"), UNSUPPORTED)
def test_known_fields_of_other_servers(model: type[Body], name: str) -> None:
    """By name, with the values that would do; the neutral ones read to nothing."""
    assert name not in model.names()
    for neutral in (None, *model.unsupported[name]):
        assert model.read(LEAST[model] | {name: neutral}) == model.read(LEAST[model])
    with pytest.raises(InvalidRequestError) as caught:
        model.read(LEAST[model] | {name: "surely not"})
    assert caught.value.message.startswith(
        f'{name} is not supported by this server: got "surely not", only null'
    )
    assert caught.value.param == name


ELSEWHERE = [
    pytest.param(model, name, id=f"{model.__name__}.{name}")
    for model in LEAST
    for name in model.elsewhere
    if name not in model.names() and name not in model.unsupported
]


@pytest.mark.parametrize(("model", "name"), ELSEWHERE)
def test_fields_that_are_at_home_elsewhere(model: type[Body], name: str) -> None:
    for value in (None, 1):
        with pytest.raises(InvalidRequestError) as caught:
            model.read(LEAST[model] | {name: value})
        assert caught.value.message == f'Unknown field "{name}": {model.elsewhere[name]}.'


SLIPS = {
    "temprature": "temperature",
    "topk": "top_k",
    "repetition_penality": "repetition_penalty",
    "streem": "stream",
    "return_logprobs": "return_logprob",
    "max_token": "max_tokens",
    "image_dat": None,
    "length_penalties": None,
    "penalty": None,
}


@pytest.mark.parametrize(("name", "meant"), SLIPS.items())
def test_near_names_are_suggested_and_far_ones_are_not(name: str, meant: str | None) -> None:
    told = []
    for model in (schema.Generate, schema.Sampling, openai.Completions, openai.Chat):
        with pytest.raises(InvalidRequestError) as caught:
            model.read(LEAST[model] | {name: 1})
        assert caught.value.message.startswith(f'Unknown field "{name}".')
        told.append(caught.value.message)
    assert any(f'Did you mean "{meant}"' in message for message in told) is (meant is not None)
    if meant is None:
        assert not any("Did you mean" in message for message in told)


DEEP: list[tuple[type[Body], dict[str, Any], str, str]] = [
    (schema.Generate, {"sampling_params": [{}, {"top_p": 2}]}, "sampling_params[1].top_p", "got 2"),
    (schema.Generate, {"sampling_params": {"top_p": 2}}, "sampling_params.top_p", "got 2"),
    (schema.Generate, {"sampling_params": {"x": 2}}, "sampling_params.x", "Unknown field"),
    (
        schema.Generate,
        {"sampling_params": {"speculation": True}},
        "sampling_params.speculation",
        "false or",
    ),
    (
        openai.Chat,
        {"messages": [USER, {"role": "x", "content": ""}]},
        "messages[1].role",
        '"x"',
    ),
    (openai.Chat, {"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
    (
        openai.Chat,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].image_url",
        "is not supported",
    ),
    (
        openai.Chat,
        {"stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        "got 1",
    ),
    (
        openai.Chat,
        {"response_format": {"type": "json_schema", "json_schema": {"x": 1}}},
        "response_format.json_schema.x",
        "Unknown field",
    ),
    (
        openai.Chat,
        {"max_tokens": 3, "max_completion_tokens": 4},
        "max_completion_tokens",
        "differ: 3 and 4",
    ),
    (schema.Sampling, {"seed": 3, "sampling_seed": 4}, "sampling_seed", "differ: 3 and 4"),
]


@pytest.mark.parametrize(("model", "extra", "param", "words"), DEEP)
def test_a_fault_is_named_by_its_path(
    model: type[Body], extra: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        model.read(LEAST[model] | extra)
    assert caught.value.param == param
    assert param in caught.value.message
    assert words in caught.value.message


@pytest.mark.parametrize("body", [None, [], "x", 3, True])
def test_a_body_is_an_object(body: object) -> None:
    for model in LEAST:
        with pytest.raises(InvalidRequestError, match="request body must be an object, got"):
            model.read(body)


LARGE: list[tuple[type[Body], dict[str, Any], str]] = [
    (schema.Generate, {"text": None, "input_ids": ["a"] * 10**6}, r"\(look at \[0\]\)"),
    (schema.Generate, {"text": ["a"] * 10**5 + [1]}, r"\(look at \[100000\]\)"),
    (openai.Chat, {"messages": [1] * 10**6}, r"messages\[0\] must be an object"),
    (openai.Chat, {"messages": [{"role": "user"}] * 10**5}, r"messages\[0\]\.content is required"),
    (openai.Chat, {"tools": [{"x": 1}] * 10**5}, r"tools\[0\]\.x"),
    (openai.Chat, {"metadata": {str(i): 1 for i in range(10**5)}}, r"metadata\.0 must be"),
]


@pytest.mark.parametrize(("model", "extra", "message"), LARGE)
def test_a_large_body_is_refused_at_its_first_fault(
    model: type[Body], extra: dict[str, Any], message: str
) -> None:
    """One error for each of a million members takes half a minute, in which nobody is served."""
    began = time.process_time()
    with pytest.raises(InvalidRequestError, match=message):
        model.read(LEAST[model] | extra)
    assert time.process_time() - began < 2


@pytest.mark.parametrize("integer", [2.0, 2])
def test_whole_numbers_are_integers(integer: float) -> None:
    read = openai.Completions.read({"prompt": [[1.0, 2], [3.0]], "max_tokens": integer})
    assert (read.prompt, read.max_tokens) == ([[1, 2], [3]], 2)
    assert all(type(i) is int for ids in read.prompt for i in ids)  # type: ignore[union-attr]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*schema.Sampling.names(), *openai.Chat.names(), "role", "type"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
ROUTES: dict[type[Body], Callable[[object], object]] = {
    schema.Generate: read_generate,
    openai.Completions: lambda b: read_completions(b, SamplingDefaults({}), (), repr),
    openai.Chat: lambda b: read_chat(b, SamplingDefaults({}), (), repr),
}


@pytest.mark.parametrize("model", ROUTES)
@given(data=st.data())
def test_any_json_is_read_or_refused(model: type[Body], data: st.DataObject) -> None:
    """Whatever a client sends, the answer is a reading or a sentence, never another exception."""
    names = st.sampled_from([*model.names(), *model.unsupported, "x"])
    body = data.draw(st.dictionaries(names, JSON, max_size=4) | JSON)
    with contextlib.suppress(InvalidRequestError, NotFoundError):
        ROUTES[model](LEAST[model] | body if isinstance(body, dict) else body)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_json_numbers_that_are_none(number: str) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        orjson.loads(f'{{"temperature": {number}}}')


PAGE = schema_tables.PAGE.read_text()


class TestDocuments:
    """/openapi.json and docs/http.md."""

    def test_openapi_holds_every_body(self) -> None:
        document = build_app(ServerState(), None).openapi()
        known = document["components"]["schemas"]
        used = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document)))
        assert {body.__name__ for body in BODIES} <= used <= known.keys()
        for model in LEAST:
            assert known[model.__name__]["properties"].keys() == model.names().keys()

    def test_the_tables_of_fields_are_those_of_today(self) -> None:
        assert schema_tables.written(PAGE) == PAGE, "python tests/schema_tables.py"

    def test_every_route_is_told(self) -> None:
        told = PAGE[: PAGE.index("\n## ")] + PAGE[PAGE.index("\n## Errors") :]
        for route in router.routes:
            assert isinstance(route, APIRoute)
            path = route.path.replace("{name:path}", "NAME").replace("/get_", "/")
            assert re.search(rf"[ `]{path}`", told), path

    @pytest.mark.parametrize(
        "limit",
        [
            f"1 to {request.MAX_CHOICES}; a call holds at most {schema.MAX_REQUESTS_PER_CALL}",
            f"seeds are below 2^{request.SEED_BITS}",
            f"1 to {schema.MAX_RID_CHARS} characters",
            f"2^{request.MAX_PROMPT_LOGPROBS.bit_length() - 1}",
            f"the first {request.MAX_DRAFT_ROUNDS} rounds",
            f"A body is at most {http.MAX_BODY_BYTES >> 20} MiB",
        ],
    )
    def test_limits(self, limit: str) -> None:
        assert limit in PAGE
