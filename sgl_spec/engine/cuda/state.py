"""What a round must know of each request, by table row, where the device finds it.

The host decides the parameters and sends all of them when one has changed; they are a few
kilobytes. Lengths and last tokens belong to the device: rounds move them on before the host has
read what they gave.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sgl_spec.engine.cuda.transfer import send
from sgl_spec.layers.transfer import on_device
from sgl_spec.request import SamplingParams
from sgl_spec.speculative.rows import ALL_TOKENS
from sgl_spec_kernels.round_state import RowState

_FIELDS = 6  # of a row's parameters, eight bytes each


def _views(block: Tensor, committed: Tensor, last: Tensor) -> RowState:
    """The parameters within a block of [6, rows] words; float32 in the first half of theirs."""
    rows = block.shape[1]
    temperature, min_p = (block[i].view(torch.float32)[:rows] for i in (4, 5))
    return RowState(
        committed=committed,
        last=last,
        seed=block[0],
        top_k=block[1],
        max_nodes=block[2],
        top_p=block[3].view(torch.float64),
        temperature=temperature,
        min_p=min_p,
    )


class DeviceRows:
    """Rows of requests, and behind them the filler, which belongs to nobody and never changes.

    state: what rounds read, [rows + 1] each. filler: the number of the last row.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.device = device
        self.filler = num_rows
        self._host = torch.zeros(_FIELDS, num_rows + 1, dtype=torch.int64)
        self._device = self._host.to(device, copy=True)
        lengths = torch.zeros(2, num_rows + 1, dtype=torch.int64)
        self._params = _views(self._host, *lengths)
        self.state = _views(self._device, *lengths.to(device, copy=True))
        self._stale = True
        self.set_params(self.filler, SamplingParams(temperature=0.0, seed=0), 1)

    def set_params(self, row: int, sampling: SamplingParams, max_nodes: int) -> None:
        """A request took a row. max_nodes: of its trees, root included."""
        mine, seed = self._params, sampling.seed
        assert seed is not None
        mine.seed[row] = seed
        mine.top_k[row] = sampling.top_k if sampling.top_k > 0 else ALL_TOKENS
        mine.max_nodes[row] = max_nodes
        mine.top_p[row] = sampling.top_p
        mine.temperature[row] = sampling.temperature
        mine.min_p[row] = sampling.min_p
        self._stale = True

    def sync(self) -> None:
        """Send parameters that changed."""
        if self._stale:
            send(self._host, self._device)
            self._stale = False

    def place(
        self, rows: np.ndarray[tuple[int], np.dtype[np.int64]], committed: Tensor, last: Tensor
    ) -> None:
        """Set where texts stand. committed, last: int64, on the host or on the device."""
        at = on_device(rows, self.device)
        self.state.committed.index_copy_(0, at, on_device(committed, self.device))
        self.state.last.index_copy_(0, at, on_device(last, self.device))
