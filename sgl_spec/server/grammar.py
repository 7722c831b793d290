"""Grammars as the routes spell them: `json_schema`, `regex`, `ebnf`, and OpenAI's
`response_format`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from sgl_spec.errors import InvalidRequestError
from sgl_spec.request import GRAMMAR_KINDS
from sgl_spec.server.fields import (
    BOOLEAN,
    OBJECT,
    STRING,
    Ignore,
    Kind,
    Table,
    Use,
    path_of,
    read_object,
    refuse,
)

SCHEMA = Kind("a JSON schema: an object or its text", lambda value: isinstance(value, (dict, str)))
GRAMMAR: Table = {"json_schema": Use(SCHEMA), "regex": Use(STRING), "ebnf": Use(STRING)}
# What vLLM calls them, or has called them.
VLLM_GRAMMAR = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "ebnf",
    "structured_outputs": "json_schema, regex or ebnf",
}

RESPONSE_FORMAT: Table = {"type": Use(STRING), "json_schema": Use(OBJECT)}
JSON_SCHEMA: Table = {
    "schema": Use(OBJECT),
    # Output always follows the schema, so there is nothing that "strict" could change.
    "strict": Ignore(BOOLEAN),
    "name": Ignore(STRING),
    "description": Ignore(STRING),
}
_TYPES = '"text", "json_object" or "json_schema"'


def grammar_of(fields: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The fields of `SamplingParams` that say what the output must match. fields: a request's, with
    `response_format` where the route has it. where: the path of the object that holds them."""
    chosen: dict[str, Any] = {kind: fields[kind] for kind in GRAMMAR_KINDS}
    schema = _read_response_format(fields.get("response_format"))
    given = [path_of(where, kind) for kind in GRAMMAR_KINDS if chosen[kind] is not None]
    given = given if schema is None else ["response_format", *given]
    if len(given) > 1:
        raise InvalidRequestError(
            f"{given[0]} and {given[1]} cannot both be given: an output has one grammar.",
            param=given[1],
        )
    if isinstance(chosen["json_schema"], dict):
        chosen["json_schema"] = schema_text(chosen["json_schema"], given[0])
    if schema is not None:
        chosen["json_schema"] = schema
    return chosen | {"grammar_field": given[0] if given else None}


def _read_response_format(value: object) -> str | None:
    """The JSON schema that `response_format` asks for, None for plain text."""
    if value is None:
        return None
    fields = read_object(value, RESPONSE_FORMAT, "response_format")
    kind, inner = fields["type"], fields["json_schema"]
    if kind not in ("text", "json_object", "json_schema"):
        refuse("response_format.type", _TYPES, kind)
    if kind != "json_schema":
        if inner is not None:
            refuse("response_format.type", '"json_schema" where a json_schema is given', kind)
        return '{"type": "object"}' if kind == "json_object" else None
    where = "response_format.json_schema"
    schema = read_object(inner, JSON_SCHEMA, where)["schema"]
    if schema is None:
        refuse(f"{where}.schema", "a JSON schema (an object)", None)
    return schema_text(schema, f"{where}.schema")


def schema_text(schema: dict[str, Any], where: str) -> str:
    """The schema as JSON, its keys in the client's order: properties come out in that order."""
    try:
        return orjson.dumps(schema).decode()
    except orjson.JSONEncodeError as error:
        raise InvalidRequestError(f"{where} cannot be read: {error}.", param=where) from error
