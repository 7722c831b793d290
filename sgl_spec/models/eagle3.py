"""EAGLE3's draft head: a layer (or more) over the embedding and a fusion of several target layers.

    feature[p] = fc(norms(cat(captured rows of p)))                          committed positions
    x[p] = cat(input_layernorm(embed(token of p + 1)), hidden_norm(feature[p]))
    feature'[p] = layers(residual stream feature[p], first attention reading x)[p]
    logits[p] = head(norm(feature'[p]))              predicts the token of p + 2

A draft node's feature is its parent's feature', with no `fc`. Options of published heads: the
residual stream starts from the normed feature (norm_before_residual), what goes back into the head
is normed (norm_output), norms before `fc` over all features (input_norm) or each (fc_norm).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sgl_spec.layers.backend import resolve_backend
from sgl_spec.layers.context import ForwardBatch, KVCache
from sgl_spec.layers.linear import Linear, use_tuned
from sgl_spec.layers.norm_rope import rms_norm
from sgl_spec.models.decoder import Decoder
from sgl_spec.models.draft_config import HeadConfig
from sgl_spec.models.layer import DecoderLayer, LayerStack, total_bytes
from sgl_spec.models.stored import WeightSource

if TYPE_CHECKING:
    from sgl_spec.models.fused import FusedLayers  # needs triton, which a CPU does without


@dataclass(frozen=True, slots=True)
class Eagle3Names:
    """How the tensors of the head are called; None or () for those that it does not have.

    fc: ".weight" and ".bias" follow. layers: the prefix of each. lm_head: None where the target's
    (or, tied, the head's own embedding) is used. embedding: None for the target's.
    """

    fc: str
    layers: tuple[str, ...]
    norm: str
    feature_norms: tuple[str, ...]
    input_norm: str | None
    lm_head: str | None
    embedding: str | None


class Eagle3Head:
    """A `DraftModel` in EAGLE3's layout.

    capture: the target layers whose inputs it reads. token_ids: [draft vocabulary] int64, None
    where its columns are the target's tokens.
    """

    def __init__(
        self,
        name: str,
        config: HeadConfig,
        weights: WeightSource,
        names: Eagle3Names,
        target: Decoder,
        *,
        capture: tuple[int, ...],
        token_ids: Tensor | None,
        tied: bool = False,
    ) -> None:
        self.name = name
        self.config = config
        self.width = config.layers.hidden_size
        self.capture = capture
        self.token_ids = None if token_ids is None else token_ids.to(target.device)
        self._shares_embedding, self._embedding = _embedding(weights, names.embedding, target)
        self._shares_head = names.lm_head is None and not tied
        if names.lm_head is not None:
            self._head = Linear(weights(names.lm_head))
        else:
            self._head = Linear(self._embedding) if tied else target.lm_head
        self.logit_width = config.draft_vocab_size or target.config.vocab_size
        bias = weights(f"{names.fc}.bias") if config.fc_bias else None
        self._fc = Linear(weights(f"{names.fc}.weight"), bias)
        self._input_norm = None if names.input_norm is None else weights(names.input_norm)
        self._feature_norms = [weights(norm) for norm in names.feature_norms]
        self._hidden_norm = weights(f"{names.layers[0]}.hidden_norm.weight")
        self._norm = weights(names.norm)
        layers = [DecoderLayer(config.layers, weights, prefix) for prefix in names.layers]
        backend = resolve_backend(
            target.backend.name, target.device, config.layers.head_dim, target.dtype
        )
        self._stack = LayerStack(config.layers, layers, target.dtype, target.device, backend)
        if self._stack.fused is not None:
            own = [] if self._shares_head else [self._head]
            use_tuned([*self._stack.linears(), self._fc, *own], target.device)

    def fuse(self, features: Tensor) -> Tensor:
        """[T, width] of captured rows [T, len(capture) * target hidden]."""
        if self._input_norm is not None:
            features = self._normed(features, self._input_norm)
        if self._feature_norms:
            features = self._normed_parts(features)
        return self._fc(features)

    def forward(self, batch: ForwardBatch, features: Tensor | None, kv: KVCache) -> Tensor:
        """See `DraftModel.forward`; features are required."""
        assert features is not None
        if self._stack.fused is not None:
            return self._forward_fused(self._stack.fused, batch, features, kv)
        steps = self._stack.each(batch, kv)
        first, k_cache, v_cache, shared = next(steps)
        embedded = self._embedding.index_select(0, batch.tokens)
        normed = self._normed(features, self._hidden_norm)
        residual = normed if self.config.norm_before_residual else features
        assert first.input_norm is not None
        both = torch.cat((self._normed(embedded, first.input_norm), normed), dim=-1)
        hidden = first.mix(residual, both, k_cache, v_cache, shared)
        for layer, k_cache, v_cache, shared in steps:
            hidden = layer(hidden, k_cache, v_cache, shared)
        return self._normed(hidden, self._norm) if self.config.norm_output else hidden

    def _forward_fused(
        self, fused: FusedLayers, batch: ForwardBatch, features: Tensor, kv: KVCache
    ) -> Tensor:
        eps = self.config.layers.rms_norm_eps
        steps = fused.each(batch, self._stack.caches(kv))
        first, k_cache, v_cache, shared = next(steps)
        assert first.input_norm is not None
        norms = first.input_norm, self._hidden_norm
        normed = torch.empty_like(features) if self.config.norm_before_residual else None
        both = fused.beside(self._embedding, batch.tokens, features, norms, eps, normed)
        residual = features if normed is None else normed
        stream, added = fused.enter(first, residual, both, k_cache, v_cache, shared)
        stream, (last, inner) = fused.run(stream, steps, added=added)
        if self.config.norm_output:
            return fused.norm(last.down(inner), self._norm, eps, stream)
        last.down.add_into(stream, inner)
        return stream

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, logit_width] float32 of rows that `forward` returned."""
        return self.raw_logits(hidden).float()

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """`logits` in the head's dtype."""
        if not self.config.norm_output:
            hidden = self._normed(hidden, self._norm)
        return self._head(hidden)

    def reserve(self, max_batch: int, max_q_len: int, positions: int = 0) -> None:
        """See `Decoder.reserve`."""
        self._stack.reserve(max_batch, max_q_len, positions)

    def new_kv_cache(self, num_slots: int) -> KVCache:
        """Empty keys and values for `num_slots` tokens of every draft layer."""
        return self._stack.new_kv_cache(num_slots)

    @property
    def weight_bytes(self) -> int:
        """Memory of the head's own weights."""
        own = [*self._fc.tensors(), *self._stack.tensors(), *self._feature_norms]
        own += [self._hidden_norm, self._norm]
        own += [] if self._input_norm is None else [self._input_norm]
        own += [] if self._shares_embedding else [self._embedding]
        return total_bytes(own if self._shares_head else [*own, *self._head.tensors()])

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one KV slot over all draft layers."""
        return self._stack.kv_bytes_per_token

    def _normed_parts(self, features: Tensor) -> Tensor:
        """Each layer's rows by their own norm."""
        count, fused = len(self._feature_norms), self._stack.fused
        pairs = zip(features.chunk(count, dim=-1), self._feature_norms, strict=True)
        if fused is None:
            return torch.cat([self._normed(part, norm) for part, norm in pairs], dim=-1)
        out = torch.empty_like(features)
        for (part, norm), into in zip(pairs, out.chunk(count, dim=-1), strict=True):
            fused.norm(part, norm, self.config.layers.rms_norm_eps, out=into)
        return out

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        eps, fused = self.config.layers.rms_norm_eps, self._stack.fused
        return rms_norm(x, weight, eps) if fused is None else fused.norm(x, weight, eps)


def _embedding(weights: WeightSource, name: str | None, target: Decoder) -> tuple[bool, Tensor]:
    """(whether it is the target's, the embedding). A stored copy of the target's is not kept."""
    if name is None:
        return True, target.embedding
    own = weights(name)
    if own.shape == target.embedding.shape and torch.equal(own, target.embedding):
        return True, target.embedding
    return False, own
