"""A decoder's forward over KV regions of fixed length, in plain torch, fit for CUDA graphs.

The weights and the formulas are those of serving's `Decoder`. What differs is memory: row b owns
positions 0 .. capacity-1 of one region, so a decode step has the same shapes whatever the rows do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_spec.layers.norm_rope import RotaryRows, rms_norm, rotary_rows, rotate
from sgl_spec.models.decoder import Decoder
from sgl_spec.models.layer import DecoderLayer
from sgl_spec.models.rope import attention_factor, inverse_frequencies

_WIDTH = 64  # attention covers a multiple of it; one graph per multiple


def capacity_for(tokens: int) -> int:
    """Positions of a region that holds `tokens` and whatever a width is rounded up to."""
    return -(-tokens // _WIDTH) * _WIDTH


Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


def attention_by_name(name: str) -> Attend:
    """`region_attention` as a Triton kernel ("triton") or in plain torch ("torch")."""
    assert name in ("torch", "triton"), name
    module = "region_attn" if name == "triton" else "region_attn_ref"
    attend: Attend = import_module(f"sgl_spec_kernels.{module}").region_attention
    return attend


@dataclass(frozen=True, slots=True)
class Rows:
    """What a decode step reads and updates, all on the device and [B] unless said.

    tokens: fed next, at `positions`. counts: new tokens so far, of at most `limits`. alive: still
    generating. temperatures: float32, 0 for greedy. new: [B, max_new + 1] int32, the new tokens;
    the last column takes what rows without a job draw.
    """

    tokens: Tensor
    positions: Tensor
    counts: Tensor
    limits: Tensor
    alive: Tensor
    temperatures: Tensor
    new: Tensor

    @classmethod
    def empty(cls, batch_size: int, max_new: int, device: torch.device) -> Rows:
        """No row generates."""

        def zeros(dtype: torch.dtype = torch.int64, *more: int) -> Tensor:
            return torch.zeros(batch_size, *more, dtype=dtype, device=device)

        return cls(
            tokens=zeros(),
            positions=zeros(),
            counts=zeros(),
            limits=zeros(),
            alive=zeros(torch.bool),
            temperatures=zeros(torch.float32),
            new=zeros(torch.int32, max_new + 1),
        )

    def start(
        self,
        rows: Tensor,
        *,
        tokens: Tensor,
        positions: Tensor,
        limits: Tensor,
        temperatures: Tensor,
    ) -> None:
        """Let `rows` generate from `tokens`, whose KV is not written yet."""
        self.tokens[rows] = tokens
        self.positions[rows] = positions
        self.limits[rows] = limits
        self.temperatures[rows] = temperatures
        self.counts[rows] = 0
        self.alive[rows] = True

    def take(self, drawn: Tensor, stops: Tensor) -> None:
        """Append one token to every row that is alive. drawn: [B]."""
        spare = self.new.shape[1] - 1
        at = self.counts.masked_fill(~self.alive, spare)
        self.new.scatter_(1, at[:, None], drawn[:, None].int())
        self.counts.add_(self.alive)
        ended = (drawn[:, None] == stops).any(1) | (self.counts >= self.limits)
        self.alive.logical_and_(~ended)
        self.tokens.copy_(torch.where(self.alive, drawn, self.tokens))
        self.positions.add_(self.alive)


class StaticDecoder:
    """`model` over the KV of `rows`, each `capacity` positions long."""

    def __init__(
        self,
        model: Decoder,
        rows: Rows,
        capacity: int,
        stops: tuple[int, ...],
        *,
        attention: str,
        graphs: bool,
    ) -> None:
        self.model, self.rows, self.capacity = model, rows, capacity
        config, device = model.config, model.device
        batch = len(rows.tokens)
        # Zeros, not `empty`: a masked position has weight 0, and 0 times a stray NaN is NaN.
        self._kv = [
            torch.zeros(
                (2, batch, config.num_kv_heads, capacity, config.head_dim),
                dtype=model.dtype,
                device=device,
            )
            for _ in range(config.num_layers)
        ]
        self._inv_freq = inverse_frequencies(config.rope, config.head_dim).to(device)
        self._factor = attention_factor(config.rope)
        self._stops = torch.tensor(stops, dtype=torch.int64, device=device)
        self._columns = torch.arange(capacity, device=device)
        self._batch = torch.arange(batch, device=device)[:, None]
        self._heads = torch.arange(config.num_kv_heads, device=device)
        self._attend = attention_by_name(attention)
        # The kernel stops at each row's length by itself, so one width does for all.
        self._width_step = capacity if attention == "triton" else _WIDTH
        self._graphs: _Graphs | None = None
        if graphs and device.type == "cuda":
            self._graphs = _Graphs(self._step)

    def advance(self, steps: int, reach: int) -> None:
        """Decode `steps` tokens in every row that is alive. reach: beyond every row's positions in
        these steps."""
        width = min(-(-reach // self._width_step) * self._width_step, self.capacity)
        step = self._step if self._graphs is None else self._graphs.replay
        for _ in range(steps):
            step(width)

    def prefill(self, rows: Tensor, tokens: Tensor) -> None:
        """Write the KV of whole prompts. tokens: [n, P], padded on the right, for `rows` [n].

        What is written for padding lies beyond the row's positions and is overwritten in time.
        """
        count, length = tokens.shape
        positions = self._columns[:length].repeat(count)
        rotary = self._rotary(positions)
        hidden = self.model.embedding.index_select(0, tokens.reshape(-1))
        for layer, kv in zip(self.model.stack.layers, self._kv, strict=True):
            q, k, v = self._project(layer, hidden, rotary)
            k, v = (part.view(count, length, *part.shape[1:]).transpose(1, 2) for part in (k, v))
            kv[0, :, :, :length].index_copy_(0, rows, k)
            kv[1, :, :, :length].index_copy_(0, rows, v)
            q = q.view(count, length, *q.shape[1:]).transpose(1, 2)
            group = layer.num_heads // layer.num_kv_heads
            k, v = (part.repeat_interleave(group, dim=1) for part in (k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            hidden = _finish(layer, hidden, mixed.transpose(1, 2).reshape(count * length, -1))

    def _step(self, width: int) -> None:
        """Feed every row's token, draw the next one. width: attention reads positions below it."""
        rows, config = self.rows, self.model.config
        rotary = self._rotary(rows.positions)
        lens = rows.positions + 1
        hidden = self.model.embedding.index_select(0, rows.tokens)
        at = (self._batch, self._heads, rows.positions[:, None])
        for layer, kv in zip(self.model.stack.layers, self._kv, strict=True):
            q, k, v = self._project(layer, hidden, rotary)
            kv[0].index_put_(at, k)
            kv[1].index_put_(at, v)
            mixed = self._attend(q, kv[0], kv[1], lens, width)
            hidden = _finish(layer, hidden, mixed)
        hidden = rms_norm(hidden, self.model.norm, config.rms_norm_eps)
        rows.take(draw(self.model.lm_head(hidden), rows.temperatures), self._stops)

    def _rotary(self, positions: Tensor) -> RotaryRows:
        return rotary_rows(positions, self._inv_freq, self._factor, self.model.dtype)

    def _project(
        self, layer: DecoderLayer, hidden: Tensor, rotary: RotaryRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q [T, heads, d] and k [T, kv_heads, d], and v."""
        assert layer.input_norm is not None
        normed = rms_norm(hidden, layer.input_norm, layer.eps)
        qkv = layer.qkv(normed).view(len(hidden), -1, layer.head_dim)
        q, k = qkv[:, : layer.num_heads], qkv[:, layer.num_heads : -layer.num_kv_heads]
        if layer.qk_norm is not None:
            q = rms_norm(q, layer.qk_norm[0], layer.eps)
            k = rms_norm(k, layer.qk_norm[1], layer.eps)
        return rotate(q, rotary), rotate(k, rotary), qkv[:, -layer.num_kv_heads :]


def draw(logits: Tensor, temperatures: Tensor) -> Tensor:
    """[B] ids: the best where the temperature is 0, else a sample (Gumbel-max). logits: [B, V]."""
    noise = torch.empty(logits.shape, dtype=torch.float32, device=logits.device).exponential_()
    greedy = (temperatures == 0)[:, None]
    scores = logits / temperatures.masked_fill(temperatures == 0, 1.0)[:, None]
    return torch.where(greedy, scores, scores - noise.log_()).argmax(-1)


def _finish(layer: DecoderLayer, hidden: Tensor, mixed: Tensor) -> Tensor:
    """What follows attention in a layer. mixed: [T, heads * d]."""
    hidden = layer.output.add_to(hidden, mixed)
    normed = rms_norm(hidden, layer.post_norm, layer.eps)
    gate, up = layer.gate_up(normed).chunk(2, dim=-1)
    return layer.down.add_to(hidden, F.silu(gate).mul_(up))


class _Graphs:
    """The decode step as one CUDA graph per width, captured when a width is first needed."""

    def __init__(self, step: Callable[[int], None]) -> None:
        self._step = step
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def replay(self, width: int) -> None:
        """Run one step. The first of a width runs outside a graph, which warms it up."""
        if width in self._graphs:
            self._graphs[width].replay()
            return
        self._step(width)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step(width)
        self._graphs[width] = graph
