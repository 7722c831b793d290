"""The layers of a model by fused kernels, nine launches a layer:

    x = norm(stream += what the layer before adds)      one launch
    qkv = QKV product;   q, cache = rotary(qkv)         two
    attended = attention(q, cache);  a = output product two
    x = norm(stream += a)                               one
    inner = silu(gate) * up of the gate-up product      two, or one where that is faster
    what the layer adds = down product of inner         one

The residual stream [T, hidden_size] is one tensor that every layer changes in place; where few rows
are wanted (`ForwardBatch.wanted`) the last layer goes on with these, behind its keys and values.
Nothing here reads the device or waits for it, so a forward can be captured in a CUDA graph, once
`reserve` has made what it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sgl_spec.layers.backend import Backend
from sgl_spec.layers.context import AttnBatch, ForwardBatch
from sgl_spec.layers.device_attention import Attend, Heads, attention_of, is_capturing
from sgl_spec.layers.linear import Linear
from sgl_spec.layers.norm_rope import rotary_tables
from sgl_spec.layers.wanted import only, shared_by_layer
from sgl_spec.models.config import ModelConfig
from sgl_spec.models.features import Features
from sgl_spec.models.rope import attention_factor, inverse_frequencies
from sgl_spec_kernels.embed import embed_beside, embed_norm
from sgl_spec_kernels.rms_norm import rms_norm
from sgl_spec_kernels.rope_kv import rope_kv
from sgl_spec_kernels.silu_mul import silu_mul

if TYPE_CHECKING:
    from sgl_spec.models.layer import DecoderLayer

Caches = Iterable[tuple["DecoderLayer", Tensor, Tensor]]
"""Each layer with its keys and values."""


@dataclass(frozen=True, slots=True)
class FusedShared:
    """What a layer of one forward reads. cos, sin: [positions, head_dim / 2] float32. wanted: see
    `layer.Shared`."""

    positions: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor
    attend: Attend
    wanted: Tensor | None


Steps = Iterable[tuple["DecoderLayer", Tensor, Tensor, FusedShared]]
"""The same, and what each of them reads."""


class FusedLayers:
    """What the layers of one geometry share: rotary tables and the work space of attention."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, backend: Backend
    ) -> None:
        group = config.num_heads // config.num_kv_heads
        heads = Heads(config.num_kv_heads, group, config.head_dim, dtype, device)
        self._attention = attention_of(backend, heads)
        self._device = device
        self._context = config.context_length
        self._inv_freq = inverse_frequencies(config.rope, config.head_dim).to(device)
        self._factor = attention_factor(config.rope)
        self._tables: list[tuple[Tensor, Tensor]] = []  # rising; graphs may use all of them

    def reserve(self, max_batch: int, max_q_len: int, positions: int) -> None:
        """See `Decoder.reserve`."""
        columns = max(positions, self._context)
        self._attention.reserve(max_batch, max_q_len, columns)
        self._table(columns)

    def each(
        self, batch: ForwardBatch, caches: Caches
    ) -> Iterator[tuple[DecoderLayer, Tensor, Tensor, FusedShared]]:
        """The layers of a stack with what each of them reads in the forward of `batch`."""
        # No row lies at a rotary position beyond its logical one, which the table holds.
        cos, sin = self._table(batch.req_to_token.shape[1])

        def share(attention: AttnBatch, wanted: Tensor | None) -> FusedShared:
            attend = self._attention.plan(attention)
            return FusedShared(batch.positions, batch.slots, cos, sin, attend, wanted)

        layers = list(caches)
        for one, shared in zip(layers, shared_by_layer(batch, len(layers), share), strict=True):
            yield *one, shared

    def norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        stream: Tensor | None = None,
        out: Tensor | None = None,
        copy: Tensor | None = None,
    ) -> Tensor:
        """The norm of x, or of `stream` after x is added to it; into `out`, whose rows may lie
        apart, if there is one. copy: gets what the stream then is."""
        normed: Tensor = rms_norm(x, weight, eps, stream, out, copy)
        return normed

    def begin(
        self, table: Tensor, tokens: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(stream, the norm of it) of embedded tokens."""
        stream, normed = embed_norm(table, tokens, weight, eps)
        return stream, normed

    def beside(
        self,
        table: Tensor,
        tokens: Tensor,
        features: Tensor,
        norms: tuple[Tensor, Tensor] | None = None,
        eps: float = 0.0,
        stream: Tensor | None = None,
    ) -> Tensor:
        """Embedded tokens and features side by side, each by its norm. stream: gets the normed
        features."""
        both: Tensor = embed_beside(table, tokens, features, norms, eps, stream)
        return both

    def run(
        self,
        stream: Tensor,
        steps: Steps,
        *,
        x: Tensor | None = None,
        added: tuple[DecoderLayer, Tensor] | None = None,
        features: Features | None = None,
    ) -> tuple[Tensor, tuple[DecoderLayer, Tensor]]:
        """Run layers, if there are any, over `stream`, changed in place. Returns the rows of it
        that are read, and what the last layer adds, which is still missing: its down product of
        the rows beside it.

        x: what the attention of the first reads; or added: the same of the layer before. features:
        take what enters these layers.
        """
        assert (x is None) != (added is None)
        for index, (layer, k_cache, v_cache, shared) in enumerate(steps):
            places = [] if features is None else features.places(index)
            if added is not None:
                assert layer.input_norm is not None, "only a first layer reads the stream as it is"
                before, inner = added
                copy = places.pop() if places else None
                x = self.norm(before.down(inner), layer.input_norm, layer.eps, stream, copy=copy)
            for place in places:
                place.copy_(stream)
            assert x is not None
            output = layer.output(self.attend(layer, x, k_cache, v_cache, shared))
            stream = only(stream, shared.wanted)
            x = self.norm(output, layer.post_norm, layer.eps, stream)
            added = layer, _activated(layer.gate_up, x)
        assert added is not None
        return stream, added

    def enter(
        self,
        layer: DecoderLayer,
        residual: Tensor,
        x: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        shared: FusedShared,
    ) -> tuple[Tensor, tuple[DecoderLayer, Tensor]]:
        """A first layer whose attention reads x, on a residual that is left as it is: the new
        stream, and what `run` returns."""
        attended = self.attend(layer, x, k_cache, v_cache, shared)
        stream = layer.output.add_to(only(residual, shared.wanted), attended)
        x = self.norm(stream, layer.post_norm, layer.eps)
        return stream, (layer, _activated(layer.gate_up, x))

    def attend(
        self, layer: DecoderLayer, x: Tensor, k_cache: Tensor, v_cache: Tensor, shared: FusedShared
    ) -> Tensor:
        """Attention over x [T, columns of the q, k and v weights]: [R, heads * head_dim] of those
        rows that are read."""
        q = rope_kv(
            layer.qkv(x),
            k_cache,
            v_cache,
            shared.cos,
            shared.sin,
            shared.positions,
            shared.slots,
            layer.qk_norm,
            layer.eps,
        )
        return shared.attend(only(q, shared.wanted), k_cache, v_cache)

    def _table(self, positions: int) -> tuple[Tensor, Tensor]:
        """The largest tables there are, which reach at least this far."""
        if not self._tables or len(self._tables[-1][0]) < positions:
            assert not is_capturing(self._device), "reserve() must come before a capture"
            self._tables.append(rotary_tables(positions, self._inv_freq, self._factor))
        return self._tables[-1]


def _activated(gate_up: Linear, x: Tensor) -> Tensor:
    """silu(gate) * up of a product with the gates first."""
    found = gate_up.gated(x)
    return silu_mul(gate_up(x)) if found is None else found
