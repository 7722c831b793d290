"""Fields that are accepted without effect, and fields of other servers: typed, named, refused."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from sgl_spec.errors import InvalidRequestError
from sgl_spec.request import MAX_SEED, MIN_SEED
from sgl_spec.server.fields import Ignore, Refuse, Table, read_object
from sgl_spec.server.grammar import JSON_SCHEMA, RESPONSE_FORMAT
from sgl_spec.server.openai_protocol import CHAT, COMPLETIONS, MESSAGE, STREAM_OPTIONS
from sgl_spec.server.protocol import ABORT, DETOKENIZE, GENERATE, PROFILE, TOKENIZE
from sgl_spec.server.sampling import NATIVE
from sgl_spec.server.unsupported import UNSUPPORTED

TABLES: dict[str, Table] = {
    "generate": GENERATE,
    "sampling_params": NATIVE,
    "completions": COMPLETIONS,
    "chat": CHAT,
    "stream_options": STREAM_OPTIONS,
    "message": MESSAGE,
    "response_format": RESPONSE_FORMAT,
    "json_schema": JSON_SCHEMA,
    "tokenize": TOKENIZE,
    "detokenize": DETOKENIZE,
    "abort": ABORT,
    "profile": PROFILE,
}
GENERATING = ("generate", "sampling_params", "completions", "chat")
VALUES: tuple[Any, ...] = (True, 7, 0.5, "x", ["x"], [7], {}, {"a": "x"}, {"a": 7})
LABELS = [
    pytest.param(table, name, id=f"{route}.{name}")
    for route, table in TABLES.items()
    for name, rule in table.items()
    if isinstance(rule, Ignore)
]


@pytest.mark.parametrize(("table", "name"), LABELS)
def test_what_has_no_effect_has_a_type(table: Table, name: str) -> None:
    rule = table[name]
    assert isinstance(rule, Ignore)
    fitting = [value for value in VALUES if rule.kind.accepts(value)]
    assert 1 <= len(fitting) <= 3
    for value in VALUES:
        if value in fitting:
            assert read_object({name: value}, table) == read_object({}, table)
        else:
            with pytest.raises(InvalidRequestError) as caught:
                read_object({name: value}, table)
            assert caught.value.message.startswith(f"{name} must be {rule.kind.allowed}, got ")
            assert caught.value.param == name


ASKING: list[tuple[str, str, Any, str]] = [
    ("chat", "store", True, "only null or false is accepted"),
    ("chat", "store", "zz", "only null or false is accepted"),
    ("chat", "service_tier", "flex", 'only null or "auto" or "default" is accepted'),
    ("chat", "service_tier", 1, 'only null or "auto" or "default" is accepted'),
    ("chat", "prompt_cache_retention", "24h", 'or "in_memory" or'),
    ("chat", "user", 7, "user must be a string, got 7"),
    ("chat", "metadata", 1, "metadata must be an object of strings, got 1"),
    ("chat", "parallel_tool_calls", "x", "parallel_tool_calls must be true or false"),
    ("chat", "priority", 5, "priority is not supported by this server: got 5, only null or 0"),
    ("completions", "store", True, "only null or false is accepted"),
    ("generate", "priority", 5, "priority is not supported by this server: got 5, only null or 0"),
    ("generate", "priority", "zzz", 'got "zzz", only null or 0 is accepted'),
    ("generate", "no_logs", 7, "no_logs must be true or false, got 7"),
    ("generate", "log_metrics", "maybe", "log_metrics must be true or false"),
    ("generate", "conversation_id", [1], r"conversation_id must be a string, got \[1\]"),
    ("generate", "custom_labels", 3, "custom_labels must be an object of strings, got 3"),
    ("stream_options", "include_obfuscation", True, "only null or false is accepted"),
    ("sampling_params", "spaces_between_special_tokens", 1, "must be true or false, got 1"),
    ("sampling_params", "stream_interval", "2", "stream_interval must be an integer"),
    ("sampling_params", "stream_interval", 2.5, "stream_interval must be an integer"),
]


@pytest.mark.parametrize(("route", "name", "value", "message"), ASKING)
def test_what_asks_for_more_than_there_is(route: str, name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        read_object({name: value}, TABLES[route])
    assert caught.value.param == name


@pytest.mark.parametrize("route", GENERATING)
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_known_fields_of_other_servers(route: str, name: str) -> None:
    """By name, on every route, with the values that would do; the neutral ones read to nothing."""
    table = TABLES[route]
    rule = table[name]
    assert isinstance(rule, Refuse)
    for neutral in (None, *rule.neutral):
        assert read_object({name: neutral}, table) == read_object({}, table)
    with pytest.raises(InvalidRequestError) as caught:
        read_object({name: "surely not"}, table)
    assert caught.value.message.startswith(f"{name} is not supported by this server: got ")
    assert "only null" in caught.value.message


STRANGERS = ("image_dat", "length_penalties", "truncate", "penalty", "metadate_x", "presence")


@pytest.mark.parametrize("name", STRANGERS)
@pytest.mark.parametrize("route", GENERATING)
def test_far_names_are_suggested_nothing(route: str, name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_object({name: 1}, TABLES[route])
    assert caught.value.message == f'Unknown field "{name}".'


SLIPS = {
    "temprature": "temperature",
    "topk": "top_k",
    "repetition_penality": "repetition_penalty",
    "max_token": "max_tokens",
    "stop_tokens": "stop_token_ids",
    "streem": "stream",
}


@pytest.mark.parametrize("slip", SLIPS)
def test_near_spellings_are(slip: str) -> None:
    with pytest.raises(InvalidRequestError, match=f'Did you mean "{SLIPS[slip]}"'):
        read_object({slip: 1}, CHAT)


@pytest.mark.parametrize("table", [NATIVE, COMPLETIONS, CHAT], ids=["native", "text", "chat"])
@pytest.mark.parametrize("name", ["seed", "sampling_seed"])
def test_seeds_have_a_range_and_it_is_told(table: Table, name: str) -> None:
    for seed in (MIN_SEED, -1, 2**53 + 1, MAX_SEED):
        assert (
            read_object(orjson.loads(b'{"%s":%d}' % (name.encode(), seed)), table)["seed"] == seed
        )
    for digits in ("9223372036854775808", "18446744073709551616", "1" + "0" * 40, "1.5", '"1"'):
        with pytest.raises(InvalidRequestError) as caught:
            read_object(orjson.loads(f'{{"{name}":{digits}}}'), table)
        assert caught.value.message.startswith(
            f"{name} must be a 64-bit signed integer, -9223372036854775808 to 9223372036854775807, "
        )
