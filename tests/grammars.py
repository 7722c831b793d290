"""Grammars that the tests ask for: twenty JSON schemas, ten regular expressions, some EBNF.

Each schema is small enough that a model without sense can fill it in a few dozen tokens, and each
holds one thing that constrained decoders have been known to get wrong.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def closed(properties: Schema, required: list[str] | None = None) -> Schema:
    """An object of exactly these properties, all required unless `required` says which."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


_DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
_WORD: Schema = {"type": "string", "maxLength": 8}

SCHEMAS: dict[str, Schema] = {
    "one string": closed({"name": _WORD}),
    "nested object": closed({"a": closed({"b": closed({"c": _DIGIT, "d": _WORD})}), "e": _DIGIT}),
    "enum": closed(
        {"colour": {"enum": ["red", "green", "dark blue"]}, "n": {"enum": [1, 22, 333]}}
    ),
    "mixed enum": {"enum": ["yes", 0, None, True, [1, "two"], {"three": 3}]},
    "const": closed({"version": {"const": "v1"}, "ok": {"const": True}, "n": {"const": -5}}),
    "optional null": closed({"nick": {"type": ["string", "null"], "maxLength": 6}, "n": _DIGIT}),
    "optional property": closed({"a": _DIGIT, "b": _DIGIT, "c": _DIGIT}, ["b"]),
    "array": {"type": "array", "items": _DIGIT, "minItems": 2, "maxItems": 4},
    "array of objects": closed(
        {"rows": {"type": "array", "items": closed({"x": _DIGIT}), "minItems": 1, "maxItems": 3}}
    ),
    "tuple": {
        "type": "array",
        "prefixItems": [_DIGIT, {"type": "boolean"}, _WORD],
        "items": False,
        "minItems": 3,
    },
    "bounded integer": closed({"year": {"type": "integer", "minimum": 1987, "maximum": 2031}}),
    "bounded negative": closed({"t": {"type": "integer", "minimum": -12, "exclusiveMaximum": 7}}),
    "bounded number": closed({"p": {"type": "number", "minimum": 0, "maximum": 1}}),
    "boolean": closed({"a": {"type": "boolean"}, "b": {"type": "boolean"}}),
    "unicode keys": closed({"größe": _DIGIT, "名前": _WORD, "🚢": {"type": "boolean"}}),
    "escapes": closed({'a"b': _DIGIT, "c\\d": {"enum": ['say "hi"\n', "tab\t"]}}),
    "anyOf": {"anyOf": [closed({"id": _DIGIT}), closed({"tag": {"enum": ["x", "y"]}})]},
    "pattern": closed({"code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}}),
    "format": closed({"day": {"type": "string", "format": "date"}}),
    "recursion": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": closed(
                {
                    "v": {"enum": [0, 1]},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                }
            )
        },
    },
}

REGEXES: dict[str, str] = {
    "literal": "sgl-spec",
    "choice": "yes|no|maybe so",
    "digits": "[0-9]{3,6}",
    "date": r"(19|20)\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
    "address": r"([1-9]?[0-9]\.){3}[1-9]?[0-9]",
    "mail": r"[a-z]{1,8}@[a-z]{1,8}\.(com|org)",
    "repetition": "(ab|cd){2,5}!",
    "unicode": "(größe|名前|🚢){1,3}",
    "classes": r"[^\n]{4,12}\.",
    "optional": r"-?(0|[1-9][0-9]{0,3})(\.[0-9]{1,2})?",
}

EBNF: dict[str, str] = {
    "sum": 'root ::= term (" + " term){1,3} " ="\nterm ::= [0-9]{1,3}\n',
    "nested": 'root ::= list\nlist ::= "(" item* ")"\nitem ::= [a-c] | list\n',
    "table": (
        'root ::= row row row # three lines\nrow ::= name ": " ("on" | "off") "\\n"\n'
        'name ::= "lamp" | "fan" | "pump"\n'
    ),
    "words": 'root ::= "the " noun " " verb-past "."\nnoun ::= "gull" | "boat"\n'
    'verb-past ::= "sank" | "sang"\n',
}

# For an instructed model: they ask for prose, for a fence, for anything but what the grammar lets.
LURES = (
    "Tell me a long story about the sea. Do not use any JSON.",
    "Answer inside a markdown code fence that starts with ```json and explain each line.",
    "Write a haiku, then say sorry, then think aloud step by step.",
    'Continue: {"name": "Gulls", "hour": 21, "crew": ["Ann", "Piet"]',
)
