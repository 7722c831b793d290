"""What a request asks for and how it ends. Pure data: no torch, no engine state."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from pydantic import ConfigDict, Field, ValidationError, create_model

from sgl_spec.errors import InvalidRequestError, preview

MAX_STOP_STRINGS = 32
MAX_BIAS = 100.0
MIN_REPETITION_PENALTY = 1e-30  # logits divided by it stay within float32
MAX_TOP_LOGPROBS = 128
MAX_LOGPROB_IDS = 1024
MAX_DRAFT_ROUNDS = 1024  # of one request, that `return_draft_trees` shows
# Bounds a reply: listed alternatives over all reported prompt positions.
MAX_PROMPT_LOGPROBS = 1 << 21
# Of seeds that are drawn or derived: readers of JSON that know doubles alone keep these whole.
SEED_BITS = 53
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
MAX_CHOICES = 128  # of one prompt
GrammarKind = Literal["json_schema", "regex", "ebnf"]
GRAMMAR_KINDS: tuple[GrammarKind, ...] = ("json_schema", "regex", "ebnf")
MAX_GRAMMAR_CHARS = 1 << 18

# Type, range and help of each setting, for `SamplingParams` and for the bodies of HTTP requests.
NewTokens = Annotated[
    int,
    Field(
        ge=0,
        description="0 or more; prompt and output together fit into the context, or are a 400 "
        "(`--allow-auto-truncate` cuts them)",
    ),
]
MinTokens = Annotated[int, Field(ge=0, description="0 to `max_new_tokens`")]
Temperature = Annotated[
    float, Field(ge=0, allow_inf_nan=False, description="0 or more; 0 is greedy")
]
TopK = Annotated[
    Literal[-1] | Annotated[int, Field(ge=1)], Field(description="1 or more, or -1: all tokens")
]
TopP = Annotated[float, Field(gt=0, le=1, description="(0, 1]")]
MinP = Annotated[float, Field(ge=0, le=1, description="[0, 1]")]
RepetitionPenalty = Annotated[
    float,
    Field(
        ge=MIN_REPETITION_PENALTY,
        le=2,
        description=f"[{MIN_REPETITION_PENALTY:g}, 2]; of a token that prompt or output hold, a "
        "positive logit is divided by it, any other multiplied: as transformers does",
    ),
]
FrequencyPenalty = Annotated[
    float,
    Field(
        ge=-2,
        le=2,
        description="[-2, 2]; taken from a token's logit for every time the output holds it",
    ),
]
PresencePenalty = Annotated[
    float,
    Field(ge=-2, le=2, description="[-2, 2]; taken from it once, if the output holds it"),
]
IgnoreEos = Annotated[bool, Field(description="EOS is a token like others")]
NoStopTrim = Annotated[bool, Field(description="the stop stays in the text")]
SkipSpecialTokens = Annotated[bool, Field(description="special tokens have no text")]
Seed = Annotated[
    int, Field(ge=MIN_SEED, le=MAX_SEED, description="an integer from -2^63 to 2^63 - 1")
]
StreamInterval = Annotated[
    int,
    Field(
        ge=1,
        description="1 or more: tokens between two chunks of a stream, instead of the server's "
        "`--stream-interval`; the first token comes at once",
    ),
]


class Speculation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much may be drafted for one request: at most `max_draft_tokens` tokens a round (the
    tree's root is none of them). It changes no text under the default acceptance rule."""

    max_draft_tokens: int


class Grammar(msgspec.Struct, frozen=True):
    """What the output must match. field: what the client calls it, for messages."""

    kind: GrammarKind
    text: str
    field: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen and when the request ends.

    `temperature` 0 is greedy. `top_k` -1 keeps every token. Penalties count as
    `speculative.penalties` tells; `logit_bias` maps token ids to biases. `seed` None means: draw a
    random one and report it. `stream_interval`: tokens between two chunks of a stream, None for the
    server's. `speculation` None drafts as much as the server does, False nothing.
    At most one of `json_schema` (text, or the schema itself), `regex` and `ebnf` constrains the
    output; `grammar_field` is the name that messages give it where it is another one. Ranges are
    checked by `check`.
    """

    max_new_tokens: NewTokens = 128
    min_new_tokens: MinTokens = 0
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = -1
    min_p: MinP = 0.0
    frequency_penalty: FrequencyPenalty = 0.0
    presence_penalty: PresencePenalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: IgnoreEos = False
    skip_special_tokens: SkipSpecialTokens = True
    no_stop_trim: NoStopTrim = False
    stream_interval: StreamInterval | None = None
    seed: Seed | None = None
    speculation: bool | Speculation | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar_field: str | None = None

    @property
    def grammar(self) -> Grammar | None:
        """What the output must match, if anything."""
        for kind in GRAMMAR_KINDS:
            value = getattr(self, kind)
            if value is not None:
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                return Grammar(kind, text, self.grammar_field or kind)
        return None

    @property
    def greedy(self) -> bool:
        """Whether every draw is an argmax."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether logits depend on what the text holds."""
        penalties = (self.frequency_penalty, self.presence_penalty, self.repetition_penalty - 1)
        return any(penalties)

    def max_nodes(self, most: int) -> int:
        """Most nodes of the request's trees, root included, where the server allows `most`."""
        if isinstance(self.speculation, Speculation):
            return min(most, 1 + self.speculation.max_draft_tokens)
        return 1 if self.speculation is False else most

    def check(self, vocab_size: int) -> None:
        """Raise `InvalidRequestError` naming the first field of another type or out of range."""
        given = {name: getattr(self, name) for name in _SETTINGS.model_fields}
        try:
            _SETTINGS.model_validate(given)
        except ValidationError as error:
            raise refusal(error, given) from None
        _between("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens)
        self._check_biases(vocab_size)
        self._check_stops(vocab_size)
        self._check_grammar()
        if self.speculation is True:
            _refuse("speculation", True, 'false or {"max_draft_tokens": k}')
        if isinstance(self.speculation, Speculation):
            _at_least("speculation.max_draft_tokens", self.speculation.max_draft_tokens, 0)

    def _check_biases(self, vocab_size: int) -> None:
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size:
                _refuse("logit_bias", token, f"a map from token ids, 0 to {vocab_size - 1}")
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                _refuse("logit_bias", bias, f"a map to numbers in [{-MAX_BIAS:g}, {MAX_BIAS:g}]")

    def _check_grammar(self) -> None:
        given = [kind for kind in GRAMMAR_KINDS if getattr(self, kind) is not None]
        if len(given) > 1:
            raise InvalidRequestError(
                f"{given[0]} and {given[1]} cannot both be given: an output has one grammar.",
                param=given[1],
            )
        grammar = self.grammar
        if grammar is not None and not 0 < len(grammar.text) <= MAX_GRAMMAR_CHARS:
            raise InvalidRequestError(
                f"{grammar.field} must be 1 to {MAX_GRAMMAR_CHARS} characters, got "
                f"{len(grammar.text)}.",
                param=grammar.field,
            )

    def _check_stops(self, vocab_size: int) -> None:
        allowed = f"at most {MAX_STOP_STRINGS} non-empty strings"
        if len(self.stop) > MAX_STOP_STRINGS:
            _refuse_count("stop", len(self.stop), "strings", allowed)
        if "" in self.stop:
            _refuse("stop", list(self.stop), allowed)
        for token in self.stop_token_ids:
            if not 0 <= token < vocab_size:
                _refuse("stop_token_ids", token, f"ids from 0 to {vocab_size - 1}")


def _ranges(struct: type) -> dict[str, Any]:
    """The fields that are declared with a range, which holds whatever the model."""
    hints = get_type_hints(struct, include_extras=True).items()
    return {name: (hint, ...) for name, hint in hints if "FieldInfo" in repr(hint)}


_SETTINGS = create_model("Settings", __config__=ConfigDict(strict=True), **_ranges(SamplingParams))


def refusal(error: ValidationError, body: object) -> InvalidRequestError:
    """The deepest of the faults that `error` finds in `body`, in one sentence that names the field,
    the value and what is allowed. `ctx` of a fault may hold the name of the field and the text."""
    faults = [(*_find(body, fault), fault) for fault in error.errors(include_url=False)]
    deepest, value, first = max(faults, key=lambda fault: len(fault[0]))
    quoted = preview(path_text(deepest))
    field = quoted.strip('"')
    wanted = [fault["msg"] for path, _, fault in faults if path == deepest]
    if "field" in first.get("ctx", {}):
        message = first["msg"].replace('"{field}"', quoted).replace("{field}", field)
        message = message.replace("{value}", preview(value))
    elif first["type"] == "missing":
        message = f"{field} is required."
    elif all(one.startswith(_SHOULD_BE) for one in wanted):
        allowed = " or ".join(dict.fromkeys(one.removeprefix(_SHOULD_BE) for one in wanted))
        allowed = re.sub(r"a valid dictionary( or instance of \w+)?", "an object", allowed)
        message = f"{field or 'The request body'} must be {allowed}, got {preview(value)}."
    else:
        message = f"{field}: {first['msg']}, got {preview(value)}."
    names = [i for i, step in enumerate(deepest) if isinstance(step, str)]
    param = path_text(deepest[: names[-1] + 1]) if names else None
    return InvalidRequestError(message, param=param)


_SHOULD_BE = "Input should be "


def _find(body: Any, fault: Any) -> tuple[tuple[str | int, ...], Any]:
    """Where in `body` a fault is, and the value there. Steps of its location that are no key and no
    index there tell which member of a union was tried."""
    path: list[str | int] = []
    for step in fault["loc"]:
        inside = isinstance(body, dict) and isinstance(step, str) and step in body
        if inside or (isinstance(body, (list, tuple)) and isinstance(step, int)):
            path.append(step)
            body = body[step]
    name = fault["loc"][-1] if fault["type"] == "missing" else fault.get("ctx", {}).get("field")
    if name is None or path[-1:] == [name]:
        return tuple(path), body
    return (*path, name), body.get(name) if isinstance(body, dict) else None


def path_text(path: Sequence[str | int]) -> str:
    """The way to a field as messages write it: messages[0].role."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += f".{step}" if text else step
    return text


class LogprobParams(msgspec.Struct, frozen=True, kw_only=True):
    """Which log-probabilities a request reports, beside that of every output token.

    They are the model's own: log_softmax in float32 of its logits, before penalties, logit_bias,
    masks, temperature and filters. So they do not depend on how a token is drawn.

    logprob_start_len: the first prompt position to report, -1 for none of the prompt; that first
    one has no value. top_logprobs_num: how many of the most likely tokens at every position.
    token_ids_logprob: tokens to report at every position, whatever stands there.
    """

    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()

    def check(self, vocab_size: int, prompt_len: int) -> None:
        """Raise `InvalidRequestError` naming the first field out of range."""
        if not -1 <= self.logprob_start_len < prompt_len:
            allowed = f"-1 (output only) or a position of the prompt, 0 to {prompt_len - 1}"
            _refuse("logprob_start_len", self.logprob_start_len, allowed)
        _between("top_logprobs_num", self.top_logprobs_num, 0, min(MAX_TOP_LOGPROBS, vocab_size))
        if len(self.token_ids_logprob) > MAX_LOGPROB_IDS:
            allowed = f"at most {MAX_LOGPROB_IDS} ids"
            _refuse_count("token_ids_logprob", len(self.token_ids_logprob), "ids", allowed)
        for token in self.token_ids_logprob:
            if not 0 <= token < vocab_size:
                _refuse("token_ids_logprob", token, f"ids from 0 to {vocab_size - 1}")
        self._check_size(prompt_len)

    def _check_size(self, prompt_len: int) -> None:
        if self.logprob_start_len == -1:
            return
        width = self.top_logprobs_num + len(self.token_ids_logprob)
        total = (prompt_len - self.logprob_start_len) * width
        if total > MAX_PROMPT_LOGPROBS:
            raise InvalidRequestError(
                f"logprob_start_len {self.logprob_start_len} asks for {total} log-probabilities "
                f"({width} at each of {prompt_len - self.logprob_start_len} prompt positions), the "
                f"most is {MAX_PROMPT_LOGPROBS}.",
                param="logprob_start_len",
            )


class Logprobs(msgspec.Struct):
    """Log-probabilities (natural) of consecutive tokens, as `LogprobParams` asks for them.

    values: one per token, its own. top_ids, top_values: per token, the most likely tokens at its
    place, falling, equal ones by rising id. id_values: per token, those of `token_ids_logprob` in
    their order. What is not asked for is empty.
    """

    values: list[float] = []
    top_ids: list[list[int]] = []
    top_values: list[list[float]] = []
    id_values: list[list[float]] = []

    def __len__(self) -> int:
        return len(self.values)

    def extend(self, other: Logprobs) -> None:
        """Append those of the tokens that follow."""
        self.values += other.values
        self.top_ids += other.top_ids
        self.top_values += other.top_values
        self.id_values += other.id_values

    def part(self, start: int, end: int | None = None) -> Logprobs:
        """Those of tokens start .. end - 1."""
        cut = slice(start, end)
        return Logprobs(
            self.values[cut], self.top_ids[cut], self.top_values[cut], self.id_values[cut]
        )


def _refuse(field: str, value: object, allowed: str) -> None:
    raise InvalidRequestError(f"{field} must be {allowed}, got {preview(value)}.", param=field)


def _refuse_count(field: str, count: int, of: str, allowed: str) -> None:
    raise InvalidRequestError(f"{field} must be {allowed}, got {count} {of}.", param=field)


def _at_least(field: str, value: int, low: int) -> None:
    if value < low:
        _refuse(field, value, f"an integer >= {low}")


def _between(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        _refuse(field, value, f"an integer from {low} to {high}")


class FinishReason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request ended.

    `matched` is the stop token id or stop string of a "stop"; `message` and `status` tell about an
    "abort" (status is the HTTP code to give when nothing has been sent yet, `param` the field that
    is to blame).
    """

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str | None = None
    status: int = 200
    param: str | None = None


class SpecStats(msgspec.Struct, kw_only=True):
    """Speculation counts of one request, over its decode rounds only.

    The token sampled from the prompt's last row is no round and counts nowhere here; neither do
    draft tokens accepted after the position where the request stopped.

    verify_ct: rounds (target forwards) that this request took part in.
    proposed: draft tokens that were verified, summed over the rounds (the root is not one).
    accepted: of those, accepted and kept.
    emitted: tokens kept from the rounds, so that emitted / verify_ct is the accept length.
    histogram: entry i = rounds that kept exactly i draft tokens.
    simulated: the accept length that the engine was told to simulate; the others are real counts,
    but of drafts that were accepted whatever the target said.
    """

    verify_ct: int = 0
    proposed: int = 0
    accepted: int = 0
    emitted: int = 0
    histogram: list[int] = []
    simulated: float | None = None

    def add_round(self, *, proposed: int, accepted: int, emitted: int) -> None:
        """Count one round."""
        self.verify_ct += 1
        self.proposed += proposed
        self.accepted += accepted
        self.emitted += emitted
        self.histogram.extend([0] * (accepted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1


class RoundTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of a round, which all requests of its batch share.

    draft: making the trees, with what the draft model read of the round before. verify: the
    target's forward. host: all else since the batch before. round: all three. None where it was
    not measured.
    """

    draft_ms: float | None = None
    verify_ms: float | None = None
    host_ms: float | None = None
    round_ms: float | None = None


class DraftRound(msgspec.Struct, frozen=True, kw_only=True):
    """One round of a request: its tree, and what the target made of it.

    tokens, parents: of each node; node 0 is the root, whose parent is -1. scores: the drafter's
    estimate of the chance that a node is accepted, 1 at the root; empty where it gives none. probs:
    the model's own probability of a node's token behind its parent's text, softmax in float32 of
    its logits; 1 at the root. path: the accepted nodes in order, without the root. emitted: the
    tokens that the text took, those of the path and then the target's own (a stop may have cut
    them), with the model's own probabilities. start: tokens of the output before them. requests: of
    the batch. option: what the controller chose, 0 for no drafts; None where it had no choice.
    """

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    probs: list[float]
    path: list[int]
    emitted: list[int]
    emitted_probs: list[float]
    requests: int
    option: int | None
    times: RoundTimes
    start: int = 0

    def cut(self, kept: int, start: int) -> DraftRound:
        """The round of a request that took the first `kept` tokens behind `start` others."""
        return msgspec.structs.replace(
            self,
            path=self.path[:kept],
            emitted=self.emitted[:kept],
            emitted_probs=self.emitted_probs[:kept],
            start=start,
        )


class TokenizedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the engine receives it: ids only, every default resolved, the seed drawn.

    `arrival` is wall-clock time (`time.time()`) at the API process. `stream` only changes how often
    the engine reports (`sampling.stream_interval`, or else `--stream-interval`). `logprobs` None:
    none are computed. `draft_trees`: whether it reports its rounds.
    """

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    stream: bool = False
    arrival: float = 0.0
    logprobs: LogprobParams | None = None
    draft_trees: bool = False


def derive_seed(seed: int, choice: int) -> int:
    """The seed of choice `choice` of a request with n > 1: the seed itself for choice 0.

    Others take the finaliser of SplitMix64 (Steele, Lea, Flood 2014) at the `choice`-th step of its
    counter, cut to `SEED_BITS` bits.
    """
    if choice == 0:
        return seed
    mask = 2**64 - 1
    z = (seed + choice * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> (64 - SEED_BITS)


def check_choices(n: int, where: str) -> None:
    """Raise unless 1 <= n <= `MAX_CHOICES`."""
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidRequestError(
            f"{where} must be an integer from 1 to {MAX_CHOICES}, got {n}.", param=where
        )
