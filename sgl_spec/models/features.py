"""What enters some layers of a forward, kept for a draft head."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class Features:
    """Collects what enters some layers, side by side: [T, len(layers) * hidden_size]."""

    def __init__(self, layers: Sequence[int], stream: Tensor) -> None:
        self._layers = layers
        self._stream = stream
        self.rows = stream.new_empty(len(stream), len(layers) * stream.shape[1])

    def keep(self, layer: int, rows: Tensor | None = None) -> None:
        """What enters `layer`: the stream as it is now, or `rows`."""
        source = self._stream if rows is None else rows
        width = source.shape[1]
        for place, wanted in enumerate(self._layers):
            if wanted == layer:
                self.rows[:, place * width : (place + 1) * width].copy_(source)
