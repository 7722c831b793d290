"""Between the host and the device of a model."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgl_spec.layers.context import ForwardBatch


def on_device(values: npt.NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """The values as a tensor on `device`; the same memory where they lie there already.

    To a GPU they go in the order of its stream; the host does not wait, and may change them at
    once.
    """
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type == "cuda" and tensor.device.type == "cpu":
        # PyTorch gives pinned memory to nobody else before the copy from it is done.
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def batch_on_device(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    """A batch that was built on the host; its slot table lies on the device already."""
    assert batch.req_to_token.device == device
    found: dict[str, Any] = {field.name: getattr(batch, field.name) for field in fields(batch)}
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    moved: dict[str, Any] = {name: on_device(value, device) for name, value in tensors.items()}
    return replace(batch, **moved)


def wait_for(device: torch.device) -> None:
    """Wait until all that was asked of the device is done: before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
