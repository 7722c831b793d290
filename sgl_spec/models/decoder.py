"""One decoder for Llama, Mistral, Qwen2 and Qwen3; what differs between them is a flag."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_spec.layers.attention import plan_attention, store_and_attend
from sgl_spec.layers.context import ForwardBatch, KVCache
from sgl_spec.layers.linear import Linear
from sgl_spec.layers.norm_rope import RotaryRows, rms_norm, rotary_rows, rotate
from sgl_spec.models.config import ModelConfig
from sgl_spec.models.rope import attention_factor, inverse_frequencies
from sgl_spec_kernels.tree_attn_ref import AttnPlan

WeightSource = Callable[[str], Tensor]
"""A weight by its Hugging Face name, in the dtype and on the device of the model."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """What every layer of one forward reads."""

    rotary: RotaryRows
    plan: AttnPlan
    slots: Tensor


class DecoderLayer:
    """Attention and MLP, each behind an RMSNorm and added to the residual stream."""

    def __init__(self, config: ModelConfig, weights: WeightSource, prefix: str) -> None:
        self.eps = config.rms_norm_eps
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim

        def linear(names: tuple[str, ...], bias: bool) -> Linear:
            stacked = [weights(f"{prefix}.{name}.weight") for name in names]
            biases = [weights(f"{prefix}.{name}.bias") for name in names] if bias else []
            return Linear(
                torch.cat(stacked) if len(stacked) > 1 else stacked[0],
                torch.cat(biases) if biases else None,
            )

        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.qkv = linear(qkv, config.attention_bias)
        self.output = linear(("self_attn.o_proj",), config.output_bias)
        self.gate_up = linear(("mlp.gate_proj", "mlp.up_proj"), config.mlp_bias)
        self.down = linear(("mlp.down_proj",), config.mlp_bias)
        self.input_norm = weights(f"{prefix}.input_layernorm.weight")
        self.post_norm = weights(f"{prefix}.post_attention_layernorm.weight")
        self.qk_norm = None
        if config.qk_norm:
            q_norm = weights(f"{prefix}.self_attn.q_norm.weight")
            k_norm = weights(f"{prefix}.self_attn.k_norm.weight")
            self.qk_norm = (q_norm, k_norm)

    def __call__(self, hidden: Tensor, k_cache: Tensor, v_cache: Tensor, shared: _Shared) -> Tensor:
        """hidden: [T, hidden_size], the residual stream; k_cache, v_cache: this layer's."""
        normed = rms_norm(hidden, self.input_norm, self.eps)
        attended = self._attention(normed, k_cache, v_cache, shared)
        hidden = self.output.add_to(hidden, attended)
        gate, up = self.gate_up(rms_norm(hidden, self.post_norm, self.eps)).chunk(2, dim=-1)
        return self.down.add_to(hidden, F.silu(gate).mul_(up))

    def tensors(self) -> list[Tensor]:
        """Every weight."""
        linears = (self.qkv, self.output, self.gate_up, self.down)
        stored = [tensor for linear in linears for tensor in linear.tensors()]
        return [*stored, self.input_norm, self.post_norm, *(self.qk_norm or ())]

    def _attention(
        self, normed: Tensor, k_cache: Tensor, v_cache: Tensor, shared: _Shared
    ) -> Tensor:
        qkv = self.qkv(normed).view(len(normed), -1, self.head_dim)  # [T, q + k + v heads, d]
        qk = qkv[:, : -self.num_kv_heads]
        if self.qk_norm is not None:
            q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
            q_norm, k_norm = self.qk_norm
            qk = torch.cat((rms_norm(q, q_norm, self.eps), rms_norm(k, k_norm, self.eps)), dim=1)
        qk = rotate(qk, shared.rotary)
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        v = qkv[:, -self.num_kv_heads :]
        return store_and_attend(q, k, v, k_cache, v_cache, shared.slots, shared.plan)


class Decoder:
    """A decoder-only language model over slot-addressed KV.

    Use under `torch.inference_mode()`. config: what it was built from; dtype, device: of its
    weights.
    """

    def __init__(self, config: ModelConfig, weights: WeightSource) -> None:
        self.config = config
        self.embedding = weights("model.embed_tokens.weight")
        self.dtype = self.embedding.dtype
        self.device = self.embedding.device
        self.layers = [
            DecoderLayer(config, weights, f"model.layers.{index}")
            for index in range(config.num_layers)
        ]
        self.norm = weights("model.norm.weight")
        tied = config.tie_word_embeddings
        self.lm_head = Linear(self.embedding if tied else weights("lm_head.weight"))
        self._inv_freq = inverse_frequencies(config.rope, config.head_dim).to(self.device)
        self._attention_factor = attention_factor(config.rope)

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """Write the KV of every row at `batch.slots`; the final-normed hidden [T, hidden_size]."""
        shared = self._share(batch)
        hidden = self.embedding.index_select(0, batch.tokens)
        for layer, k_cache, v_cache in zip(self.layers, kv.k.unbind(), kv.v.unbind(), strict=True):
            hidden = layer(hidden, k_cache, v_cache, shared)
        return rms_norm(hidden, self.norm, self.config.rms_norm_eps)

    def forward_features(
        self, batch: ForwardBatch, kv: KVCache, layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """`forward`, and what the rows were on the way: [T, len(layers) * hidden_size].

        layers: which rows, concatenated in this order. l < num_layers: the residual stream that
        enters layer l (so 0 is the embedding); num_layers: the final-normed hidden.
        """
        count = self.config.num_layers
        assert layers, "nothing to capture"
        assert all(0 <= layer <= count for layer in layers), f"{layers} of {count} layers"
        shared = self._share(batch)
        wanted: dict[int, Tensor] = {}
        hidden = self.embedding.index_select(0, batch.tokens)
        caches = zip(self.layers, kv.k.unbind(), kv.v.unbind(), strict=True)
        for index, (layer, k_cache, v_cache) in enumerate(caches):
            if index in layers:
                wanted[index] = hidden  # a layer returns a new tensor, this one stays as it is
            hidden = layer(hidden, k_cache, v_cache, shared)
        wanted[count] = rms_norm(hidden, self.norm, self.config.rms_norm_eps)
        return wanted[count], torch.cat([wanted[layer] for layer in layers], dim=-1)

    def _share(self, batch: ForwardBatch) -> _Shared:
        heads_per_kv = self.config.num_heads // self.config.num_kv_heads
        return _Shared(
            rotary=rotary_rows(batch.positions, self._inv_freq, self._attention_factor, self.dtype),
            plan=plan_attention(batch, heads_per_kv, self.dtype),
            slots=batch.slots,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, vocab_size] float32 of final-normed rows. hidden: [R, hidden_size]."""
        return self.lm_head(hidden).float()

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights, the embedding counted beside a repacked head."""
        tensors = [self.embedding, self.norm, *self.lm_head.tensors()]
        for layer in self.layers:
            tensors += layer.tensors()
        distinct = {id(tensor): tensor for tensor in tensors}
        return sum(tensor.numel() * tensor.element_size() for tensor in distinct.values())

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one KV slot over all layers."""
        config = self.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.dtype.itemsize

    def new_kv_cache(self, num_slots: int) -> KVCache:
        """Empty keys and values for `num_slots` tokens of every layer."""
        config = self.config
        shape = (config.num_layers, num_slots, config.num_kv_heads, config.head_dim)
        k = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return KVCache(k=k, v=torch.zeros_like(k))
