"""What a drafter that follows the target's KV is told of each forward (`base.KVDrafter`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgl_spec.engine.batch import PrefillBatch, following_tokens
from sgl_spec.layers.context import ForwardBatch, KVCache
from sgl_spec.layers.transfer import on_device
from sgl_spec.speculative.base import DraftBatch, Drafter, KVDrafter, follows_kv
from sgl_spec.speculative.tree import AcceptResult

if TYPE_CHECKING:
    from sgl_spec.models.decoder import Decoder


class Follower:
    """Runs the target and hands on what its drafter wants of it; any other drafter costs nothing
    here."""

    def __init__(self, model: Decoder, kv: KVCache, drafter: Drafter | None) -> None:
        self.model = model
        self.kv = kv
        self.drafter: KVDrafter | None = drafter if follows_kv(drafter) else None
        self.capture = () if self.drafter is None else self.drafter.capture

    @property
    def reads_hidden(self) -> bool:
        """Whether the drafter wants the final hidden of every row."""
        return self.model.config.num_layers in self.capture

    def run(self, forward: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """The target's final-normed hidden [R, H] of the rows that are read, and the features
        [T, C] if any are wanted."""
        if self.capture:
            return self.model.forward_features(forward, self.kv, self.capture)
        return self.model.forward(forward, self.kv), None

    def open(self, row: int, cached: int) -> None:
        """A request takes a row with so many tokens from the prefix cache."""
        if self.drafter is not None:
            self.drafter.open(row, cached)

    def prefilled(
        self,
        forward: ForwardBatch,
        batch: PrefillBatch,
        texts: npt.NDArray[np.int32],
        features: Tensor | None,
    ) -> None:
        """Prompt rows were run. texts: [rows, width], with the tokens that were drawn behind
        them."""
        if self.drafter is not None:
            following = torch.from_numpy(following_tokens(batch, texts))
            self.drafter.prefilled(forward, following, features)

    def verified(
        self, draft: DraftBatch, kept: AcceptResult, offsets: Tensor, features: Tensor | None
    ) -> None:
        """A round is over. kept: its paths, as far as the requests took them. offsets: [B], first
        verified row of each request; both on the CPU. features: [T, C] of the verified rows."""
        if self.drafter is None:
            return
        if features is not None:
            step = torch.arange(kept.path.shape[1])
            nodes = (offsets[:, None] + kept.path)[step < kept.counts[:, None]]
            features = features[on_device(nodes, features.device)]
        self.drafter.verified(draft, kept.counts, features)

    def written(self, row: int, committed: int) -> int:
        """Leading positions of a row with all KV, of `committed` that have the target's."""
        if self.drafter is None:
            return committed
        return min(committed, self.drafter.written_len(row))
