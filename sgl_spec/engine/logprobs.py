"""Which log-probabilities a forward owes to whom. A batch in which nobody asks costs a look into an
empty dictionary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgl_spec.engine.batch import IntArray, PrefillBatch
from sgl_spec.engine.req import Req
from sgl_spec.layers.transfer import on_device
from sgl_spec.request import LogprobParams, Logprobs
from sgl_spec.speculative.logprobs import Span, read_logprobs
from sgl_spec.speculative.tree import AcceptResult

if TYPE_CHECKING:
    from sgl_spec.models.decoder import Decoder

PerRequest = list[Logprobs | None] | None


class LogprobReader:
    """Knows what the requests in the table's rows ask for, and reads it from a forward."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.vocab = model.config.vocab_size
        self._asked: dict[int, tuple[LogprobParams, int]] = {}

    def open(self, req: Req) -> None:
        """Note what the request in a row asks for."""
        if req.logprobs is not None:
            self._asked[req.held.row] = (req.logprobs.params, req.prompt_len)

    def close(self, row: int) -> None:
        """The row's request ended or was retracted."""
        self._asked.pop(row, None)

    def asked(self, rows: IntArray) -> bool:
        """Whether a request in one of the rows asks for any."""
        return any(row in self._asked for row in rows.tolist())

    def of_prompts(
        self,
        batch: PrefillBatch,
        tokens: npt.NDArray[np.int32],
        hidden: Tensor,
    ) -> PerRequest:
        """Those of prompt tokens that this chunk predicts, the first token of the next chunk
        included. tokens: [rows, width], every request's text. hidden: [T, hidden_size], final."""
        found: list[tuple[int, Span]] = []
        index, following = [], []
        begins = np.cumsum(batch.takes) - batch.takes
        chunks = zip(batch.rows, batch.starts, batch.takes, batch.unscored, begins, strict=True)
        for i, (row, start, take, unscored, begin) in enumerate(chunks if self._asked else ()):
            params, prompt_len = self._asked.get(int(row), (None, 0))
            first, end = max(start, unscored), min(start + take, prompt_len - 1)
            if params is not None and first < end:
                found.append((i, Span(params, int(end - first))))
                index.append(np.arange(first, end) + (begin - start))
                following.append(tokens[row, first + 1 : end + 1].astype(np.int64))
        if not found:
            return None
        read = read_logprobs(
            lambda part: self.model.logits(hidden[part]),
            on_device(np.concatenate(index), hidden.device),
            on_device(np.concatenate(following), hidden.device),
            [span for _, span in found],
            self.vocab,
        )
        return _spread([i for i, _ in found], read, len(batch.rows))

    def of_emitted(
        self, rows: IntArray, accepted: AcceptResult, logits: Tensor, offsets: Tensor
    ) -> PerRequest:
        """Those of the tokens that a walk emits, and of no other node. logits: [T, V], request i's
        nodes from row offsets[i] on. The rest lies on the CPU."""
        asking = [i for i, row in enumerate(rows.tolist()) if row in self._asked]
        if not asking:
            return None
        who = torch.tensor(asking)
        counts = accepted.counts[who]
        walked = torch.arange(accepted.path.shape[1]) < counts[:, None]
        index = on_device((offsets[who, None] + accepted.path[who])[walked], logits.device)
        spans = [
            Span(self._asked[int(rows[i])][0], count)
            for i, count in zip(asking, counts.tolist(), strict=True)
        ]
        emitted = on_device(accepted.tokens[who][walked], logits.device)
        read = read_logprobs(lambda part: logits[part], index, emitted, spans, self.vocab)
        return _spread(asking, read, len(rows))


def _spread(places: list[int], read: list[Logprobs], count: int) -> list[Logprobs | None]:
    """`read` at its places among `count` requests."""
    spread: list[Logprobs | None] = [None] * count
    for place, logprobs in zip(places, read, strict=True):
        spread[place] = logprobs
    return spread
