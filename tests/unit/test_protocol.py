"""What /generate takes bodies for: every refusal names its field, nothing is coerced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_spec.errors import InvalidRequestError, NotFoundError
from sgl_spec.request import MAX_CHOICES, SamplingParams
from sgl_spec.server.fields import (
    INTEGER,
    STRING,
    STRINGS,
    Elsewhere,
    Ignore,
    Refuse,
    Renamed,
    Table,
    Use,
    read_object,
)
from sgl_spec.server.grammar import GRAMMAR
from sgl_spec.server.openai_protocol import CHAT, COMPLETIONS, read_chat, read_completions
from sgl_spec.server.protocol import GENERATE, TOKENIZE, read_generate
from sgl_spec.server.sampling import NATIVE, OPENAI, SAMPLING_FIELDS, SamplingDefaults


class TestReadObject:
    TABLE = {  # noqa: RUF012 - read only
        "count": Use(INTEGER, 5),
        "number": Use(INTEGER, target="count"),
        "stop": Use(STRINGS),
        "penalty": Refuse((0,)),
        "flag": Refuse((False,)),
        "user": Ignore(STRING),
    }

    def test_defaults_and_null(self) -> None:
        body = {"count": None, "stop": None, "penalty": None, "user": "any"}
        assert read_object(body, self.TABLE) == {"count": 5, "stop": None}

    def test_two_names_of_one_value_must_agree(self) -> None:
        assert read_object({"count": 3, "number": 3}, self.TABLE)["count"] == 3
        assert read_object({"number": 9}, self.TABLE)["count"] == 9
        with pytest.raises(InvalidRequestError, match=r"count and number mean the same.*3 and 4"):
            read_object({"count": 3, "number": 4}, self.TABLE)

    @pytest.mark.parametrize("value", [True, 1.0, "1", [1], {}])
    def test_no_coercion(self, value: object) -> None:
        with pytest.raises(InvalidRequestError, match=r"a\.count must be an integer") as caught:
            read_object({"count": value}, self.TABLE, "a")
        assert caught.value.param == "a.count"

    def test_null_in_a_list_is_no_default(self) -> None:
        with pytest.raises(InvalidRequestError, match=r'stop must be .*, got \["a",null\]'):
            read_object({"stop": ["a", None]}, self.TABLE)

    def test_neutral_values_keep_their_type(self) -> None:
        read_object({"penalty": 0.0, "flag": False}, self.TABLE)
        for name, value in (("penalty", False), ("flag", 0), ("penalty", 0.5)):
            with pytest.raises(InvalidRequestError, match=f"{name} is not supported.*got"):
                read_object({name: value}, self.TABLE)

    def test_unknown_names_get_a_hint(self) -> None:
        with pytest.raises(InvalidRequestError, match=r'"a\.cuont"\. Did you mean "count"'):
            read_object({"cuont": 1}, self.TABLE, "a")

    @pytest.mark.parametrize("body", [None, [], "x", 3])
    def test_only_objects(self, body: object) -> None:
        with pytest.raises(InvalidRequestError, match="body must be a JSON object") as raised:
            read_object(body, self.TABLE)
        assert raised.value.param is None, "it is no field"


def test_sampling_tables_cover_every_parameter() -> None:
    """A field added to `SamplingParams` must be reachable over HTTP."""
    fields = set(SamplingParams.__struct_fields__) - {"grammar_field"}
    assert {*SAMPLING_FIELDS, *GRAMMAR} == fields
    for table in (NATIVE, OPENAI | COMPLETIONS, OPENAI | CHAT):
        targets = {rule.target or name for name, rule in table.items() if isinstance(rule, Use)}
        assert fields <= targets


GOOD = {"text": "hello"}
SETTINGS = [name for name, rule in NATIVE.items() if not isinstance(rule, Renamed)]
AT_HOME = [name for name, rule in GENERATE.items() if isinstance(rule, Elsewhere)]
BAD_GENERATE: list[tuple[dict[str, Any], str]] = [
    ({}, "Either text or input_ids should be provided"),
    ({"text": "a", "input_ids": [1]}, "text and input_ids cannot both be given"),
    ({"text": ""}, "text cannot be empty"),
    ({"text": []}, "text cannot be empty"),
    ({"text": 5}, "text must be a string or a list of strings, got 5"),
    ({"text": ["a", 5]}, "text must be"),
    ({"input_ids": []}, "input_ids cannot be empty"),
    ({"input_ids": "1 2"}, "input_ids must be a list of integers"),
    ({"input_ids": [1, None]}, r"input_ids must be .*got \[1,null\]"),
    ({"input_ids": [1, [2]]}, "input_ids must be"),
    ({"input_ids": [True]}, "input_ids must be"),
    (GOOD | {"sampling_params": []}, "sampling_params must be one object"),
    (GOOD | {"sampling_params": [{}]}, "sampling_params must be one object"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "got 1 for 2 prompts"),
    (GOOD | {"sampling_params": {"n": 0}}, f"n must be an integer from 1 to {MAX_CHOICES}, got 0"),
    (GOOD | {"sampling_params": {"n": 10**9}}, "n must be an integer from 1"),
    (GOOD | {"sampling_params": {"max_new_tokens": "ten"}}, r"sampling_params\.max_new_tokens"),
    (GOOD | {"sampling_params": {"stop_token_ids": [None]}}, r"sampling_params\.stop_token_ids"),
    (GOOD | {"sampling_params": {"stop_token_ids": ["a"]}}, r"sampling_params\.stop_token_ids"),
    (GOOD | {"sampling_params": {"stop": 1}}, r"sampling_params\.stop must be"),
    (GOOD | {"sampling_params": {"temprature": 1}}, 'Did you mean "temperature"'),
    (
        GOOD | {"sampling_params": {"frequency_penalty": "0.5"}},
        r"params\.frequency_penalty must be",
    ),
    (GOOD | {"sampling_params": {"logit_bias": [5]}}, r"params\.logit_bias must be an object"),
    (GOOD | {"sampling_params": {"logit_bias": {"five": 1}}}, r"params\.logit_bias must be"),
    (GOOD | {"sampling_params": {"logit_bias": {"05": 1}}}, r"params\.logit_bias must be"),
    (GOOD | {"sampling_params": {"logit_bias": {"9" * 5000: 1}}}, r"params\.logit_bias must be"),
    (GOOD | {"sampling_params": {"logit_bias": {"5": None}}}, r"params\.logit_bias must be"),
    (GOOD | {"sampling_params": {"logit_bias": {"5": True}}}, r"params\.logit_bias must be"),
    (GOOD | {"sampling_params": {"speculation": True}}, r"params\.speculation must be false or"),
    (GOOD | {"sampling_params": {"speculation": 0}}, r"params\.speculation must be false or"),
    (GOOD | {"sampling_params": {"speculation": {}}}, r"params\.speculation must be false or"),
    (
        GOOD | {"sampling_params": {"speculation": {"max_draft_tokens": -1}}},
        r'params\.speculation must be .* got \{"max_draft_tokens":-1\}',
    ),
    (
        GOOD | {"sampling_params": {"speculation": {"max_draft_tokens": 1, "x": 1}}},
        r"params\.speculation must be",
    ),
    (
        GOOD | {"sampling_params": {"json_schema": 1}},
        r"params\.json_schema must be a JSON",
    ),
    (GOOD | {"sampling_params": {"json_schema": {"enum": [10**30]}}}, "json_schema cannot be read"),
    (GOOD | {"sampling_params": {"regex": ["a"]}}, r"params\.regex must be a string"),
    (GOOD | {"sampling_params": {"ebnf": {}}}, r"params\.ebnf must be a string"),
    (GOOD | {"sampling_params": {"structural_tag": "{}"}}, r"structural_tag is not supported"),
    (GOOD | {"return_logprob": 1}, "return_logprob must be true, false or a list"),
    (GOOD | {"return_logprob": [True]}, "return_logprob must hold one value"),
    (GOOD | {"top_logprobs_num": 1}, "top_logprobs_num must be left out unless return_logprob"),
    (GOOD | {"token_ids_logprob": [1]}, "token_ids_logprob must be left out unless"),
    (GOOD | {"token_ids_logprob": [[1]], "return_logprob": True}, "token_ids_logprob must hold"),
    (GOOD | {"logprob_start_len": "0"}, "logprob_start_len must be an integer or a list"),
    (GOOD | {"logprob_start_len": 0}, "logprob_start_len must be left out unless return_logprob"),
    (GOOD | {"return_text_in_logprobs": True}, "return_text_in_logprobs must be left out unless"),
    ({"text": ["a", "b"], "top_logprobs_num": [0, 2]}, r"top_logprobs_num must be .*got \[0,2\]"),
    (GOOD | {"return_text_in_logprobs": 1}, "return_text_in_logprobs must be true or false"),
    (GOOD | {"lora_path": "x"}, "lora_path is not supported"),
    (GOOD | {"image_data": "x"}, "image_data is not supported"),
    (GOOD | {"stream": "yes"}, "stream must be true or false"),
    (GOOD | {"temprature": 1}, r'field "temprature"\. Did you mean "sampling_params\.temperature"'),
    (GOOD | {"guided_regex": "a"}, r'"guided_regex": it is "sampling_params\.regex" here'),
    (
        GOOD | {"sampling_params": {"guided_json": {}}},
        r'"sampling_params\.guided_json": it is "json_schema" here',
    ),
    (GOOD | {"strem": True}, 'field "strem". Did you mean "stream"'),
    (GOOD | {"rid": 7}, "rid must be a string"),
    (GOOD | {"rid": ["a"]}, "rid must be a string for a single prompt"),
]


@pytest.mark.parametrize(("body", "message"), BAD_GENERATE)
def test_generate_refuses(body: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        read_generate(body)
    assert caught.value.param is not None


def test_every_setting_is_at_home_in_sampling_params() -> None:
    assert {name for name, rule in NATIVE.items() if not isinstance(rule, Refuse)} >= {*AT_HOME}
    assert {name for name, rule in NATIVE.items() if isinstance(rule, Use)} <= {*AT_HOME}


@pytest.mark.parametrize("name", AT_HOME)
def test_generate_tells_where_sampling_fields_belong(name: str) -> None:
    message = f'Unknown field "{name}": it belongs inside sampling_params.'
    for value in (None, False):
        with pytest.raises(InvalidRequestError) as caught:
            read_generate(GOOD | {name: value})
        assert (caught.value.message, caught.value.param) == (message, name)


def test_generate_tells_its_name_of_the_prompt() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_generate({"prompt": "x"})
    assert caught.value.message == 'Unknown field "prompt": it is "text" here.'
    assert caught.value.param == "prompt"


def test_tokenize_tells_its_name_of_the_text() -> None:
    with pytest.raises(InvalidRequestError, match='"text": it is "prompt" here'):
        read_object({"text": "x"}, TOKENIZE)


def test_generate_accepts_everything_neutral() -> None:
    """Every known field may be null, and every unsupported one may ask for nothing."""
    here = [name for name, rule in GENERATE.items() if not isinstance(rule, Elsewhere | Renamed)]
    nulls = dict.fromkeys(here) | {"sampling_params": dict.fromkeys(SETTINGS)}
    assert read_generate(nulls | GOOD) == read_generate(GOOD)
    for name, rule in GENERATE.items():
        for neutral in rule.neutral if isinstance(rule, Refuse) else ():
            assert read_generate(GOOD | {name: neutral}) == read_generate(GOOD)
    for name, rule in NATIVE.items():
        for neutral in rule.neutral if isinstance(rule, Refuse) else ():
            assert read_generate(GOOD | {"sampling_params": {name: neutral}}) == read_generate(GOOD)


def test_generate_batches() -> None:
    call = read_generate(
        {"input_ids": [[1, 2], [3]], "sampling_params": [{"n": 2}, {"temperature": 0}]}
    )
    assert [(a.prompt, a.n, a.where) for a in call.asked] == [
        ([1, 2], 2, "input_ids[0]"),
        ([3], 1, "input_ids[1]"),
    ]
    assert call.batch
    assert call.asked[1].sampling["temperature"] == 0
    single = read_generate({"text": "a", "sampling_params": {"n": 2}})
    assert single.batch, "n > 1 answers with a list"
    assert not read_generate({"input_ids": [1]}).batch


def test_speculation_and_biases_in_the_engines_types() -> None:
    read = {"logit_bias": {"5": 1, "0": -100.0}, "speculation": {"max_draft_tokens": 10**30}}
    sampling = read_generate(GOOD | {"sampling_params": read}).asked[0].sampling
    assert sampling["logit_bias"] == {5: 1, 0: -100.0}
    assert SamplingParams(speculation=sampling["speculation"]).max_nodes(12) == 12
    narrowed = ({"max_draft_tokens": 0}, 1), ({"max_draft_tokens": 3}, 4)
    for asked, nodes in ((None, 12), (False, 1), *narrowed):
        call = read_generate(GOOD | {"sampling_params": {"speculation": asked}})
        speculation = call.asked[0].sampling["speculation"]
        assert SamplingParams(speculation=speculation).max_nodes(12) == nodes


def test_one_stop_string_is_not_a_list_of_characters() -> None:
    call = read_generate({"text": "a", "sampling_params": {"stop": "end"}})
    assert call.asked[0].sampling["stop"] == ("end",)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*NATIVE, *CHAT, "role", "content", "type"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
ROUTES: dict[str, tuple[Table, Callable[[object], object]]] = {
    "generate": (GENERATE, read_generate),
    "completions": (COMPLETIONS, lambda b: read_completions(b, SamplingDefaults({}), (), repr)),
    "chat": (CHAT, lambda b: read_chat(b, SamplingDefaults({}), (), repr)),
}


@pytest.mark.parametrize("route", ROUTES)
@given(data=st.data())
def test_any_json_is_read_or_refused(route: str, data: st.DataObject) -> None:
    """Whatever a client sends, the answer is a reading or a sentence, never another exception."""
    table, read = ROUTES[route]
    fields = data.draw(st.dictionaries(st.sampled_from([*table, "x"]), JSON, max_size=4) | JSON)
    with contextlib.suppress(InvalidRequestError, NotFoundError):
        read(fields)


def test_json_numbers_that_are_none() -> None:
    """Python's json module writes these; the parser must not let them through."""
    for text in (b"NaN", b"Infinity", b"-Infinity", b"1e999"):
        with pytest.raises(orjson.JSONDecodeError):
            orjson.loads(b'{"temperature": %s}' % text)
