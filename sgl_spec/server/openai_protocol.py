"""The OpenAI routes: what checked bodies ask for."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from sgl_spec.errors import InvalidRequestError, NotFoundError, preview
from sgl_spec.request import LogprobParams
from sgl_spec.server.answers import (
    PLAIN,
    REQUIRED,
    THINK,
    Answer,
    CallReader,
    NamedCall,
    Talk,
    Thinking,
)
from sgl_spec.server.openai_schema import (
    Chat,
    Completions,
    Message,
    OpenAI,
    Tool,
    ToolCall,
    ToolChoice,
)
from sgl_spec.server.requests import Asked
from sgl_spec.server.sampling import SamplingDefaults, openai_sampling, with_schema
from sgl_spec.server.tools import check_tools, required_calls

# What both routes call fields of `SamplingParams` that have another name there.
NAMES = {"min_new_tokens": "min_tokens"}


class OpenAICall(msgspec.Struct, frozen=True, kw_only=True):
    """A checked body of either OpenAI route.

    echo: prompts to repeat in front of each completion's text; None without echo. meta_info,
    spec_details: what finished choices tell besides, see `OpenAIReplies`. logprobs: whether choices
    tell the log-probabilities of their tokens. reader: makes what reads a chat's answer, None for
    answers that are content alone.
    """

    asked: list[Asked]
    rid: str | list[str] | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: list[str] | None = None
    meta_info: bool = False
    spec_details: bool = False
    logprobs: bool = False
    reader: Callable[[], Answer] | None = None


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """What the chat template turns into a prompt.

    template_kwargs: variables of the template. continue_final: the last message is the beginning
    of the answer. generation_prompt: end with the header of the assistant's turn; None means unless
    the last message is continued. tools: as the template shows them.
    """

    messages: list[dict[str, Any]]
    template_kwargs: dict[str, Any]
    continue_final: bool
    generation_prompt: bool | None
    tools: list[dict[str, Any]]


def check_model(name: str | None, served: tuple[str, ...]) -> None:
    """Raise `NotFoundError` for a model that is not served here."""
    if name is not None and name not in served:
        raise NotFoundError(
            f"The model {preview(name)} does not exist here; model may be "
            f"{' or '.join(map(preview, served))}.",
            param="model",
        )


def read_completions(
    body: object,
    defaults: SamplingDefaults,
    served: tuple[str, ...],
    decode: Callable[[list[int], str], str],
) -> OpenAICall:
    """Check a /v1/completions body. decode: ids, which the client calls so, to text; for `echo` of
    an id prompt."""
    fields = Completions.read(body)
    check_model(fields.model, served)
    prompt: Any = fields.prompt
    if not prompt:
        raise InvalidRequestError("prompt cannot be empty.", param="prompt")
    batch = isinstance(prompt, list) and not isinstance(prompt[0], int)
    prompts = prompt if batch else [prompt]
    logprobs = None
    if fields.logprobs is not None:
        start = 0 if fields.echo else -1
        logprobs = LogprobParams(top_logprobs_num=fields.logprobs, logprob_start_len=start)
    sampling = openai_sampling(fields, defaults, fields.max_tokens)
    asked = [
        Asked(
            prompt=one,
            where=f"prompt[{i}]" if batch else "prompt",
            n=fields.n,
            sampling=sampling,
            names=NAMES | {"max_new_tokens": "max_tokens", "top_logprobs_num": "logprobs"},
            logprobs=logprobs,
            draft_trees=fields.return_draft_trees,
        )
        for i, one in enumerate(prompts)
    ]
    echo = None
    if fields.echo:
        echo = [
            one if isinstance(one, str) else decode(one, item.where)
            for one, item in zip(prompts, asked, strict=True)
        ]
    return _call(fields, fields.rid, asked, echo)


def read_chat(
    body: object,
    defaults: SamplingDefaults,
    served: tuple[str, ...],
    render: Callable[[ChatPrompt], str],
    talk: Talk = PLAIN,
) -> OpenAICall:
    """Check a /v1/chat/completions body. render: chat to prompt text."""
    return chat_call(Chat.read(body), defaults, served, render, talk)


def chat_call(
    fields: Chat,
    defaults: SamplingDefaults,
    served: tuple[str, ...],
    render: Callable[[ChatPrompt], str],
    talk: Talk,
) -> OpenAICall:
    """What a chat asks for."""
    check_model(fields.model, served)
    if fields.top_logprobs and not fields.logprobs:
        raise InvalidRequestError(
            f"top_logprobs must be 0 or left out unless logprobs is true, got "
            f"{fields.top_logprobs}.",
            param="top_logprobs",
        )
    check_tools(fields)
    text = render(_chat_prompt(fields))
    budget, name = fields.max_tokens, "max_tokens"
    if fields.max_completion_tokens is not None:
        budget, name = fields.max_completion_tokens, "max_completion_tokens"
    asked = Asked(
        prompt=text,
        add_special_tokens=False,
        where="messages",
        n=fields.n,
        sampling=_chat_sampling(fields, defaults, budget, talk),
        names=NAMES | {"max_new_tokens": name, "top_logprobs_num": "top_logprobs"},
        logprobs=LogprobParams(top_logprobs_num=fields.top_logprobs) if fields.logprobs else None,
        draft_trees=fields.return_draft_trees,
    )
    begun = text.rstrip().endswith(THINK)
    reader = partial(_answer, fields, talk, begun=begun)
    return _call(fields, fields.rid, [asked], None, reader)


def _chat_sampling(
    fields: Chat, defaults: SamplingDefaults, budget: int | None, talk: Talk
) -> dict[str, Any]:
    sampling = openai_sampling(fields, defaults, budget)
    if calls := required_calls(fields):
        return with_schema(sampling, calls, "tools")
    if not _may_call(fields):
        return sampling
    if talk.form is None:
        raise InvalidRequestError(
            'tool_choice must be "required", "none" or name a function: how this model writes '
            "calls is not known, and the server was started without --tool-call-parser.",
            param="tool_choice",
        )
    return sampling | ({"skip_special_tokens": False} if talk.form.special else {})


def _may_call(fields: Chat) -> bool:
    return bool(fields.tools) and fields.tool_choice != "none"


def _answer(fields: Chat, talk: Talk, *, begun: bool) -> Answer:
    """What reads one answer to `fields`."""
    calls: CallReader | None = None
    if isinstance(fields.tool_choice, ToolChoice):
        calls = NamedCall(fields.tool_choice.function.name)
    elif _may_call(fields):
        form = REQUIRED if fields.tool_choice == "required" else talk.form
        assert form is not None
        names = {tool.function.name for tool in fields.tools}
        calls = CallReader(form, names, None if fields.parallel_tool_calls else 1)
    thinking = talk.thinking and fields.separate_reasoning
    return Answer(calls, Thinking(begun=begun) if thinking else None)


def _call(
    fields: OpenAI,
    rid: str | list[str] | None,
    asked: list[Asked],
    echo: list[str] | None,
    reader: Callable[[], Answer] | None = None,
) -> OpenAICall:
    return OpenAICall(
        asked=asked,
        rid=rid,
        stream=fields.stream,
        include_usage=fields.stream_options.include_usage,
        continuous_usage=fields.stream_options.continuous_usage_stats,
        echo=echo,
        meta_info=fields.return_meta_info,
        spec_details=fields.return_spec_tokens_details,
        logprobs=asked[0].logprobs is not None,
        reader=reader,
    )


def _chat_prompt(fields: Chat) -> ChatPrompt:
    if not fields.messages:
        raise InvalidRequestError("messages cannot be empty.", param="messages")
    continues = fields.continue_final_message
    if continues and fields.messages[-1].role != "assistant":
        raise InvalidRequestError(
            'continue_final_message needs a last message of role "assistant", got '
            f"{preview(fields.messages[-1].role)}.",
            param="continue_final_message",
        )
    return ChatPrompt(
        messages=[_message(message) for message in fields.messages],
        template_kwargs=fields.chat_template_kwargs,
        continue_final=continues,
        generation_prompt=fields.add_generation_prompt,
        tools=[_tool(tool) for tool in fields.tools] if _may_call(fields) else [],
    )


def _tool(tool: Tool) -> dict[str, Any]:
    return tool.model_dump(include={"type", "function"}, exclude_none=True)


def _message(message: Message) -> dict[str, Any]:
    """As templates know it: no "developer", which OpenAI's models read as they read "system", and
    content that is text."""
    kept = {"role", "content", "name", "reasoning_content", "tool_call_id"}
    plain = message.model_dump(include=kept, exclude_none=True)
    plain["role"] = "system" if message.role == "developer" else message.role
    plain.setdefault("content", "")
    if message.tool_calls:
        plain["tool_calls"] = [_called(call) for call in message.tool_calls]
    return plain


def _called(call: ToolCall) -> dict[str, Any]:
    """A call as templates know it: its arguments are an object, not the text of one."""
    function = {
        "name": call.function.name,
        "arguments": json.loads(call.function.arguments or "{}"),
    }
    return {"id": call.id, "type": "function", "function": function}
