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
    read_object,
    refuse,
)

SCHEMA = Kind("a JSON schema: an object or its text", lambda value: isinstance(value, (dict, str)))
GRAMMAR: Table = {"json_schema": Use(SCHEMA), "regex": Use(STRING), "ebnf": Use(STRING)}

_RESPONSE_FORMAT: Table = {"type": Use(STRING), "json_schema": Use(OBJECT)}
_JSON_SCHEMA: Table = {
    "schema": Use(OBJECT),
    # Output always follows the schema, so there is nothing that "strict" could change.
    "strict": Use(BOOLEAN),
    "name": Use(STRING),
    "description": Ignore(),
}
_TYPES = '"text", "json_object" or "json_schema"'


def grammar_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `SamplingParams` that say what the output must match. fields: a request's, with
    `response_format` where the route has it."""
    chosen: dict[str, Any] = {kind: fields[kind] for kind in GRAMMAR_KINDS}
    if isinstance(chosen["json_schema"], dict):
        chosen["json_schema"] = schema_text(chosen["json_schema"], "json_schema")
    schema = _read_response_format(fields.get("response_format"))
    if schema is None:
        return chosen
    for kind in GRAMMAR_KINDS:
        if chosen[kind] is not None:
            raise InvalidRequestError(
                f"response_format and {kind} cannot both be given: an output has one grammar.",
                param=kind,
            )
    return chosen | {"json_schema": schema, "grammar_field": "response_format"}


def _read_response_format(value: object) -> str | None:
    """The JSON schema that `response_format` asks for, None for plain text."""
    if value is None:
        return None
    fields = read_object(value, _RESPONSE_FORMAT, "response_format")
    kind, inner = fields["type"], fields["json_schema"]
    if kind not in ("text", "json_object", "json_schema"):
        refuse("response_format.type", _TYPES, kind)
    if kind != "json_schema":
        if inner is not None:
            refuse("response_format.type", '"json_schema" where a json_schema is given', kind)
        return '{"type": "object"}' if kind == "json_object" else None
    where = "response_format.json_schema"
    schema = read_object(inner, _JSON_SCHEMA, where)["schema"]
    if schema is None:
        refuse(f"{where}.schema", "a JSON schema (an object)", None)
    return schema_text(schema, f"{where}.schema")


def schema_text(schema: dict[str, Any], where: str) -> str:
    """The schema as JSON, its keys in the client's order: properties come out in that order."""
    try:
        return orjson.dumps(schema).decode()
    except orjson.JSONEncodeError as error:
        raise InvalidRequestError(f"{where} cannot be read: {error}.", param=where) from error
