"""How log-probabilities are worded: the lists of /generate, and OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from sgl_spec.request import LogprobParams, Logprobs, TokenizedRequest
from sgl_spec.server.output import Output
from sgl_spec.text import PROMPT_TAIL, IncrementalDecoder, token_bytes

Entries = list[list[Any]]


class NativeLogprobs:
    """The log-probability keys of one request's `meta_info`, as SGLang has them.

    An entry is [log-probability, id, text or null]. Entries are made once, as output comes, since
    every event of a cumulative stream shows all of them. texts: --return_text_in_logprobs.
    """

    def __init__(self, request: TokenizedRequest, tokenizer: Tokenizer, *, texts: bool) -> None:
        assert request.logprobs is not None
        self._params: LogprobParams = request.logprobs
        self._prompt = request.input_ids
        self._tokenizer = tokenizer
        self._texts = texts
        self._lists: dict[str, list[Any]] = {"input_token_logprobs": []}
        self._done = 0

    def meta(self, output: Output, fresh: int | None = None) -> dict[str, Any]:
        """The keys now. fresh: show the last so many output tokens only."""
        if not self._lists["input_token_logprobs"]:
            self._add_prompt(output.prompt_logprobs)
        self._add("output", output.ids[self._done :], output.logprobs.part(self._done))
        self._done = len(output.ids)
        shown = dict(self._lists)
        if fresh is not None:
            for name in shown:
                if name.startswith("output"):
                    shown[name] = shown[name][len(shown[name]) - fresh :]
        return shown | {"output_token_logprobs_length": self._done}

    def _add_prompt(self, logprobs: Logprobs) -> None:
        """The first position has no value: nothing before it is looked at."""
        start = self._params.logprob_start_len
        self._add("input", [], Logprobs())
        if start == -1:
            return
        for name, first in self._lists.items():
            if name.startswith("input"):
                own = [None, self._prompt[start], self._text(self._prompt[start])]
                first.append(own if name == "input_token_logprobs" else None)
        self._add("input", self._prompt[start + 1 : start + 1 + len(logprobs)], logprobs)

    def _add(self, side: str, ids: Sequence[int], logprobs: Logprobs) -> None:
        found = {"token_logprobs": self._entries(logprobs.values, ids)}
        if self._params.top_logprobs_num:
            tops = zip(logprobs.top_values, logprobs.top_ids, strict=True)
            found["top_logprobs"] = [self._entries(values, best) for values, best in tops]
        if wanted := self._params.token_ids_logprob:
            lists = [self._entries(values, wanted) for values in logprobs.id_values]
            found["token_ids_logprobs"] = lists
        for name, entries in found.items():
            self._lists.setdefault(f"{side}_{name}", []).extend(entries)

    def _entries(self, values: Sequence[float], ids: Sequence[int]) -> Entries:
        return [[value, i, self._text(i)] for value, i in zip(values, ids, strict=True)]

    def _text(self, token_id: int) -> str | None:
        if not self._texts:
            return None
        return token_bytes(self._tokenizer, token_id).decode(errors="replace")


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as OpenAI writes one: its text, or its bytes when they are no text by themselves."""
    data = token_bytes(tokenizer, token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobs:
    """`logprobs` of one choice of /v1/completions, part by part in the order of its text.

    echo: the prompt's text in front of the output's, empty without it.
    """

    def __init__(self, request: TokenizedRequest, tokenizer: Tokenizer, echo: str) -> None:
        self._prompt = request.input_ids
        self._tokenizer = tokenizer
        self._echo = echo
        self._offset = len(echo)
        self._decoder = IncrementalDecoder(
            tokenizer,
            skip_special_tokens=request.sampling.skip_special_tokens,
            prompt_tail=self._prompt[-PROMPT_TAIL:],
        )

    def prompt(self, logprobs: Logprobs) -> dict[str, list[Any]]:
        """Of the echoed prompt; its first token has no value."""
        found = self._part(self._prompt[1 : 1 + len(logprobs)], logprobs)
        first = {
            "tokens": token_name(self._tokenizer, self._prompt[0]),
            "token_logprobs": None,
            "top_logprobs": None,
        }
        whole = {name: [value, *found[name]] for name, value in first.items()}
        return whole | {"text_offset": self._echo_offsets()[: 1 + len(logprobs)]}

    def new(self, ids: Sequence[int], logprobs: Logprobs) -> dict[str, list[Any]]:
        """Of the output's next tokens."""
        offsets = []
        for i in ids:
            offsets.append(self._offset)
            self._offset += len(self._decoder.push((i,)))
        return self._part(ids, logprobs) | {"text_offset": offsets}

    def _echo_offsets(self) -> list[int]:
        """A token that the echo does not show, such as one that begins every prompt, takes no
        room."""
        decoder = IncrementalDecoder(self._tokenizer, skip_special_tokens=False)
        offsets, at = [], 0
        for i in self._prompt:
            offsets.append(at)
            text = decoder.push((i,))
            at += len(text) if self._echo.startswith(text, at) else 0
        return offsets

    def _part(self, ids: Sequence[int], logprobs: Logprobs) -> dict[str, list[Any]]:
        tops = logprobs.top_ids or [[]] * len(ids)
        top_values = logprobs.top_values or [[]] * len(ids)
        return {
            "tokens": [token_name(self._tokenizer, i) for i in ids],
            "token_logprobs": list(logprobs.values),
            "top_logprobs": [
                self._named([*best, i], [*values, value])
                for i, value, best, values in zip(
                    ids, logprobs.values, tops, top_values, strict=True
                )
            ],
        }

    def _named(self, ids: Sequence[int], values: Sequence[float]) -> dict[str, float]:
        """Tokens that look the same share a name, which then tells the likeliest."""
        named: dict[str, float] = {}
        for i, value in zip(ids, values, strict=True):
            name = token_name(self._tokenizer, i)
            named[name] = max(value, named.get(name, value))
        return named


def chat_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Logprobs
) -> dict[str, list[dict[str, Any]] | None]:
    """`logprobs` of a choice of /v1/chat/completions: one entry per token."""

    def entry(token_id: int, value: float) -> dict[str, Any]:
        return {
            "token": token_name(tokenizer, token_id),
            "logprob": value,
            "bytes": list(token_bytes(tokenizer, token_id)),
        }

    tops: Sequence[Any] = list(zip(logprobs.top_ids, logprobs.top_values, strict=True))
    content = [
        entry(i, value) | {"top_logprobs": [entry(*one) for one in zip(*top, strict=True)]}
        for i, value, top in zip(ids, logprobs.values, tops or [((), ())] * len(ids), strict=True)
    ]
    return {"content": content, "refusal": None}
