"""Grammars that no finite text satisfies, such as an object that requires itself.

A model in one would write until its budget is gone and never match. What can end is derived as in
Horn logic: a clause says that its head can end if all of its body can, and a grammar can end if its
beginning is derived. Where a schema cannot be judged surely, it is taken to end.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator
from typing import Any
from urllib.parse import unquote

Clause = tuple[Hashable, list[Hashable]]
_NESTED = ("object", "array")  # types whose values hold others


def derived(clauses: Iterable[Clause]) -> set[Hashable]:
    """All heads that follow, in time linear in the clauses' length."""
    missing: list[int] = []
    heads: list[Hashable] = []
    users: dict[Hashable, list[int]] = {}
    found: list[Hashable] = []
    for number, (head, body) in enumerate(clauses):
        needed = set(body)
        heads.append(head)
        missing.append(len(needed))
        for one in needed:
            users.setdefault(one, []).append(number)
        if not needed:
            found.append(head)
    known = set(found)
    for one in found:  # grows while it is walked
        for number in users.pop(one, ()):
            missing[number] -= 1
            if not missing[number] and heads[number] not in known:
                known.add(heads[number])
                found.append(heads[number])
    return known


def never_ends(schema_text: str) -> bool:
    """Whether a JSON schema (as text, which was compiled) surely has no finite instance."""
    schema = json.loads(schema_text)
    if schema_text.count('"$id"') > ("$id" in schema):
        return False  # references may mean something else than a place in this text
    return id(schema) not in derived(_Clauses(schema))


class _Clauses:
    """What each schema that the root needs depends on."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._stack: list[Any] = [root]
        self._seen: set[int] = set()

    def __iter__(self) -> Iterator[Clause]:
        while self._stack:
            schema = self._stack.pop()
            if id(schema) in self._seen:
                continue
            self._seen.add(id(schema))
            yield from self._of(schema)

    def _of(self, schema: dict[str, Any]) -> Iterator[Clause]:
        me = id(schema)
        if "$ref" in schema:  # what stands beside it restricts further, or is ignored
            yield me, self._need(self._target(schema["$ref"]))
            return
        body: list[Hashable] = [(me, "type")]
        for part in _list(schema.get("allOf")):
            body += self._need(part)
        for word in ("anyOf", "oneOf"):
            if branches := _list(schema.get(word)):
                body.append((me, word))
                for branch in branches:
                    yield (me, word), self._need(branch)
        yield me, body
        yield from (((me, "type"), needed) for needed in self._types(schema))

    def _types(self, schema: dict[str, Any]) -> Iterator[list[Hashable]]:
        """What a value of each type needs, one of which is enough."""
        kinds = schema.get("type", "any")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if "enum" in schema or "const" in schema or any(kind not in _NESTED for kind in kinds):
            yield []
            return
        if "object" in kinds:
            yield [one for part in _properties(schema) for one in self._need(part)]
        if "array" in kinds:
            yield [one for part in _items(schema) for one in self._need(part)]

    def _need(self, schema: Any) -> list[Hashable]:
        if schema is False:
            return ["nothing"]
        if not isinstance(schema, dict):
            return []
        self._stack.append(schema)
        return [id(schema)]

    def _target(self, ref: Any) -> Any:
        """The schema at a reference of the form #/a/b; True for any other."""
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            return True
        place: Any = self._root
        for step in unquote(ref).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(place, dict) and step in place:
                place = place[step]
            elif isinstance(place, list) and step.isdecimal() and int(step) < len(place):
                place = place[int(step)]
            else:
                return True
        return place


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _properties(schema: dict[str, Any]) -> list[Any]:
    """Schemas that a value of each required property must satisfy."""
    named = schema.get("properties", {})
    others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
    return [named.get(name, others) for name in _list(schema.get("required"))]


def _items(schema: dict[str, Any]) -> list[Any]:
    """Schemas that an item of the shortest array must satisfy."""
    least, items = int(schema.get("minItems", 0)), schema.get("items", True)
    first = _list(schema.get("prefixItems", items))
    others = schema.get("additionalItems", True) if isinstance(items, list) else items
    return [*first[:least], *([others] if least > len(first) else [])]
