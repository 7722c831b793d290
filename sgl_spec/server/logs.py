"""One log format for both processes, and what is said of requests."""

from __future__ import annotations

import logging
import time

import msgspec
from tokenizers import Tokenizer

from sgl_spec.messages import OutputChunk
from sgl_spec.request import TokenizedRequest

logger = logging.getLogger(__name__)

# What probes and scrapers ask for again and again.
POLLED = ("/health", "/health_generate", "/metrics")
BEGINNING_CHARS = 2048  # of a prompt or an output, at level 2


def _not_a_poll(record: logging.LogRecord) -> bool:
    """Whether an access is worth a line. The arguments are uvicorn's: client, method, path, HTTP
    version, status."""
    args = record.args
    return not (isinstance(args, tuple) and len(args) == 5 and _path(args[2]) in POLLED)


def _path(target: object) -> str:
    return str(target).partition("?")[0]


def configure_logging(level: str, process: str) -> None:
    """Log to stderr from `level` on; `process` says which of the two processes speaks."""
    logging.basicConfig(
        level=level.upper(),
        format=f"[%(asctime)s {process}] %(levelname)s %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )
    logging.getLogger("uvicorn.access").addFilter(_not_a_poll)
    # What uvicorn says of its own start and end; `Server` has better words for both.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


class RequestLog:
    """A line when a request comes, and one when it has ended (--log-requests).

    level: 0 to 3, see --log-requests-level.
    """

    def __init__(self, tokenizer: Tokenizer, level: int) -> None:
        self._tokenizer = tokenizer
        self._level = level
        self._outputs: dict[str, list[int]] = {}

    def received(self, request: TokenizedRequest) -> None:
        """A request goes to the engine."""
        self._outputs[request.rid] = []
        about = [f"rid={request.rid}", f"prompt_tokens={len(request.input_ids)}"]
        if self._level >= 1:
            about.append(f"sampling_params={msgspec.json.encode(request.sampling).decode()}")
        logger.info("Receive: %s", ", ".join(about + self._text("prompt", request.input_ids)))

    def chunk(self, request: TokenizedRequest, chunk: OutputChunk) -> None:
        """The engine has told something of it."""
        ids = self._outputs.get(request.rid, [])
        ids += chunk.ids
        if chunk.finish is None:
            return
        self._outputs.pop(request.rid, None)
        about = [
            f"rid={request.rid}",
            f"finish_reason={chunk.finish.kind}",
            f"prompt_tokens={chunk.prompt_tokens}",
            f"completion_tokens={chunk.completion_tokens}",
            f"cached_tokens={chunk.cached_tokens}",
            f"e2e_latency={time.time() - request.arrival:.3f}",
        ]
        if chunk.queued_s is not None:
            about.append(f"queue_time={chunk.queued_s:.3f}")
        if chunk.spec is not None and chunk.spec.verify_ct:
            about.append(f"spec_accept_length={chunk.spec.emitted / chunk.spec.verify_ct:.2f}")
        logger.info("Finish: %s", ", ".join(about + self._text("output", ids)))

    def _text(self, name: str, ids: list[int]) -> list[str]:
        if self._level < 2:
            return []
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return [f"{name}={text[: None if self._level > 2 else BEGINNING_CHARS]!r}"]
