"""How the tokens of each request row are drawn: its parameters, and counts of its text where they
ask for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from sgl_spec.engine.batch import IntArray
from sgl_spec.engine.req import Req
from sgl_spec.layers.transfer import on_device
from sgl_spec.request import SamplingParams
from sgl_spec.speculative.penalties import TokenCounts
from sgl_spec.speculative.sampling import SamplingRows, build_rows
from sgl_spec.speculative.tree import AcceptResult

if TYPE_CHECKING:
    from sgl_spec.models.decoder import Decoder


class RowSampling:
    """See the module. num_rows: request rows. counts: whether to count texts; without, penalties
    are left out."""

    def __init__(self, model: Decoder, num_rows: int, *, counts: bool = True) -> None:
        self._config, self._device, self._num_rows = model.config, model.device, num_rows
        self._counts_texts = counts
        self._params: dict[int, tuple[SamplingParams, int]] = {}
        self._built: tuple[bytes, SamplingRows] | None = None
        self._counts: TokenCounts | None = None  # made when a request with penalties comes
        self._counted: npt.NDArray[np.bool_] = np.zeros(num_rows, dtype=np.bool_)

    def open(self, req: Req) -> None:
        """A request took a row."""
        row, sampling = req.held.row, req.sampling
        if not self._counts_texts:
            sampling = replace(
                sampling, frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0
            )
        penalised = sampling.penalised
        self._params[row] = (sampling, req.prompt_len)
        self._built = None
        self._counted[row] = penalised
        if penalised:
            if self._counts is None:
                self._counts = TokenCounts(self._num_rows, self._config.vocab_size, self._device)
            self._counts.start(row, req.ids[: req.prompt_len], req.ids[req.prompt_len :])

    def of(self, rows: IntArray) -> SamplingRows:
        """Parameters of a batch, built again only when its membership changes."""
        key = rows.tobytes()
        if self._built is None or self._built[0] != key:
            params = [self._params[row] for row in rows.tolist()]
            built = build_rows(
                [p for p, _ in params],
                [n for _, n in params],
                self._config.eos_token_ids,
                self._device,
                counts=self._counts,
                request_rows=rows.tolist(),
            )
            self._built = (key, built)
        return self._built[1]

    def count(self, rows: IntArray, accepted: AcceptResult) -> None:
        """Add new tokens to the counts of the requests that have penalties."""
        counted = torch.from_numpy(self._counted[rows])
        if self._counts is None or not bool(counted.any()):
            return
        new = torch.arange(accepted.tokens.shape[1]) < accepted.counts[:, None]
        new &= counted[:, None]
        row_of = torch.from_numpy(rows)[:, None].expand_as(new)
        pairs = on_device(torch.stack((row_of[new], accepted.tokens[new])), self._device)
        self._counts.add(pairs[0], pairs[1])
