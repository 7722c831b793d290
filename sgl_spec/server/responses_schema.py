"""The body of /v1/responses: items of a conversation, and functions without a wrapper."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from sgl_spec import request
from sgl_spec.server.body import Body, Many
from sgl_spec.server.openai_schema import CalledFunction, Function
from sgl_spec.server.schema import Label, Labels, Past, PastList


class ItemText(Body):
    """A part of the content of an item of `input`."""

    unsupported = dict.fromkeys(("image_url", "file_id", "file_data", "file_url", "detail"), ())
    type: Literal["input_text", "output_text"]
    text: str
    annotations: PastList = None
    logprobs: PastList = None


class ItemMessage(Body):
    """A message; `type` may be left out."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Many[ItemText]
    id: Past = None
    status: Past = None
    phase: Past = None


class ItemCall(CalledFunction):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    id: Past = None
    status: Past = None


class ItemResult(Body):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Many[ItemText]
    id: Label = None
    status: Label = None


class ItemReasoning(Body):
    """Reasoning of an earlier answer, which models are not shown again."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None
    status: str | None = None


def _item_type(item: Any) -> str | None:
    return item.get("type") or "message" if isinstance(item, dict) else None


Item = Annotated[
    Annotated[ItemMessage, Tag("message")]
    | Annotated[ItemCall, Tag("function_call")]
    | Annotated[ItemResult, Tag("function_call_output")]
    | Annotated[ItemReasoning, Tag("reasoning")],
    Discriminator(
        _item_type,
        custom_error_type="words",
        custom_error_message="Input should be an object of type message, function_call, "
        "function_call_output or reasoning",
    ),
]


class FlatFunction(Function):
    """A function that may be called, as /v1/responses writes it."""

    type: Literal["function"]


class FlatChoice(Body):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """What the output must match."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    name: Label = None
    description: Label = None
    strict: bool | None = Field(None, description="output follows the schema in any case")


class TextOptions(Body):
    """How text is written."""

    unsupported: ClassVar = {"verbosity": ("medium",)}
    format: TextFormat | None = Field(None, description="constrained output")


class Responses(Body):
    """What /v1/responses takes. Nothing is stored: a call holds the whole conversation."""

    unsupported: ClassVar = {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "include": ([],),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory", "in-memory"),
        "reasoning": ({},),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "stream_options": ({}, {"include_obfuscation": False}),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    model: str | None = Field(
        None, description="the served name, the model path or `default`; others are a 404"
    )
    input: str | Many[Item] = Field(description="a text, or the items of the conversation")
    instructions: str | None = Field(None, description="a system message in front")
    max_output_tokens: request.NewTokens | None = Field(
        None, description="0 or more. Without, all that the context (or a smaller KV pool) leaves"
    )
    temperature: request.Temperature | None = None
    top_p: request.TopP | None = None
    stream: bool = Field(False, description="server-sent events")
    tools: Many[FlatFunction] = Field([], description="functions that the model may call")
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = Field(
        None, description="as in chats"
    )
    parallel_tool_calls: bool = Field(True, description="false: at most one call")
    text: TextOptions = Field(default_factory=TextOptions, description="constrained output")
    user: Label = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    metadata: Labels = None
