"""Chat messages to prompt text, through the model's own Jinja template in a sandbox."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sgl_spec.errors import ConfigError, InvalidRequestError, preview
from sgl_spec.server.tools import with_tools_told

# Marks the end of the message to continue. The space shows whether the template trims content.
_CONTINUE = "<continue-from-here> "
# What an operation of a template on message fields of an unexpected type can raise.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's part for training; here the
    body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which a model has never seen.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


class ChatTemplate:
    """A compiled template and the special tokens that it may name.

    variants: sources by name; "tool_use" serves requests with tools when there is one, "default"
    the others. special_tokens: "bos_token" and so on, to their text. shows_tools: whether the
    template tells the model of tools; where it does not, they are told as Hermes and Qwen do.
    """

    def __init__(self, variants: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        if "default" not in variants:
            raise ConfigError(
                f"The model has chat templates {sorted(variants)} but none is named 'default'; "
                "choose one with --chat-template."
            )
        self.sources = dict(variants)
        self._special_tokens = dict(special_tokens)
        self._variants = {
            name: compile_template(f"The {name} chat template", source)
            for name, source in variants.items()
        }
        self.shows_tools = any(
            "tools" in jinja2.meta.find_undeclared_variables(_environment().parse(source))
            for source in variants.values()
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text; `InvalidRequestError` when messages and template do not fit.

        add_generation_prompt: None means unless the final message is continued.
        variables: more names for the template (`chat_template_kwargs`).
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        elif add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt cannot both be true.",
                param="continue_final_message",
            )
        chat = [_plain_message(message) for message in messages]
        if not self.shows_tools:
            chat, tools = with_tools_told(chat, tools or []), None
        if continue_final_message:
            chat[-1] = _to_continue(chat[-1])
        text = self._render(chat, add_generation_prompt, tools, variables or {})
        return _cut_at_mark(text) if continue_final_message else text

    def _render(
        self,
        chat: list[dict[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        for name in _RESERVED:
            if name in variables:
                raise InvalidRequestError(
                    f"chat_template_kwargs cannot set {preview(name)}, a field of the request.",
                    param="chat_template_kwargs",
                )
        name = "tool_use" if tools and "tool_use" in self._variants else "default"
        try:
            return self._variants[name].render(
                messages=chat,
                tools=list(tools) if tools is not None else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **(self._special_tokens | dict(variables)),
            )
        except _RENDER_ERRORS as error:
            raise InvalidRequestError(
                f"The model's chat template does not take these messages: {error}",
                param="messages",
            ) from error


def compile_template(origin: str, source: str) -> jinja2.Template:
    """A template; `ConfigError` says which one is no Jinja."""
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"{origin} is not valid Jinja (line {error.lineno}): {error.message}"
        ) from error


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message without null fields, its content one string: parts are joined by a space, as in
    SGLang."""
    plain = {key: value for key, value in message.items() if value is not None}
    if isinstance(content := plain.get("content"), list):
        plain["content"] = " ".join(part["text"] for part in content)
    return plain


def _to_continue(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        raise InvalidRequestError(
            "continue_final_message needs text in the content of the final message.",
            param="continue_final_message",
        )
    return message | {"content": content + _CONTINUE}


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_CONTINUE.strip())
    if at < 0:
        raise InvalidRequestError(
            "continue_final_message cannot be used: the chat template drops the final message.",
            param="continue_final_message",
        )
    return text[:at] if text.startswith(_CONTINUE, at) else text[:at].rstrip()
