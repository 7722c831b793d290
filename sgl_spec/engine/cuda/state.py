"""What a round must know of each request, by table row, where the device finds it.

The host decides the parameters and sends all of them when one has changed; they are a few
kilobytes. Penalties and biases are a vocabulary wide and are sent for the row that has them.
Lengths, last tokens and counts belong to the device: rounds move them on before the host has read
what they gave.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sgl_spec.engine.cuda.transfer import send
from sgl_spec.engine.req import Req
from sgl_spec.request import (
    MAX_BIAS,
    MAX_LOGPROB_IDS,
    LogprobParams,
    SamplingParams,
)
from sgl_spec.speculative.rows import ALL_TOKENS, end_ids_of
from sgl_spec_kernels.logprobs import Asked
from sgl_spec_kernels.round_state import RowState
from sgl_spec_kernels.settings import (
    BANNED,
    BIASED,
    ENDS,
    FORCED,
    HAS_BANNED,
    HAS_FORCED,
    HAS_MINIMUM,
    HELD,
    PENALISED,
    RowSettings,
)

_INTS = 7  # of a row's parameters, eight bytes each; then those of float64, then of float32
_FIELDS = _INTS + 1 + 5
_GREEDY = SamplingParams(temperature=0.0, seed=0)


class _Block:
    """The parameters within a block of [13, rows] words; float32 in the first half of theirs."""

    def __init__(self, block: Tensor) -> None:
        rows = block.shape[1]
        self.seed, self.top_k, self.max_nodes = block[0], block[1], block[2]
        self.flags, self.end_from, self.top, self.ids = block[3], block[4], block[5], block[6]
        self.top_p = block[_INTS].view(torch.float64)
        halves = [block[i].view(torch.float32)[:rows] for i in range(_INTS + 1, _FIELDS)]
        self.temperature, self.min_p, self.repetition, self.frequency, self.presence = halves


class DeviceRows:
    """Rows of requests, and behind them the filler, which belongs to nobody and never changes.

    state, settings, asked: what rounds read, [rows + 1] each. filler: the number of the last row.
    """

    def __init__(
        self, num_rows: int, vocab: int, eos_ids: Sequence[int], device: torch.device
    ) -> None:
        self.device, self.vocab, self.filler = device, vocab, num_rows
        self._eos_ids = eos_ids
        rows = num_rows + 1
        self._host = torch.zeros(_FIELDS, rows, dtype=torch.int64)
        self._device = self._host.to(device, copy=True)
        self._params, at = _Block(self._host), _Block(self._device)
        lengths = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self.state = RowState(
            committed=lengths[0],
            last=lengths[1],
            seed=at.seed,
            top_k=at.top_k,
            max_nodes=at.max_nodes,
            top_p=at.top_p,
            temperature=at.temperature,
            min_p=at.min_p,
        )
        self.settings = RowSettings(
            flags=at.flags,
            end_from=at.end_from,
            repetition=at.repetition,
            frequency=at.frequency,
            presence=at.presence,
            marks=torch.zeros(rows, vocab, dtype=torch.uint8, device=device),
            output=torch.zeros(rows, vocab, dtype=torch.int32, device=device),
            bias=torch.zeros(rows, vocab, device=device),
        )
        ids = torch.zeros(rows, MAX_LOGPROB_IDS, dtype=torch.int32, device=device)
        self.asked = Asked(at.top, at.ids, ids)
        self._stale = True
        self._set(self.filler, _GREEDY, 1)

    def open(self, req: Req, max_nodes: int) -> None:
        """A request took its row. max_nodes: of its trees, root included."""
        row, params = req.held.row, None if req.logprobs is None else req.logprobs.params
        self._set(row, req.sampling, max_nodes, params)
        self._set_tokens(row, req)

    def _set(
        self,
        row: int,
        sampling: SamplingParams,
        max_nodes: int,
        logprobs: LogprobParams | None = None,
    ) -> None:
        mine, seed = self._params, sampling.seed
        assert seed is not None
        mine.seed[row] = seed
        mine.top_k[row] = sampling.top_k if sampling.top_k > 0 else ALL_TOKENS
        mine.max_nodes[row] = max_nodes
        mine.top_p[row] = sampling.top_p
        mine.temperature[row] = sampling.temperature
        mine.min_p[row] = sampling.min_p
        mine.repetition[row] = sampling.repetition_penalty
        mine.frequency[row] = sampling.frequency_penalty
        mine.presence[row] = sampling.presence_penalty
        mine.flags[row] = 0
        mine.top[row] = -1 if logprobs is None else logprobs.top_logprobs_num
        mine.ids[row] = 0 if logprobs is None else len(logprobs.token_ids_logprob)
        if logprobs is not None and logprobs.token_ids_logprob:
            wanted = np.array(logprobs.token_ids_logprob, dtype=np.int32)
            send(wanted, self.asked.ids[row, : len(wanted)])
        self._stale = True

    def _set_tokens(self, row: int, req: Req) -> None:
        """What the row says of single tokens, and which of it there is."""
        sampling, flags = req.sampling, 0
        marks = np.zeros(self.vocab, dtype=np.uint8)
        if sampling.penalised:
            flags |= PENALISED
            marks[req.ids] |= HELD
            self._count(row, req.ids[req.prompt_len :])
        ends = end_ids_of(sampling, self._eos_ids)
        if ends:
            flags |= HAS_MINIMUM
            marks[ends] |= ENDS
            self._params.end_from[row] = req.prompt_len + sampling.min_new_tokens
        if sampling.logit_bias:
            flags |= self._bias(row, sampling.logit_bias, marks)
        if flags:
            send(marks, self.settings.marks[row])
        self._params.flags[row] = flags

    def _count(self, row: int, output: Sequence[int]) -> None:
        counts = self.settings.output[row]
        if not output:
            counts.zero_()
            return
        send(np.bincount(output, minlength=self.vocab).astype(np.int32), counts)

    def _bias(
        self, row: int, biases: dict[int, float], marks: np.ndarray[tuple[int], np.dtype[np.uint8]]
    ) -> int:
        """Write a row's biases and mark the tokens whose bias is absolute; the flags of both."""
        tokens = np.fromiter(biases, dtype=np.int64)
        values = np.fromiter(biases.values(), dtype=np.float32)
        banned, forced = values == -MAX_BIAS, values == MAX_BIAS
        marks[tokens[banned]] |= BANNED
        marks[tokens[forced]] |= FORCED
        between = np.zeros(self.vocab, dtype=np.float32)
        between[tokens] = np.where(banned | forced, 0, values)
        send(between, self.settings.bias[row])
        flags: int = BIASED
        flags |= HAS_BANNED if banned.any() else 0
        flags |= HAS_FORCED if forced.any() else 0
        return flags

    def sync(self) -> None:
        """Send parameters that changed."""
        if self._stale:
            send(self._host, self._device)
            self._stale = False
