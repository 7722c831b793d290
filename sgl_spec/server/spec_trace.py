"""The rounds of all requests in a file (--spec-trace), which `sgl-spec trace` reads."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

import orjson
from tokenizers import Tokenizer

from sgl_spec.errors import ConfigError
from sgl_spec.messages import OutputChunk
from sgl_spec.request import TokenizedRequest
from sgl_spec.server.draft_trees import TreeWords
from sgl_spec.text import PROMPT_TAIL, OutputText

logger = logging.getLogger(__name__)


class SpecTrace:
    """Writes a line of JSON when a request has ended. source: the algorithm that drafts."""

    def __init__(self, directory: str, tokenizer: Tokenizer, source: str | None) -> None:
        self._tokenizer, self._source = tokenizer, source
        self._chunks: dict[str, list[OutputChunk]] = {}
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
        self.path = Path(directory) / name
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO | None = self.path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"--spec-trace {directory} cannot be written to: {error.strerror}.",
                param="spec_trace",
            ) from error
        logger.info("Rounds are written to %s", self.path)

    def chunk(self, request: TokenizedRequest, chunk: OutputChunk) -> None:
        """The engine has told something of a request."""
        chunks = self._chunks.setdefault(request.rid, [])
        chunks.append(chunk)
        if chunk.finish is not None:
            del self._chunks[request.rid]
            self._write(self._line(request, chunks))

    def _line(self, request: TokenizedRequest, chunks: list[OutputChunk]) -> dict[str, Any]:
        ids = [token for chunk in chunks for token in chunk.ids]
        rounds = [one for chunk in chunks for one in chunk.draft_trees]
        sampling, finish = request.sampling, chunks[-1].finish
        assert finish is not None
        text = OutputText(
            self._tokenizer,
            sampling.stop,
            skip_special_tokens=sampling.skip_special_tokens,
            no_stop_trim=sampling.no_stop_trim,
            prompt_tail=request.input_ids[-PROMPT_TAIL:],
        )
        return {
            "rid": request.rid,
            "prompt_tokens": len(request.input_ids),
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "finish_reason": finish.kind,
            "text": text.finish(ids, finish.matched),
            "output_ids": ids,
            "rounds": TreeWords(self._tokenizer, request, self._source).of(rounds, ids),
        }

    def _write(self, line: dict[str, Any]) -> None:
        """A disk that is full ends the trace, not the server."""
        if self._file is None:
            return
        try:
            self._file.write(orjson.dumps(line) + b"\n")
        except OSError as error:
            logger.error("Rounds are not written any more to %s: %s", self.path, error)
            self._file.close()
            self._file = None
