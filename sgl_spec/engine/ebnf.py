"""EBNF (as llama.cpp's GBNF and SGLang write it) to the Lark dialect of the grammar engine.

    root ::= greeting " " [A-Z] [a-z]{2,7} ("!" | "?")?   # a comment
    greeting ::= "hello" | "good \\u0064ay"

The engine splits text into lexemes greedily, which is not what EBNF means: of `[a-z]* "x"` it would
never see the end. So a grammar without recursion becomes one single lexeme, a regular expression
over rules, and one with recursion becomes rules over lexemes of one character each. Both are exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

MAX_NESTING = 100
_ANY = "[\\x{0}-\\x{10ffff}]"
_TOKENS = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<rule>[\w-]+)(?=(?:\s|\#[^\n]*\n)*::=)
    |(?P<name>[\w-]+)
    |(?P<is>::=)
    |"(?P<text>(?:\\.|[^"\\\n])*)"
    |\[(?P<set>(?:\\.|[^\]\\\n])+)\]
    |\{\s*(?P<count>\d+\s*(?:,\s*\d*\s*)?)\}
    |(?P<mark>[()|*+?.])""",
    re.VERBOSE,
)
_CHAR = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<c>.))|(?P<p>[^\\])"
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"} | {c: c for c in "\\\"'[]-^/"}


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    value: str
    start: int


@dataclass(frozen=True, slots=True)
class _Chars:
    """Regular expressions of one character each, in sequence."""

    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Ref:
    name: str
    start: int


@dataclass(frozen=True, slots=True)
class _Repeat:
    node: _Node
    count: str


@dataclass(frozen=True, slots=True)
class _Choice:
    """Alternatives, each a sequence."""

    options: tuple[tuple[_Node, ...], ...]


_Node = _Chars | _Ref | _Repeat | _Choice


def to_lark(text: str) -> str:
    """The grammar in Lark; `ValueError` says where and why it cannot be read."""
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise ValueError("there is no rule named root")
    order = _reachable(rules, text)
    regular = not _recursive(rules, order)
    names = {name: f"{'R' if regular else 'r'}{i}" for i, name in enumerate(order)}
    lines = [f"start: {names['root']}"]
    lines += [f"{names[name]}: {_write(rules[name], names, regular)}" for name in order]
    return "\n".join(lines) + "\n"


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(_tokens(text))
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, _Choice]:
        rules: dict[str, _Choice] = {}
        while (token := self._peek()).kind != "end":
            if token.kind != "rule":
                self._fail(token, "a rule (name ::= ...) is expected")
            if token.value in rules:
                self._fail(token, f"the rule {token.value} is defined twice")
            self._at += 2  # the name and ::=
            rules[token.value] = self._choice()
        return rules

    def _choice(self) -> _Choice:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return _Choice(tuple(options))

    def _sequence(self) -> tuple[_Node, ...]:
        nodes: list[_Node] = []
        while (node := self._item()) is not None:
            while (count := self._count()) is not None:
                node = _Repeat(node, count)
            nodes.append(node)
        return tuple(nodes)

    def _item(self) -> _Node | None:
        token = self._peek()
        if token.kind in ("rule", "end") or (token.kind == "mark" and token.value in "|)"):
            return None
        self._at += 1
        match token.kind, token.value:
            case "text", value:
                return _Chars(tuple(_escaped(c) for c in self._chars(token, value)))
            case "set", value:
                return _Chars((self._set(token, value),))
            case "name", value:
                return _Ref(value, token.start)
            case "mark", ".":
                return _Chars((_ANY,))
            case "mark", "(":
                return self._group(token)
            case _:
                self._fail(token, f"{token.value!r} does not belong here")

    def _group(self, opening: _Token) -> _Choice:
        self._depth += 1
        if self._depth > MAX_NESTING:
            self._fail(opening, f"more than {MAX_NESTING} nested parentheses")
        inner = self._choice()
        if not self._take(")"):
            self._fail(opening, "this ( is not closed")
        self._depth -= 1
        return inner

    def _count(self) -> str | None:
        token = self._peek()
        if token.kind == "mark" and token.value in "*+?":
            self._at += 1
            return token.value
        if token.kind != "count":
            return None
        self._at += 1
        low, _, high = token.value.replace(" ", "").partition(",")
        if "," not in token.value:
            high = low
        if high and int(high) < int(low):
            self._fail(token, f"{{{token.value}}} asks for at least {low} and at most {high}")
        return f"{{{int(low)},{int(high) if high else ''}}}"

    def _chars(self, token: _Token, raw: str) -> Iterator[str]:
        at = 0
        while at < len(raw):
            found = _CHAR.match(raw, at)
            value = None if found is None else _value(found)
            if found is None or value is None:
                self._fail(token, f"unknown escape {raw[at : at + 2]!r}")
            yield value
            at = found.end()

    def _set(self, token: _Token, raw: str) -> str:
        negated = raw.startswith("^")
        parts: list[str] = []
        plain = raw[negated:]
        chars = list(self._chars(token, plain))
        # A dash is a range only where it stands unescaped between two characters.
        dashes = [found.group() == "-" for found in _CHAR.finditer(plain)]
        i = 0
        while i < len(chars):
            if i + 2 < len(chars) and dashes[i + 1]:
                if chars[i] > chars[i + 2]:
                    self._fail(token, f"the range {chars[i]}-{chars[i + 2]} is empty")
                parts.append(f"{_escaped(chars[i])}-{_escaped(chars[i + 2])}")
                i += 3
            else:
                parts.append(_escaped(chars[i]))
                i += 1
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    def _peek(self) -> _Token:
        return self._tokens[self._at]

    def _take(self, mark: str) -> bool:
        token = self._peek()
        found = token.kind == "mark" and token.value == mark
        self._at += found
        return found

    def _fail(self, token: _Token, problem: str) -> NoReturn:
        raise _error(self._text, token.start, problem)


def _tokens(text: str) -> Iterator[_Token]:
    at = 0
    while at < len(text):
        found = _TOKENS.match(text, at)
        if found is None:
            raise _error(text, at, f"{text[at : at + 10]!r} cannot be read")
        kind = found.lastgroup
        assert kind is not None
        if kind != "space":
            yield _Token(kind, found.group(kind), at)
        at = found.end()
    yield _Token("end", "the end", at)


def _value(found: re.Match[str]) -> str | None:
    """The character of a match of `_CHAR`, None for an escape that does not exist."""
    digits = found["x"] or found["u"] or found["U"]
    if digits:
        code = int(digits, 16)
        return None if 0xD800 <= code < 0xE000 or code > 0x10FFFF else chr(code)
    return found["p"] or _ESCAPES.get(found["c"])


def _escaped(char: str) -> str:
    return f"\\x{{{ord(char):x}}}"


def _error(text: str, at: int, problem: str) -> ValueError:
    line = text.count("\n", 0, at) + 1
    column = at - (text.rfind("\n", 0, at) + 1) + 1
    return ValueError(f"line {line}, column {column}: {problem}")


def _refs(node: _Node) -> Iterator[_Ref]:
    match node:
        case _Ref():
            yield node
        case _Repeat(inner, _):
            yield from _refs(inner)
        case _Choice(options):
            for option in options:
                for part in option:
                    yield from _refs(part)


def _reachable(rules: dict[str, _Choice], text: str) -> list[str]:
    """Names of the rules that root needs, root first."""
    order = ["root"]
    known = {"root"}
    for name in order:  # grows while it is walked
        for ref in _refs(rules[name]):
            if ref.name not in rules:
                raise _error(text, ref.start, f"there is no rule named {ref.name}")
            if ref.name not in known:
                known.add(ref.name)
                order.append(ref.name)
    return order


def _recursive(rules: dict[str, _Choice], order: list[str]) -> bool:
    """Whether some rule contains itself: rules are taken away while all that they need are."""
    needs = {name: {ref.name for ref in _refs(rules[name])} for name in order}
    users: dict[str, list[str]] = {name: [] for name in order}
    for name, needed in needs.items():
        for other in needed:
            users[other].append(name)
    ready = [name for name in order if not needs[name]]
    for name in ready:
        for user in users[name]:
            needs[user].discard(name)
            if not needs[user]:
                ready.append(user)
    return len(ready) < len(order)


def _write(node: _Node, names: dict[str, str], regular: bool) -> str:
    match node:
        case _Chars(parts) if regular:
            return f"/{''.join(parts)}/" if parts else '""'
        case _Chars(parts):
            return " ".join(f"/{part}/" for part in parts) or '""'
        case _Ref(name, _):
            return names[name]
        case _Repeat(inner, count):
            return f"({_write(inner, names, regular)}){count}"
        case _Choice(options):
            written = (
                " ".join(_write(part, names, regular) for part in option) or '""'
                for option in options
            )
            return f"({' | '.join(written)})"
