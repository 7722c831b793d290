"""One request's output on its way to the client: ids, text, and what is said about it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer

from sgl_spec.errors import InvalidRequestError, SglSpecError, UnavailableError
from sgl_spec.messages import OutputChunk
from sgl_spec.request import FinishReason, Logprobs, SpecStats, TokenizedRequest
from sgl_spec.server.draft_trees import TreeWords
from sgl_spec.server.frontend import Update
from sgl_spec.text import PROMPT_TAIL, OutputText


class Output:
    """What a request has given so far.

    ids: all tokens. text: what may be shown of the text. chunk: the latest counts, None before any.
    logprobs: those of `ids`; prompt_logprobs: those of the prompt; both empty unless asked for.
    trees: words for its rounds, None where they are not to be shown; draft_trees: all of them so
    far; new_trees: those of the last update. marks: what else every `meta_info` says.
    """

    def __init__(
        self,
        request: TokenizedRequest,
        tokenizer: Tokenizer,
        marks: Mapping[str, Any] = MappingProxyType({}),
        trees: TreeWords | None = None,
    ) -> None:
        sampling = request.sampling
        self.request = request
        self._marks = marks
        self.ids: list[int] = []
        self.text = ""
        self.chunk: OutputChunk | None = None
        self.logprobs = Logprobs()
        self.prompt_logprobs = Logprobs()
        self.trees = trees
        self.draft_trees: list[dict[str, Any]] = []
        self.new_trees: list[dict[str, Any]] = []
        self._decoder = OutputText(
            tokenizer,
            sampling.stop,
            skip_special_tokens=sampling.skip_special_tokens,
            no_stop_trim=sampling.no_stop_trim,
            prompt_tail=request.input_ids[-PROMPT_TAIL:],
        )

    @property
    def finish(self) -> FinishReason | None:
        """Why the request ended, if it has."""
        return None if self.chunk is None else self.chunk.finish

    def feed(self, update: Update) -> str:
        """Take an update; the text it adds."""
        self.chunk = update.chunk
        self.ids += update.ids
        self.logprobs.extend(update.logprobs)
        self.prompt_logprobs.extend(update.prompt_logprobs)
        if self.trees is not None:
            self.new_trees = self.trees.of(update.draft_trees, self.ids)
            self.draft_trees += self.new_trees
        finish = update.chunk.finish
        if finish is None:
            new = self._decoder.push(update.ids)
        else:
            new = self._decoder.finish(update.ids, finish.matched)
        self.text += new
        return new

    def meta_info(self, *, speculating: bool) -> dict[str, Any]:
        """`meta_info` of a /generate reply, now."""
        chunk, sampling = self.chunk, self.request.sampling
        assert chunk is not None
        meta: dict[str, Any] = {
            "id": chunk.rid,
            "finish_reason": finish_dict(chunk),
            "prompt_tokens": chunk.prompt_tokens,
            "completion_tokens": chunk.completion_tokens,
            "cached_tokens": chunk.cached_tokens,
            "num_retractions": chunk.retractions,
            "seed": sampling.seed,
            **self._marks,
        }
        if chunk.finish is not None:
            meta["e2e_latency"] = time.time() - self.request.arrival
            if speculating:
                meta |= self.spec_details() or {}
        return meta

    def spec_details(self) -> dict[str, Any] | None:
        """The spec_* keys, once there was a round and the request has ended."""
        spec = None if self.chunk is None else self.chunk.spec
        return spec_dict(spec) if spec is not None and spec.verify_ct > 0 else None


def simulation_mark(simulated: float | None) -> dict[str, float]:
    """What every reply says whose text was not decided by the target."""
    return {} if simulated is None else {"simulated_accept_length": simulated}


def finish_dict(chunk: OutputChunk) -> dict[str, Any] | None:
    """`finish_reason` as /generate shows it."""
    finish = chunk.finish
    if finish is None:
        return None
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": chunk.completion_tokens}
    return {"type": "abort", "message": finish.message or "Aborted."}


def spec_dict(spec: SpecStats) -> dict[str, Any]:
    """The spec_* keys. Accept length: tokens given out by rounds, per round.

    The token that prefill samples and tokens accepted behind a stop count nowhere, so the length
    is 1 when no draft is ever accepted.
    """
    return {
        "spec_verify_ct": spec.verify_ct,
        "spec_num_correct_drafts": spec.accepted,
        "spec_num_proposed_drafts": spec.proposed,
        "spec_accept_rate": spec.accepted / spec.proposed if spec.proposed else 0.0,
        "spec_accept_length": spec.emitted / spec.verify_ct,
        "spec_correct_drafts_histogram": spec.histogram,
        **simulation_mark(spec.simulated),
    }


def failure_of(finish: FinishReason | None) -> SglSpecError | None:
    """The error to reply with when a request ended by one; None when it ended well or was aborted
    at the client's wish."""
    if finish is None or finish.kind != "abort" or finish.status == 200:
        return None
    message = finish.message or "The request was aborted."
    for kind in (InvalidRequestError, UnavailableError):
        if finish.status == kind.status:
            return kind(message, param=finish.param)
    return SglSpecError(message)
