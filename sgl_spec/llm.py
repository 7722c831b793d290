"""Offline generation over the same engine, without HTTP.

from sgl_spec import LLM
llm = LLM("smollm2", speculative_algorithm="NGRAM")
print(llm.generate("The capital of France is", {"temperature": 0})[0].text)
"""

from __future__ import annotations

import asyncio
import itertools
import operator
import queue
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, overload

import msgspec
from tqdm import tqdm

from sgl_spec.args import ServerArgs
from sgl_spec.engine.engine import Engine
from sgl_spec.errors import EngineDeadError, InvalidRequestError, SglSpecError, preview
from sgl_spec.interrupts import Interrupts
from sgl_spec.messages import Failed, OutputChunk
from sgl_spec.options import near
from sgl_spec.request import (
    SEED_BITS,
    DraftRound,
    FinishReason,
    LogprobParams,
    Logprobs,
    SamplingParams,
    SpecStats,
    TokenizedRequest,
    check_choices,
    derive_seed,
)
from sgl_spec.speculative.base import registered_drafters
from sgl_spec.streams import News, Streams, followed, joined
from sgl_spec.text import PROMPT_TAIL, OutputText

Prompt = str | Sequence[int]
Params = SamplingParams | Mapping[str, Any] | None
Asks = LogprobParams | Sequence[LogprobParams | None] | None
# What a mapping may hold. `grammar_field` words the server's messages and is for nobody to give.
_FIELDS = [*SamplingParams.__struct_fields__, "n", "sampling_seed"]
_FIELDS.remove("grammar_field")


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. seed: the one used, so that the text can be drawn again. logprobs: those
    of output_ids; prompt_logprobs: those of the prompt behind `logprob_start_len`; draft_trees: its
    rounds. None unless asked for."""

    text: str
    output_ids: list[int]
    finish: FinishReason
    prompt_tokens: int
    cached_tokens: int
    seed: int
    spec: SpecStats | None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    draft_trees: list[DraftRound] | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """News of a stream. index: whose, as `generate` would order the completions. text, output_ids:
    what is new. completion: all of it, once that request has ended."""

    index: int
    text: str
    output_ids: list[int]
    completion: Completion | None = None


class LLM:
    """A model in this process. `flags` are the server's options by field name; SGLang's other flags
    are accepted or refused as on the command line.

    Calls from several threads wait for each other; give one call several prompts to batch them.
    The memory is given back by `shutdown`, or at the end of a `with` block, or when the engine
    fails.
    """

    def __init__(self, model_path: str = "smollm2", **flags: Any) -> None:
        args = ServerArgs.from_keywords(model_path=model_path, **flags)
        self._failure = ""  # what broke the engine off
        resolved = args.resolve(registered_drafters())
        self._engine: Engine | None = Engine.start(resolved, self._on_death)
        self._seeds = random.Random(self.engine.args.random_seed)
        self._serial = itertools.count(1)
        self._lock = threading.RLock()  # a signal's handler may come in the middle of a call
        self._calling = False
        self._streams = Streams(
            self._lock,
            lambda request: self.engine.submit(request),
            lambda rid: self.engine.abort(rid),
            lambda: self._step(),
            lambda: self._engine is not None and self._engine.has_work,
        )

    def _on_death(self, failed: Failed) -> None:
        """The step under way fails as well; what it says is not the reason."""
        self._failure = failed.message

    @property
    def engine(self) -> Engine:
        """What runs the model; a `RuntimeError` after `shutdown`, an `EngineDeadError` after a
        step of it failed."""
        if self._failure:
            raise EngineDeadError(
                f"The engine failed in an earlier call ({self._failure}), in the middle of a step, "
                "and cannot be trusted any more; make another LLM."
            )
        if self._engine is None:
            raise RuntimeError("This LLM was shut down; make another one.")
        return self._engine

    def shutdown(self) -> None:
        """Let go of the model and its memory, when a call in another thread has ended. Doing it
        twice does nothing. A call in whose middle a signal's handler does it is a `RuntimeError`
        after the step under way."""
        with self._lock:
            self._let_go()

    def _let_go(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw text, special tokens added as the tokenizer says."""
        return list(self.engine.tokenizer.encode(text).ids)

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Params | Sequence[Params] = None,
        logprobs: Asks = None,
        *,
        sampling_params: Params | Sequence[Params] = None,
        draft_trees: bool = False,
        stream: Literal[False] = False,
        use_tqdm: bool = False,
    ) -> list[Completion]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Params | Sequence[Params] = None,
        logprobs: Asks = None,
        *,
        sampling_params: Params | Sequence[Params] = None,
        draft_trees: bool = False,
        stream: Literal[True],
    ) -> Iterator[Piece]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Params | Sequence[Params] = None,
        logprobs: Asks = None,
        *,
        sampling_params: Params | Sequence[Params] = None,
        draft_trees: bool = False,
        stream: bool = False,
        use_tqdm: bool = False,
    ) -> list[Completion] | Iterator[Piece]:
        """Complete one prompt or several (texts or id lists) together; results in their order.

        sampling: one for all or one each; a mapping names fields of `SamplingParams`, and may hold
        `n` for that many completions of its prompt, which follow each other in the result (their
        seeds are derived as over HTTP). `sampling_params` is another word for it. logprobs: what to
        report of log-probabilities, one for all or one each; None is nothing. draft_trees: whether
        to report rounds, at most `request.MAX_DRAFT_ROUNDS` of each request. stream: give a `Piece`
        whenever there is news; the requests run on while those are read, and are dropped when the
        iterator is closed. use_tqdm: show a bar of the requests that have ended. Raises
        `InvalidRequestError` before anything runs if a prompt or a field cannot be served.

        Ctrl-C ends the call after the step under way and drops its requests; the next call finds
        everything in order. An exception within a step ends the engine: every later call is an
        `EngineDeadError` that tells it.
        """
        given = _one_sampling(sampling, sampling_params)
        if stream:
            return self._pieces(self._prepare(prompts, given, logprobs, draft_trees, stream=True))
        with self._call():
            requests = self._prepare(prompts, given, logprobs, draft_trees)
            with tqdm(total=len(requests), disable=not use_tqdm, unit="request") as bar:
                chunks = self._run(requests, bar.update)
            return [self._completion(request, chunks[request.rid]) for request in requests]

    @overload
    async def async_generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Params | Sequence[Params] = None,
        logprobs: Asks = None,
        *,
        sampling_params: Params | Sequence[Params] = None,
        draft_trees: bool = False,
        stream: Literal[False] = False,
    ) -> list[Completion]: ...

    @overload
    async def async_generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Params | Sequence[Params] = None,
        logprobs: Asks = None,
        *,
        sampling_params: Params | Sequence[Params] = None,
        draft_trees: bool = False,
        stream: Literal[True],
    ) -> AsyncIterator[Piece]: ...

    async def async_generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Params | Sequence[Params] = None,
        logprobs: Asks = None,
        *,
        sampling_params: Params | Sequence[Params] = None,
        draft_trees: bool = False,
        stream: bool = False,
    ) -> list[Completion] | AsyncIterator[Piece]:
        """`generate` for asyncio: calls that wait at the same time run in one batch. A call that is
        cancelled drops its requests."""
        given = _one_sampling(sampling, sampling_params)
        requests = self._prepare(prompts, given, logprobs, draft_trees, stream=stream)
        pieces = self._async_pieces(requests)
        if stream:
            return pieces
        done = {piece.index: piece.completion async for piece in pieces}
        return [one for i in range(len(requests)) if (one := done[i]) is not None]

    def _prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Params | Sequence[Params],
        logprobs: Asks,
        draft_trees: bool,
        *,
        stream: bool = False,
    ) -> list[TokenizedRequest]:
        batch = _as_batch(prompts)
        params = _per_prompt("sampling", sampling, SamplingParams | Mapping, len(batch))
        asks = _per_prompt("logprobs", logprobs, LogprobParams, len(batch))
        several = len(batch) != 1
        places = [f"prompts[{i}]" if several else "prompts" for i in range(len(batch))]
        made = [self._requests(*one) for one in zip(places, batch, params, asks, strict=True)]
        return [
            msgspec.structs.replace(request, draft_trees=draft_trees, stream=stream)
            for of_prompt in made
            for request in of_prompt
        ]

    def _pieces(self, requests: list[TokenizedRequest]) -> Iterator[Piece]:
        news: queue.SimpleQueue[News] = queue.SimpleQueue()
        follow = _Follow(self, requests)
        self._streams.open(requests, news.put)
        try:
            yield from map(follow.piece, followed(news, len(requests)))
        finally:
            self._streams.close(requests)

    async def _async_pieces(self, requests: list[TokenizedRequest]) -> AsyncIterator[Piece]:
        loop, news = asyncio.get_running_loop(), asyncio.Queue[News]()
        follow, running = _Follow(self, requests), len(requests)
        self._streams.open(requests, lambda one: _hand_over(loop, lambda: news.put_nowait(one)))
        try:
            while running:
                one = await news.get()
                if isinstance(one, BaseException):
                    raise one
                running -= one.finish is not None
                yield follow.piece(one)
        finally:
            self._streams.close(requests)

    @contextmanager
    def _call(self) -> Iterator[None]:
        """One at a time."""
        with self._lock:
            if self._calling:
                raise RuntimeError(
                    "A signal's handler cannot call generate in the middle of another call of it."
                )
            self._calling = True
            try:
                yield
            finally:
                self._calling = False

    def _requests(
        self, where: str, prompt: Prompt, params: Params, logprobs: LogprobParams | None
    ) -> list[TokenizedRequest]:
        ids = self._ids(where, prompt)
        sampling, choices = _as_params(params)
        self._check(where, ids, sampling)
        if logprobs is not None:
            logprobs.check(self.engine.model.config.vocab_size, len(ids))
        seed = self._seeds.getrandbits(SEED_BITS) if sampling.seed is None else sampling.seed
        made = []
        for choice in range(choices):
            seeded = msgspec.structs.replace(sampling, seed=derive_seed(seed, choice))
            rid = f"offline-{next(self._serial)}"
            made.append(
                TokenizedRequest(rid=rid, input_ids=ids, sampling=seeded, logprobs=logprobs)
            )
        return made

    def _ids(self, where: str, prompt: Prompt) -> list[int]:
        """A prompt as token ids: of a text, or any sequence of integers."""
        try:
            if isinstance(prompt, str):
                prompt.encode()
                return self.encode(prompt)
            return [operator.index(token) for token in prompt]
        except UnicodeEncodeError as error:
            problem = f"must be text, got {preview(prompt)} ({error.reason} at {error.start})."
        except TypeError:
            problem = f"must be a text or a sequence of token ids, got {preview(prompt)}."
        raise InvalidRequestError(f"{where} {problem}", param="prompts")

    def _check(self, where: str, ids: list[int], sampling: SamplingParams) -> None:
        vocab = self.engine.model.config.vocab_size
        sampling.check(vocab)
        if not ids:
            raise InvalidRequestError(f"{where} cannot be empty.", param="prompts")
        for token in ids:
            if not 0 <= token < vocab:
                raise InvalidRequestError(
                    f"{where} must hold ids from 0 to {vocab - 1}, got {token}.", param="prompts"
                )
        total, limit = len(ids) + sampling.max_new_tokens, self.engine.context_length
        if total > limit:
            raise _too_long(ids, sampling, f"the context of {limit}")
        pool = self.engine.scheduler.limits.max_request_tokens
        if total > pool:
            raise _too_long(ids, sampling, f"the {pool} that max_total_tokens leaves to a request")

    def _run(
        self, requests: Sequence[TokenizedRequest], ended: Callable[[int], object]
    ) -> dict[str, OutputChunk]:
        done: dict[str, OutputChunk] = {}
        with Interrupts() as interrupts:
            try:
                for request in requests:
                    self.engine.submit(request)
                while self.engine.has_work:
                    interrupts.deliver()
                    new = [chunk for chunk in self._step() if chunk.finish]
                    done.update((chunk.rid, chunk) for chunk in new)
                    ended(len(new))
            except BaseException:
                if self._engine is not None:
                    self._drop(requests)
                raise
        return done

    def _step(self) -> list[OutputChunk]:
        """A step that fails may have moved the KV, penalties or drafts of some requests and not
        those of others, and a device may be still at it: nothing can be computed from that."""
        try:
            return self.engine.step()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}".removesuffix(": ")
            elsewhere = None if self._engine is None else self._engine.party.failure()
            self._failure = elsewhere or said
            self._let_go()
            if elsewhere is not None:
                raise EngineDeadError(f"The engine failed: {elsewhere}") from error
            raise

    def _drop(self, requests: Sequence[TokenizedRequest]) -> None:
        """End these requests between two steps; what is under way with them is waited for."""
        for request in requests:
            self.engine.abort(request.rid)
        while self.engine.has_work:
            self._step()

    def _completion(self, request: TokenizedRequest, chunk: OutputChunk) -> Completion:
        finish = chunk.finish
        assert finish is not None
        assert request.sampling.seed is not None
        if finish.kind == "abort":
            kind = InvalidRequestError if finish.status == 400 else SglSpecError
            raise kind(finish.message or "The request was aborted.", param=finish.param)
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
            draft_trees=chunk.draft_trees if request.draft_trees else None,
        )

    def _text(self, request: TokenizedRequest, chunk: OutputChunk, finish: FinishReason) -> str:
        return self._output_text(request).finish(chunk.ids, finish.matched)

    def _output_text(self, request: TokenizedRequest) -> OutputText:
        sampling = request.sampling
        return OutputText(
            self.engine.tokenizer,
            sampling.stop,
            skip_special_tokens=sampling.skip_special_tokens,
            no_stop_trim=sampling.no_stop_trim,
            prompt_tail=request.input_ids[-PROMPT_TAIL:],
        )


class _Follow:
    """Turns the chunks of a stream's requests into pieces."""

    def __init__(self, llm: LLM, requests: Sequence[TokenizedRequest]) -> None:
        self._llm = llm
        self._requests = {request.rid: (i, request) for i, request in enumerate(requests)}
        self._texts = {request.rid: llm._output_text(request) for request in requests}
        self._chunks: dict[str, list[OutputChunk]] = {rid: [] for rid in self._requests}

    def piece(self, chunk: OutputChunk) -> Piece:
        """What is new."""
        index, request = self._requests[chunk.rid]
        text, chunks = self._texts[chunk.rid], self._chunks[chunk.rid]
        chunks.append(chunk)
        if chunk.finish is None:
            return Piece(index, text.push(chunk.ids), chunk.ids)
        completion = self._llm._completion(request, joined(chunks))
        last = text.finish(chunk.ids, chunk.finish.matched)
        return Piece(index, last, chunk.ids, completion)


def _hand_over(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """To a loop that may have ended with those that waited in it."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)


def _one_sampling(
    sampling: Params | Sequence[Params], other: Params | Sequence[Params]
) -> Params | Sequence[Params]:
    if sampling is not None and other is not None:
        raise InvalidRequestError(
            "sampling and sampling_params mean the same; give one of them.", param="sampling"
        )
    return other if sampling is None else sampling


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
    if not isinstance(prompts, str):
        try:
            operator.index(prompts[0])  # type: ignore[arg-type]
        except (TypeError, IndexError):  # no id: the first of several prompts, or of none
            return list(prompts)  # type: ignore[arg-type]
    return [prompts]  # type: ignore[list-item]


def _as_params(params: Params) -> tuple[SamplingParams, int]:
    """The parameters, and how many completions they ask for."""
    if isinstance(params, SamplingParams):
        return params, 1
    fields = {name: value for name, value in (params or {}).items() if value is not None}
    choices = fields.pop("n", 1)
    if type(choices) is not int:
        raise InvalidRequestError(f"n must be an integer, got {choices!r}.", param="n")
    check_choices(choices, "n")
    _take_seed(fields)
    if isinstance(fields.get("stop"), str):
        fields["stop"] = (fields["stop"],)
    for name in fields:
        if name not in _FIELDS:
            raise InvalidRequestError(
                f"sampling: {name!r} is not one of {', '.join(_FIELDS)}{near(name, _FIELDS)}.",
                param="sampling",
            )
    try:
        return msgspec.convert(fields, SamplingParams, strict=True, str_keys=True), choices
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"sampling: {error}", param="sampling") from error


def _take_seed(fields: dict[str, Any]) -> None:
    """SGLang's name of the seed becomes ours."""
    other = fields.pop("sampling_seed", None)
    if other is None:
        return
    if fields.get("seed", other) != other:
        raise InvalidRequestError(
            f"seed and sampling_seed mean the same and differ: {fields['seed']} and {other}.",
            param="sampling_seed",
        )
    fields["seed"] = other
