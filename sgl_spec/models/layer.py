"""The decoder layer, and what the layers of one model share in a forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_spec.layers.attention import plan_attention, store_and_attend
from sgl_spec.layers.backend import Backend
from sgl_spec.layers.context import AttnBatch, ForwardBatch, KVCache
from sgl_spec.layers.linear import Linear
from sgl_spec.layers.norm_rope import RotaryRows, rms_norm, rotary_rows, rotate
from sgl_spec.layers.parallel import ALONE, Ranks, SummedLinear
from sgl_spec.layers.wanted import only, shared_by_layer
from sgl_spec.models.config import ModelConfig
from sgl_spec.models.rope import attention_factor, inverse_frequencies
from sgl_spec.models.stored import WeightSource
from sgl_spec_kernels.tree_attn_ref import AttnPlan

if TYPE_CHECKING:
    from sgl_spec.models.fused import FusedLayers  # needs triton, which a CPU does without


@dataclass(frozen=True, slots=True)
class Shared:
    """What a layer of one forward reads. wanted: [R] int64, the rows that it goes on with once keys
    and values are stored, which are those of the plan; None: all."""

    rotary: RotaryRows
    plan: AttnPlan
    slots: Tensor
    wanted: Tensor | None = None


class DecoderLayer:
    """Attention and MLP, each behind an RMSNorm and added to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        prefix: str,
        *,
        input_norm: bool = True,
        ranks: Ranks = ALONE,
    ) -> None:
        """config: of this rank's heads and inner columns. prefix: of the weights' names.
        input_norm: False where attention reads the residual stream as it is."""
        self.eps = config.rms_norm_eps
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim

        def stored(names: tuple[str, ...], bias: bool) -> tuple[Tensor, Tensor | None]:
            weight, added = (
                [f"{prefix}.{name}.{part}" for name in names] for part in ("weight", "bias")
            )
            return weights.stacked(weight), weights.stacked(added) if bias else None

        def summed(name: str, bias: bool) -> Linear:
            weight, added = stored((name,), bias)
            return Linear(weight, added) if ranks.size == 1 else SummedLinear(weight, added, ranks)

        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.qkv = Linear(*stored(qkv, config.attention_bias))
        self.output = summed("self_attn.o_proj", config.output_bias)
        self.gate_up = Linear(*stored(("mlp.gate_proj", "mlp.up_proj"), config.mlp_bias))
        self.down = summed("mlp.down_proj", config.mlp_bias)
        self.input_norm = weights(f"{prefix}.input_layernorm.weight") if input_norm else None
        self.post_norm = weights(f"{prefix}.post_attention_layernorm.weight")
        self.qk_norm = None
        if config.qk_norm:
            q_norm = weights(f"{prefix}.self_attn.q_norm.weight")
            k_norm = weights(f"{prefix}.self_attn.k_norm.weight")
            self.qk_norm = (q_norm, k_norm)

    def __call__(self, hidden: Tensor, k_cache: Tensor, v_cache: Tensor, shared: Shared) -> Tensor:
        """hidden: [T, hidden_size], the residual stream; k_cache, v_cache: this layer's."""
        norm = self.input_norm
        normed = hidden if norm is None else rms_norm(hidden, norm, self.eps)
        return self.mix(hidden, normed, k_cache, v_cache, shared)

    def mix(
        self, hidden: Tensor, normed: Tensor, k_cache: Tensor, v_cache: Tensor, shared: Shared
    ) -> Tensor:
        """The layer with what its attention reads given: normed [T, columns of the q, k and v
        weights]."""
        attended = self._attention(normed, k_cache, v_cache, shared)
        hidden = self.output.add_to(only(hidden, shared.wanted), attended)
        gate, up = self.gate_up(rms_norm(hidden, self.post_norm, self.eps)).chunk(2, dim=-1)
        return self.down.add_to(hidden, F.silu(gate).mul_(up))

    def linears(self) -> tuple[Linear, ...]:
        """Its dense layers."""
        return self.qkv, self.output, self.gate_up, self.down

    def tensors(self) -> list[Tensor]:
        """Every weight."""
        stored = [tensor for linear in self.linears() for tensor in linear.tensors()]
        norms = () if self.input_norm is None else (self.input_norm,)
        return [*stored, *norms, self.post_norm, *(self.qk_norm or ())]

    def _attention(
        self, normed: Tensor, k_cache: Tensor, v_cache: Tensor, shared: Shared
    ) -> Tensor:
        qkv = self.qkv(normed).view(len(normed), -1, self.head_dim)  # [T, q + k + v heads, d]
        qk = qkv[:, : -self.num_kv_heads]
        if self.qk_norm is not None:
            q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
            q_norm, k_norm = self.qk_norm
            qk = torch.cat((rms_norm(q, q_norm, self.eps), rms_norm(k, k_norm, self.eps)), dim=1)
        qk = rotate(qk, shared.rotary)
        q, k = only(qk[:, : self.num_heads], shared.wanted), qk[:, self.num_heads :]
        v = qkv[:, -self.num_kv_heads :]
        return store_and_attend(q, k, v, k_cache, v_cache, shared.slots, shared.plan)


class LayerStack:
    """Layers that share one geometry: their rotary embedding, their attention plan, their KV.

    config: shapes and rotary settings. layers: `config.num_layers` of them. fused: what runs them
    by fused kernels, None where plain torch does.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[DecoderLayer],
        dtype: torch.dtype,
        device: torch.device,
        backend: Backend,
    ) -> None:
        assert len(layers) == config.num_layers
        self.config = config
        self.layers = layers
        self.dtype = dtype
        self.device = device
        self.backend = backend
        self._inv_freq = inverse_frequencies(config.rope, config.head_dim).to(device)
        self._attention_factor = attention_factor(config.rope)
        self.fused: FusedLayers | None = None
        if backend.kernels == "triton":
            from sgl_spec.models.fused import FusedLayers

            self.fused = FusedLayers(config, dtype, device, backend)

    def each(
        self, batch: ForwardBatch, kv: KVCache
    ) -> Iterator[tuple[DecoderLayer, Tensor, Tensor, Shared]]:
        """Each layer with its keys and values and what it reads in the forward of `batch`, whose
        positions may be any."""
        factor = self._attention_factor
        rotary = rotary_rows(batch.positions, self._inv_freq, factor, self.dtype)

        def share(attention: AttnBatch, wanted: Tensor | None) -> Shared:
            heads_per_kv = self.config.num_heads // self.config.num_kv_heads
            plan = plan_attention(attention, heads_per_kv, self.dtype)
            return Shared(rotary, plan, batch.slots, wanted)

        pairs = zip(self.caches(kv), shared_by_layer(batch, len(self.layers), share), strict=True)
        for (layer, k_cache, v_cache), shared in pairs:
            yield layer, k_cache, v_cache, shared

    def reserve(self, max_batch: int, max_q_len: int, positions: int = 0) -> None:
        """See `Decoder.reserve`."""
        if self.fused is not None:
            self.fused.reserve(max_batch, max_q_len, positions)

    def linears(self) -> list[Linear]:
        """Every dense layer."""
        return [linear for layer in self.layers for linear in layer.linears()]

    def caches(self, kv: KVCache) -> Iterator[tuple[DecoderLayer, Tensor, Tensor]]:
        """Each layer with its keys and values."""
        return zip(self.layers, kv.k.unbind(), kv.v.unbind(), strict=True)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one KV slot over all layers."""
        config = self.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.dtype.itemsize

    def new_kv_cache(self, num_slots: int) -> KVCache:
        """Empty keys and values for `num_slots` tokens of every layer."""
        config = self.config
        shape = (config.num_layers, num_slots, config.num_kv_heads, config.head_dim)
        k, v = (zeros(shape, self.dtype, self.device) for _ in range(2))
        return KVCache(k=k, v=v)

    def tensors(self) -> list[Tensor]:
        """Every weight of every layer."""
        return [tensor for layer in self.layers for tensor in layer.tensors()]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that the host's memory gives page by page as they are used.

    A pool is gigabytes, most of which a short run never touches; `torch.zeros` writes all of them,
    which takes seconds of every start on a CPU.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap(-1, prod(shape) * dtype.itemsize, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Memory of the tensors, each counted once."""
    distinct = {id(tensor): tensor for tensor in tensors}
    return sum(tensor.numel() * tensor.element_size() for tensor in distinct.values())
