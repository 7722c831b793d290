"""/generate: what a checked body asks for, and how it is answered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer

from sgl_spec.errors import InvalidRequestError, preview
from sgl_spec.request import LogprobParams, TokenizedRequest
from sgl_spec.server.logprobs import NativeLogprobs
from sgl_spec.server.output import Output
from sgl_spec.server.requests import Asked
from sgl_spec.server.sampling import native_sampling
from sgl_spec.server.schema import Generate

# What to report of log-probabilities; kept only with `return_logprob`.
_LOGPROBS = (
    *("logprob_start_len", "top_logprobs_num", "token_ids_logprob"),
    "return_text_in_logprobs",
)


class GenerateCall(msgspec.Struct, frozen=True, kw_only=True):
    """What a /generate body asks for. batch: answer with a list, and with "index" in streams.
    logprob_texts: whether log-probabilities tell the text of their tokens."""

    asked: list[Asked]
    rid: str | list[str] | None
    stream: bool
    batch: bool
    prompt_ids: bool
    logprob_texts: bool


def read_generate(body: object) -> GenerateCall:
    """Check a /generate body; raises `InvalidRequestError` naming the field."""
    fields = Generate.read(body)
    where, prompts, batch = _prompts(fields)
    count = len(prompts)
    shared = not isinstance(fields.sampling_params, list)
    samplings = _each("sampling_params", fields.sampling_params, count, batch)
    logprobs = _logprobs(fields, count, batch)
    asked = []
    for i, (prompt, sampling, wanted) in enumerate(zip(prompts, samplings, logprobs, strict=True)):
        home = "sampling_params" if shared else f"sampling_params[{i}]"
        asked.append(
            Asked(
                prompt=prompt,
                where=f"{where}[{i}]" if batch else where,
                n=sampling.n,
                sampling=native_sampling(sampling, home),
                home=f"{home}.",
                names=_logprob_names(fields, i),
                logprobs=wanted,
                draft_trees=fields.return_draft_trees,
            )
        )
    several = batch or any(item.n > 1 for item in asked)
    if isinstance(fields.rid, list) and not several:
        raise InvalidRequestError(
            "rid must be a string for a single prompt, got a list.", param="rid"
        )
    return GenerateCall(
        asked=asked,
        rid=fields.rid,
        stream=fields.stream,
        batch=several,
        prompt_ids=fields.return_prompt_token_ids,
        logprob_texts=fields.return_text_in_logprobs,
    )


def _prompts(fields: Generate) -> tuple[str, list[Any], bool]:
    if fields.text is None and fields.input_ids is None:
        raise InvalidRequestError("Either text or input_ids should be provided.", param="text")
    if fields.text is not None and fields.input_ids is not None:
        raise InvalidRequestError(
            "text and input_ids cannot both be given; send one of them.", param="input_ids"
        )
    where = "text" if fields.input_ids is None else "input_ids"
    value: Any = fields.text if fields.input_ids is None else fields.input_ids
    if not value:
        raise InvalidRequestError(f"{where} cannot be empty.", param=where)
    batch = isinstance(value, list) and not isinstance(value[0], int)
    return where, value if batch else [value], batch


def _logprobs(fields: Generate, count: int, batch: bool) -> list[LogprobParams | None]:
    """What each prompt asks for; a list of lists in `token_ids_logprob`, or a list in one of the
    other fields, holds one value per prompt of a batch."""
    wanted = _each("return_logprob", fields.return_logprob, count, batch)
    starts = _each("logprob_start_len", fields.logprob_start_len, count, batch)
    tops = _each("top_logprobs_num", fields.top_logprobs_num, count, batch)
    given: Any = fields.token_ids_logprob
    shared = not given or isinstance(given[0], int)
    ids = [given] * count if shared else _each("token_ids_logprob", given, count, batch)
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


def _refuse_logprobs(fields: Generate) -> None:
    """Raise for the first field that wants more of log-probabilities than none."""
    for name in _LOGPROBS:
        value = getattr(fields, name)
        default = Generate.model_fields[name].default
        values = value if isinstance(value, list) else [value]
        if any(one not in (default, []) for one in values):
            raise InvalidRequestError(
                f"{name} must be left out unless return_logprob is true, got {preview(value)}.",
                param=name,
            )


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


def _logprob_names(fields: Generate, member: int) -> dict[str, str]:
    """What a prompt's log-probability settings are called where they are members of a list."""
    listed = {
        name: isinstance(getattr(fields, name), list)
        for name in ("logprob_start_len", "top_logprobs_num")
    }
    ids: Any = fields.token_ids_logprob
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
        all. Of the rounds a stream shows those that are new: all of them each time would be too
        much."""
        meta = output.meta_info(speculating=self._speculating)
        if output.request.logprobs is not None:
            meta |= self._logprobs_of(output.request).meta(output, fresh)
        if output.trees is not None:
            meta["draft_trees"] = output.new_trees if self._call.stream else output.draft_trees
        reply = {"text": text, "output_ids": ids, "meta_info": meta}
        if self._call.prompt_ids:
            reply["prompt_token_ids"] = output.request.input_ids
        return reply

    def _logprobs_of(self, request: TokenizedRequest) -> NativeLogprobs:
        if request.rid not in self._logprobs:
            texts = self._call.logprob_texts
            self._logprobs[request.rid] = NativeLogprobs(request, self._tokenizer, texts=texts)
        return self._logprobs[request.rid]
