"""Where a mask is true, found fast."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def true_entries(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns [n] int64 of the true entries of a mask [r, V], row by row, columns
    rising."""
    if mask.device.type != "cpu":
        rows, columns = torch.nonzero(mask, as_tuple=True)
        return rows, columns
    flat = torch.from_numpy(np.flatnonzero(mask.numpy()))  # four times as fast as torch's
    if mask.shape[0] == 1:
        return torch.zeros_like(flat), flat
    rows = flat.div(mask.shape[1], rounding_mode="floor")
    return rows, flat - rows * mask.shape[1]
