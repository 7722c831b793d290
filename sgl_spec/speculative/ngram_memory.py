"""Zeroed arrays reserved at full size whose memory arrives page by page, as they are written."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt


def lazy_zeros(shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array of zeros that costs memory only where it is written.

    NumPy would ask for huge pages, and a first touch then can stall for milliseconds while the
    system clears or makes one; small pages cost some microseconds each and never more.
    """
    shape = (shape,) if isinstance(shape, int) else shape
    kind = np.dtype(dtype)
    pages = mmap.mmap(-1, max(1, math.prod(shape) * kind.itemsize))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, kind, count=math.prod(shape)).reshape(shape)
