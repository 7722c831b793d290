"""Safetensors to `Decoder`: every weight is accounted for by name before the first one is read."""

from __future__ import annotations

import logging
import re
import time
import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sgl_spec.errors import ConfigError, UnsupportedModelError
from sgl_spec.models.config import STORED_DTYPES, ModelConfig, read_json
from sgl_spec.models.decoder import Decoder

logger = logging.getLogger(__name__)

LOAD_FORMATS = ("auto", "safetensors", "dummy")
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_NAMED = 5  # tensors named in one refusal
_DUMMY_STD = 0.02
# Old checkpoints carry the rotary frequencies, which the config determines.
_IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")

Shape = tuple[int, ...]


def load_model(
    directory: Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    load_format: str = "auto",
    context_length: int | None = None,
) -> Decoder:
    """Build the model in `directory` (Hugging Face layout).

    dtype: "auto" (float32 on a CPU, the stored one on a GPU) or one of `STORED_DTYPES`.
    load_format: "auto" and "safetensors" read the weights, "dummy" makes up seeded random ones.
    Raises `UnsupportedModelError` naming what does not fit, `ConfigError` for unreadable files.
    """
    if load_format not in LOAD_FORMATS:
        allowed = ", ".join(LOAD_FORMATS)
        raise ConfigError(f"--load-format {load_format} is unknown; allowed: {allowed}.")
    config = ModelConfig.from_hf(directory, context_length)
    start = time.perf_counter()
    if load_format == "dummy":
        resolved = _resolve_dtype(dtype, config.dtype or "float32", device)
        model = Decoder(config, _Dummy(config, resolved, device))
    else:
        with _Safetensors(directory) as stored:
            stored.check(expected_shapes(config), config)
            stored.dtype = _resolve_dtype(dtype, config.dtype or stored.first_dtype(), device)
            stored.device = device
            model = Decoder(config, stored)
    _log_loaded(model, time.perf_counter() - start)
    return model


def _log_loaded(model: Decoder, seconds: float) -> None:
    logger.info(
        "Loaded %s in %.1f s: %.2f GB, %s on %s, linear layers %s.",
        model.config.architecture,
        seconds,
        model.weight_bytes / 1e9,
        str(model.dtype).removeprefix("torch."),
        model.device,
        "packed for oneDNN" if model.lm_head.packed else "in plain layout",
    )


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name and shape of every weight of a checkpoint, in the order of the layers."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        layer = _layer_shapes(config)
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    linears = {
        "self_attn.q_proj": (q, hidden, config.attention_bias),
        "self_attn.k_proj": (kv, hidden, config.attention_bias),
        "self_attn.v_proj": (kv, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, q, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, Shape] = {}
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    shapes["input_layernorm.weight"] = shapes["post_attention_layernorm.weight"] = (hidden,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (dim,)
    return shapes


def _resolve_dtype(asked: str, stored: str, device: str) -> torch.dtype:
    if asked == "auto":
        asked = "float32" if torch.device(device).type == "cpu" else stored
    if asked not in STORED_DTYPES:
        allowed = ", ".join(("auto", *STORED_DTYPES))
        raise ConfigError(f"--dtype {asked} is unknown; allowed: {allowed}.", param="dtype")
    resolved = getattr(torch, asked)
    assert isinstance(resolved, torch.dtype)
    return resolved


class _Dummy:
    """Random weights that depend on the tensor's name alone: norms 1, the rest N(0, 0.02^2)."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        self.shapes = expected_shapes(config)
        self.dtype = dtype
        self.device = device

    def __call__(self, name: str) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(self.shapes[name], dtype=self.dtype, device=self.device)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        weight = torch.empty(self.shapes[name]).normal_(0.0, _DUMMY_STD, generator=generator)
        return weight.to(device=self.device, dtype=self.dtype)


class _Safetensors:
    """The tensors of a directory, one file or several; files are mapped, not read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.dtype = torch.float32
        self.device = "cpu"
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}  # tensor name -> open file

    def __enter__(self) -> _Safetensors:
        for path in self._paths():
            try:
                handle = self._stack.enter_context(safe_open(str(path), framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"Cannot read the weights in {path}: {error}.") from error
            self._files.update(dict.fromkeys(handle.keys(), handle))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def __call__(self, name: str) -> Tensor:
        """A copy in the model's dtype: a mapped tensor would follow later changes of the file."""
        mapped = self._files[name].get_tensor(name)
        return torch.empty(mapped.shape, dtype=self.dtype, device=self.device).copy_(mapped)

    def check(self, expected: dict[str, Shape], config: ModelConfig) -> None:
        """Raise unless the stored names and shapes are the expected ones."""
        extra = {name for name in self._files.keys() - expected.keys() if not _IGNORED.match(name)}
        if config.tie_word_embeddings and "lm_head.weight" in extra:
            self._check_tied()
            extra.discard("lm_head.weight")
        missing = expected.keys() - self._files.keys()
        for kind, names in (("misses", missing), ("has unexpected", extra)):
            if names:
                raise UnsupportedModelError(f"{self.directory} {kind} weights: {_listed(names)}.")
        for name, shape in expected.items():
            stored = self._files[name].get_slice(name)
            if stored.get_dtype() not in _STORED:
                raise UnsupportedModelError(
                    f"{self.directory}: {name} is stored as {stored.get_dtype()}; "
                    f"allowed: {', '.join(_STORED)}."
                )
            found = tuple(stored.get_shape())
            if found != shape:
                raise UnsupportedModelError(
                    f"{self.directory}: {name} has shape {list(found)}, "
                    f"config.json implies {list(shape)}."
                )

    def first_dtype(self) -> str:
        """The dtype of the embedding, for configs that do not say."""
        name = "model.embed_tokens.weight"
        return _STORED[self._files[name].get_slice(name).get_dtype()]

    def _check_tied(self) -> None:
        """A stored head beside tied embeddings is fine only as a copy of them."""
        head = self._files["lm_head.weight"].get_tensor("lm_head.weight")
        name = "model.embed_tokens.weight"
        if name in self._files and not torch.equal(head, self._files[name].get_tensor(name)):
            raise UnsupportedModelError(
                f"{self.directory}: tie_word_embeddings is true, but lm_head.weight differs from "
                f"{name}; set tie_word_embeddings to false to use it."
            )

    def _paths(self) -> list[Path]:
        single = self.directory / "model.safetensors"
        index = self.directory / "model.safetensors.index.json"
        if index.is_file():
            shards = read_json(index).get("weight_map")
            if not isinstance(shards, dict):
                raise ConfigError(f"{index} has no weight_map.")
            return [self.directory / name for name in sorted(set(shards.values()))]
        if single.is_file():
            return [single]
        raise ConfigError(
            f"{self.directory} has neither {single.name} nor {index.name}; "
            "only safetensors weights are read (--load-format dummy needs none)."
        )


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    rest = len(ordered) - _NAMED
    return ", ".join(ordered[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
