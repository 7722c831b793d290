"""One decoder for Llama, Mistral, Qwen2 and Qwen3; what differs between them is a flag."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sgl_spec.layers.backend import Kernels, resolve_backend
from sgl_spec.layers.context import ForwardBatch, KVCache
from sgl_spec.layers.linear import Linear, use_tuned
from sgl_spec.layers.norm_rope import rms_norm
from sgl_spec.layers.parallel import ALONE, GatheredLinear, Ranks
from sgl_spec.models.config import ModelConfig
from sgl_spec.models.features import Features
from sgl_spec.models.layer import DecoderLayer, LayerStack, total_bytes
from sgl_spec.models.shard import Shard
from sgl_spec.models.stored import WeightSource

if TYPE_CHECKING:
    from sgl_spec.models.fused import FusedLayers  # needs triton, which a CPU does without


class Decoder:
    """A decoder-only language model over slot-addressed KV.

    Use under `torch.inference_mode()`. config: what it was built from, whole where ranks share the
    model; dtype, device: of its weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        attention_backend: str | None = None,
        ranks: Ranks = ALONE,
        *,
        strict: bool = False,
    ) -> None:
        """attention_backend: one of `layers.backend.BACKENDS`, None for the device's default.
        ranks: those that share the model; `weights` gives this one's part. strict: see `Backend`.
        """
        self.config, self.ranks = config, ranks
        shard = Shard(config, ranks)
        self.embedding = weights("model.embed_tokens.weight")
        self.dtype = self.embedding.dtype
        self.device = self.embedding.device
        layers = [
            DecoderLayer(shard.config, weights, f"model.layers.{index}", ranks=ranks)
            for index in range(config.num_layers)
        ]
        self.backend = resolve_backend(
            attention_backend, self.device, config.head_dim, self.dtype, strict=strict
        )
        self.stack = LayerStack(shard.config, layers, self.dtype, self.device, self.backend)
        self.norm = weights("model.norm.weight")
        self.lm_head = self._head(shard, weights)
        if self.stack.fused is not None:
            use_tuned([*self.stack.linears(), self.lm_head], self.device, strict=strict)

    def _head(self, shard: Shard, weights: WeightSource) -> Linear:
        tied = self.config.tie_word_embeddings
        weight = shard.words(self.embedding) if tied else weights("lm_head.weight")
        return Linear(weight) if self.ranks.size == 1 else GatheredLinear(weight, self.ranks)

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Write the KV of every row at `batch.slots`; the final-normed hidden [R, hidden_size] of
        the rows that are read."""
        if self.stack.fused is not None:
            return self._forward_fused(self.stack.fused, batch, kv, ())[0]
        hidden = self.embedding.index_select(0, batch.tokens)
        for layer, k_cache, v_cache, shared in self.stack.each(batch, kv):
            hidden = layer(hidden, k_cache, v_cache, shared)
        return rms_norm(hidden, self.norm, self.config.rms_norm_eps)

    def forward_features(
        self, batch: ForwardBatch, kv: KVCache, layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """`forward`, and what the rows were on the way: [T, len(layers) * hidden_size].

        layers: which rows, concatenated in this order. l < num_layers: the residual stream that
        enters layer l (so 0 is the embedding); num_layers: the final-normed hidden, for which all
        rows must be read.
        """
        count = self.config.num_layers
        assert layers, "nothing to capture"
        assert all(0 <= layer <= count for layer in layers), f"{layers} of {count} layers"
        assert batch.wanted is None or count not in layers, "the features are of all rows"
        if self.stack.fused is not None:
            return self._forward_fused(self.stack.fused, batch, kv, layers)
        wanted: dict[int, Tensor] = {}
        hidden = self.embedding.index_select(0, batch.tokens)
        for index, (layer, k_cache, v_cache, shared) in enumerate(self.stack.each(batch, kv)):
            if index in layers:
                wanted[index] = hidden  # a layer returns a new tensor, this one stays as it is
            hidden = layer(hidden, k_cache, v_cache, shared)
        wanted[count] = rms_norm(hidden, self.norm, self.config.rms_norm_eps)
        return wanted[count], torch.cat([wanted[layer] for layer in layers], dim=-1)

    def _forward_fused(
        self, fused: FusedLayers, batch: ForwardBatch, kv: KVCache, layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """(final-normed hidden, features of `layers`)."""
        eps, count = self.config.rms_norm_eps, self.config.num_layers
        norm = self.stack.layers[0].input_norm
        assert norm is not None
        stream, x = fused.begin(self.embedding, batch.tokens, norm, eps)
        features = Features(layers, stream)
        steps = fused.each(batch, self.stack.caches(kv))
        stream, (last, inner) = fused.run(stream, steps, x=x, features=features)
        hidden = fused.norm(last.down(inner), self.norm, eps, stream)
        if layers == (count,):
            return hidden, hidden
        for place in features.places(count):
            place.copy_(hidden)
        return hidden, features.rows

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, vocab_size] float32 of final-normed rows. hidden: [R, hidden_size]."""
        return self.raw_logits(hidden).float()

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """`logits` in the model's dtype, for kernels that widen them as they read."""
        return self.lm_head(hidden)

    def clock(self) -> float:
        """Seconds that only grow, the same on all ranks: what is decided by them must be, too."""
        now: float = self.ranks.agree(time.perf_counter())
        return now

    @property
    def kernels(self) -> Kernels:
        """Whether the fused kernels run the model, or plain torch."""
        return self.backend.kernels

    def reserve(self, max_batch: int, max_q_len: int, positions: int = 0) -> None:
        """Make the work space of forwards of up to max_batch requests of up to max_q_len rows, at
        rotary positions below `positions`, before they are captured in a CUDA graph. Earlier work
        space stays where it is, for graphs that use it. Nothing to do on plain torch."""
        self.stack.reserve(max_batch, max_q_len, positions)

    def head_rows(self, rows: Tensor) -> Linear:
        """A layer with the given rows [n] int64 of the head, in that order."""
        return Linear(self.lm_head.plain_weight().index_select(0, rows))

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights, the embedding counted beside a repacked head."""
        own = [self.embedding, self.norm, *self.lm_head.tensors()]
        return total_bytes([*own, *self.stack.tensors()])

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one KV slot over all layers."""
        return self.stack.kv_bytes_per_token

    def new_kv_cache(self, num_slots: int) -> KVCache:
        """Empty keys and values for `num_slots` tokens of every layer."""
        return self.stack.new_kv_cache(num_slots)
