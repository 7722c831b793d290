"""Offline generation over the same engine, without HTTP.

from sgl_spec import LLM
llm = LLM("smollm2", speculative_algorithm="NGRAM")
print(llm.generate("The capital of France is", {"temperature": 0})[0].text)
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sgl_spec.args import ServerArgs
from sgl_spec.engine.engine import Engine
from sgl_spec.errors import InvalidRequestError, SglSpecError
from sgl_spec.messages import OutputChunk
from sgl_spec.request import (
    SEED_BITS,
    FinishReason,
    LogprobParams,
    Logprobs,
    SamplingParams,
    SpecStats,
    TokenizedRequest,
)
from sgl_spec.text import PROMPT_TAIL, OutputText

Prompt = str | Sequence[int]
Params = SamplingParams | Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. seed: the one used, so that the text can be drawn again. logprobs: those
    of output_ids; prompt_logprobs: those of the prompt behind `logprob_start_len`; None unless
    asked for."""

    text: str
    output_ids: list[int]
    finish: FinishReason
    prompt_tokens: int
    cached_tokens: int
    seed: int
    spec: SpecStats | None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


class LLM:
    """A model in this process. `flags` are the server's options by field name.

    Calls from several threads wait for each other; give one call several prompts to batch them.
    """

    def __init__(self, model_path: str = "smollm2", **flags: Any) -> None:
        self.engine = Engine(ServerArgs(model_path=model_path, **flags))
        self._seeds = random.Random(self.engine.args.random_seed)
        self._serial = 0
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw text, special tokens added as the tokenizer says."""
        return list(self.engine.tokenizer.encode(text).ids)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Params | Sequence[Params] = None,
        logprobs: LogprobParams | Sequence[LogprobParams | None] | None = None,
    ) -> list[Completion]:
        """Complete one prompt or several (texts or id lists) together; results in their order.

        sampling: one for all or one each; a mapping names fields of `SamplingParams`. logprobs:
        what to report of log-probabilities, one for all or one each; None is nothing. Raises
        `InvalidRequestError` before anything runs if a prompt or a field cannot be served.
        """
        batch = _as_batch(prompts)
        params = _per_prompt("sampling", sampling, SamplingParams | Mapping, len(batch))
        asks = _per_prompt("logprobs", logprobs, LogprobParams, len(batch))
        with self._lock:
            requests = [self._request(*one) for one in zip(batch, params, asks, strict=True)]
            chunks = self._run(requests)
        return [self._completion(request, chunks[request.rid]) for request in requests]

    def _request(
        self, prompt: Prompt, params: Params, logprobs: LogprobParams | None
    ) -> TokenizedRequest:
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        sampling = _as_params(params)
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self._seeds.getrandbits(SEED_BITS))
        self._check(ids, sampling)
        if logprobs is not None:
            logprobs.check(self.engine.model.config.vocab_size, len(ids))
        self._serial += 1
        return TokenizedRequest(
            rid=f"offline-{self._serial}", input_ids=ids, sampling=sampling, logprobs=logprobs
        )

    def _check(self, ids: list[int], sampling: SamplingParams) -> None:
        vocab = self.engine.model.config.vocab_size
        sampling.check(vocab)
        if not ids:
            raise InvalidRequestError("The prompt is empty.", param="prompts")
        for token in ids:
            if not 0 <= token < vocab:
                raise InvalidRequestError(
                    f"prompt ids must be from 0 to {vocab - 1}, got {token}.", param="prompts"
                )
        total, limit = len(ids) + sampling.max_new_tokens, self.engine.context_length
        if total > limit:
            raise _too_long(ids, sampling, f"the context of {limit}")
        pool = self.engine.scheduler.limits.max_request_tokens
        if total > pool:
            raise _too_long(ids, sampling, f"the {pool} that max_total_tokens leaves to a request")

    def _run(self, requests: Sequence[TokenizedRequest]) -> dict[str, OutputChunk]:
        for request in requests:
            self.engine.submit(request)
        done: dict[str, OutputChunk] = {}
        while self.engine.has_work:
            done.update((chunk.rid, chunk) for chunk in self.engine.step() if chunk.finish)
        return done

    def _completion(self, request: TokenizedRequest, chunk: OutputChunk) -> Completion:
        finish = chunk.finish
        assert finish is not None
        assert request.sampling.seed is not None
        if finish.kind == "abort":
            kind = InvalidRequestError if finish.status == 400 else SglSpecError
            raise kind(finish.message or "The request was aborted.")
        return Completion(
            text=self._text(request, chunk, finish),
            output_ids=chunk.ids,
            finish=finish,
            prompt_tokens=chunk.prompt_tokens,
            cached_tokens=chunk.cached_tokens,
            seed=request.sampling.seed,
            spec=chunk.spec,
            logprobs=chunk.logprobs,
            prompt_logprobs=chunk.prompt_logprobs,
        )

    def _text(self, request: TokenizedRequest, chunk: OutputChunk, finish: FinishReason) -> str:
        sampling = request.sampling
        text = OutputText(
            self.engine.tokenizer,
            sampling.stop,
            skip_special_tokens=sampling.skip_special_tokens,
            no_stop_trim=sampling.no_stop_trim,
            prompt_tail=request.input_ids[-PROMPT_TAIL:],
        )
        return text.finish(chunk.ids, finish.matched)


def _too_long(ids: list[int], sampling: SamplingParams, bound: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{len(ids)} prompt + {sampling.max_new_tokens} new tokens exceed {bound}.",
        param="max_new_tokens",
    )


def _per_prompt(name: str, value: Any, single: Any, count: int) -> list[Any]:
    """One value per prompt. single: the types that are one value for all, as None is."""
    values = [value] * count if value is None or isinstance(value, single) else list(value)
    if len(values) != count:
        raise InvalidRequestError(
            f"{name} has {len(values)} entries for {count} prompts.", param=name
        )
    return values


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_params(params: Params) -> SamplingParams:
    if isinstance(params, SamplingParams):
        return params
    allowed = SamplingParams.__struct_fields__
    for name in params or {}:
        if name not in allowed:
            raise InvalidRequestError(
                f"sampling: {name!r} is not one of {', '.join(allowed)}.", param="sampling"
            )
    try:
        return msgspec.convert(dict(params or {}), SamplingParams, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"sampling: {error}", param="sampling") from error
