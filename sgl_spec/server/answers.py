"""A chat answer's text read as it comes: reasoning, content, and calls of the client's functions.

Every reader takes new text and gives deltas as /v1/chat/completions streams them: objects with
`reasoning_content`, `content` or `tool_calls`. `merged` makes one message of them.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import msgspec

Delta = dict[str, Any]

THINK, END_THINK = "<think>", "</think>"
# The beginning of a call whose arguments can be streamed; any other is read when it is complete.
_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
# The newer form of Mistral's, and what may become one.
_NAMED = re.compile(r"([\w.-]+)\[ARGS\]\s*(?=\{)")
_NAMED_PART = re.compile(r"[\w.-]+(\[(A(R(G(S(\]\s*)?)?)?)?)?)?")
_BETWEEN = " \t\r\n,;"


class Form(msgspec.Struct, frozen=True):
    """How a model writes calls: objects with `name` and `arguments` (or `parameters`).

    opener, closer: what stands around them, the closer "" where nothing does. bare: an answer that
    begins with an object may be a call without the opener. special: the opener is a special token,
    which an answer shows only without `skip_special_tokens`. id_chars: what the template wants of
    the ids of calls, 0 for anything. named: a call may also be `NAME[ARGS]{...}`, each behind an
    opener of its own.
    """

    opener: str
    closer: str = ""
    bare: bool = False
    special: bool = False
    id_chars: int = 0
    named: bool = False

    def fresh_id(self) -> str:
        """An id for a new call."""
        name = uuid.uuid4().hex
        return name[: self.id_chars] if self.id_chars else f"call_{name}"


HERMES = Form("<tool_call>", "</tool_call>")
LLAMA3 = Form("<|python_tag|>", bare=True, special=True)
MISTRAL = Form("[TOOL_CALLS]", special=True, id_chars=9, named=True)
# What a grammar that requires calls writes, whatever the model's own form.
REQUIRED = Form("", bare=True)
# Under SGLang's and vLLM's names.
FORMS = {
    **dict.fromkeys(("hermes", "qwen", "qwen25"), HERMES),
    "llama3": LLAMA3,
    "mistral": MISTRAL,
}


def form_of(template: str) -> Form | None:
    """The form of calls that a chat template shows to its model, if it is one of ours."""
    for form in (HERMES, MISTRAL, LLAMA3):
        if form.opener in template:
            return form
    return None


class Talk(msgspec.Struct, frozen=True):
    """How a server reads its model's answers. form: of calls, None where it is not known. thinking:
    whether to take reasoning apart (--reasoning-parser)."""

    form: Form | None = None
    thinking: bool = False


PLAIN = Talk()


class Answer:
    """One answer, read to its end. thinking: whether to look for reasoning, and whether the prompt
    has begun it; calls: the reader of calls, None for answers without tools."""

    def __init__(self, calls: CallReader | None, thinking: Thinking | None) -> None:
        self._calls = calls
        self._thinking = thinking

    @property
    def called(self) -> bool:
        """Whether the answer holds a call so far."""
        return self._calls is not None and self._calls.count > 0

    def push(self, text: str, *, last: bool) -> list[Delta]:
        """What new text adds; `last`: there is no more, so nothing is held back."""
        thought, text = self._thinking.push(text, last=last) if self._thinking else ("", text)
        deltas: list[Delta] = [{"reasoning_content": thought}] if thought else []
        if self._calls is not None:
            return deltas + self._calls.push(text, last=last)
        return deltas + ([{"content": text}] if text else [])


class Thinking:
    """Splits `<think>...</think>` from what follows. begun: the prompt ends with the opener."""

    def __init__(self, *, begun: bool) -> None:
        self._state = "inside" if begun else "before"
        self._held = ""

    def push(self, text: str, *, last: bool) -> tuple[str, str]:
        """The reasoning and the content that are new."""
        self._held += text
        if self._state == "before":
            begins = self._held.lstrip()
            if THINK.startswith(begins) and not last:
                return "", ""
            self._state = "inside" if begins.startswith(THINK) else "behind"
            if self._state == "inside":
                self._held = begins.removeprefix(THINK).lstrip("\n")
        thought = self._thought(last) if self._state == "inside" else ""
        if self._state == "between":  # line breaks in front of the content are none of it
            self._held = self._held.lstrip("\n")
            self._state = "behind" if self._held else "between"
        return thought, self._take(len(self._held)) if self._state == "behind" else ""

    def _thought(self, last: bool) -> str:
        thought, mark, rest = self._held.partition(END_THINK)
        if mark:
            self._state, self._held = "between", rest
            return thought.rstrip("\n")
        return self._take(len(thought) - (0 if last else held_back(thought, [END_THINK])))

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken


def held_back(text: str, marks: Collection[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a mark, with the blanks in
    front of them."""
    longest = max(
        (n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0
    )
    head = text[: len(text) - longest]
    return longest + len(head) - len(head.rstrip())


class CallReader:
    """Reads the calls of an answer as it comes.

    names: the functions that may be called; an object that calls another is content. most: calls
    beyond it are left out (`parallel_tool_calls` false).
    """

    def __init__(self, form: Form, names: Collection[str], most: int | None = None) -> None:
        self.count = 0
        self._form = form
        self._names = names
        self._most = most
        self._text = ""
        self._inside = False
        self._started = False
        self._scan: _Scan | None = None

    def push(self, text: str, *, last: bool) -> list[Delta]:
        """The deltas of new text."""
        self._text += text
        deltas: list[Delta] = []
        while self._text:
            left = len(self._text), self._inside
            deltas += self._step(last)
            if left == (len(self._text), self._inside):
                break
        return deltas

    def _step(self, last: bool) -> Iterable[Delta]:
        if self._scan is not None:
            return self._arguments(self._scan)
        if self._inside and self._form.named and (found := self._named(last)) is not None:
            return found
        return self._object(last) if self._inside else self._content(last)

    def _content(self, last: bool) -> Iterator[Delta]:
        """Text outside of calls, up to the next opener."""
        opener = self._form.opener
        begins = self._text.lstrip()
        if self._form.bare and not self._started and begins[:1] == ("{" if opener else "["):
            self._inside = self._started = True
            return
        before, mark, rest = self._text.partition(opener) if opener else (self._text, "", "")
        if mark:
            self._inside, self._text = True, rest
            yield from self._plain(before.rstrip())
        else:
            sure = len(before) if last else len(before) - held_back(before, [opener])
            self._text = before[sure:]
            yield from self._plain(before[:sure] if before.strip() or not self.count else "")

    def _plain(self, text: str) -> Iterator[Delta]:
        self._started = self._started or bool(text.strip())
        if text:
            yield {"content": text}

    def _object(self, last: bool) -> Iterator[Delta]:
        """The beginning of a call, or what is behind the last one."""
        begins = self._text.lstrip(_BETWEEN + "[")
        closer = self._form.closer
        if closer and begins.startswith(closer):
            self._inside, self._text = False, begins.removeprefix(closer)
        elif head := _HEAD.match(begins):
            name = json.loads(head[1])
            if name in self._names:
                self._text, self._scan = begins[head.end() :], _Scan()
                yield from self._begin(name, "")
            else:
                yield from self._complete(begins, last)
        elif begins.startswith("{"):
            yield from self._complete(begins, last)
        elif begins.startswith("]") and not closer:
            self._inside, self._text = False, begins[1:]
        elif last or not (closer.startswith(begins) or not begins):
            self._inside, self._text = False, ""
            yield from self._plain(begins)

    def _named(self, last: bool) -> list[Delta] | None:
        """A call that is written as a name and its arguments; None if there is none here."""
        begins, opener = self._text.lstrip(_BETWEEN), self._form.opener
        if begins.startswith(opener):
            self._text = begins.removeprefix(opener)
            return []
        head = _NAMED.match(begins)
        if head and head[1] in self._names:
            self._text, self._scan = begins[head.end() :], _Scan(around=0)
            return list(self._begin(head[1], ""))
        may_be = opener.startswith(begins) or _NAMED_PART.fullmatch(begins)
        return [] if begins and may_be and not last else None

    def _complete(self, text: str, last: bool) -> Iterator[Delta]:
        """An object that is read when all of it is there: its keys come in another order, its
        arguments are a string, or it is no call."""
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except ValueError:
            if last:
                self._inside, self._text = False, ""
                yield from self._plain(text)
            return
        self._text = text[end:]
        name = value.get("name")
        if name in self._names:
            arguments = value.get("arguments", value.get("parameters")) or {}
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            yield from self._begin(name, arguments)
            self.count += 1
        else:
            self._inside = self._inside and bool(self._form.closer)
            yield from self._plain(text[:end])

    def _begin(self, name: str, arguments: str) -> Iterator[Delta]:
        self._started = True
        if not self._left_out:
            function = {"name": name, "arguments": arguments}
            call = {"index": self.count, "id": self._form.fresh_id(), "type": "function"}
            yield {"tool_calls": [call | {"function": function}]}

    @property
    def _left_out(self) -> bool:
        return self._most is not None and self.count >= self._most

    def _arguments(self, scan: _Scan) -> Iterator[Delta]:
        """More of the arguments, and of what follows them in the object."""
        read, shown = scan.read(self._text)
        new, self._text = self._text[:shown], self._text[read:]
        if new and not self._left_out:
            yield {"tool_calls": [{"index": self.count, "function": {"arguments": new}}]}
        if scan.depth == 0:
            self._scan = None
            self.count += 1


class _Scan:
    """Finds the end of a call's arguments, and of the object around them (at depth 0). around: how
    many objects there are around them, 0 or 1."""

    def __init__(self, around: int = 1) -> None:
        self.depth = self._around = around
        self._shown = True
        self._quoted = False
        self._escaped = False

    def read(self, text: str) -> tuple[int, int]:
        """How many characters of `text` belong to the call, and how many of them to its
        arguments."""
        shown = len(text) if self._shown else 0
        for at, char in enumerate(text):
            if self._quoted:
                self._quoted = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
                continue
            self._quoted = char == '"'
            self.depth += (char in "{[") - (char in "}]")
            if self.depth == self._around and self._shown and char == "}":
                shown, self._shown = at + 1, False
            if self.depth == 0:
                return at + 1, shown
        return len(text), shown


class NamedCall(CallReader):
    """An answer that is the arguments of one function, as a grammar has made it."""

    def __init__(self, name: str) -> None:
        super().__init__(REQUIRED, (name,))
        self._name = name

    def push(self, text: str, *, last: bool) -> list[Delta]:
        """The deltas of new text."""
        if not text:
            return []
        if self.count:
            return [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]}]
        deltas = list(self._begin(self._name, text))
        self.count = 1
        return deltas


def merged(deltas: Iterable[Delta]) -> dict[str, Any]:
    """The message that deltas add up to; what is absent is None."""
    texts: dict[str, str] = {}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for name, value in delta.items():
            if name != "tool_calls":
                texts[name] = texts.get(name, "") + value
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                calls.append({**part, "function": dict(part["function"])})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    content = texts.get("content", None if calls or "reasoning_content" in texts else "")
    message = {"role": "assistant", "content": content, "tool_calls": calls or None}
    return message | {k: v for k, v in texts.items() if k == "reasoning_content"}
