"""A request inside the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from sgl_spec.engine.grammar_jobs import CompileJob
from sgl_spec.engine.kv_pool import Holding
from sgl_spec.engine.prefix_cache import Node
from sgl_spec.request import (
    MAX_DRAFT_ROUNDS,
    DraftRound,
    FinishReason,
    LogprobParams,
    Logprobs,
    SamplingParams,
    SpecStats,
    TokenizedRequest,
)
from sgl_spec.speculative.grammar import Constraint, Place
from sgl_spec.text import StopMatcher


class Phase(Enum):
    """Where a request is: prefill and decode hold a row and slots; waiting holds nothing, nor does
    grammar, which waits for its grammar to be compiled first."""

    GRAMMAR = "grammar"
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True)
class LogprobRecord:
    """Log-probabilities of one request so far. It outlives retractions: what is in it is neither
    computed nor reported again.

    prompt: those of the tokens behind position `params.logprob_start_len`. output: one per output
    token. prompt_sent: whether the prompt's are reported.
    """

    params: LogprobParams
    prompt: Logprobs = field(default_factory=Logprobs)
    output: Logprobs = field(default_factory=Logprobs)
    prompt_sent: bool = False


@dataclass(slots=True)
class TreeRecord:
    """Rounds of one request that are to be shown and were not reported. left: how many more may
    be."""

    fresh: list[DraftRound] = field(default_factory=list)
    left: int = MAX_DRAFT_ROUNDS

    def add(self, tree: DraftRound) -> None:
        """Take one in."""
        if self.left > 0:
            self.fresh.append(tree)
            self.left -= 1

    def take(self) -> list[DraftRound]:
        """Those to be reported now."""
        taken, self.fresh = self.fresh, []
        return taken


@dataclass(slots=True, eq=False)
class Req:
    """State of one request, owned by the scheduler.

    ids: prompt and output. While decoding, ids has holding.committed_len + 1 tokens: the last one
    is the next tree's root. reported: output tokens already sent. drafted: tokens of ids the
    drafter was given. in_flight: batches with this request that are launched and not collected.
    passed: forwards of other prompts since this one could be computed. job: its grammar being
    compiled. submitted: when it came, on the monotonic clock; queued_s: how long it then waited,
    its grammar's compilation included. constraint: its grammar, at the end of ids; it stays there
    through a retraction. trees: None where its rounds are not to be shown.
    """

    rid: str
    ids: list[int]
    prompt_len: int
    sampling: SamplingParams
    stream: bool
    stop_ids: frozenset[int]
    stops: StopMatcher | None
    logprobs: LogprobRecord | None = None
    trees: TreeRecord | None = None
    job: CompileJob | None = None
    constraint: Constraint | None = None
    spec: SpecStats = field(default_factory=lambda: SpecStats(histogram=[]))
    phase: Phase = Phase.WAITING
    holding: Holding | None = None
    node: Node | None = None
    submitted: float = field(default_factory=time.monotonic)
    queued_s: float | None = None
    cached_tokens: int = 0
    admissions: int = 0
    drafted: int = 0
    reported: int = 0
    in_flight: int = 0
    passed: int = 0
    finish: FinishReason | None = None

    @property
    def output_len(self) -> int:
        """Tokens generated."""
        return len(self.ids) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.sampling.max_new_tokens - self.output_len

    @property
    def held(self) -> Holding:
        """The row and slots of a request that has them."""
        assert self.holding is not None
        return self.holding

    @property
    def unfilled(self) -> int:
        """Tokens whose KV is still to be computed before the next token can be drawn."""
        return len(self.ids) - self.held.committed_len

    @property
    def unscored(self) -> int:
        """The first position whose logits a log-probability of the prompt still waits for; the
        length of ids if none does."""
        if self.logprobs is None or self.logprobs.params.logprob_start_len == -1:
            return len(self.ids)
        position = self.logprobs.params.logprob_start_len + len(self.logprobs.prompt)
        return position if position < self.prompt_len - 1 else len(self.ids)

    @property
    def reusable(self) -> int:
        """Tokens of ids that need not be computed if their KV is cached: their logits are not
        wanted, which those of the last token always are."""
        return min(self.unscored, len(self.ids) - 1)

    def append(self, tokens: Sequence[int]) -> int:
        """Take tokens in order until one of them ends the request; returns how many were taken.

        Text, ids, usage and KV are all cut at the token that ends the request, wherever it lies in
        an accepted block.
        """
        if self.stops is None and self.constraint is None:
            return self._append_plain(tokens)
        tokens, place = tokens[: max(1, self.remaining)], Place.OPEN
        legal = len(tokens)
        if self.constraint is not None:
            legal = self.constraint.take(tokens)
            tokens, place = tokens[: max(1, legal)], self.constraint.place
        for taken, token in enumerate(tokens, 1):
            self.ids.append(token)
            end = place if taken == len(tokens) else Place.OPEN
            self.finish = self._end_at(token, end, legal=legal > 0)
            if self.finish is not None:
                return taken
        return len(tokens)

    def _append_plain(self, tokens: Sequence[int]) -> int:
        """The same where only token ids and the length can end a request: every round of every
        request comes through here."""
        end, first_end = max(1, self.remaining), self.sampling.min_new_tokens - self.output_len
        for taken, token in enumerate(tokens[:end], 1):
            if token in self.stop_ids and taken >= first_end:
                self.finish = FinishReason(kind="stop", matched=token)
                break
        else:
            taken = min(len(tokens), end)
            if taken == end:
                self.finish = FinishReason(kind="length")
        self.ids += tokens[:taken]
        return taken

    def _end_at(self, token: int, place: Place, *, legal: bool) -> FinishReason | None:
        """place: where the grammar stands behind the token. legal: whether it allows the token."""
        text = self.stops.push(token) if self.stops is not None else None
        if legal and self.output_len >= self.sampling.min_new_tokens:
            if token in self.stop_ids:
                return FinishReason(kind="stop", matched=token)
            if text is not None:
                return FinishReason(kind="stop", matched=text)
        if place is Place.ENDED:
            return FinishReason(kind="stop")
        if place is Place.BROKEN:
            return self._broken()
        if self.remaining <= 0:
            return FinishReason(kind="length")
        return None

    def _broken(self) -> FinishReason:
        grammar, constraint = self.sampling.grammar, self.constraint
        assert grammar is not None
        assert constraint is not None
        problem = constraint.problem
        message = f"{grammar.field} cannot be followed any further: {problem}."
        return FinishReason(kind="abort", message=message, status=400, param=grammar.field)


def make_req(request: TokenizedRequest, eos_ids: Sequence[int], stops: StopMatcher | None) -> Req:
    """A `Req` to submit. Stop ids are the request's own and, unless ignore_eos, the model's."""
    own = request.sampling.stop_token_ids
    stop_ids = frozenset(own) if request.sampling.ignore_eos else frozenset([*own, *eos_ids])
    return Req(
        rid=request.rid,
        ids=list(request.input_ids),
        prompt_len=len(request.input_ids),
        sampling=request.sampling,
        stream=request.stream,
        stop_ids=stop_ids,
        stops=stops,
        logprobs=None if request.logprobs is None else LogprobRecord(request.logprobs),
        trees=TreeRecord() if request.draft_trees else None,
    )
