"""Messages between the API process and the engine process: msgpack over ZMQ, never pickle.

API -> engine: `ToEngine`, one message each. Engine -> API: `FromEngine`; the chunks of one step
travel together in one `Chunks`, so that a step costs the API process one receive.

Rank 0 of several -> the others: `ToRank`, the calls of its engine in their order, and between them
what it measured. The others -> rank 0: `FromRank`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sgl_spec.request import DraftRound, FinishReason, Logprobs, SpecStats, TokenizedRequest


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Start a request. Answered by `OutputChunk`s, the last of which carries `finish`."""

    request: TokenizedRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request, or all of them when `rid` is None. Each still gets its terminal chunk."""

    rid: str | None


class Control(msgspec.Struct, frozen=True, tag="control"):
    """Ask the engine for something that is no generation; answered by `ControlReply`.

    op: "flush_cache" (drops prefix cache and drafter memory if no request is running), "state",
    "start_profile" (args: see `engine.profiling`) or "stop_profile".
    """

    call_id: int
    op: str
    args: dict[str, Any] = {}


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Abort what runs, then end the engine process."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is ready to serve.

    `info` is plain data for /model_info and /server_info: see `engine.engine.Engine.info`.
    """

    info: dict[str, Any]


class OutputChunk(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one request. Exactly one chunk per request has `finish` set: the last.

    ids: tokens since the previous chunk (possibly none on the last). logprobs: theirs, if asked
    for. prompt_logprobs: on the first chunk, if asked for: those of the prompt's tokens behind
    position `logprob_start_len`, fewer when the request was aborted before it had them.
    queued_s: how long it waited for its first batch; None if it had none. draft_trees: the rounds
    since the previous chunk, if asked for.
    The remaining fields are meaningful on every chunk and final on the last.
    """

    rid: str
    ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    queued_s: float | None = None
    retractions: int = 0
    finish: FinishReason | None = None
    spec: SpecStats | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    draft_trees: list[DraftRound] = []


class Chunks(msgspec.Struct, frozen=True, tag="chunks"):
    """All chunks of one engine step."""

    chunks: list[OutputChunk]


class ControlReply(msgspec.Struct, frozen=True, tag="control_reply"):
    """Answer to `Control`; `ok` False carries the reason in `message`, and in `param` the argument
    that is to blame, if one is."""

    call_id: int
    ok: bool
    message: str = ""
    data: dict[str, Any] = {}
    param: str | None = None


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """`ControlReply.data` of the op "state", as `msgspec.to_builtins` gives it.

    `grammar_queued` counts requests whose grammar is being compiled; they are not among `queued`.
    Token counts are KV slots: used + cached + free == the pool. Names in `_total` only ever grow,
    from the start of the engine. The spec counts leave out tokens sampled by prefill;
    `spec_emitted_total` counts the tokens that rounds gave out (bonus included), entry i of the
    histogram the rounds that kept exactly i draft tokens. `gen_throughput` is in tokens/s over the
    last reporting window.
    """

    running: int
    queued: int
    used_tokens: int
    cached_tokens: int
    free_tokens: int
    held_tokens: int = 0
    grammar_queued: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    cached_tokens_total: int = 0
    requests_total: int = 0
    aborted_total: int = 0
    refused_total: int = 0
    retracted_total: int = 0
    spec_verify_total: int = 0
    spec_proposed_total: int = 0
    spec_accepted_total: int = 0
    spec_emitted_total: int = 0
    spec_histogram: list[int] = []
    gen_throughput: float = 0.0
    drafter: dict[str, Any] = {}


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot start or go on; it ends after sending this."""

    message: str
    config_error: bool = False


class Join(msgspec.Struct, frozen=True, tag="join"):
    """The first message to a rank: which one it is, how many there are, which of its host's GPUs is
    its own, and where they meet (torch.distributed's init_method)."""

    rank: int
    size: int
    local: int
    meeting: str


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Run one step of the engine."""


class PrepareMore(msgspec.Struct, frozen=True, tag="prepare_more"):
    """Use a moment without work; see `engine.engine.Engine.prepare_more`."""


class Agreed(msgspec.Struct, frozen=True, tag="agreed"):
    """Plain data that rank 0 measured, in the middle of a call; see `layers.parallel.Ranks`."""

    value: Any


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """A rank's answer to `Join`. facts: what all ranks must have in common, by name."""

    rank: int
    facts: dict[str, str]


class RankFailed(msgspec.Struct, frozen=True, tag="rank_failed"):
    """A rank cannot go on; it ends after sending this. config_error: see `Failed`."""

    rank: int
    message: str
    config_error: bool = False


ToEngine = Submit | Abort | Control | Shutdown
FromEngine = Ready | Chunks | ControlReply | Failed
ToRank = Join | Submit | Abort | Control | Shutdown | Step | PrepareMore | Agreed
FromRank = Joined | RankFailed

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)
_to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)


def encode(message: ToEngine | FromEngine | ToRank | FromRank) -> bytes:
    """Message to msgpack bytes."""
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """Bytes to a message for the engine; raises `msgspec.ValidationError` on anything else."""
    return _to_engine.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    """Bytes to a message from the engine; raises `msgspec.ValidationError` on anything else."""
    return _from_engine.decode(data)


def decode_to_rank(data: bytes) -> ToRank:
    """Bytes to a message for a rank; raises `msgspec.ValidationError` on anything else."""
    return _to_rank.decode(data)


def decode_from_rank(data: bytes) -> FromRank:
    """Bytes to a message from a rank; raises `msgspec.ValidationError` on anything else."""
    return _from_rank.decode(data)
