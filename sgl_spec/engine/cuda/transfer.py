"""Between the host and the device, in the order of the stream and without waiting for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def pinned(values: Tensor) -> Tensor:
    """A copy that the device may read whenever it comes to it. PyTorch gives such memory to nobody
    else before the copies that were asked for are done."""
    return values.pin_memory() if torch.cuda.is_available() else values.clone()


def send(values: npt.NDArray[Any] | Tensor, to: Tensor) -> None:
    """Copy host values of the same dtype and size into a device tensor. The host may change them
    at once."""
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    to.copy_(pinned(host).view(to.shape), non_blocking=True)


def sent(values: npt.NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """Host values as a new tensor on the device."""
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return pinned(host).to(device, non_blocking=True)


class Fetched:
    """Values on their way to the host."""

    def __init__(self, values: Tensor) -> None:
        on_gpu = values.device.type == "cuda"
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_gpu)
        self._host.copy_(values, non_blocking=True)
        self._arrived = None
        if on_gpu:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> Tensor:
        """The values, once they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host
