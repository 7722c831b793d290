"""How /v1/completions and /v1/chat/completions word their answers."""

from __future__ import annotations

import abc
import time
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer

from sgl_spec.request import Logprobs
from sgl_spec.server.answers import merged
from sgl_spec.server.logprobs import CompletionLogprobs, chat_logprobs
from sgl_spec.server.openai_protocol import OpenAICall
from sgl_spec.server.output import Output, simulation_mark
from sgl_spec.server.requests import Made


class OpenAIReplies(abc.ABC):
    """What both routes share: the envelope, usage, and the order of a stream's events.

    model: the name shown. tokenizer: names the tokens of log-probabilities. cache_report: whether
    usage tells cached prompt tokens (--enable-cache-report). speculating: whether finished requests
    report spec_* keys. simulated: the accept length that the server was told to simulate.

    Beyond OpenAI's fields, a finished choice tells `matched_stop` (the stop string or token id) and
    `seed` (which repeats this very choice when sent with n = 1); asked for by `return_meta_info`,
    it has the `meta_info` of /generate. With `return_spec_tokens_details`, `sglext` of the reply,
    or of a choice's last event, holds the spec_* keys: one object, or a list of one per choice.
    With `return_draft_trees` it holds the rounds as well, in a stream those that are new.
    """

    kind: str
    chunk_kind: str

    def __init__(
        self,
        call: OpenAICall,
        made: Made,
        model: str,
        tokenizer: Tokenizer,
        *,
        cache_report: bool,
        speculating: bool,
        simulated: float | None = None,
    ) -> None:
        self._call = call
        self._prompt_of = made.prompt_of
        self._id = made.group or made.requests[0].rid
        self._model = model
        self._tokenizer = tokenizer
        self._cache_report = cache_report
        self._speculating = speculating
        self._marks = simulation_mark(simulated)
        self._created = int(time.time())
        self._begun: set[int] = set()

    def whole(self, outputs: Sequence[Output]) -> Any:
        """The body of a reply that is no stream."""
        choices = [
            {
                "index": index,
                **self.content(output, index),
                "logprobs": self._logprobs(output, index, output.ids),
                **self._ending(output, index),
            }
            for index, output in enumerate(outputs)
        ]
        usage = {"usage": self._usage(outputs)}
        return self._envelope(self.kind, choices) | usage | self._extension(outputs)

    def events(self, output: Output, index: int, new: str, ids: list[int]) -> Iterable[Any]:
        """The events of one update."""
        parts = [] if index in self._begun else self.opening(output, index)
        self._begun.add(index)
        # Tokens whose text is held back, or is none, still have their log-probabilities.
        deltas = self.deltas(output, index, new)
        if output.new_trees:
            deltas = deltas or self.empty()
        if ids and output.request.logprobs is not None:
            deltas = deltas or self.empty()
            deltas[0]["logprobs"] = self._logprobs(output, index, ids)
        parts += deltas
        choices = [{"index": index, "logprobs": None, **part, **_OPEN} for part in parts]
        if output.finish is not None:
            ending = {**self.empty()[0], "logprobs": None, **self._ending(output, index)}
            choices.append({"index": index, **ending})
        counted = [output] if self._call.continuous_usage else None
        events = [self._event([choice], counted) for choice in choices]
        if events:
            events[-1] |= self._extension([output])
        return events

    def last(self, outputs: Sequence[Output]) -> Iterable[Any]:
        """The usage event, when asked for."""
        return [self._event([], outputs)] if self._call.include_usage else []

    @abc.abstractmethod
    def content(self, output: Output, index: int) -> dict[str, Any]:
        """The text of a whole choice."""

    @abc.abstractmethod
    def opening(self, output: Output, index: int) -> list[dict[str, Any]]:
        """What a streamed choice starts with."""

    @abc.abstractmethod
    def deltas(self, output: Output, index: int, new: str) -> list[dict[str, Any]]:
        """What new text adds to a streamed choice."""

    @abc.abstractmethod
    def empty(self) -> list[dict[str, Any]]:
        """A delta without text."""

    def finish_reason(self, kind: str, index: int) -> str:
        """The word for how a choice ended. kind: that of `FinishReason`."""
        return kind

    @abc.abstractmethod
    def logprobs(self, output: Output, index: int, ids: list[int], new: Logprobs) -> dict[str, Any]:
        """Log-probabilities `new` of `ids`, the choice's last tokens."""

    def _logprobs(self, output: Output, index: int, ids: list[int]) -> dict[str, Any] | None:
        if output.request.logprobs is None:
            return None
        new = output.logprobs.part(len(output.logprobs) - len(ids))
        return self.logprobs(output, index, ids, new)

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            **self._marks,
        }

    def _event(
        self, choices: list[dict[str, Any]], counted: Sequence[Output] | None
    ) -> dict[str, Any]:
        event = self._envelope(self.chunk_kind, choices)
        if self._call.include_usage or self._call.continuous_usage:
            event["usage"] = None if counted is None else self._usage(counted)
        return event

    def _usage(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Token counts; a prompt with several choices counts once."""
        chunks = [output.chunk for output in outputs if output.chunk is not None]
        firsts = [
            chunk
            for i, chunk in enumerate(chunks)
            if i == 0 or self._prompt_of[i] != self._prompt_of[i - 1]
        ]
        prompt = sum(chunk.prompt_tokens for chunk in firsts)
        completion = sum(chunk.completion_tokens for chunk in chunks)
        cached = sum(chunk.cached_tokens for chunk in firsts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached} if self._cache_report else None,
        }

    def _ending(self, output: Output, index: int) -> dict[str, Any]:
        assert output.finish is not None
        ending: dict[str, Any] = {
            "finish_reason": self.finish_reason(output.finish.kind, index),
            "matched_stop": output.finish.matched,
            "seed": output.request.sampling.seed,
        }
        if self._call.meta_info:
            ending["meta_info"] = output.meta_info(speculating=self._speculating)
        return ending

    def _extension(self, outputs: Sequence[Output]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._call.spec_details and outputs[0].finish is not None:
            details = [output.spec_details() if self._speculating else None for output in outputs]
            found["spec_tokens_details"] = details[0] if len(details) == 1 else details
        if outputs[0].trees is not None:
            stream = self._call.stream
            trees = [one.new_trees if stream else one.draft_trees for one in outputs]
            if any(trees) or not stream:
                found["draft_trees"] = trees[0] if len(trees) == 1 else trees
        return {"sglext": found} if found else {}


_OPEN = {"finish_reason": None, "matched_stop": None}


class CompletionReplies(OpenAIReplies):
    """/v1/completions: plain text, after the prompt if it is to be echoed."""

    kind = chunk_kind = "text_completion"

    def __init__(self, call: OpenAICall, made: Made, *args: Any, **options: Any) -> None:
        super().__init__(call, made, *args, **options)
        self._readers = [
            CompletionLogprobs(request, self._tokenizer, self._echo(index))
            for index, request in enumerate(made.requests if call.logprobs else ())
        ]

    def content(self, output: Output, index: int) -> dict[str, Any]:
        """The text of a whole choice."""
        return {"text": self._echo(index) + output.text}

    def opening(self, output: Output, index: int) -> list[dict[str, Any]]:
        """The echoed prompt."""
        echo = self._echo(index)
        if not echo:
            return []
        asked = output.request.logprobs is not None
        logprobs = self._readers[index].prompt(output.prompt_logprobs) if asked else None
        return [{"text": echo, "logprobs": logprobs}]

    def deltas(self, output: Output, index: int, new: str) -> list[dict[str, Any]]:
        """New text."""
        return [{"text": new}] if new else []

    def empty(self) -> list[dict[str, Any]]:
        """No text."""
        return [{"text": ""}]

    def logprobs(self, output: Output, index: int, ids: list[int], new: Logprobs) -> dict[str, Any]:
        """Parallel lists; in a whole reply with the echoed prompt's in front."""
        reader = self._readers[index]
        found = reader.new(ids, new)
        if self._call.stream or not self._echo(index):
            return found
        prompt = reader.prompt(output.prompt_logprobs)
        return {name: prompt[name] + values for name, values in found.items()}

    def _echo(self, index: int) -> str:
        return "" if self._call.echo is None else self._call.echo[self._prompt_of[index]]


class ChatReplies(OpenAIReplies):
    """/v1/chat/completions: one assistant message per choice."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, call: OpenAICall, made: Made, *args: Any, **options: Any) -> None:
        super().__init__(call, made, *args, **options)
        assert call.reader is not None
        self._answers = [call.reader() for _ in made.requests]

    def content(self, output: Output, index: int) -> dict[str, Any]:
        """The whole message."""
        return {"message": merged(self._answers[index].push(output.text, last=True))}

    def opening(self, output: Output, index: int) -> list[dict[str, Any]]:
        """The role."""
        return [{"delta": {"role": "assistant", "content": ""}}]

    def deltas(self, output: Output, index: int, new: str) -> list[dict[str, Any]]:
        """Reasoning, content and calls, as new text completes them."""
        last = output.finish is not None
        return [{"delta": delta} for delta in self._answers[index].push(new, last=last)]

    def empty(self) -> list[dict[str, Any]]:
        """Nothing."""
        return [{"delta": {}}]

    def finish_reason(self, kind: str, index: int) -> str:
        """ "tool_calls" for an answer that calls."""
        return "tool_calls" if kind == "stop" and self._answers[index].called else kind

    def logprobs(self, output: Output, index: int, ids: list[int], new: Logprobs) -> dict[str, Any]:
        """One entry per token."""
        return chat_logprobs(self._tokenizer, ids, new)
