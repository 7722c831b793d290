"""The bodies of OpenAI's routes."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sgl_spec import request
from sgl_spec.server.body import Body, Many, fault
from sgl_spec.server.schema import (
    Counted,
    DraftTrees,
    Hint,
    Label,
    Labels,
    Name,
    Names,
    PastList,
    Prompts,
    Settings,
)
from sgl_spec.server.unsupported import UNSUPPORTED

MAX_OPENAI_LOGPROBS = 20


class StreamOptions(Body):
    """What a stream tells of usage."""

    unsupported: ClassVar = {"include_obfuscation": (False,)}
    include_usage: bool = Field(False, description="one event with it at the end")
    continuous_usage_stats: bool = Field(False, description="in every event")


class NamedSchema(Body):
    """A JSON schema as OpenAI wraps it. Output follows it whether `strict` is set or not."""

    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="output follows the schema in any case")
    name: Label = None
    description: Label = None


class ResponseFormat(Body):
    """OpenAI's word for what the output must match."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise fault("json_schema", "{field} must be an object, got null.")
        if self.type != "json_schema" and self.json_schema is not None:
            raise fault(
                "type",
                '{field} must be "json_schema" where a json_schema is given, got {value}.',
            )
        return self


_OPENAI_UNSUPPORTED = {
    **UNSUPPORTED,
    "return_prompt_token_ids": (False,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "prompt_cache_retention": ("in_memory", "in-memory"),
}


class OpenAI(Settings):
    """What /v1/completions and /v1/chat/completions share."""

    unsupported = _OPENAI_UNSUPPORTED

    model: str | None = Field(
        None, description="the served name, the model path or `default`; others are a 404"
    )
    temperature: request.Temperature | None = None
    top_k: request.TopK | None = None
    top_p: request.TopP | None = None
    min_p: request.MinP | None = None
    repetition_penalty: request.RepetitionPenalty | None = None
    min_tokens: request.MinTokens = Field(0, description="`min_new_tokens`")
    stream: bool = Field(False, description="server-sent events")
    stream_options: StreamOptions = Field(
        default_factory=StreamOptions,
        description="`include_usage`: one event with it at the end; `continuous_usage_stats`: "
        "in every event",
    )
    response_format: ResponseFormat | None = Field(
        None,
        description='`{"type": "text"}`, `{"type": "json_object"}` or `{"type": "json_schema", '
        '"json_schema": {"schema": ...}}`',
    )
    return_spec_tokens_details: bool = Field(False, description="what speculation reports")
    return_draft_trees: DraftTrees = False
    return_meta_info: bool = Field(False, description="what speculation reports")
    user: Label = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    metadata: Labels = None
    log_metrics: Counted = None
    custom_labels: Labels = None


class Completions(OpenAI):
    """What /v1/completions takes."""

    unsupported: ClassVar = {**_OPENAI_UNSUPPORTED, "suffix": ("",)}

    prompt: Prompts = Field(description="a string, a list of strings, of ids or of lists of ids")
    max_tokens: request.NewTokens = Field(16, description="0 or more")
    echo: bool = Field(False, description="the prompt's text in front")
    rid: Names = None
    logprobs: int | None = Field(
        None, ge=0, le=MAX_OPENAI_LOGPROBS, description=f"0 to {MAX_OPENAI_LOGPROBS}"
    )


class TextPart(Body):
    """A part of a message's content."""

    unsupported = dict.fromkeys(
        ("image_url", "input_audio", "file", "video_url", "audio_url", "refusal"), ()
    )
    type: Literal["text"]
    text: str
    cache_control: Hint = None


class CalledFunction(Body):
    """What was called, and with what."""

    name: str
    arguments: str = Field(description="a JSON object as text")

    @model_validator(mode="after")
    def _arguments_are_json(self) -> Self:
        try:
            is_object = isinstance(json.loads(self.arguments or "{}"), dict)
        except ValueError:
            is_object = False
        if not is_object:
            raise fault("arguments", "{field} must be the text of a JSON object, got {value}.")
        return self


class ToolCall(Body):
    """A call in the history."""

    id: str | None = Field(None, description="what the answer to it names")
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="of a stream")


class Function(Body):
    """A function that may be called."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = Field(None, description="told to the model")
    parameters: dict[str, Any] | None = Field(
        None, description="a JSON schema; null for a function without"
    )
    strict: bool | None = Field(
        None, description="where calls are required, arguments follow the schema in any case"
    )


class Tool(Body):
    """What a chat offers."""

    type: Literal["function"]
    function: Function
    cache_control: Hint = None


class FunctionName(Body):
    """Which function."""

    name: str


class ToolChoice(Body):
    """The function that must be called."""

    type: Literal["function"]
    function: FunctionName


class Message(Body):
    """One message of a chat."""

    unsupported: ClassVar = {"function_call": (), "audio": (), "refusal": ("",)}
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[TextPart] | None = Field(
        None, description="may be null in an assistant's message that calls tools"
    )
    tool_calls: Many[ToolCall] = Field([], description="the calls of an assistant's message")
    tool_call_id: str | None = Field(None, description="which call a tool's message answers")
    name: str | None = Field(None, description="for templates that know it")
    reasoning_content: str | None = Field(None, description="for templates that know it")
    annotations: PastList = None
    cache_control: Hint = None
    provider_specific_fields: dict[str, Any] | None = Field(None, description="of litellm")

    @model_validator(mode="after")
    def _with_content(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise fault("tool_calls", f"{{field}} belongs to an assistant, not to a {self.role}.")
        if self.content is None and not self.tool_calls:
            raise fault("content", "{field} is required.")
        return self


class Chat(OpenAI):
    """What /v1/chat/completions takes."""

    unsupported: ClassVar = {
        **_OPENAI_UNSUPPORTED,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "audio": (),
        "web_search_options": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "stream_reasoning": (True,),
    }

    messages: Many[Message] = Field(description="the chat so far")
    max_tokens: request.NewTokens | None = Field(
        None, description="0 or more. Without, all that the context (or a smaller KV pool) leaves"
    )
    max_completion_tokens: request.NewTokens | None = Field(
        None, description="another word for `max_tokens`"
    )
    continue_final_message: bool = Field(
        False, description="the last message, the assistant's, is the beginning of the answer"
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="end the prompt with the header of the assistant's turn; null is true unless "
        "the last message is continued",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="an object of further variables for the template"
    )
    rid: Name | None = Field(None, description="a name")
    logprobs: bool = Field(False, description="log-probabilities of the output")
    top_logprobs: int = Field(
        0, ge=0, le=MAX_OPENAI_LOGPROBS, description=f"0 to {MAX_OPENAI_LOGPROBS}"
    )
    tools: Many[Tool] = Field([], description="functions that the model may call")
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = Field(
        None,
        description='"none" hides the tools, "auto" (as null) lets the model choose, "required" '
        "and a named function are kept by a grammar",
    )
    parallel_tool_calls: bool = Field(True, description="false: at most one call")
    separate_reasoning: bool = Field(
        True,
        description="with `--reasoning-parser`: `reasoning_content` apart from `content`",
    )
    prediction: dict[str, Any] | None = Field(
        None, description="a guess at the text; the server's own drafter makes them"
    )

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        self.same_meaning("max_tokens", "max_completion_tokens")
        return self
