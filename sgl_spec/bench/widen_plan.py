"""What a widened checkpoint consists of, tensor by tensor, and how it is written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sgl_spec.bench.report import say
from sgl_spec.bench.widen_parts import (
    Axis,
    LayerAxes,
    Noise,
    Size,
    free,
    layer_axes,
    widened_bias,
    widened_linear,
    widened_norm,
    widened_rows,
)
from sgl_spec.models.config import ModelConfig
from sgl_spec.models.loader import layer_shapes
from sgl_spec.models.stored import StoredWeights

SHARD_BYTES = 2 * 10**9
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_QUIET = ("self_attn.o_proj", "mlp.down_proj")  # zero in a layer that is to change nothing


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to write: its shape is known before `make` builds it."""

    shape: tuple[int, ...]
    make: Callable[[], Tensor]


Plan = dict[str, Planned]


class Widener:
    """Plans the tensors of one directory: source weights, noise, the axes of its layers."""

    def __init__(
        self, stored: StoredWeights, config: ModelConfig, size: Size, noise: Noise
    ) -> None:
        self.stored = stored
        self.config = config
        self.size = size
        self.noise = noise
        self.axes: LayerAxes = layer_axes(config, size)

    def linear(self, name: str, out: Axis, read: Axis, scale: float = 1.0) -> Plan:
        """The weight `name`, and its bias if there is one."""
        weight, bias = f"{name}.weight", f"{name}.bias"

        def make_weight() -> Tensor:
            old = self.stored.raw(weight)
            noise = self.noise(weight, (out.size, read.size), old)
            return widened_linear(old, noise, out, read, scale)

        def make_bias() -> Tensor:
            old = self.stored.raw(bias)
            return widened_bias(old, self.noise(bias, (out.size,), old), out, scale)

        plan = {weight: Planned((out.size, read.size), make_weight)}
        if bias in self.stored.names:
            plan[bias] = Planned((out.size,), make_bias)
        return plan

    def norm(self, name: str, read: Axis) -> Plan:
        """A norm over `read`."""

        def make() -> Tensor:
            old = self.stored.raw(name)
            return widened_norm(old, self.noise(name, (read.size,), old), read)

        return {name: Planned((read.size,), make)}

    def embedding(self, name: str, out: Axis) -> Plan:
        """Rows that are put into the stream as they are."""
        rows = self.stored.shape(name)[0]
        return {
            name: Planned(
                (rows, out.size), lambda: widened_rows(self.stored.raw(name), out, self.noise.dtype)
            )
        }

    def output(self, name: str, stored_as: str, read: Axis) -> Plan:
        """A row for each token that may come out."""
        columns = self.stored.shape(stored_as)[0]

        def make() -> Tensor:
            old = self.stored.raw(stored_as)
            noise = self.noise(name, (columns, read.size), old)
            return widened_linear(old, noise, free(torch.arange(columns), columns), read, 1.0)

        return {name: Planned((columns, read.size), make)}

    def layer(self, prefix: str, read: Axis | None = None) -> Plan:
        """A decoder layer. read: what its attention reads, None for the stream."""
        axes = self.axes
        hidden, read = axes.hidden, read or axes.hidden
        plan = {
            **self.linear(f"{prefix}.self_attn.q_proj", axes.q, read, axes.q_scale),
            **self.linear(f"{prefix}.self_attn.k_proj", axes.k, read),
            **self.linear(f"{prefix}.self_attn.v_proj", axes.v, read),
            **self.linear(f"{prefix}.self_attn.o_proj", hidden, axes.attended),
            **self.linear(f"{prefix}.mlp.gate_proj", axes.inner, hidden),
            **self.linear(f"{prefix}.mlp.up_proj", axes.inner, hidden),
            **self.linear(f"{prefix}.mlp.down_proj", hidden, axes.inner),
        }
        for norm in ("input_layernorm", "post_attention_layernorm", "hidden_norm"):
            if f"{prefix}.{norm}.weight" in self.stored.names:
                plan |= self.norm(f"{prefix}.{norm}.weight", hidden)
        return plan

    def idle_layer(self, prefix: str, wide: ModelConfig) -> Plan:
        """A layer that costs what the others cost and adds zero; as random as the last one is."""
        last = f"model.layers.{self.config.num_layers - 1}"

        def planned(name: str, shape: tuple[int, ...]) -> Planned:
            if name.startswith(_QUIET):
                return Planned(shape, lambda: torch.zeros(shape, dtype=self.noise.dtype))
            full = f"{prefix}.{name}"
            return Planned(
                shape, lambda: self.noise(full, shape, self.stored.raw(f"{last}.{name}"))
            )

        return {f"{prefix}.{n}": planned(n, shape) for n, shape in layer_shapes(wide).items()}

    def model(self, wide: ModelConfig) -> Plan:
        """A whole decoder; the added layers stand behind the old ones, whose numbers stay."""
        hidden = self.axes.hidden
        plan = self.embedding(EMBEDDING, hidden)
        for index in range(wide.num_layers):
            prefix = f"model.layers.{index}"
            old = index < self.config.num_layers
            plan |= self.layer(prefix) if old else self.idle_layer(prefix, wide)
        plan |= self.norm(NORM, hidden)
        return plan | self.output(
            HEAD, EMBEDDING if self.config.tie_word_embeddings else HEAD, hidden
        )


def widened_keys(content: Mapping[str, Any], old: ModelConfig, size: Size) -> dict[str, Any]:
    """The keys of a config that follow the size of a layer; eps shrinks as the norms' mean does."""
    return {
        **content,
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "rms_norm_eps": old.rms_norm_eps * old.hidden_size / size.hidden,
    }


def write_checkpoint(out: Path, plan: Plan, content: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Weights in shards of at most `SHARD_BYTES` (or one tensor), built one after the other, so
    that one shard is in memory; the config last, so that a directory with one is complete."""
    shards = _shards(plan, dtype.itemsize)
    names = {
        name: f"{index:05}-of-{len(shards):05}" for index, s in enumerate(shards, 1) for name in s
    }
    total = 0
    for index, shard in enumerate(shards, 1):
        made = {name: plan[name].make() for name in shard}
        total += sum(tensor.nbytes for tensor in made.values())
        file = out / f"model-{names[shard[0]]}.safetensors"
        save_file(made, file, metadata={"format": "pt"})
        say(f"Wrote {file.name} ({index} of {len(shards)}), {total / 1e9:.2f} GB so far.")
    weight_map = {name: f"model-{part}.safetensors" for name, part in names.items()}
    write_json(
        out / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )
    kept = {key: value for key, value in content.items() if key != "torch_dtype"}
    write_json(out / "config.json", kept | {"dtype": str(dtype).removeprefix("torch.")})


def _shards(plan: Plan, itemsize: int) -> list[list[str]]:
    shards: list[list[str]] = []
    room = 0
    for name, planned in plan.items():
        size = math.prod(planned.shape) * itemsize
        if not shards or size > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size
    return shards


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
