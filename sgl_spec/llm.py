"""Offline generation over the same engine, without HTTP.

from sgl_spec import LLM
llm = LLM("smollm2", speculative_algorithm="NGRAM")
print(llm.generate("The capital of France is", {"temperature": 0})[0].text)
"""

from __future__ import annotations

import operator
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec

from sgl_spec.args import ServerArgs
from sgl_spec.engine.engine import Engine
from sgl_spec.errors import EngineDeadError, InvalidRequestError, SglSpecError, preview
from sgl_spec.interrupts import Interrupts
from sgl_spec.messages import OutputChunk
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
from sgl_spec.text import PROMPT_TAIL, OutputText

Prompt = str | Sequence[int]
Params = SamplingParams | Mapping[str, Any] | None
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


class LLM:
    """A model in this process. `flags` are the server's options by field name; SGLang's other flags
    are accepted or refused as on the command line.

    Calls from several threads wait for each other; give one call several prompts to batch them.
    The memory is given back by `shutdown`, or at the end of a `with` block, or when the engine
    fails.
    """

    def __init__(self, model_path: str = "smollm2", **flags: Any) -> None:
        args = ServerArgs.from_keywords(model_path=model_path, **flags)
        self._engine: Engine | None = Engine(args.resolve(registered_drafters()))
        self._failure = ""  # what broke the engine off
        self._seeds = random.Random(self.engine.args.random_seed)
        self._serial = 0
        self._lock = threading.RLock()  # a signal's handler may come in the middle of a call
        self._calling = False

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

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Params | Sequence[Params] = None,
        logprobs: LogprobParams | Sequence[LogprobParams | None] | None = None,
        *,
        sampling_params: Params | Sequence[Params] = None,
        draft_trees: bool = False,
    ) -> list[Completion]:
        """Complete one prompt or several (texts or id lists) together; results in their order.

        sampling: one for all or one each; a mapping names fields of `SamplingParams`, and may hold
        `n` for that many completions of its prompt, which follow each other in the result (their
        seeds are derived as over HTTP). `sampling_params` is another word for it. logprobs: what to
        report of log-probabilities, one for all or one each; None is nothing. draft_trees: whether
        to report rounds, at most `request.MAX_DRAFT_ROUNDS` of each request. Raises
        `InvalidRequestError` before anything runs if a prompt or a field cannot be served.

        Ctrl-C ends the call after the step under way and drops its requests; the next call finds
        everything in order. An exception within a step ends the engine: every later call is an
        `EngineDeadError` that tells it.
        """
        if sampling is not None and sampling_params is not None:
            raise InvalidRequestError(
                "sampling and sampling_params mean the same; give one of them.", param="sampling"
            )
        given = sampling_params if sampling is None else sampling
        batch = _as_batch(prompts)
        params = _per_prompt("sampling", given, SamplingParams | Mapping, len(batch))
        asks = _per_prompt("logprobs", logprobs, LogprobParams, len(batch))
        with self._call():
            several = len(batch) != 1
            places = [f"prompts[{i}]" if several else "prompts" for i in range(len(batch))]
            each = zip(places, batch, params, asks, strict=True)
            made = [self._requests(*one) for one in each]
            requests = [
                msgspec.structs.replace(request, draft_trees=draft_trees)
                for of_prompt in made
                for request in of_prompt
            ]
            chunks = self._run(requests)
            return [self._completion(request, chunks[request.rid]) for request in requests]

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
            self._serial += 1
            seeded = msgspec.structs.replace(sampling, seed=derive_seed(seed, choice))
            rid = f"offline-{self._serial}"
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

    def _run(self, requests: Sequence[TokenizedRequest]) -> dict[str, OutputChunk]:
        done: dict[str, OutputChunk] = {}
        with Interrupts() as interrupts:
            try:
                for request in requests:
                    self.engine.submit(request)
                while self.engine.has_work:
                    interrupts.deliver()
                    done.update((chunk.rid, chunk) for chunk in self._step() if chunk.finish)
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
            self._failure = f"{type(error).__name__}: {error}".removesuffix(": ")
            self._engine = None
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
