"""The functions that a chat offers: into the prompt, and into the grammar of calls it requires."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sgl_spec.errors import InvalidRequestError, preview
from sgl_spec.server.openai_schema import Chat, Tool, ToolChoice

# For models whose template shows no tools: the prompt of Hermes and Qwen.
_PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def check_tools(chat: Chat) -> None:
    """Raise for names that come twice, and for a choice of what is not offered."""
    names = [tool.function.name for tool in chat.tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InvalidRequestError(
                f"tools[{i}].function.name must differ from the others, got {preview(name)}.",
                param=f"tools[{i}].function.name",
            )
    choice = chat.tool_choice
    if choice not in (None, "none", "auto") and not names:
        raise InvalidRequestError("tool_choice needs tools.", param="tool_choice")
    if isinstance(choice, ToolChoice) and choice.function.name not in names:
        raise InvalidRequestError(
            f"tool_choice.function.name must be one of tools ({', '.join(names)}), got "
            f"{preview(choice.function.name)}.",
            param="tool_choice.function.name",
        )


def required_calls(chat: Chat) -> dict[str, Any] | None:
    """The schema of an answer that must call: the arguments of the function that is named, or a
    list of calls; None where the model may choose."""
    if isinstance(chat.tool_choice, ToolChoice):
        chosen = chat.tool_choice.function.name
        return _arguments(next(t for t in chat.tools if t.function.name == chosen), "")
    if chat.tool_choice != "required":
        return None
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": _arguments(tool, f"/items/anyOf/{i}/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, tool in enumerate(chat.tools)
    ]
    most = {} if chat.parallel_tool_calls else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}


def _arguments(tool: Tool, place: str) -> dict[str, Any]:
    """What a function's arguments must match, in a schema that has them at `place`."""
    schema = tool.function.parameters or {"type": "object", "properties": {}}
    moved = _moved(schema, place)
    assert isinstance(moved, dict)
    return moved


def _moved(schema: Any, place: str) -> Any:
    """The schema with references to its own parts as they are from outside."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, place) for name, value in schema.items()}
    if isinstance(ref := schema.get("$ref"), str) and ref.startswith("#"):
        moved["$ref"] = f"#{place}{ref[1:]}"
    return moved


def with_tools_told(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A chat for a template that knows no tools: they are told in the system message, calls and
    results in the texts, all as Hermes and Qwen do."""
    told = [_told(message) for message in messages]
    if tools:
        prompt = _PROMPT.format(tools="\n".join(map(_json, tools)))
        if told and told[0]["role"] == "system":
            told[0]["content"] = f"{told[0]['content']}\n\n{prompt}"
        else:
            told.insert(0, {"role": "system", "content": prompt})
    return told


def _told(message: Mapping[str, Any]) -> dict[str, Any]:
    plain = {k: v for k, v in message.items() if k not in ("tool_calls", "tool_call_id")}
    if message["role"] == "tool":
        return plain | {
            "role": "user",
            "content": f"<tool_response>\n{message['content']}\n</tool_response>",
        }
    if calls := message.get("tool_calls"):
        texts = [f"<tool_call>\n{_json(call['function'])}\n</tool_call>" for call in calls]
        return plain | {"content": "\n".join([*filter(None, [message["content"]]), *texts])}
    return plain


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
