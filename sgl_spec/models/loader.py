"""Safetensors to `Decoder`: every weight is accounted for by name before the first one is read."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from sgl_spec.errors import ConfigError, UnsupportedModelError
from sgl_spec.layers.linear import Linear
from sgl_spec.layers.parallel import ALONE, Ranks
from sgl_spec.models.checkpoint import short_name
from sgl_spec.models.config import ModelConfig
from sgl_spec.models.decoder import Decoder
from sgl_spec.models.shard import Shard
from sgl_spec.models.stored import DummyWeights, Shape, StoredWeights, resolve_dtype

logger = logging.getLogger(__name__)

LOAD_FORMATS = ("auto", "safetensors", "dummy")
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


def load_model(
    directory: Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    load_format: str = "auto",
    context_length: int | None = None,
    role: str = "target",
    attention_backend: str | None = None,
    ranks: Ranks = ALONE,
    strict: bool = False,
) -> Decoder:
    """Build the model in `directory` (Hugging Face layout).

    dtype: "auto" (float32 on a CPU, the stored one on a GPU) or one of `STORED_DTYPES`.
    load_format: "auto" and "safetensors" read the weights, "dummy" makes up seeded random ones.
    role: what the log calls the model, "target" or "draft".
    attention_backend: one of `layers.backend.BACKENDS`, None for the device's default.
    ranks: those that share the model; each reads its part of the weights.
    strict: see `layers.backend.Backend`.
    Raises `UnsupportedModelError` naming what does not fit, `ConfigError` for unreadable files.
    """
    if load_format not in LOAD_FORMATS:
        allowed = ", ".join(LOAD_FORMATS)
        raise ConfigError(f"--load-format {load_format} is unknown; allowed: {allowed}.")
    config = ModelConfig.from_hf(directory, context_length)
    if torch.device(device).type == "cuda":
        torch.set_float32_matmul_precision("highest")  # TF32 would round what fp32 is asked for
    start, shard = time.perf_counter(), Shard(config, ranks)
    if load_format == "dummy":
        resolved = resolve_dtype(dtype, lambda: config.dtype or "float32", device)
        weights = DummyWeights(expected_shapes(config), resolved, device, shard.cut)
        model = Decoder(config, weights, attention_backend, ranks, strict=strict)
    else:
        with StoredWeights(directory) as stored:
            _check(stored, config)
            said = config.dtype
            stored.dtype = resolve_dtype(
                dtype, lambda: said or stored.float_dtype(_EMBEDDING), device
            )
            stored.device, stored.cut = device, shard.cut
            model = Decoder(config, stored, attention_backend, ranks, strict=strict)
    _log_loaded(model, f"{role} {short_name(directory)}", time.perf_counter() - start)
    return model


def _log_loaded(model: Decoder, what: str, seconds: float) -> None:
    logger.info(
        "Loaded the %s (%s) in %.1f s: %.2f GB, %s on %s. Products: %s.",
        what,
        model.config.architecture,
        seconds,
        model.weight_bytes / 1e9,
        str(model.dtype).removeprefix("torch."),
        model.device,
        _forms([*model.stack.linears(), model.lm_head]),
    )


def _forms(linears: Sequence[Linear]) -> str:
    """How the dense layers are held, by the size of their weights where that differs."""
    by_form: dict[str, set[str]] = {}
    for linear in linears:
        size = "x".join(map(str, linear.size))
        by_form.setdefault(str(linear.form), set()).add(size)
    if len(by_form) == 1:
        return next(iter(by_form))
    return "; ".join(f"{' and '.join(sorted(sizes))} {form}" for form, sizes in by_form.items())


def _check(stored: StoredWeights, config: ModelConfig) -> None:
    """Raise unless the stored weights are the expected ones; a stored head beside tied embeddings
    is fine only as a copy of them."""
    expected = expected_shapes(config)
    tied_head = config.tie_word_embeddings and _HEAD in stored.names
    if tied_head and _EMBEDDING in stored.names:
        _check_copy(stored)
    stored.check(expected, also=[_HEAD] if tied_head else [])


def _check_copy(stored: StoredWeights) -> None:
    if not torch.equal(stored.raw(_HEAD), stored.raw(_EMBEDDING)):
        raise UnsupportedModelError(
            f"{stored.directory}: tie_word_embeddings is true, but {_HEAD} differs from "
            f"{_EMBEDDING}; set tie_word_embeddings to false to use it."
        )


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name and shape of every weight of a checkpoint, in the order of the layers."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {_EMBEDDING: (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        layer = layer_shapes(config)
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (config.vocab_size, hidden)
    return shapes


def layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name and shape of every weight of one layer."""
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
