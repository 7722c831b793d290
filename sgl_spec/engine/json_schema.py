"""JSON schemas as this server reads them, in the words of the grammar engine.

Two readings are ours. An object that declares `properties` and says nothing of others has no
others, as in OpenAI's strict mode and in SGLang: else a model that has lost its way may write keys
until its budget is gone. A `format` that the engine does not know is an annotation, as JSON Schema
says. What the engine cannot enforce is refused with the keyword's path where we know it by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

# What the engine enforces of `format`.
FORMATS = {
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
}
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_BRANCHES = ("allOf", "anyOf", "oneOf")
_LISTS = ("prefixItems", *_BRANCHES)
_ONE = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else")
# Beside these an object's own properties are not all that it may have.
_OPEN = {
    *("additionalProperties", "unevaluatedProperties", "patternProperties"),
    *("$ref", "if", *_BRANCHES),
}
_LOOK_AROUND = re.compile(r"(?<!\\)\(\?<?[=!]")


class SchemaError(Exception):
    """A schema that cannot be kept. The message names the path of the keyword."""


def as_read(text: str, *, closed: bool) -> str:
    """The schema for the engine. closed: objects have only the properties that they declare."""
    try:
        schema = json.loads(text)
        if isinstance(schema, dict):
            _read(schema, "", closed, _open_parts(schema))
    except RecursionError:
        raise SchemaError("it is nested too deeply") from None
    except ValueError:
        return text  # which the engine refuses in its words
    return json.dumps(schema)


def _read(schema: dict[str, Any], path: str, closed: bool, parts: set[str]) -> None:
    """Rewrite a schema and those in it. parts: references to schemas that stay open."""
    if schema.get("uniqueItems") is True:
        raise SchemaError(f"{path}uniqueItems is not supported")
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and _LOOK_AROUND.search(pattern):
        raise SchemaError(f"{path}pattern is not supported: it looks ahead or behind")
    if isinstance(schema.get("format"), str) and schema["format"] not in FORMATS:
        del schema["format"]
    declared = schema.get("properties")
    if closed and isinstance(declared, dict) and not _OPEN & schema.keys():
        required = schema.get("required")
        if not isinstance(required, list) or all(name in declared for name in required):
            schema["additionalProperties"] = False
    for place, one in _inside(schema):
        branch = place.startswith(_BRANCHES)
        mixed = branch and (isinstance(declared, dict) or len(schema.get("allOf", ())) > 1)
        inner = closed and not mixed and f"#/{place.replace('.', '/')}" not in parts
        _read(one, f"{path}{place}.", inner, parts)


def _inside(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas that are part of one, with their places in it."""
    for word in _BY_NAME:
        if isinstance(schema.get(word), dict):
            yield from ((f"{word}.{k}", v) for k, v in schema[word].items() if isinstance(v, dict))
    for word in (*_LISTS, "items"):
        if isinstance(schema.get(word), list):
            several = enumerate(schema[word])
            yield from ((f"{word}.{i}", one) for i, one in several if isinstance(one, dict))
    for word in _ONE:
        if isinstance(schema.get(word), dict):
            yield word, schema[word]


def _open_parts(schema: dict[str, Any]) -> set[str]:
    """References in an `allOf` of several, or beside other properties: each such part describes a
    part of an object only."""
    found = set()
    for _, one in _inside(schema):
        found |= _open_parts(one)
    if isinstance(schema.get("properties"), dict) or len(schema.get("allOf", ())) > 1:
        for word in _BRANCHES:
            branches = schema.get(word)
            for one in branches if isinstance(branches, list) else ():
                if isinstance(one, dict) and isinstance(one.get("$ref"), str):
                    found.add(one["$ref"])
    return found
