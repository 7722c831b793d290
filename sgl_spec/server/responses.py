"""/v1/responses: OpenAI's newer route, over the chat route; nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from sgl_spec.errors import InvalidRequestError
from sgl_spec.server.answers import Answer, Delta
from sgl_spec.server.openai_schema import Chat
from sgl_spec.server.output import Output
from sgl_spec.server.requests import Made
from sgl_spec.server.responses_schema import (
    FlatChoice,
    FlatFunction,
    Item,
    ItemCall,
    ItemMessage,
    ItemResult,
    ItemText,
    Responses,
)

# What this route calls fields of `SamplingParams`.
NAMES = {"max_new_tokens": "max_output_tokens"}


def as_chat(fields: Responses) -> Chat:
    """The chat that the call stands for."""
    if not fields.input:
        raise InvalidRequestError("input cannot be empty.", param="input")
    asked: dict[str, Any] = {
        "model": fields.model,
        "messages": list(_messages(fields)),
        "max_tokens": fields.max_output_tokens,
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "tools": [_tool(tool) for tool in fields.tools],
        "tool_choice": _choice(fields.tool_choice),
        "parallel_tool_calls": fields.parallel_tool_calls,
    }
    if (wanted := fields.text.format) is not None:
        asked["response_format"] = {"type": wanted.type}
        if wanted.json_schema is not None:
            asked["response_format"]["json_schema"] = {"schema": wanted.json_schema}
    return Chat.read(asked)


def _messages(fields: Responses) -> Iterator[dict[str, Any]]:
    if fields.instructions is not None:
        yield {"role": "system", "content": fields.instructions}
    if isinstance(fields.input, str):
        yield {"role": "user", "content": fields.input}
        return
    calls: list[dict[str, Any]] = []  # those of one answer stand behind each other
    for item in fields.input:
        if isinstance(item, ItemCall):
            function = {"name": item.name, "arguments": item.arguments}
            calls.append({"id": item.call_id, "type": "function", "function": function})
            continue
        if calls:
            yield {"role": "assistant", "content": None, "tool_calls": calls}
            calls = []
        yield from _message(item)
    if calls:
        yield {"role": "assistant", "content": None, "tool_calls": calls}


def _message(item: Item) -> Iterator[dict[str, Any]]:
    if isinstance(item, ItemMessage):
        yield {"role": item.role, "content": _content(item.content)}
    elif isinstance(item, ItemResult):
        result = _content(item.output)
        yield {"role": "tool", "tool_call_id": item.call_id, "content": result}


def _content(content: str | list[ItemText]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]


def _tool(tool: FlatFunction) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"})}


def _choice(choice: str | FlatChoice | None) -> Any:
    if isinstance(choice, FlatChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


class ResponsesReplies:
    """How /v1/responses words its answers: items of reasoning, text and calls.

    model: the name shown. reader: makes what reads the answer. marks: see
    `output.simulation_mark`.
    """

    def __init__(
        self,
        fields: Responses,
        made: Made,
        model: str,
        reader: Callable[[], Answer],
        marks: dict[str, float],
    ) -> None:
        (request,) = made.requests
        shown = {"model": model, "temperature": request.sampling.temperature}
        self._shown = {
            "id": f"resp_{request.rid}",
            "object": "response",
            "created_at": int(time.time()),
            **fields.model_dump(include=_REPEATED, by_alias=True),
            **shown,
            "top_p": request.sampling.top_p,
            "tool_choice": _told_choice(fields.tool_choice),
            "metadata": fields.metadata or {},
            "text": {"format": _told_format(fields)},
            **_ALWAYS,
            **marks,
        }
        self._answer = reader()
        self._items = _Items()
        self._count = 0

    def whole(self, outputs: Sequence[Output]) -> Any:
        """The body of a reply that is no stream."""
        (output,) = outputs
        for _ in self._read(output, output.text):
            pass
        return self._response(output)

    def events(self, output: Output, index: int, new: str, ids: list[int]) -> Iterable[Any]:
        """The events of one update."""
        if self._count == 0:
            for kind in ("created", "in_progress"):
                yield self._numbered({"type": f"response.{kind}", "response": self._begun()})
        for event in self._read(output, new):
            yield self._numbered(event)
        if output.finish is not None:
            response = self._response(output)
            kind = {"cancelled": "incomplete"}.get(response["status"], response["status"])
            yield self._numbered({"type": f"response.{kind}", "response": response})

    def last(self, outputs: Sequence[Output]) -> Iterable[Any]:
        """The events after all outputs have ended."""
        return ()

    def _read(self, output: Output, new: str) -> Iterator[Any]:
        last = output.finish is not None
        for delta in self._answer.push(new, last=last):
            yield from self._items.add(delta)
        if last:
            whole = output.finish is not None and output.finish.kind == "stop"
            yield from self._items.close("completed" if whole else "incomplete")

    def _numbered(self, event: dict[str, Any]) -> dict[str, Any]:
        self._count += 1
        return event | {"sequence_number": self._count - 1}

    def _begun(self) -> dict[str, Any]:
        return self._shown | {"status": "in_progress", "output": [], "usage": None}

    def _response(self, output: Output) -> dict[str, Any]:
        assert output.finish is not None
        assert output.chunk is not None
        kind, chunk = output.finish.kind, output.chunk
        status = {"length": "incomplete", "abort": "cancelled"}.get(kind, "completed")
        cut = {"reason": "max_output_tokens"} if kind == "length" else None
        usage = {
            "input_tokens": chunk.prompt_tokens,
            "input_tokens_details": {"cached_tokens": chunk.cached_tokens},
            "output_tokens": chunk.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": chunk.prompt_tokens + chunk.completion_tokens,
        }
        ended = {"status": status, "incomplete_details": cut, "usage": usage}
        return self._shown | ended | {"output": self._items.done}


_REPEATED = {"instructions", "max_output_tokens", "parallel_tool_calls", "tools"}
_ALWAYS: dict[str, Any] = {
    "error": None,
    "incomplete_details": None,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": False,
    "truncation": "disabled",
}


def _told_choice(choice: str | FlatChoice | None) -> Any:
    return choice.model_dump() if isinstance(choice, FlatChoice) else choice or "auto"


def _told_format(fields: Responses) -> dict[str, Any]:
    wanted = fields.text.format
    return {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True)


class _Items:
    """The items of an answer as they grow, and the events that tell so. done: those that ended."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None
        self._text = ""

    def add(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """A delta of the answer."""
        for name, kind in (("reasoning_content", "reasoning"), ("content", "message")):
            if name in delta:
                yield from self._text_of(kind, delta[name])
        for part in delta.get("tool_calls", ()):
            function = part["function"]
            if "id" in part:
                call = {"call_id": part["id"], "name": function["name"], "arguments": ""}
                yield from self._open("function_call", "fc", call)
            if new := function["arguments"]:
                self._text += new
                yield self._event("function_call_arguments.delta", delta=new)

    def _text_of(self, kind: str, new: str) -> Iterator[dict[str, Any]]:
        if self._item is None or self._item["type"] != kind:
            if kind == "message":
                yield from self._open(kind, "msg", {"role": "assistant", "content": []})
                yield self._event("content_part.added", content_index=0, part=_part(kind, ""))
            else:
                yield from self._open(kind, "rs", {"summary": [], "content": []})
        self._text += new
        extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"{_PARTS[kind]}.delta", content_index=0, delta=new, **extra)

    def _open(self, kind: str, prefix: str, about: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.close()
        name = f"{prefix}_{uuid.uuid4().hex}"
        self._item = {"type": kind, "id": name, "status": "in_progress", **about}
        yield self._about_item("added")

    def close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """The end of the last item, which was cut where it is "incomplete"."""
        if self._item is None:
            return
        kind, text = self._item["type"], self._text
        if kind == "function_call":
            self._item["arguments"] = text
            name = self._item["name"]
            yield self._event("function_call_arguments.done", arguments=text, name=name)
        else:
            self._item["content"] = [_part(kind, text)]
            extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield self._event(f"{_PARTS[kind]}.done", content_index=0, text=text, **extra)
            if kind == "message":
                part = _part(kind, text)
                yield self._event("content_part.done", content_index=0, part=part)
        self._item["status"] = status
        yield self._about_item("done")
        self.done.append(self._item)
        self._item, self._text = None, ""

    def _about_item(self, what: str) -> dict[str, Any]:
        kind = f"response.output_item.{what}"
        return {"type": kind, "output_index": len(self.done), "item": dict(self._item or {})}

    def _event(self, kind: str, **about: Any) -> dict[str, Any]:
        assert self._item is not None
        place = {"item_id": self._item["id"], "output_index": len(self.done)}
        return {"type": f"response.{kind}", **place, **about}


_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


def _part(kind: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "message" else {}
    return {"type": _PARTS[kind], "text": text, **more}
