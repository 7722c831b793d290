"""Tensors of a wider model that computes what a narrower one computes.

An activation of the wide model holds the narrow one's entries at some places; the rest of it is
either zero or anything (`Axis`). A weight between two such activations then has the old entries
where both are kept, zeros where something else would reach a kept or a zero entry, and random
numbers everywhere else: real weights move at another speed than zeros.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_spec.errors import ConfigError
from sgl_spec.models.config import ModelConfig

_POOL = 8_388_617  # odd, so that no row of a matrix repeats the one above it


@dataclass(frozen=True, slots=True)
class Size:
    """The geometry of a decoder; its vocabulary stays what it is."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int

    def __str__(self) -> str:
        return "x".join(str(getattr(self, name)) for name in _FIELDS)


_FIELDS = ("hidden", "layers", "heads", "kv_heads", "head_dim", "inner")
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
    numbers = text.split("x")
    if len(numbers) != len(_FIELDS) or not all(n.isdecimal() and int(n) > 0 for n in numbers):
        raise ConfigError(
            f"--shape must be one of {', '.join(SIZES)}, or {'x'.join(_FIELDS)} in numbers, "
            f"got {text!r}.",
            param="shape",
        )
    return Size(*map(int, numbers))


def check_size(old: ModelConfig, size: Size, *, layers: int) -> None:
    """Raise `ConfigError` naming the first number of `size` in which the model does not fit.

    layers: how many the wide model will have.
    """
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
    if size.heads % size.kv_heads:
        raise ConfigError(
            f"--shape {size}: heads must be a multiple of the {size.kv_heads} KV heads."
        )
    if size.hidden % size.heads:
        raise ConfigError(
            f"--shape {size}: hidden must be a multiple of the {size.heads} heads; transformers "
            "loads no other."
        )
    if size.head_dim % old.head_dim:
        raise ConfigError(
            f"--shape {size}: head_dim must be a multiple of {old.head_dim}, so that every rotary "
            f"frequency is among the new ones; got {size.head_dim}."
        )
    if old.rope.kind == "yarn" and size.head_dim != old.head_dim:
        raise ConfigError(
            f"--shape {size}: head_dim must stay {old.head_dim}, because yarn's frequencies "
            f"depend on it; got {size.head_dim}."
        )
    if old.qk_norm and size.hidden != old.hidden_size:
        raise ConfigError(
            f"{old.architecture} cannot be widened: its norms of q and k would need another "
            "rms_norm_eps than the rest; allowed: Llama, Mistral and Qwen2 layers."
        )


@dataclass(frozen=True, slots=True)
class Axis:
    """An activation of the wide model.

    kept: [old size] int64, where the narrow model's entries lie. zero: [size] bool, where it is
    zero for certain; what is neither may hold anything.
    """

    kept: Tensor
    zero: Tensor

    @property
    def size(self) -> int:
        """Entries."""
        return len(self.zero)

    @property
    def anything(self) -> Tensor:
        """[n] int64: the places of entries that mean nothing."""
        other = ~self.zero
        other[self.kept] = False
        return other.nonzero().flatten()

    @property
    def growth(self) -> float:
        """New size over old."""
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


@dataclass(frozen=True, slots=True)
class LayerAxes:
    """The activations of a decoder layer, and what q is multiplied by, so that the attention's
    1 / sqrt(head_dim) comes out as before. attended: what o_proj reads."""

    hidden: Axis
    q: Axis
    k: Axis
    v: Axis
    attended: Axis
    inner: Axis
    q_scale: float


def layer_axes(old: ModelConfig, size: Size) -> LayerAxes:
    """Query heads stay with their KV head; the rotary pairs of a head go where their frequencies
    are among the new ones, its values to the front."""
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
    return LayerAxes(
        hidden=stream(old.hidden_size, size.hidden),
        q=Axis(places(head, pairs), silent),
        k=free(places(kv_head, pairs), kv_width),
        v=free(places(kv_head, front), kv_width),
        attended=free(places(head, front), size.heads * new_dim),
        inner=free(torch.arange(old.intermediate_size), size.inner),
        q_scale=math.sqrt(new_dim / dim),
    )


class Noise:
    """Normal numbers in `dtype` that depend on the seed and on the tensor's name alone.

    They come from one pool, each tensor from another place of it: drawing billions takes minutes,
    and nothing ever depends on them.
    """

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._seed = seed
        self._pool = torch.randn(_POOL, generator=torch.Generator().manual_seed(seed))

    def __call__(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """[*shape] with the standard deviation of `like`, for a vector its mean too."""
        like = like.float()
        std, mean = float(like.std(correction=0)), float(like.mean()) if like.dim() == 1 else 0.0
        drawn = torch.empty(math.prod(shape), dtype=self.dtype)
        start, done = zlib.crc32(f"{self._seed} {name}".encode()) % _POOL, 0
        while done < len(drawn):
            part = self._pool[start : start + len(drawn) - done]
            torch.mul(part, std, out=drawn[done : done + len(part)])
            start, done = 0, done + len(part)
        return drawn.view(*shape).add_(mean) if mean else drawn.view(*shape)


def widened_linear(old: Tensor, noise: Tensor, out: Axis, read: Axis, scale: float) -> Tensor:
    """[out, read] of old [old out, old read], in the memory of `noise` [out, read]."""
    silent = out.zero.nonzero().flatten()
    exact = torch.cat((silent, out.kept)).sort().values
    _Block(noise, exact, read.anything).set(0.0)
    _Block(noise, silent, read.kept).set(0.0)
    _Block(noise, out.kept, read.kept).set(old.float() * scale)
    return noise


@dataclass(frozen=True, slots=True)
class _Block:
    """The entries of `matrix` in some rows and columns (indices [n], rising)."""

    matrix: Tensor
    rows: Tensor
    columns: Tensor

    def set(self, values: Tensor | float) -> None:
        """values: [rows, columns], or one for all. Runs of indices are taken as such: an index put
        of a big matrix is several times slower."""
        values = torch.as_tensor(values, dtype=self.matrix.dtype)
        for rows in _runs(self.rows):
            for columns in _runs(self.columns):
                part = values[rows.place][:, columns.place] if values.dim() else values
                self.matrix[rows.index][:, columns.index] = part


@dataclass(frozen=True, slots=True)
class _Run:
    """Indices first, first + step, ... as a slice, and their places among all."""

    index: slice
    place: slice


def _runs(index: Tensor) -> Iterator[_Run]:
    """Indices in the fewest arithmetic runs that a scan finds."""
    numbers, start = index.tolist(), 0
    while start < len(numbers):
        end = start + 1
        step = numbers[end] - numbers[start] if end < len(numbers) else 1
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
            end += 1
        yield _Run(slice(numbers[start], numbers[end - 1] + 1, step), slice(start, end))
        start = end


def widened_bias(old: Tensor, noise: Tensor, out: Axis, scale: float) -> Tensor:
    """[out] of old [old out], in the memory of `noise` [out]."""
    noise[out.zero] = 0
    noise[out.kept] = (old.float() * scale).to(noise.dtype)
    return noise


def widened_norm(old: Tensor, noise: Tensor, read: Axis) -> Tensor:
    """[read]: the mean of the squares sinks with the zeros, so the weight does too."""
    scale = math.sqrt(1 / read.growth)
    noise *= scale
    noise[read.kept] = (old.float() * scale).to(noise.dtype)
    return noise


def widened_rows(old: Tensor, out: Axis, dtype: torch.dtype) -> Tensor:
    """[n, out] of the rows [n, old out] of an embedding, which give the stream itself."""
    rows = torch.zeros(len(old), out.size, dtype=dtype)
    _Block(rows, torch.arange(len(old)), out.kept).set(old)
    return rows
