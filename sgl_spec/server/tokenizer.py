"""Text to ids and chats to text in the API process, without torch or transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sgl_spec.errors import ConfigError, InvalidRequestError
from sgl_spec.server.answers import HERMES, Form, form_of
from sgl_spec.server.chat_template import ChatTemplate, compile_template
from sgl_spec.text import load_tokenizer

_SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class ServerTokenizer:
    """A model's tokenizer with its chat template, if it has one.

    tokenizer: for `sgl_spec.text`. special_tokens: "bos_token" and so on, to their text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        special_tokens: Mapping[str, str],
    ) -> None:
        self.tokenizer = tokenizer
        self.special_tokens = dict(special_tokens)
        self._template = template

    @classmethod
    def from_dir(cls, path: str | Path, chat_template: str | None = None) -> ServerTokenizer:
        """Read a Hugging Face directory; `chat_template` (a file, or the template itself) replaces
        the model's. Raises `ConfigError` for what is missing, broken or not supported."""
        directory = Path(path)
        config = _read_json(directory / "tokenizer_config.json")
        special = _special_tokens(_read_json(directory / "special_tokens_map.json") | config)
        if chat_template is not None:
            variants = {"default": _given_template(chat_template)}
        else:
            variants = _own_templates(directory, config)
        template = ChatTemplate(variants, special) if variants else None
        return cls(load_tokenizer(directory), template, special)

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be served."""
        return self._template is not None

    @property
    def form(self) -> Form | None:
        """How the model writes calls of tools, as far as its chat template tells."""
        if self._template is None:
            return None
        known = form_of("".join(self._template.sources.values()))
        return known if self._template.shows_tools else HERMES

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a raw prompt, with the special tokens that the tokenizer adds to one."""
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Whole text of `ids`."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a chat; see `ChatTemplate.render`."""
        if self._template is None:
            raise InvalidRequestError(
                "This model has no chat template; the server needs --chat-template to serve chats.",
                param="messages",
            )
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables=variables,
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Ids of `render_chat`. The template has written the special tokens, so none are added."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold an object, got {type(content).__name__}.")
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in (f"{short}_token" for short in _SPECIAL_NAMES):
        token = config.get(name)
        text = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(text, str):
            found[name] = text
    return found


def require_template(value: str) -> None:
    """`ConfigError` unless this value of --chat-template is one, or a file that holds one."""
    compile_template("--chat-template", _given_template(value))


def _given_template(value: str) -> str:
    if "{" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template must be a readable file or a Jinja template, got {value!r}: {error}"
        ) from error


def _own_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template sources by name; files win over tokenizer_config.json."""
    files = {}
    if (directory / "chat_template.jinja").is_file():
        files["default"] = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        files[file.stem] = file.read_text(encoding="utf-8")
    if files:
        return files
    match config.get("chat_template"):
        case None:
            return {}
        case str(source):
            return {"default": source}
        case list(entries):
            return {entry["name"]: entry["template"] for entry in entries}
        case other:
            raise ConfigError(f"chat_template must be a string or a list, got {other!r}.")
