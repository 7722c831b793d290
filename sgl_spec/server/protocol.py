"""The native routes: what /generate and its small neighbours accept, and how they answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer

from sgl_spec.errors import InvalidRequestError
from sgl_spec.request import LogprobParams, TokenizedRequest, check_choices
from sgl_spec.server.fields import (
    BOOLEAN,
    ID_LISTS,
    INTEGER,
    LABELS,
    OBJECTS,
    STRING,
    STRINGS,
    Elsewhere,
    Ignore,
    Kind,
    Refuse,
    Renamed,
    Table,
    Use,
    list_of,
    path_of,
    read_object,
    refuse,
)
from sgl_spec.server.grammar import VLLM_GRAMMAR
from sgl_spec.server.logprobs import NativeLogprobs
from sgl_spec.server.output import Output
from sgl_spec.server.requests import Asked
from sgl_spec.server.sampling import NATIVE, SAMPLING_FIELDS, sampling_of
from sgl_spec.server.unsupported import UNSUPPORTED

FLAGS = Kind(
    "true, false or a list of these", lambda v: BOOLEAN.accepts(v) or list_of(BOOLEAN.accepts)(v)
)
INTEGERS = Kind(
    "an integer or a list of integers", lambda v: INTEGER.accepts(v) or list_of(INTEGER.accepts)(v)
)
ACTIVITIES = Kind('a list of "CPU" and "GPU"', list_of(STRING.accepts))
# What to report of log-probabilities; kept only with `return_logprob`.
LOGPROBS: dict[str, Use] = {
    "logprob_start_len": Use(INTEGERS, -1),
    "top_logprobs_num": Use(INTEGERS, 0),
    "token_ids_logprob": Use(ID_LISTS, ()),
    "return_text_in_logprobs": Use(BOOLEAN, False),
}
GENERATE: Table = {
    **dict.fromkeys(NATIVE, Elsewhere("sampling_params")),
    **UNSUPPORTED,
    **{name: Renamed(f"sampling_params.{here}") for name, here in VLLM_GRAMMAR.items()},
    "text": Use(STRINGS),
    "prompt": Renamed("text"),
    "input_ids": Use(ID_LISTS),
    "sampling_params": Use(OBJECTS),
    "rid": Use(STRINGS),
    "stream": Use(BOOLEAN, False),
    "return_prompt_token_ids": Use(BOOLEAN, False),
    "return_logprob": Use(FLAGS, False),
    **LOGPROBS,
    "log_metrics": Ignore(BOOLEAN),
    "no_logs": Ignore(BOOLEAN),
    "conversation_id": Ignore(STRING),
    "custom_labels": Ignore(LABELS),
}
PROFILE: Table = {
    "output_dir": Use(STRING),
    "num_steps": Use(INTEGER),
    "activities": Use(ACTIVITIES),
    "record_shapes": Use(BOOLEAN),
    "with_stack": Use(BOOLEAN),
    "start_step": Refuse(),
    "profile_by_stage": Refuse((False,)),
    "profile_stages": Refuse(),
    "merge_profiles": Refuse((False,)),
    "profile_prefix": Refuse(),
    "profile_id": Ignore(STRING),
}
ABORT: Table = {"rid": Use(STRING, ""), "abort_all": Use(BOOLEAN, False)}
TOKENIZE: Table = {
    "model": Use(STRING),
    "prompt": Use(STRINGS),
    "text": Renamed("prompt"),
    "add_special_tokens": Use(BOOLEAN, True),
}
DETOKENIZE: Table = {
    "model": Use(STRING),
    "tokens": Use(ID_LISTS),
    "skip_special_tokens": Use(BOOLEAN, True),
}


class GenerateCall(msgspec.Struct, frozen=True, kw_only=True):
    """A checked /generate body. batch: answer with a list, and with "index" in streams.
    logprob_texts: whether log-probabilities tell the text of their tokens."""

    asked: list[Asked]
    rid: str | list[str] | None
    stream: bool
    batch: bool
    prompt_ids: bool
    logprob_texts: bool


def read_generate(body: object) -> GenerateCall:
    """Check a /generate body; raises `InvalidRequestError` naming the field."""
    fields = read_object(body, GENERATE)
    where, prompts, batch = _prompts(fields)
    samplings = _samplings(fields["sampling_params"], len(prompts), batch)
    logprobs = _logprobs(fields, len(prompts), batch)
    asked = [
        Asked(
            prompt=prompt,
            where=f"{where}[{i}]" if batch else where,
            n=sampling.n,
            sampling=sampling.fields,
            names=sampling.names | _logprob_names(fields, i),
            logprobs=wanted,
        )
        for i, (prompt, sampling, wanted) in enumerate(
            zip(prompts, samplings, logprobs, strict=True)
        )
    ]
    several = batch or any(item.n > 1 for item in asked)
    rid = fields["rid"]
    if isinstance(rid, list) and not several:
        raise InvalidRequestError(
            "rid must be a string for a single prompt, got a list.", param="rid"
        )
    return GenerateCall(
        asked=asked,
        rid=rid,
        stream=fields["stream"],
        batch=several,
        prompt_ids=fields["return_prompt_token_ids"],
        logprob_texts=fields["return_text_in_logprobs"],
    )


def _prompts(fields: dict[str, Any]) -> tuple[str, list[Any], bool]:
    text, ids = fields["text"], fields["input_ids"]
    if text is None and ids is None:
        raise InvalidRequestError("Either text or input_ids should be provided.", param="text")
    if text is not None and ids is not None:
        raise InvalidRequestError(
            "text and input_ids cannot both be given; send one of them.", param="input_ids"
        )
    where, value = ("text", text) if ids is None else ("input_ids", ids)
    if not value:
        raise InvalidRequestError(f"{where} cannot be empty.", param=where)
    batch = isinstance(value, list) and not isinstance(value[0], int)
    return where, value if batch else [value], batch


class _Sampling(msgspec.Struct, frozen=True):
    """Read `sampling_params`: the fields of `SamplingParams`, and where the client has them."""

    fields: dict[str, Any]
    names: dict[str, str]
    n: int


def _samplings(value: Any, count: int, batch: bool) -> list[_Sampling]:
    if not isinstance(value, list):
        return [_sampling(value or {}, "sampling_params")] * count
    if not batch or len(value) != count:
        raise InvalidRequestError(
            "sampling_params must be one object, or a list with one per prompt of a batch; got "
            f"{len(value)} for {count} prompt{'s' * (count > 1)}.",
            param="sampling_params",
        )
    return [_sampling(item, f"sampling_params[{i}]") for i, item in enumerate(value)]


def _sampling(value: dict[str, Any], where: str) -> _Sampling:
    read = read_object(value, NATIVE, where)
    check_choices(read["n"], f"{where}.n")
    names = {name: path_of(where, name) for name in SAMPLING_FIELDS}
    return _Sampling(sampling_of(read, where), names, read["n"])


def _logprobs(fields: dict[str, Any], count: int, batch: bool) -> list[LogprobParams | None]:
    """What each prompt asks for; a list of lists in `token_ids_logprob`, or a list in one of the
    other fields, holds one value per prompt of a batch."""
    ids = fields["token_ids_logprob"]
    wanted = _each("return_logprob", fields["return_logprob"], count, batch)
    starts = _each("logprob_start_len", fields["logprob_start_len"], count, batch)
    tops = _each("top_logprobs_num", fields["top_logprobs_num"], count, batch)
    shared = not ids or isinstance(ids[0], int)
    ids = [ids] * count if shared else _each("token_ids_logprob", ids, count, batch)
    if not any(wanted):
        _refuse_logprobs(fields)
    return [
        LogprobParams(
            logprob_start_len=start, top_logprobs_num=top, token_ids_logprob=tuple(tokens)
        )
        if want
        else None
        for want, start, top, tokens in zip(wanted, starts, tops, ids, strict=True)
    ]


def _refuse_logprobs(fields: dict[str, Any]) -> None:
    """Raise for the first field that wants more of log-probabilities than none."""
    for name, rule in LOGPROBS.items():
        values = fields[name] if isinstance(fields[name], list) else [fields[name]]
        if any(value not in (rule.default, []) for value in values):
            refuse(name, "left out unless return_logprob is true", fields[name])


def _each(name: str, value: Any, count: int, batch: bool) -> list[Any]:
    """One value per prompt."""
    if not isinstance(value, list):
        return [value] * count
    if not batch or len(value) != count:
        raise InvalidRequestError(
            f"{name} must hold one value, or one per prompt of a batch; got {len(value)} for "
            f"{count} prompt{'s' * (count > 1)}.",
            param=name,
        )
    return value


def _logprob_names(fields: dict[str, Any], member: int) -> dict[str, str]:
    """What a prompt's log-probability settings are called where they are members of a list."""
    listed = {
        name: isinstance(fields[name], list) for name in ("logprob_start_len", "top_logprobs_num")
    }
    ids = fields["token_ids_logprob"]
    listed["token_ids_logprob"] = bool(ids) and isinstance(ids[0], list)
    return {name: f"{name}[{member}]" for name, several in listed.items() if several}


class GenerateReplies:
    """How /generate words its answers.

    incremental: streams carry new text and ids only, not all so far
    (--incremental-streaming-output). speculating: whether finished requests report spec_* keys.
    """

    def __init__(
        self, call: GenerateCall, tokenizer: Tokenizer, *, incremental: bool, speculating: bool
    ) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._incremental = incremental
        self._speculating = speculating
        self._logprobs: dict[str, NativeLogprobs] = {}

    def whole(self, outputs: Sequence[Output]) -> Any:
        """The body of a reply that is no stream."""
        replies = [self._reply(output, output.text, output.ids) for output in outputs]
        return replies if self._call.batch else replies[0]

    def events(self, output: Output, index: int, new: str, ids: list[int]) -> Iterable[Any]:
        """The events of one update."""
        if self._incremental:
            event = self._reply(output, new, ids, fresh=len(ids))
        else:
            event = self._reply(output, output.text, output.ids)
        if self._call.batch:
            event["index"] = index
        return (event,)

    def last(self, outputs: Sequence[Output]) -> Iterable[Any]:
        """The events after all outputs have ended."""
        return ()

    def _reply(
        self, output: Output, text: str, ids: list[int], *, fresh: int | None = None
    ) -> dict[str, Any]:
        """fresh: the output tokens that log-probabilities are shown for, the last so many; None for
        all."""
        meta = output.meta_info(speculating=self._speculating)
        if output.request.logprobs is not None:
            meta |= self._logprobs_of(output.request).meta(output, fresh)
        reply = {"text": text, "output_ids": ids, "meta_info": meta}
        if self._call.prompt_ids:
            reply["prompt_token_ids"] = output.request.input_ids
        return reply

    def _logprobs_of(self, request: TokenizedRequest) -> NativeLogprobs:
        if request.rid not in self._logprobs:
            texts = self._call.logprob_texts
            self._logprobs[request.rid] = NativeLogprobs(request, self._tokenizer, texts=texts)
        return self._logprobs[request.rid]
