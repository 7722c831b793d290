"""How the rounds of a request are worded: token ids with their texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from sgl_spec.request import DraftRound, TokenizedRequest
from sgl_spec.text import PROMPT_TAIL, IncrementalDecoder, token_bytes


class TreeWords:
    """The words for one request's rounds, in their order. source: the algorithm that drafts, None
    where nothing does."""

    def __init__(self, tokenizer: Tokenizer, request: TokenizedRequest, source: str | None) -> None:
        self._tokenizer = tokenizer
        self._source = source
        self._decoder = IncrementalDecoder(
            tokenizer,
            skip_special_tokens=request.sampling.skip_special_tokens,
            prompt_tail=request.input_ids[-PROMPT_TAIL:],
        )
        self._read = self._chars = 0

    def of(self, rounds: Sequence[DraftRound], ids: Sequence[int]) -> list[dict[str, Any]]:
        """rounds: those that follow what was worded before. ids: the whole output so far."""
        return [self._words(one, ids) for one in rounds]

    def _words(self, one: DraftRound, ids: Sequence[int]) -> dict[str, Any]:
        self._push(ids[self._read : one.start])
        begins = self._chars
        return {
            "start": one.start,
            "text_start": begins,
            "source": self._source if len(one.tokens) > 1 else None,
            "tokens": one.tokens,
            "texts": [self._text(token) for token in one.tokens],
            "parents": one.parents,
            "scores": one.scores or None,
            "probs": one.probs,
            "accepted": one.path,
            "output_ids": one.emitted,
            "output_texts": self._push(one.emitted),
            "output_probs": one.emitted_probs,
            "batch_size": one.requests,
            "option": one.option,
            "draft_ms": one.times.draft_ms,
            "verify_ms": one.times.verify_ms,
            "host_ms": one.times.host_ms,
            "round_ms": one.times.round_ms,
        }

    def _push(self, ids: Sequence[int]) -> list[str]:
        """What each of these adds to the text."""
        pieces = [self._decoder.push([token]) for token in ids]
        self._read += len(pieces)
        self._chars += sum(map(len, pieces))
        return pieces

    def _text(self, token: int) -> str:
        return token_bytes(self._tokenizer, token).decode(errors="replace")
