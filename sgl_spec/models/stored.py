"""The weights of a directory by name, whatever file format holds them; each is checked before the
first one is read."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sgl_spec.errors import ConfigError, UnsupportedModelError
from sgl_spec.models.config import STORED_DTYPES, read_json
from sgl_spec.models.torch_file import load_torch_file
from sgl_spec.models.upload import Upload

Shape = tuple[int, ...]
Cut = Callable[[str, Tensor], Tensor]
"""The part of a stored weight that is wanted, by its name; a view."""

_FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_CODES = {getattr(torch, name): code for code, name in _FLOATS.items()}
_NAMED = 5  # tensors named in one refusal
_DUMMY_STD = 0.02
# Old checkpoints carry the rotary frequencies, which the config determines.
_IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")


def whole(name: str, weight: Tensor) -> Tensor:
    """All of it."""
    return weight


class WeightSource(Protocol):
    """Weights by their Hugging Face names, in the dtype and on the device of the model."""

    def __call__(self, name: str) -> Tensor:
        """One of them."""
        ...

    def stacked(self, names: Sequence[str]) -> Tensor:
        """Several, one below the other in one tensor."""
        ...


class StoredWeights:
    """The tensors of a directory, one file or several; files are mapped, not read.

    A `WeightSource` in `dtype` on `device`, of the parts that `cut` gives; set them before.
    pickled: whether `pytorch_model.bin` is read where there are no safetensors, as published heads
    have it.
    """

    def __init__(self, directory: Path, *, pickled: bool = False) -> None:
        self.directory = directory
        self.dtype = torch.float32
        self.device = "cpu"
        self.cut: Cut = whole
        self._pickled = pickled
        self._stack = ExitStack()
        self._sources: dict[str, Any] = {}  # tensor name -> open safetensors file, or the tensor
        self._upload: Upload | None = None  # for a GPU

    def __enter__(self) -> StoredWeights:
        for path in self._paths():
            self._sources.update(_open_bin(path) if path.suffix == ".bin" else self._open(path))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        self._sources.clear()
        self._upload = None

    def __call__(self, name: str) -> Tensor:
        """A copy in the model's dtype: a mapped tensor would follow later changes of the file.

        Raises `UnsupportedModelError` if a value is not finite in that dtype.
        """
        return self.stacked([name])

    def stacked(self, names: Sequence[str]) -> Tensor:
        """Copies in one tensor that is allocated once and filled; errors as for one."""
        sources = [self.cut(name, self.raw(name)) for name in names]
        rows = [len(source) for source in sources]
        shape = (sum(rows), *sources[0].shape[1:])
        stack = torch.empty(shape, dtype=self.dtype, device=self.device)
        for name, source, part in zip(names, sources, torch.split(stack, rows), strict=True):
            self._fill(name, source, part)
        return stack

    @property
    def names(self) -> frozenset[str]:
        """Of every stored tensor."""
        return frozenset(self._sources)

    def raw(self, name: str) -> Tensor:
        """As stored, and mapped to the file."""
        source = self._sources[name]
        tensor: Tensor = source if isinstance(source, Tensor) else source.get_tensor(name)
        return tensor

    def shape(self, name: str) -> Shape:
        """Without reading it."""
        return self._describe(name)[1]

    def float_dtype(self, name: str) -> str:
        """The dtype of a weight that `check` has passed, one of `STORED_DTYPES`."""
        return _FLOATS[self._describe(name)[0]]

    def check(self, expected: Mapping[str, Shape], also: Iterable[str] = ()) -> None:
        """Raise `UnsupportedModelError` unless the stored names, shapes and dtypes are the expected
        ones. also: names that may be stored as well, whatever they hold."""
        known = expected.keys() | set(also)
        extra = {name for name in self.names - known if not _IGNORED.match(name)}
        missing = expected.keys() - self.names
        for kind, names in (("misses", missing), ("has unexpected", extra)):
            if names:
                raise UnsupportedModelError(f"{self.directory} {kind} weights: {_listed(names)}.")
        for name, shape in expected.items():
            self._check_one(name, shape)

    def _fill(self, name: str, source: Tensor, out: Tensor) -> None:
        if out.is_cuda:
            self._upload = self._upload or Upload(out.device)
            self._upload.copy(source, out)
        else:
            out.copy_(source)
        if not out.is_meta and not _finite(out):
            dtype = str(self.dtype).removeprefix("torch.")
            raise UnsupportedModelError(
                f"{self.directory}: {name} holds NaN or infinite values in {dtype}; every weight "
                "must be finite."
            )

    def _check_one(self, name: str, shape: Shape) -> None:
        code, found = self._describe(name)
        if code not in _FLOATS:
            raise UnsupportedModelError(
                f"{self.directory}: {name} is stored as {code}; allowed: {', '.join(_FLOATS)}."
            )
        if found != shape:
            raise UnsupportedModelError(
                f"{self.directory}: {name} has shape {list(found)}, "
                f"config.json implies {list(shape)}."
            )

    def _describe(self, name: str) -> tuple[str, Shape]:
        source = self._sources[name]
        if isinstance(source, Tensor):
            return _CODES.get(source.dtype, str(source.dtype)), tuple(source.shape)
        stored = source.get_slice(name)
        return stored.get_dtype(), tuple(stored.get_shape())

    def _open(self, path: Path) -> dict[str, Any]:
        try:
            handle = self._stack.enter_context(safe_open(str(path), framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"Cannot read the weights in {path}: {error}.") from error
        return dict.fromkeys(handle.keys(), handle)

    def _paths(self) -> list[Path]:
        stems = ["model.safetensors"] + (["pytorch_model.bin"] if self._pickled else [])
        for stem in stems:
            single, index = self.directory / stem, self.directory / f"{stem}.index.json"
            if index.is_file():
                shards = read_json(index).get("weight_map")
                if not isinstance(shards, dict):
                    raise ConfigError(f"{index} has no weight_map.")
                return [self.directory / name for name in sorted(set(shards.values()))]
            if single.is_file():
                return [single]
        if self._pickled:
            raise ConfigError(f"{self.directory} has neither {' nor '.join(stems)}.")
        raise ConfigError(
            f"{self.directory} has neither {stems[0]} nor {stems[0]}.index.json; "
            "only safetensors weights are read (--load-format dummy needs none)."
        )


class DummyWeights:
    """Random weights that depend on the tensor's name alone: norms 1, the rest N(0, 0.02^2).

    A GPU makes its own, which are not those of a CPU.
    """

    def __init__(
        self, shapes: Mapping[str, Shape], dtype: torch.dtype, device: str, cut: Cut | None = None
    ) -> None:
        self.shapes = shapes
        self.cut: Cut = cut or whole
        self.dtype = dtype
        self.device = device

    def __call__(self, name: str) -> Tensor:
        if len(self.shapes[name]) == 1 and name.endswith(".weight"):  # only norms are vectors
            return torch.ones(self.shapes[name], dtype=self.dtype, device=self.device)
        where = self.device if torch.device(self.device).type == "cuda" else "cpu"
        generator = torch.Generator(where).manual_seed(zlib.crc32(name.encode()))
        weight = torch.empty(self.shapes[name], device=where)
        weight.normal_(0.0, _DUMMY_STD, generator=generator)
        part = self.cut(name, weight)
        copied = part.shape != weight.shape
        return part.to(device=self.device, dtype=self.dtype, copy=copied).contiguous()

    def stacked(self, names: Sequence[str]) -> Tensor:
        """See `WeightSource`."""
        return torch.cat([self(name) for name in names])


def resolve_dtype(asked: str, stored: Callable[[], str], device: str) -> torch.dtype:
    """The dtype that "auto" (float32 on a CPU, `stored()` elsewhere) or a name stands for."""
    if asked == "auto":
        asked = "float32" if torch.device(device).type == "cpu" else stored()
    if asked not in STORED_DTYPES:
        allowed = ", ".join(("auto", *STORED_DTYPES))
        raise ConfigError(f"--dtype {asked} is unknown; allowed: {allowed}.", param="dtype")
    resolved = getattr(torch, asked)
    assert isinstance(resolved, torch.dtype)
    return resolved


def _finite(weight: Tensor) -> bool:
    """One pass without a copy: NaN is its own least and greatest value."""
    return all(bool(bound.isfinite()) for bound in weight.aminmax())


def _open_bin(path: Path) -> dict[str, Tensor]:
    content = load_torch_file(path)
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise ConfigError(f"{path} must hold a dictionary of tensors.")
    return content


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    rest = len(ordered) - _NAMED
    return ", ".join(ordered[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
