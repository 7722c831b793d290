"""Writes a model, an EAGLE or EAGLE3 head or a STANDALONE draft at the cost of a bigger one: the
same text and the same drafts, from an ordinary checkpoint of the asked shape.

    .venv/bin/python examples/widen.py --shape llama-8b w8b
    .venv/bin/python examples/widen.py --shape llama-8b --draft smollm2-eagle3 w8b-eagle3

A head is widened together with its target: give both the same --shape. The shape of a STANDALONE
draft is its own. --random-head writes an EAGLE3 head that nobody trained, where only its cost
matters.

An activation of the wide model holds the narrow one's entries at some places; the rest of it is
either zero or anything. A weight between two such activations has the old entries where both are
kept, zeros where something else would reach a kept or a zero entry, and random numbers everywhere
else: real weights move at another speed than zeros. One shard of at most 2 GB is in memory.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from sgl_spec.errors import ConfigError, SglSpecError
from sgl_spec.models import draft_names
from sgl_spec.models.checkpoint import resolve_checkpoint, resolve_draft
from sgl_spec.models.config import STORED_DTYPES, Keys, ModelConfig, read_json
from sgl_spec.models.draft_config import EAGLE, EAGLE3, SPECULATORS, HeadConfig, read_head_config
from sgl_spec.models.loader import expected_shapes, layer_shapes
from sgl_spec.models.stored import StoredWeights

SHARD_BYTES = 2 * 10**9
POOL = 8_388_617  # odd, so that no row of a matrix repeats the one above it
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
QUIET = ("self_attn.o_proj", "mlp.down_proj")  # zero in a layer that is to change nothing
CAPTURED = "eagle_aux_hidden_state_layer_ids"
COPIED = ("tokenizer*", "special_tokens_map.json", "generation_config.json", "*.jinja", "*.txt")
OF_TARGET = (
    *("vocab_size", "bos_token_id", "eos_token_id", "hidden_act", "max_position_embeddings"),
    *("rope_theta", "rope_parameters", "rope_scaling"),
)


@dataclass(frozen=True)
class Size:
    """The geometry of a decoder; its vocabulary stays what it is."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int

    def __str__(self) -> str:
        return "x".join(str(getattr(self, field.name)) for field in fields(self))


SIZES = {
    "smollm2-360m": Size(960, 32, 15, 5, 64, 2560),
    "llama-1b": Size(2048, 16, 32, 8, 64, 8192),
    "llama-3b": Size(3072, 28, 24, 8, 128, 8192),
    "llama-8b": Size(4096, 32, 32, 8, 128, 14336),
    "qwen-14b": Size(5120, 48, 40, 8, 128, 13824),
    "qwen-32b": Size(5120, 64, 40, 8, 128, 27648),
    "llama-70b": Size(8192, 80, 64, 8, 128, 28672),
}


def parse_size(text: str) -> Size:
    """A name of `SIZES`, or six numbers in the order of `Size`, an x between them."""
    if text.lower() in SIZES:
        return SIZES[text.lower()]
    names, numbers = [field.name for field in fields(Size)], text.split("x")
    if len(numbers) != len(names) or not all(n.isdecimal() and int(n) > 0 for n in numbers):
        raise ConfigError(
            f"--shape must be one of {', '.join(SIZES)}, or {'x'.join(names)} in numbers, "
            f"got {text!r}."
        )
    return Size(*map(int, numbers))


def check_size(old: ModelConfig, size: Size, layers: int) -> None:
    """`ConfigError` naming the first number of `size` in which the model does not fit."""
    least = {
        "hidden": (size.hidden, old.hidden_size),
        "layers": (layers, old.num_layers),
        "KV heads": (size.kv_heads, old.num_kv_heads),
        "heads per KV head": (size.heads // size.kv_heads, old.num_heads // old.num_kv_heads),
        "inner": (size.inner, old.intermediate_size),
    }
    for name, (asked, own) in least.items():
        if asked < own:
            raise ConfigError(f"--shape {size}: {name} must be at least {own}, got {asked}.")
    for bad, said in (
        (size.heads % size.kv_heads, f"heads must be a multiple of the {size.kv_heads} KV heads"),
        (size.hidden % size.heads, f"hidden must be a multiple of the {size.heads} heads"),
        (size.head_dim % old.head_dim, f"head_dim must be a multiple of {old.head_dim}"),
        (
            old.rope.kind == "yarn" and size.head_dim != old.head_dim,
            f"head_dim must stay {old.head_dim}, on which yarn's frequencies depend",
        ),
        (
            old.qk_norm and size.hidden != old.hidden_size,
            f"{old.architecture} cannot be widened: norms of q and k would need another eps",
        ),
    ):
        if bad:
            raise ConfigError(f"--shape {size}: {said}.")


@dataclass(frozen=True)
class Axis:
    """An activation of the wide model. kept: [old size] int64, where the narrow model's entries
    lie. zero: [size] bool, where it is zero for certain; the rest may hold anything."""

    kept: Tensor
    zero: Tensor

    @property
    def size(self) -> int:
        return len(self.zero)

    @property
    def anything(self) -> Tensor:
        """[n] int64: the places of entries that mean nothing."""
        other = ~self.zero
        other[self.kept] = False
        return other.nonzero().flatten()

    @property
    def growth(self) -> float:
        return self.size / len(self.kept)


def stream(old: int, new: int) -> Axis:
    """The residual stream: the old entries, then zeros."""
    return Axis(torch.arange(old), torch.arange(new) >= old)


def free(kept: Tensor, size: int) -> Axis:
    """The rest may be anything: neurons, keys, values."""
    return Axis(kept, torch.zeros(size, dtype=torch.bool))


def joined(axes: Sequence[Axis]) -> Axis:
    """Activations one behind the other."""
    starts = [sum(axis.size for axis in axes[:i]) for i in range(len(axes))]
    kept = [axis.kept + start for axis, start in zip(axes, starts, strict=True)]
    return Axis(torch.cat(kept), torch.cat([axis.zero for axis in axes]))


class LayerAxes:
    """The activations of a decoder layer. Query heads stay with their KV head; the rotary pairs of
    a head go where their frequencies are among the new ones, its values to the front."""

    def __init__(self, old: ModelConfig, size: Size) -> None:
        group, new_group = old.num_heads // old.num_kv_heads, size.heads // size.kv_heads
        head, kv_head = torch.arange(old.num_heads), torch.arange(old.num_kv_heads)
        head = head // group * new_group + head % group
        dim, new_dim = old.head_dim, size.head_dim
        pairs = torch.arange(dim // 2) * (new_dim // dim)
        pairs, front = torch.cat((pairs, pairs + new_dim // 2)), torch.arange(dim)

        def places(heads: Tensor, within: Tensor) -> Tensor:
            return (heads[:, None] * new_dim + within).flatten()

        # Beside its pairs a kept head must add nothing to a score: q is zero there, k anything.
        silent = torch.zeros(size.heads * new_dim, dtype=torch.bool)
        silent[places(head, torch.arange(new_dim))] = True
        silent[places(head, pairs)] = False
        kv_width = size.kv_heads * new_dim
        self.hidden = stream(old.hidden_size, size.hidden)
        self.q = Axis(places(head, pairs), silent)
        self.k = free(places(kv_head, pairs), kv_width)
        self.v = free(places(kv_head, front), kv_width)
        self.attended = free(places(head, front), size.heads * new_dim)
        self.inner = free(torch.arange(old.intermediate_size), size.inner)
        self.q_scale = math.sqrt(new_dim / dim)  # so that 1 / sqrt(head_dim) comes out as before


class Noise:
    """Normal numbers in `dtype` that depend on the seed and on the tensor's name alone. They come
    from one pool, each tensor from another place of it: drawing billions takes minutes."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.dtype, self.seed = dtype, seed
        self.pool = torch.randn(POOL, generator=torch.Generator().manual_seed(seed))

    def __call__(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """[*shape] with the standard deviation of `like`, for a vector its mean too."""
        like = like.float()
        std, mean = float(like.std(correction=0)), float(like.mean()) if like.dim() == 1 else 0.0
        drawn = torch.empty(math.prod(shape), dtype=self.dtype)
        start, done = zlib.crc32(f"{self.seed} {name}".encode()) % POOL, 0
        while done < len(drawn):
            part = self.pool[start : start + len(drawn) - done]
            torch.mul(part, std, out=drawn[done : done + len(part)])
            start, done = 0, done + len(part)
        return drawn.view(*shape).add_(mean)


def put(matrix: Tensor, rows: Tensor, columns: Tensor, values: Tensor | float) -> None:
    """matrix[rows][:, columns] = values, indices rising. By slices: an index put of a big matrix is
    several times slower."""
    values = torch.as_tensor(values, dtype=matrix.dtype)
    for into_row, from_row in runs(rows):
        for into, source in runs(columns):
            matrix[into_row, into] = values[from_row, source] if values.dim() else values


def runs(index: Tensor) -> Iterator[tuple[slice, slice]]:
    """Indices as arithmetic runs: what they are, and their places among all."""
    numbers, start = index.tolist(), 0
    while start < len(numbers):
        end = start + 1
        step = numbers[end] - numbers[start] if end < len(numbers) else 1
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
            end += 1
        yield slice(numbers[start], numbers[end - 1] + 1, step), slice(start, end)
        start = end


class Planned(NamedTuple):
    """A tensor to write: its shape is known before `make` builds it."""

    shape: tuple[int, ...]
    make: Callable[[], Tensor]


Plan = dict[str, Planned]


class Widener:
    """Plans the tensors of one directory."""

    def __init__(
        self, stored: StoredWeights, config: ModelConfig, size: Size, noise: Noise
    ) -> None:
        self.stored, self.config, self.size, self.noise = stored, config, size, noise
        self.axes = LayerAxes(config, size)

    def linear(self, name: str, out: Axis, read: Axis, scale: float = 1.0) -> Plan:
        """The weight `name`, and its bias if there is one."""
        weight, bias = f"{name}.weight", f"{name}.bias"

        def make_bias() -> Tensor:
            old = self.stored.raw(bias)
            made = self.noise(bias, (out.size,), old)
            made[out.zero] = 0
            made[out.kept] = (old.float() * scale).to(made.dtype)
            return made

        plan = {weight: self._matrix(weight, weight, out, read, scale)}
        if bias in self.stored.names:
            plan[bias] = Planned((out.size,), make_bias)
        return plan

    def _matrix(self, name: str, source: str, out: Axis, read: Axis, scale: float) -> Planned:
        """[out, read] of the stored `source` [old out, old read]."""

        def make() -> Tensor:
            old = self.stored.raw(source)
            made = self.noise(name, (out.size, read.size), old)
            silent = out.zero.nonzero().flatten()
            put(made, torch.cat((silent, out.kept)).sort().values, read.anything, 0.0)
            put(made, silent, read.kept, 0.0)
            put(made, out.kept, read.kept, old.float() * scale)
            return made

        return Planned((out.size, read.size), make)

    def norm(self, name: str, read: Axis) -> Plan:
        """A norm over `read`: the mean of the squares sinks with the zeros, the weight too."""

        def make() -> Tensor:
            old, scale = self.stored.raw(name), math.sqrt(1 / read.growth)
            made = self.noise(name, (read.size,), old) * scale
            made[read.kept] = (old.float() * scale).to(made.dtype)
            return made

        return {name: Planned((read.size,), make)}

    def embedding(self, name: str, out: Axis) -> Plan:
        """Rows that are put into the stream as they are."""
        shape = (self.stored.shape(name)[0], out.size)

        def make() -> Tensor:
            rows = torch.zeros(shape, dtype=self.noise.dtype)
            put(rows, torch.arange(shape[0]), out.kept, self.stored.raw(name))
            return rows

        return {name: Planned(shape, make)}

    def output(self, name: str, source: str, read: Axis) -> Plan:
        """A row for each token that may come out."""
        columns = self.stored.shape(source)[0]
        return {name: self._matrix(name, source, free(torch.arange(columns), columns), read, 1.0)}

    def layer(self, prefix: str, read: Axis | None = None) -> Plan:
        """A decoder layer. read: what its attention reads, None for the stream."""
        axes, hidden = self.axes, self.axes.hidden
        read = read or hidden
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
            if name.startswith(QUIET):
                return Planned(shape, lambda: torch.zeros(shape, dtype=self.noise.dtype))
            like, full = f"{last}.{name}", f"{prefix}.{name}"
            return Planned(shape, lambda: self.noise(full, shape, self.stored.raw(like)))

        return {f"{prefix}.{n}": planned(n, shape) for n, shape in layer_shapes(wide).items()}

    def model(self, wide: ModelConfig) -> Plan:
        """A whole decoder; the added layers stand behind the old ones, whose numbers stay."""
        hidden = self.axes.hidden
        plan = self.embedding(EMBEDDING, hidden)
        for index in range(wide.num_layers):
            prefix, old = f"model.layers.{index}", index < self.config.num_layers
            plan |= self.layer(prefix) if old else self.idle_layer(prefix, wide)
        source = EMBEDDING if self.config.tie_word_embeddings else HEAD
        return plan | self.norm(NORM, hidden) | self.output(HEAD, source, hidden)

    def eagle(self, config: HeadConfig) -> Plan:
        """An EAGLE head."""
        stored, hidden = self.stored, self.axes.hidden
        names = draft_names.eagle_names(config, stored.names)
        unread = draft_names.eagle_unread(stored.names)
        stored.check(draft_names.eagle_shapes(config, names), also=unread)
        plan = self.linear(names.fc, hidden, joined([hidden, hidden]))
        for prefix in names.layers:
            plan |= self.layer(prefix)
        return plan

    def eagle3(self, config: HeadConfig, keys: Keys, target: ModelConfig) -> Plan:
        """An EAGLE3 head."""
        stored, hidden = self.stored, self.axes.hidden
        tied = config.draft_vocab_size in (None, target.vocab_size)
        tied = tied and keys.flag("tie_word_embeddings", False)
        names = draft_names.eagle3_names(config, stored.names, target.hidden_size, tied=tied)
        unread = draft_names.eagle3_unread(config)
        stored.check(draft_names.eagle3_shapes(config, names), also=unread)
        captured = stream(target.hidden_size, self.size.hidden)
        features = joined([captured] * config.num_features)
        plan = self.linear(names.fc, hidden, features)
        for index, prefix in enumerate(names.layers):
            plan |= self.layer(prefix, joined([hidden, hidden]) if index == 0 else None)
        plan |= self.norm(names.norm, hidden)
        norms = [(name, captured) for name in names.feature_norms]
        norms += [] if names.input_norm is None else [(names.input_norm, features)]
        if norms and captured.growth != hidden.growth:
            raise ConfigError(
                f"{keys.path}: a head with norms before fc must be as wide as its target "
                f"({target.hidden_size}) to be widened, got {config.layers.hidden_size}."
            )
        for name, axis in norms:
            plan |= self.norm(name, axis)
        if names.lm_head is not None:
            plan |= self.output(names.lm_head, names.lm_head, hidden)
        if names.embedding is not None:
            plan |= self.embedding(names.embedding, hidden)
        return plan | {name: self._copy(name) for name in ("d2t", "t2d") if name in stored.names}

    def _copy(self, name: str) -> Planned:
        return Planned(self.stored.shape(name), lambda: self.stored.raw(name).clone())


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


def widen_model(source: Path, out: Path, size: Size, noise: Noise) -> None:
    """Write the decoder in `source` at `size` into the empty directory `out`."""
    old = ModelConfig.from_hf(source)
    check_size(old, size, layers=size.layers)
    content = widened_keys(read_json(source / "config.json"), old, size)
    content |= {"num_hidden_layers": size.layers, "tie_word_embeddings": False}
    if isinstance(content.get("layer_types"), list):
        kinds = content["layer_types"]
        content["layer_types"] = kinds + [kinds[-1]] * (size.layers - len(kinds))
    wide = ModelConfig.from_keys(Keys(content, out / "config.json"))
    with StoredWeights(source) as stored:
        stored.check(expected_shapes(old), also=[HEAD] if old.tie_word_embeddings else [])
        plan = Widener(stored, old, size, noise).model(wide)
        assert {name: p.shape for name, p in plan.items()} == expected_shapes(wide)
        write_checkpoint(out, plan, content, noise.dtype)
    for pattern in COPIED:
        for file in source.glob(pattern):
            shutil.copyfile(file, out / file.name)


def widen_draft(source: Path, target: ModelConfig, out: Path, size: Size, noise: Noise) -> None:
    """Write the draft in `source`, of any of the three kinds. target: of the narrow model that a
    head was trained for."""
    content = read_json(source / "config.json")
    with StoredWeights(source, pickled=True) as stored:
        kind = draft_names.kind_of(content, stored.names)
        if kind == draft_names.STANDALONE:
            widen_model(source, out, size, noise)
            return
        assert kind is not None
        keys = Keys(content, source / "config.json")
        config = read_head_config(keys, kind)
        check_size(config.layers, size, layers=config.layers.num_layers)
        own = (config.target_hidden, config.layers.vocab_size)
        if own != (target.hidden_size, target.vocab_size):
            raise ConfigError(
                f"{source}: the head is for a target of hidden_size {own[0]} and vocab_size "
                f"{own[1]}, --model-path has {target.hidden_size} and {target.vocab_size}."
            )
        widener = Widener(stored, config.layers, size, noise)
        plan = widener.eagle(config) if kind == EAGLE else widener.eagle3(config, keys, target)
        write_checkpoint(out, plan, head_keys(keys, config, target, size), noise.dtype)


def head_keys(keys: Keys, config: HeadConfig, target: ModelConfig, size: Size) -> dict[str, Any]:
    """The config of a widened head."""
    content = dict(keys.content)
    if config.layout == SPECULATORS:
        nested = content["transformer_layer_config"]
        content["transformer_layer_config"] = widened_keys(nested, config.layers, size)
    else:
        content = widened_keys(content, config.layers, size)
    if content.get("target_hidden_size") is not None:
        content["target_hidden_size"] = size.hidden
    if config.layout != EAGLE:
        # What is guessed from the number of target layers must not change with that number.
        count = target.num_layers
        layers = list(config.capture or (2, count // 2, count - 3))
        content |= captured_keys(content, layers, nested=config.layout != SPECULATORS)
    return content


def captured_keys(content: Mapping[str, Any], layers: list[int], *, nested: bool) -> dict[str, Any]:
    """The layers whose inputs a head reads, in both places in which servers look: beside
    `eagle_config` an id means a layer's input, inside it its output."""
    found: dict[str, Any] = {CAPTURED: layers}
    if nested:
        own = content.get("eagle_config") or {}
        found["eagle_config"] = own | {CAPTURED: [layer - 1 for layer in layers]}
    return found


def random_head(
    content: dict[str, Any], target: ModelConfig, columns: int, out: Path, size: Size, noise: Noise
) -> None:
    """Write an EAGLE3 head of one layer with random weights for a target of `size`. content: the
    config of the narrow `target`. columns: its draft tokens, the first of the target's."""
    if not 1 <= columns <= target.vocab_size:
        raise ConfigError(
            f"--random-head must be from 1 to the vocabulary of {target.vocab_size}, got {columns}."
        )
    kept = {key: content[key] for key in OF_TARGET if key in content} | {"model_type": "llama"}
    head = widened_keys(kept, target, size) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": columns,
        "target_hidden_size": size.hidden,
        "tie_word_embeddings": False,
        "eagle_config": {"use_aux_hidden_state": True},
    }
    head |= captured_keys(head, [3, size.layers // 2 + 1, size.layers - 2], nested=True)
    config = read_head_config(Keys(head, out / "config.json"), EAGLE3)
    names = draft_names.eagle3_names(config, frozenset(), size.hidden, tied=False)

    def random(name: str, shape: tuple[int, ...]) -> Planned:
        """Rows of unit length for a matrix, ones for a norm."""
        spread = 1 / math.sqrt(shape[-1])
        like = torch.ones(2) if len(shape) == 1 else torch.tensor([[-spread, spread]])
        return Planned(shape, lambda: noise(name, shape, like))

    shapes = draft_names.eagle3_shapes(config, names)
    plan = {name: random(name, shape) for name, shape in shapes.items()}
    plan["d2t"] = Planned((columns,), lambda: torch.zeros(columns, dtype=torch.int64))
    vocabulary = torch.arange(target.vocab_size)
    plan["t2d"] = Planned((target.vocab_size,), lambda: vocabulary < columns)
    write_checkpoint(out, plan, head, noise.dtype)


def write_checkpoint(out: Path, plan: Plan, content: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Weights in shards of at most `SHARD_BYTES` (or one tensor), built one after the other; the
    config last, so that a directory with one is complete."""
    shards: list[list[str]] = []
    room = 0
    for name, planned in plan.items():
        size = math.prod(planned.shape) * dtype.itemsize
        if not shards or size > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size
    total, weight_map = 0, {}
    for index, shard in enumerate(shards, 1):
        made = {name: plan[name].make() for name in shard}
        total += sum(tensor.nbytes for tensor in made.values())
        file = f"model-{index:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(shard, file)
        save_file(made, out / file, metadata={"format": "pt"})
        print(f"Wrote {file}, {total / 1e9:.2f} GB so far.", file=sys.stderr, flush=True)
    listed = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(out / "model.safetensors.index.json", listed)
    kept = {key: value for key, value in content.items() if key != "torch_dtype"}
    write_json(out / "config.json", kept | {"dtype": str(dtype).removeprefix("torch.")})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def widen(argv: Sequence[str]) -> None:
    """The command. Raises `ConfigError` or `UnsupportedModelError` naming what does not fit."""
    options = parser().parse_args(argv)
    size = parse_size(options.shape)
    out = Path(options.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} must be a new or an empty directory.")
    # A head needs the narrow target's config alone; a model is copied with its tokenizer.
    alone = options.draft is None and options.random_head is None
    source = resolve_checkpoint(options.model_path, tokenizer=alone)
    noise = Noise(options.seed, getattr(torch, options.dtype))
    out.mkdir(parents=True, exist_ok=True)
    what = options.draft or options.model_path
    target = ModelConfig.from_hf(source)
    if alone:
        widen_model(source, out, size, noise)
    elif options.draft is not None:
        widen_draft(resolve_draft(options.draft), target, out, size, noise)
    else:
        content = read_json(source / "config.json")
        random_head(content, target, options.random_head, out, size, noise)
        what = f"a random EAGLE3 head for {options.model_path}"
    said = {"source": what, "shape": str(size), "dtype": options.dtype, "seed": options.seed}
    write_json(out / "widened.json", said)
    print(f"{out}: {what} at {size} in {options.dtype}.")


def parser() -> argparse.ArgumentParser:
    """Options of the command."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = found.add_argument
    add("out", metavar="OUT", help="a new or an empty directory")
    add("--model-path", default="smollm2", help="the model, or a head's target")
    which = found.add_mutually_exclusive_group()
    which.add_argument("--draft", help="widen this draft instead: a shipped name, a directory")
    which.add_argument(
        "--random-head",
        type=int,
        metavar="COLUMNS",
        help="write an untrained EAGLE3 head with so many draft tokens instead",
    )
    add("--shape", required=True, help="a name, or HIDDENxLAYERSxHEADSxKVHEADSxHEAD_DIMxINNER")
    add("--dtype", default="bfloat16", choices=STORED_DTYPES)
    add("--seed", type=int, default=0, help="of the weights that change nothing")
    return found


def main(argv: Sequence[str]) -> int:
    """Run it; 2 for what cannot work."""
    try:
        widen(argv)
    except SglSpecError as error:
        print(f"widen: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
