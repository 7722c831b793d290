"""Between the host and the device without waiting, in the order of the stream. See also
`layers.transfer`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def send(values: npt.NDArray[Any] | Tensor, to: Tensor) -> None:
    """Copy host values of the same dtype and size into a device tensor. The host may change them
    at once."""
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if to.device.type == "cuda":
        host = host.pin_memory()  # PyTorch gives it to nobody else before the copy is done
    to.copy_(host.view(to.shape), non_blocking=True)


class Fetched:
    """Values on their way to the host."""

    def __init__(self, values: Tensor) -> None:
        on_gpu = values.device.type == "cuda"
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_gpu)
        self._host.copy_(values, non_blocking=True)
        self._arrived = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> Tensor:
        """The values, once they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host
