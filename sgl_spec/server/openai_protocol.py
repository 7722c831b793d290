"""What /v1/completions and /v1/chat/completions accept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from sgl_spec.errors import InvalidRequestError, NotFoundError
from sgl_spec.request import LogprobParams, check_choices
from sgl_spec.server.fields import (
    BOOLEAN,
    INTEGER,
    LABELS,
    LIST,
    OBJECT,
    PROMPTS,
    STRING,
    STRINGS,
    Ignore,
    Kind,
    Refuse,
    Table,
    Use,
    preview,
    read_object,
    refuse,
)
from sgl_spec.server.requests import Asked
from sgl_spec.server.sampling import OPENAI, SamplingDefaults, sampling_of

MAX_OPENAI_LOGPROBS = 20
# What both routes call fields of `SamplingParams` that have another name there.
NAMES = {"min_new_tokens": "min_tokens"}

# Known to both routes beside the sampling fields.
_SHARED: Table = OPENAI | {
    "model": Use(STRING),
    "stream": Use(BOOLEAN, False),
    "stream_options": Use(OBJECT),
    "response_format": Use(OBJECT),
    "return_spec_tokens_details": Use(BOOLEAN, False),
    "return_meta_info": Use(BOOLEAN, False),
    "return_prompt_token_ids": Refuse((False,)),
    "store": Refuse((False,)),
    "service_tier": Refuse(("auto", "default")),
    "prompt_cache_retention": Refuse(("in_memory", "in-memory")),
    "user": Ignore(STRING),
    "metadata": Ignore(LABELS),
    "safety_identifier": Ignore(STRING),
    "prompt_cache_key": Ignore(STRING),
    "log_metrics": Ignore(BOOLEAN),
    "custom_labels": Ignore(LABELS),
}
COMPLETIONS: Table = _SHARED | {
    "prompt": Use(PROMPTS),
    "max_tokens": Use(INTEGER, 16, target="max_new_tokens"),
    "echo": Use(BOOLEAN, False),
    "rid": Use(STRINGS),
    "logprobs": Use(INTEGER),
    "suffix": Refuse(("",)),
}
CHAT: Table = _SHARED | {
    "messages": Use(LIST),
    "max_tokens": Use(INTEGER, target="max_new_tokens"),
    "max_completion_tokens": Use(INTEGER, target="max_new_tokens"),
    "continue_final_message": Use(BOOLEAN, False),
    "add_generation_prompt": Use(BOOLEAN),
    "chat_template_kwargs": Use(OBJECT),
    "rid": Use(STRING),
    "logprobs": Use(BOOLEAN, False),
    "top_logprobs": Use(INTEGER, 0),
    "tools": Refuse(([],)),
    "tool_choice": Refuse(("none", "auto")),
    "functions": Refuse(([],)),
    "function_call": Refuse(("none", "auto")),
    "audio": Refuse(),
    "web_search_options": Refuse(),
    "reasoning_effort": Refuse(("none",)),
    "verbosity": Refuse(("medium",)),
    # Read only together with tools, or with reasoning that a parser has found; there is neither.
    "parallel_tool_calls": Ignore(BOOLEAN),
    "separate_reasoning": Ignore(BOOLEAN),
    "stream_reasoning": Ignore(BOOLEAN),
    # A guess at the text, which may make it come faster but cannot change it.
    "prediction": Ignore(OBJECT),
}
STREAM_OPTIONS: Table = {
    "include_usage": Use(BOOLEAN, False),
    "continuous_usage_stats": Use(BOOLEAN, False),
    "include_obfuscation": Refuse((False,)),
}
CONTENT = Kind("a string or a list of content parts", lambda v: isinstance(v, (str, list)))
MESSAGE: Table = {
    "role": Use(STRING),
    "content": Use(CONTENT),
    "name": Use(STRING),
    "reasoning_content": Use(STRING),
    "tool_calls": Refuse(([],)),
    "tool_call_id": Refuse(),
    "function_call": Refuse(),
    "audio": Refuse(),
    "refusal": Refuse(("",)),
    "annotations": Ignore(LIST),
}
# Parameters of the tokenizer's own method; the template must not be given them a second time.
RESERVED_KWARGS = (
    *("self", "messages", "tools", "documents"),
    *("add_generation_prompt", "continue_final_message"),
)
# Templates know no "developer"; OpenAI's models read it as they read "system".
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class OpenAICall(msgspec.Struct, frozen=True, kw_only=True):
    """A checked body of either OpenAI route.

    echo: prompts to repeat in front of each completion's text; None without echo. meta_info,
    spec_details: what finished choices tell besides, see `OpenAIReplies`. logprobs: whether choices
    tell the log-probabilities of their tokens.
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


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """What the chat template turns into a prompt.

    template_kwargs: variables of the template. continue_final: the last message is the beginning
    of the answer. generation_prompt: end with the header of the assistant's turn; None means unless
    the last message is continued.
    """

    messages: list[dict[str, Any]]
    template_kwargs: dict[str, Any]
    continue_final: bool
    generation_prompt: bool | None


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
    fields = defaults.fill(read_object(body, COMPLETIONS))
    check_model(fields["model"], served)
    prompt = fields["prompt"]
    if not prompt:
        problem = "is required" if prompt is None else "cannot be empty"
        raise InvalidRequestError(f"prompt {problem}.", param="prompt")
    batch = isinstance(prompt, list) and not isinstance(prompt[0], int)
    prompts = prompt if batch else [prompt]
    logprobs = None
    if fields["logprobs"] is not None:
        logprobs = _logprobs("logprobs", fields["logprobs"], start=0 if fields["echo"] else -1)
    names = NAMES | {"max_new_tokens": "max_tokens", "top_logprobs_num": "logprobs"}
    asked = [
        _ask(one, f"prompt[{i}]" if batch else "prompt", fields, names, logprobs)
        for i, one in enumerate(prompts)
    ]
    echo = None
    if fields["echo"]:
        echo = [
            one if isinstance(one, str) else decode(one, item.where)
            for one, item in zip(prompts, asked, strict=True)
        ]
    return _call(fields, asked, echo)


def read_chat(
    body: object,
    defaults: SamplingDefaults,
    served: tuple[str, ...],
    render: Callable[[ChatPrompt], str],
) -> OpenAICall:
    """Check a /v1/chat/completions body. render: chat to prompt text."""
    fields = defaults.fill(read_object(body, CHAT))
    check_model(fields["model"], served)
    text = render(_chat_prompt(fields))
    sent = isinstance(body, dict) and body.get("max_completion_tokens") is not None
    budget = "max_completion_tokens" if sent else "max_tokens"
    logprobs = _logprobs("top_logprobs", fields["top_logprobs"], start=-1)
    if logprobs.top_logprobs_num and not fields["logprobs"]:
        refuse("top_logprobs", "0 or left out unless logprobs is true", fields["top_logprobs"])
    names = NAMES | {"max_new_tokens": budget, "top_logprobs_num": "top_logprobs"}
    asked = _ask(text, "messages", fields, names, logprobs if fields["logprobs"] else None)
    return _call(fields, [msgspec.structs.replace(asked, add_special_tokens=False)], None)


def _logprobs(name: str, top: int, start: int) -> LogprobParams:
    if not 0 <= top <= MAX_OPENAI_LOGPROBS:
        refuse(name, f"an integer from 0 to {MAX_OPENAI_LOGPROBS}", top)
    return LogprobParams(top_logprobs_num=top, logprob_start_len=start)


def _ask(
    prompt: str | list[int],
    where: str,
    fields: dict[str, Any],
    names: dict[str, str],
    logprobs: LogprobParams | None,
) -> Asked:
    check_choices(fields["n"], "n")
    return Asked(
        prompt=prompt,
        where=where,
        n=fields["n"],
        sampling=sampling_of(fields),
        names=names,
        logprobs=logprobs,
    )


def _call(fields: dict[str, Any], asked: list[Asked], echo: list[str] | None) -> OpenAICall:
    options = read_object(fields["stream_options"] or {}, STREAM_OPTIONS, "stream_options")
    return OpenAICall(
        asked=asked,
        rid=fields["rid"],
        stream=fields["stream"],
        include_usage=options["include_usage"],
        continuous_usage=options["continuous_usage_stats"],
        echo=echo,
        meta_info=fields["return_meta_info"],
        spec_details=fields["return_spec_tokens_details"],
        logprobs=asked[0].logprobs is not None,
    )


def _chat_prompt(fields: dict[str, Any]) -> ChatPrompt:
    if not fields["messages"]:
        problem = "is required" if fields["messages"] is None else "cannot be empty"
        raise InvalidRequestError(f"messages {problem}.", param="messages")
    messages = [_message(m, f"messages[{i}]") for i, m in enumerate(fields["messages"])]
    continues = fields["continue_final_message"]
    if continues and messages[-1]["role"] != "assistant":
        raise InvalidRequestError(
            'continue_final_message needs a last message of role "assistant", got '
            f"{preview(messages[-1]['role'])}.",
            param="continue_final_message",
        )
    kwargs = fields["chat_template_kwargs"] or {}
    for name in RESERVED_KWARGS:
        if name in kwargs:
            raise InvalidRequestError(
                f"chat_template_kwargs cannot set {preview(name)}.", param="chat_template_kwargs"
            )
    return ChatPrompt(
        messages=messages,
        template_kwargs=kwargs,
        continue_final=continues,
        generation_prompt=fields["add_generation_prompt"],
    )


def _message(value: Any, where: str) -> dict[str, Any]:
    fields = read_object(value, MESSAGE, where)
    role, content = fields["role"], fields["content"]
    if role not in ROLES:
        refuse(f"{where}.role", " or ".join(map(preview, ROLES)), role)
    if content is None:
        refuse(f"{where}.content", CONTENT.allowed, None)
    message = {"role": ROLES[role], "content": content}
    extra = {name: fields[name] for name in ("name", "reasoning_content")}
    return message | {name: value for name, value in extra.items() if value is not None}
