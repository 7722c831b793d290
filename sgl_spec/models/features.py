"""What enters some layers of a forward, kept for a draft head."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class Features:
    """Collects what enters some layers, side by side: [T, len(layers) * hidden_size].

    like: the residual stream [T, hidden_size].
    """

    def __init__(self, layers: Sequence[int], like: Tensor) -> None:
        self._layers = layers
        self._width = like.shape[1]
        self.rows = like.new_empty(len(like), len(layers) * self._width)

    def places(self, layer: int) -> list[Tensor]:
        """Where what enters `layer` goes: [T, hidden_size], as often as it is wanted."""
        places = self.rows.split(self._width, dim=1) if self._layers else ()  # type: ignore[no-untyped-call]
        return [
            place for place, wanted in zip(places, self._layers, strict=True) if wanted == layer
        ]
