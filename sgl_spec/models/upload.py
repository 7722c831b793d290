"""Weights from mapped files into a GPU's memory, without a second copy of any of them there."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK_BYTES = 64 << 20


class Upload:
    """Two buffers of pinned memory: one is filled from the file while the other is on its way.

    A copy straight from a mapped file would go through the driver's own small buffer, page by page,
    in one thread; filling a buffer takes all of them.
    """

    def __init__(self, device: torch.device, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._device = device
        gpu = device.type == "cuda"
        self._buffers = [
            torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=gpu) for _ in range(2)
        ]
        event = torch.cuda.Event if gpu else lambda: None
        self._sent = [event() for _ in self._buffers]
        self._next = 0

    def copy(self, source: Tensor, out: Tensor) -> None:
        """out[...] = source, in out's dtype, in the order of the device's current stream; `source`
        has been read when this returns. out: contiguous, on the device."""
        if out.dtype != source.dtype:
            stored = torch.empty(source.shape, dtype=source.dtype, device=self._device)
            self.copy(source, stored)
            out.copy_(stored)
            return
        assert out.is_contiguous(), "a weight is filled as a whole"
        assert out.shape == source.shape
        raw = source.contiguous().view(-1).view(torch.uint8)
        into = out.view(-1).view(torch.uint8)
        size = len(self._buffers[0])
        for start in range(0, len(raw), size):
            self._send(raw[start : start + size], into[start : start + size])

    def _send(self, raw: Tensor, into: Tensor) -> None:
        buffer, sent = self._buffers[self._next], self._sent[self._next]
        if sent is not None:
            sent.synchronize()  # at once where it was never recorded
        staged = buffer[: len(raw)].copy_(raw)
        into.copy_(staged, non_blocking=True)
        if sent is not None:
            sent.record()
        self._next = 1 - self._next
