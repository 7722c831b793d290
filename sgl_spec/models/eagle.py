"""EAGLE's draft head: a decoder layer or two over the target's embedding and final hidden rows.

    x[p] = fc(cat(embed(token of p + 1), feature of p))
    feature'[p] = layers(x)[p]                    no norm before the first layer, none at the end
    logits[p] = target head(feature'[p])          predicts the token of p + 2

The feature of a committed position is the target's final-normed hidden row, that of a draft node
its parent's feature'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sgl_spec.layers.backend import resolve_backend
from sgl_spec.layers.context import ForwardBatch, KVCache
from sgl_spec.layers.linear import Linear, use_tuned
from sgl_spec.models.decoder import Decoder
from sgl_spec.models.draft_config import HeadConfig
from sgl_spec.models.layer import DecoderLayer, LayerStack, total_bytes
from sgl_spec.models.stored import WeightSource

if TYPE_CHECKING:
    from sgl_spec.models.fused import FusedLayers  # needs triton, which a CPU does without


@dataclass(frozen=True, slots=True)
class EagleNames:
    """How the tensors of the head are called: `fc` (".weight", ".bias" follow), and each layer."""

    fc: str
    layers: tuple[str, ...]


class EagleHead:
    """A `DraftModel` in EAGLE's layout. It shares the target's embedding and output layer.

    hot_ids: [n] int64, the target tokens it may draft (a token map), None for all of them.
    """

    token_ids: Tensor | None

    def __init__(
        self,
        name: str,
        config: HeadConfig,
        weights: WeightSource,
        names: EagleNames,
        target: Decoder,
        hot_ids: Tensor | None = None,
    ) -> None:
        assert config.layers.hidden_size == target.config.hidden_size
        self.name = name
        self.width = config.layers.hidden_size
        self.capture = (target.config.num_layers,)
        bias = weights(f"{names.fc}.bias") if config.fc_bias else None
        self._fc = Linear(weights(f"{names.fc}.weight"), bias)
        layers = [
            DecoderLayer(config.layers, weights, prefix, input_norm=index > 0)
            for index, prefix in enumerate(names.layers)
        ]
        backend = resolve_backend(
            target.backend.name, target.device, config.layers.head_dim, target.dtype
        )
        self._stack = LayerStack(config.layers, layers, target.dtype, target.device, backend)
        self._embedding = target.embedding
        self.token_ids = None
        self._head, self.logit_width = target.lm_head, target.config.vocab_size
        if hot_ids is not None:
            self.token_ids = hot_ids.to(target.device)
            self._head, self.logit_width = target.head_rows(self.token_ids), len(hot_ids)
        if self._stack.fused is not None:
            own = [] if hot_ids is None else [self._head]
            use_tuned([*self._stack.linears(), self._fc, *own], target.device)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's final hidden rows are the features."""
        return features

    def forward(self, batch: ForwardBatch, features: Tensor | None, kv: KVCache) -> Tensor:
        """See `DraftModel.forward`; features are required."""
        assert features is not None
        if self._stack.fused is not None:
            return self._forward_fused(self._stack.fused, batch, features, kv)
        embedded = self._embedding.index_select(0, batch.tokens)
        hidden = self._fc(torch.cat((embedded, features), dim=-1))
        for layer, k_cache, v_cache, shared in self._stack.each(batch, kv):
            hidden = layer(hidden, k_cache, v_cache, shared)
        return hidden

    def _forward_fused(
        self, fused: FusedLayers, batch: ForwardBatch, features: Tensor, kv: KVCache
    ) -> Tensor:
        stream = self._fc(fused.beside(self._embedding, batch.tokens, features))
        steps = fused.each(batch, self._stack.caches(kv))
        stream, (last, inner) = fused.run(stream, steps, x=stream)
        last.down.add_into(stream, inner)
        return stream

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, logit_width] float32 of rows that `forward` returned."""
        return self.raw_logits(hidden).float()

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """`logits` in the head's dtype."""
        return self._head(hidden)

    def reserve(self, max_batch: int, max_q_len: int, positions: int = 0) -> None:
        """See `Decoder.reserve`."""
        self._stack.reserve(max_batch, max_q_len, positions)

    def new_kv_cache(self, num_slots: int) -> KVCache:
        """Empty keys and values for `num_slots` tokens of every draft layer."""
        return self._stack.new_kv_cache(num_slots)

    @property
    def weight_bytes(self) -> int:
        """Memory of the head's own weights, the rows of a token map among them."""
        own = [*self._fc.tensors(), *self._stack.tensors()]
        return total_bytes(own if self.token_ids is None else [*own, *self._head.tensors()])

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one KV slot over all draft layers."""
        return self._stack.kv_bytes_per_token
