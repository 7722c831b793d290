"""Strict reading of JSON objects by declarative tables.

A table maps every field name a client may send to a rule: `Use` it, `Refuse` it unless it asks
for nothing, `Ignore` it because it only labels the request, or point to where it is at home
(`Elsewhere`) or to its name here (`Renamed`). Like a name outside the table, these are errors.
JSON null means "not given" everywhere except inside lists. No value is ever converted.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from sgl_spec.errors import InvalidRequestError
from sgl_spec.errors import preview as preview


class Kind(msgspec.Struct, frozen=True):
    """A type of JSON value: what is allowed, in words, and the test."""

    allowed: str
    accepts: Callable[[Any], bool]


class Use(msgspec.Struct, frozen=True):
    """A supported field. `target` is the name in the result where it differs from the field's."""

    kind: Kind
    default: Any = None
    target: str | None = None


class Refuse(msgspec.Struct, frozen=True):
    """A known field that is not supported: only null and the `neutral` values are accepted."""

    neutral: tuple[Any, ...] = ()


class Ignore(msgspec.Struct, frozen=True):
    """A known field of which every value of its `kind` asks for nothing: a label, or a hint."""

    kind: Kind


class Elsewhere(msgspec.Struct, frozen=True):
    """A field that is at home in the object `inside`, and an error here whatever its value."""

    inside: str


class Renamed(msgspec.Struct, frozen=True):
    """What other routes call the field `here`: an error whatever its value."""

    here: str


Rule = Use | Refuse | Ignore | Elsewhere | Renamed
Table = dict[str, Rule]

# How alike two names are (by `difflib`, at most 1) of which one may be the other misspelt. Another
# server's field is likelier than a worse slip: "image_data" and "metadata" are alike by 0.67.
NEAR = 0.8


def is_integer(value: object) -> bool:
    """Whether a JSON value is an integer (true and false are not)."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a JSON value is a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def list_of(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """The test "a list whose members all pass `accepts`"."""
    return lambda value: isinstance(value, list) and all(map(accepts, value))


def _is_string(value: object) -> bool:
    return isinstance(value, str)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


_is_ids = list_of(is_integer)
_is_strings = list_of(_is_string)

INTEGER = Kind("an integer", is_integer)
NUMBER = Kind("a number", is_number)
BOOLEAN = Kind("true or false", lambda value: isinstance(value, bool))
STRING = Kind("a string", _is_string)
OBJECT = Kind("an object", _is_object)
STRINGS = Kind("a string or a list of strings", lambda v: _is_string(v) or _is_strings(v))
LABELS = Kind("an object of strings", lambda v: _is_object(v) and _is_strings([*v.values()]))
OBJECTS = Kind("an object or a list of objects", lambda v: _is_object(v) or list_of(_is_object)(v))
LIST = Kind("a list", lambda value: isinstance(value, list))
IDS = Kind("a list of integers", _is_ids)
ID_LISTS = Kind(
    "a list of integers or a list of lists of integers", lambda v: _is_ids(v) or list_of(_is_ids)(v)
)
PROMPTS = Kind(
    "a string, a list of strings, a list of integers or a list of lists of integers",
    lambda v: _is_string(v) or _is_strings(v) or ID_LISTS.accepts(v),
)


def refuse(param: str, allowed: str, value: object) -> NoReturn:
    """Raise the error for a value of the wrong type or range."""
    raise InvalidRequestError(f"{param} must be {allowed}, got {preview(value)}.", param=param)


def read_object(body: object, table: Table, where: str = "") -> dict[str, Any]:
    """The supported fields of `body` by target name, defaults filled in.

    where: path of the object inside the request, for messages. Raises `InvalidRequestError` naming
    the first field that is unknown, unsupported or of the wrong type.
    """
    if not isinstance(body, dict):
        if where:
            refuse(where, "a JSON object", body)
        raise InvalidRequestError(f"The request body must be a JSON object, got {preview(body)}.")
    for name, value in body.items():
        _check_field(name, value, table, where)
    return _collect(body, table, where)


def _collect(body: dict[str, Any], table: Table, where: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    source: dict[str, str] = {}
    for name, rule in table.items():
        if not isinstance(rule, Use):
            continue
        target = rule.target or name
        value = body.get(name)
        if value is None:
            result.setdefault(target, rule.default)
        elif target in source and result[target] != value:
            first, second = path_of(where, source[target]), path_of(where, name)
            raise InvalidRequestError(
                f"{first} and {second} mean the same and differ: "
                f"{preview(result[target])} and {preview(value)}.",
                param=second,
            )
        else:
            result[target], source[target] = value, name
    return result


def _check_field(name: str, value: Any, table: Table, where: str) -> None:
    rule = table.get(name)
    field = path_of(where, name)
    if rule is None:
        raise InvalidRequestError(
            f"Unknown field {preview(field)}.{_hint(name, table)}", param=field
        )
    if isinstance(rule, Elsewhere):
        raise InvalidRequestError(
            f"Unknown field {preview(field)}: it belongs inside {rule.inside}.", param=field
        )
    if isinstance(rule, Renamed):
        raise InvalidRequestError(
            f"Unknown field {preview(field)}: it is {preview(rule.here)} here.", param=field
        )
    if value is None:
        return
    if isinstance(rule, Use | Ignore) and not rule.kind.accepts(value):
        refuse(field, rule.kind.allowed, value)
    if isinstance(rule, Refuse) and not any(_same(value, neutral) for neutral in rule.neutral):
        allowed = " or ".join(["null", *map(preview, rule.neutral)])
        raise InvalidRequestError(
            f"{field} is not supported by this server: got {preview(value)}, only {allowed} "
            "is accepted.",
            param=field,
        )


def _hint(name: str, table: Table) -> str:
    """Where a field of a similar name is at home, if there is one that would be kept."""
    kept = [known for known, rule in table.items() if not isinstance(rule, Refuse)]
    for near in difflib.get_close_matches(name, kept, n=1, cutoff=NEAR):
        rule = table[near]
        home = path_of(rule.inside, near) if isinstance(rule, Elsewhere) else near
        return f" Did you mean {preview(home)}?"
    return ""


def _same(value: object, neutral: object) -> bool:
    """Equality in which false is not 0 and an integer may equal a float."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def path_of(where: str, name: str) -> str:
    """The field `name` of the object at `where` in the request, as messages name it."""
    return f"{where}.{name}" if where else name
