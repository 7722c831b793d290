"""From a step's output to what a request reports: the records it keeps and the chunks it sends."""

from __future__ import annotations

from sgl_spec.engine.batch import StepOutput
from sgl_spec.engine.metrics import EngineCounters
from sgl_spec.engine.req import Req
from sgl_spec.messages import OutputChunk
from sgl_spec.request import Logprobs


def keep_logprobs(reqs: list[Req], output: StepOutput) -> None:
    """Take what a step gave, cut where the tokens were."""
    for req, prompt in zip(reqs, output.prompt_logprobs or (), strict=False):
        if prompt is not None and req.logprobs is not None:
            req.logprobs.prompt.extend(prompt)
    for req, new in zip(reqs, output.logprobs or (), strict=False):
        if new is not None and req.logprobs is not None:
            kept = req.output_len - len(req.logprobs.output)
            req.logprobs.output.extend(new.part(0, kept))


def count_round(
    counters: EngineCounters, reqs: list[Req], output: StepOutput, taken: list[int]
) -> None:
    """Count a round of speculation. taken: tokens each request kept; who kept none had ended."""
    for req, tokens, proposed, kept in zip(
        reqs, output.tokens, output.proposed, taken, strict=True
    ):
        if kept:
            accepted = min(kept, len(tokens) - 1)
            req.spec.add_round(proposed=proposed, accepted=accepted, emitted=kept)
            counters.add_round(proposed=proposed, accepted=accepted, emitted=kept)


def is_due(req: Req, stream_interval: int) -> bool:
    """Whether a running request reports now: the first token at once, then every so many; its own
    interval goes before the server's, `stream_interval`."""
    interval = req.sampling.stream_interval or stream_interval
    fresh = req.output_len - req.reported
    enough = fresh >= interval or (fresh > 0 and req.reported == 0)
    return req.stream and enough


def chunk_of(req: Req) -> OutputChunk:
    """What a request has to tell since its last chunk."""
    ids = req.ids[req.prompt_len + req.reported :]
    logprobs, prompt_logprobs = _fresh_logprobs(req)
    req.reported = req.output_len
    return OutputChunk(
        rid=req.rid,
        ids=ids,
        prompt_tokens=req.prompt_len,
        completion_tokens=req.output_len,
        cached_tokens=req.cached_tokens,
        queued_s=req.queued_s,
        retractions=max(req.admissions - 1, 0) if req.finish else 0,
        finish=req.finish,
        spec=req.spec if req.finish is not None and req.spec.verify_ct else None,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        draft_trees=[] if req.trees is None else req.trees.take(),
    )


def _fresh_logprobs(req: Req) -> tuple[Logprobs | None, Logprobs | None]:
    """Those of the output tokens that no chunk has reported, and the prompt's on the first."""
    record = req.logprobs
    if record is None:
        return None, None
    prompt = None if record.prompt_sent else record.prompt
    record.prompt_sent = True
    return record.output.part(req.reported), prompt


def too_long(prompt: int, new: int, longest: int) -> str:
    """Why a request is refused that can never run. longest: what the pool holds for one."""
    return (
        f"Requested token count exceeds what the KV pool can hold for one request: {prompt} prompt "
        f"+ {new} new tokens > {longest}. Lower max_new_tokens or raise --max-total-tokens."
    )
