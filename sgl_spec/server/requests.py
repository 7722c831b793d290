"""From what a client asked for to what the engine gets: tokens, checked lengths, seeds, names."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sgl_spec.errors import InvalidRequestError
from sgl_spec.request import (
    SEED_BITS,
    LogprobParams,
    SamplingParams,
    TokenizedRequest,
    derive_seed,
)
from sgl_spec.server.model_info import ModelInfo
from sgl_spec.server.schema import MAX_REQUESTS_PER_CALL
from sgl_spec.server.tokenizer import ServerTokenizer

# Longer texts are tokenised in a thread: they take milliseconds, which other streams would feel.
INLINE_CHARS = 8192


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt of a call.

    sampling: fields of `SamplingParams`; "max_new_tokens" None means all the context left.
    home, names: what stands in front of those fields' names in the body, and what this route calls
    fields that have another name there, for messages.
    where: the prompt's field. add_special_tokens: whether the tokenizer adds the special tokens
    of a raw prompt (a chat template has written its own). logprobs: what to report of them.
    draft_trees: whether to report the rounds.
    """

    prompt: str | list[int]
    add_special_tokens: bool = True
    where: str
    n: int
    sampling: dict[str, Any]
    home: str = ""
    names: Mapping[str, str] = {}
    logprobs: LogprobParams | None = None
    draft_trees: bool = False


class Made(msgspec.Struct, frozen=True):
    """The engine requests of one call, prompt by prompt and choice by choice.

    prompt_of: the index of each request's prompt. group: a name for all of them, see
    `name_requests`. cut: the prompts of which --allow-auto-truncate left only the beginning.
    """

    requests: list[TokenizedRequest]
    prompt_of: list[int]
    group: str | None
    cut: list[int] = []


async def encode(tokenizer: ServerTokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Text to ids; long texts leave the event loop to others meanwhile."""
    if len(text) > INLINE_CHARS:
        return await asyncio.to_thread(
            tokenizer.encode, text, add_special_tokens=add_special_tokens
        )
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def fresh_rid() -> str:
    """A request name that nobody has used."""
    return uuid.uuid4().hex


class RequestMaker:
    """Makes engine requests for one loaded model.

    truncate: --allow-auto-truncate. seed: where the seeds of requests that bring none come from.
    """

    def __init__(
        self, info: ModelInfo, tokenizer: ServerTokenizer, *, truncate: bool, seed: int
    ) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._truncate = truncate
        self._random = random.Random(seed)

    async def make(
        self, asked: Sequence[Asked], rid: str | list[str] | None, *, stream: bool
    ) -> Made:
        """Tokenise, check and name; raises `InvalidRequestError` naming the field that is wrong."""
        names, group = name_requests(rid, [item.n for item in asked])
        made = Made([], [], group)
        for index, item in enumerate(asked):
            whole = await self.tokens(item)
            ids, sampling = self._fit(whole, item)
            if len(ids) < len(whole):
                made.cut.append(index)
            self._check_logprobs(item, len(ids))
            assert sampling.seed is not None
            for choice in range(item.n):
                seeded = msgspec.structs.replace(sampling, seed=derive_seed(sampling.seed, choice))
                made.requests.append(
                    TokenizedRequest(
                        rid=names[len(made.requests)],
                        input_ids=ids,
                        sampling=seeded,
                        stream=stream,
                        arrival=time.time(),
                        logprobs=item.logprobs,
                        draft_trees=item.draft_trees,
                    )
                )
                made.prompt_of.append(index)
        return made

    async def tokens(self, item: Asked) -> list[int]:
        """The prompt's ids, at least one, all within the vocabulary."""
        if isinstance(item.prompt, str):
            ids = await encode(self._tokenizer, item.prompt, item.add_special_tokens)
        else:
            ids = item.prompt
            check_ids(ids, item.where, self._info.vocab_size)
        if not ids or not item.prompt:
            raise InvalidRequestError(f"{item.where} cannot be empty.", param=item.where)
        return ids

    def _fit(self, ids: list[int], item: Asked) -> tuple[list[int], SamplingParams]:
        info = self._info
        if len(ids) >= info.context_length and not self._truncate:
            longer = len(ids) > info.context_length
            problem = "is longer than" if longer else "leaves no room for output in"
            raise InvalidRequestError(
                f"The input ({len(ids)} tokens) {problem} the model's context length "
                f"({info.context_length} tokens).",
                param=item.where,
            )
        if len(ids) > info.max_req_input_len and not self._truncate:
            raise InvalidRequestError(
                f"Input length ({len(ids)} tokens) exceeds the maximum allowed length "
                f"({info.max_req_input_len} tokens).",
                param=item.where,
            )
        ids = ids[: min(info.context_length - 1, info.max_req_input_len)]
        wanted = dict(item.sampling)
        if wanted.get("max_new_tokens") is None:
            wanted["max_new_tokens"] = self._room(len(ids))
        sampling = self._check(wanted, item)
        budget = min(sampling.max_new_tokens, self._room(len(ids)))
        if budget < sampling.max_new_tokens and not self._truncate:
            raise self._too_many(len(ids), sampling.max_new_tokens, item)
        minimum = min(sampling.min_new_tokens, budget)
        return ids, msgspec.structs.replace(sampling, max_new_tokens=budget, min_new_tokens=minimum)

    def _too_many(self, prompt_len: int, new: int, item: Asked) -> InvalidRequestError:
        info = self._info
        limit = f"the model's maximum context length of {info.context_length} tokens"
        if prompt_len + new <= info.context_length:
            limit = f"the {info.max_request_tokens} tokens that the KV pool holds for one request"
        name = item.home + item.names.get("max_new_tokens", "max_new_tokens")
        return InvalidRequestError(
            f"Requested token count exceeds {limit}: {prompt_len} in {item.where} and {new} for "
            f"{name}.",
            param=name,
        )

    def _check_logprobs(self, item: Asked, prompt_len: int) -> None:
        if item.logprobs is None:
            return
        try:
            item.logprobs.check(self._info.vocab_size, prompt_len)
        except InvalidRequestError as error:
            raise renamed(error, item.names.get(str(error.param))) from None

    def _room(self, prompt_tokens: int) -> int:
        """The longest output after a prompt: the context, or the pool where that is smaller."""
        return self._info.max_request_tokens - prompt_tokens

    def _check(self, wanted: dict[str, Any], item: Asked) -> SamplingParams:
        sampling = SamplingParams(**wanted)
        try:
            sampling.check(self._info.vocab_size)
        except InvalidRequestError as error:
            name = str(error.param)
            if name != sampling.grammar_field:  # which is the whole path already
                name = item.home + item.names.get(name, name)
            raise renamed(error, name) from None
        seed = self._random.getrandbits(SEED_BITS) if sampling.seed is None else sampling.seed
        top_k = min(sampling.top_k, self._info.vocab_size)
        return msgspec.structs.replace(sampling, seed=seed, top_k=top_k)


def renamed(error: InvalidRequestError, name: str | None) -> InvalidRequestError:
    """The same error under the name that the client knows the field by, None for the same."""
    if name is None or not error.message.startswith(f"{error.param} "):
        return error
    return InvalidRequestError(name + error.message[len(error.param or "") :], param=name)


def check_ids(ids: Sequence[int], where: str, vocab_size: int) -> None:
    """Raise for the first id outside the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        index = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise InvalidRequestError(
            f"{where}[{index}] must be a token id from 0 to {vocab_size - 1}, got {ids[index]}.",
            param=where,
        )


def name_requests(
    rid: str | list[str] | None, choices: Sequence[int]
) -> tuple[list[str], str | None]:
    """Request names and the name of the group, from the client's `rid`.

    A call of one request is called `rid`; the requests of a larger call are `rid`-0, `rid`-1, ...
    and `rid` names them all. A list names the requests of a batch one by one.
    """
    total = sum(choices)
    if total > MAX_REQUESTS_PER_CALL:
        raise InvalidRequestError(
            f"One call may hold at most {MAX_REQUESTS_PER_CALL} requests (prompts times n), "
            f"got {total}."
        )
    if isinstance(rid, list):
        if len(rid) != total:
            raise InvalidRequestError(
                f"rid must be one name per request, got {len(rid)} for {total} requests.",
                param="rid",
            )
        return rid, None
    base = rid or fresh_rid()
    if total == 1:
        return [base], None
    return [f"{base}-{i}" for i in range(total)], base
