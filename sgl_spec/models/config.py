"""What a checkpoint's `config.json` says, checked value by value. Imports no torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sgl_spec.errors import ConfigError, UnsupportedModelError
from sgl_spec.models.rope_config import RopeConfig, parse_rope

_T = TypeVar("_T")

STORED_DTYPES = ("float32", "bfloat16", "float16")
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class _Family:
    """How an architecture reads keys that its config may leave out, and which biases it has.

    model_type: transformers' name of it. kv_heads, head_dim None: num_attention_heads,
    hidden_size / num_attention_heads. qkv_bias None: the key `attention_bias` decides, for the
    output projection too. window: "never", "always" (the key `sliding_window` alone) or "flag"
    (`use_sliding_window`).
    """

    model_type: str
    kv_heads: int | None
    head_dim: int | None
    qkv_bias: bool | None
    qk_norm: bool
    window: str


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", None, None, None, False, "never"),
    "MistralForCausalLM": _Family("mistral", 8, None, False, False, "always"),
    "Qwen2ForCausalLM": _Family("qwen2", 32, None, True, False, "flag"),
    "Qwen3ForCausalLM": _Family("qwen3", 32, 128, None, True, "flag"),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A supported decoder: shapes, flags, special ids and sampling defaults.

    context_length: most tokens of one request, prompt and output. eos_token_ids: each id that
    ends a text. generation_defaults: the sampling values of `generation_config.json`, as found.
    dtype: as stored ("float32", "bfloat16", "float16"), None when the config does not say.
    attention_bias: q, k and v have biases; output_bias: the attention output has one.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    context_length: int
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    dtype: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, float]

    @classmethod
    def from_hf(cls, directory: Path, context_length: int | None = None) -> ModelConfig:
        """Read `config.json` and `generation_config.json` of a Hugging Face directory.

        context_length: the user's limit (`--context-length`), None for the model's own.
        Raises `UnsupportedModelError` naming the first value that cannot be served, `ConfigError`
        for a file that cannot be read or a context length beyond the model's.
        """
        keys = Keys(read_json(directory / "config.json"), directory / "config.json")
        generation_path = directory / "generation_config.json"
        generation = read_json(generation_path) if generation_path.is_file() else {}
        return _build(keys, Keys(generation, generation_path), context_length)

    @classmethod
    def from_keys(cls, keys: Keys) -> ModelConfig:
        """What an object in the form of a `config.json` says, wherever it was found."""
        return _build(keys, Keys({}, keys.path), None)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; `ConfigError` names the path when there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror or error}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, found {type(content).__name__}.")
    return content


class Keys:
    """Typed reads from a JSON object; a wrong value is refused with its name.

    path: of the file that holds it, for the refusals.
    """

    def __init__(self, content: dict[str, Any], path: Path) -> None:
        self.content = content
        self.path = path

    def refuse(self, key: str, value: object, allowed: str) -> UnsupportedModelError:
        """The error that says that `value` is not among the `allowed`."""
        return UnsupportedModelError(
            f"{self.path}: {key} = {value!r} is not supported; allowed: {allowed}.", param=key
        )

    def get(self, key: str, kind: type[_T], allowed: str, default: _T | None = None) -> _T:
        """The value of type `kind`, or the default where it is absent or null."""
        value = self.content.get(key)
        if value is None:
            value = default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.refuse(key, value, allowed)
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(key, int, "an integer >= 1", default)
        if value < 1:
            raise self.refuse(key, value, "an integer >= 1")
        return value

    def positive(self, key: str, default: float) -> float:
        """A number above 0, and finite."""
        value = self.get(key, float, "a positive number", default)
        if not 0 < value < math.inf:
            raise self.refuse(key, self.content[key], "a positive number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        return self.get(key, bool, "true or false", default)

    def ids(self, key: str) -> tuple[int, ...]:
        """Integers of a list, or a lone one; () where the key is absent or null."""
        value = self.content.get(key)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in listed):
            raise self.refuse(key, value, "a token id or a list of token ids")
        return tuple(listed)


def _build(keys: Keys, generation: Keys, context_length: int | None) -> ModelConfig:
    architecture = _architecture(keys)
    family = _FAMILIES[architecture]
    _refuse_unsupported(keys)
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    bias = keys.flag("attention_bias", False) if family.qkv_bias is None else family.qkv_bias
    positions = keys.count("max_position_embeddings")
    rope = parse_rope(keys.content, positions, str(keys.path))
    context = _context(rope.context(positions), context_length)
    _refuse_sliding_window(keys, family, context)
    config = ModelConfig(
        architecture=architecture,
        model_type=family.model_type,
        vocab_size=keys.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.count("intermediate_size"),
        num_layers=keys.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=keys.count("num_key_value_heads", family.kv_heads or heads),
        head_dim=keys.count("head_dim", family.head_dim or hidden // heads),
        rms_norm_eps=keys.positive("rms_norm_eps", 1e-6),
        rope=rope,
        context_length=context,
        attention_bias=bias,
        output_bias=bias and family.qkv_bias is None,
        mlp_bias=architecture == "LlamaForCausalLM" and keys.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        dtype=_dtype(keys),
        bos_token_id=_first(generation.ids("bos_token_id") or keys.ids("bos_token_id")),
        eos_token_ids=generation.ids("eos_token_id") or keys.ids("eos_token_id"),
        generation_defaults=_generation_defaults(generation),
    )
    _check_shapes(config, keys)
    return config


def _architecture(keys: Keys) -> str:
    found = keys.content.get("architectures")
    name = found[0] if isinstance(found, list) and len(found) == 1 else found
    if not isinstance(name, str) or name not in _FAMILIES:
        raise keys.refuse("architectures", found, ", ".join(_FAMILIES))
    return name


def _refuse_unsupported(keys: Keys) -> None:
    if keys.content.get("quantization_config") is not None:
        quantization = keys.content["quantization_config"]
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise keys.refuse("quantization_config", method or quantization, "absent (plain weights)")
    activation = keys.get("hidden_act", str, "'silu'", "silu")
    if activation != "silu":
        raise keys.refuse("hidden_act", activation, "'silu'")


def _refuse_sliding_window(keys: Keys, family: _Family, context: int) -> None:
    """A window at least as long as the context hides nothing, so it may stand."""
    layers = keys.count("num_hidden_layers")
    window = keys.content.get("sliding_window", 4096)
    used = family.window == "always"
    if family.window == "flag" and keys.flag("use_sliding_window", False):
        used = keys.get("max_window_layers", int, "an integer", 28) < layers
    kinds = keys.get("layer_types", list, "a list of layer types", ["full_attention"])
    others = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    if others:
        raise keys.refuse("layer_types", others, "full_attention")
    used = used or (family.window == "flag" and "sliding_attention" in kinds)
    if used and isinstance(window, int) and window < context:
        allowed = f"null, or at least the context length; --context-length {window} would fit it"
        raise keys.refuse("sliding_window", window, allowed)


def _context(model_limit: int, asked: int | None) -> int:
    if asked is None:
        return model_limit
    if not 2 <= asked <= model_limit:
        raise ConfigError(
            f"--context-length must be an integer from 2 to {model_limit}, which is this model's "
            f"own, got {asked}.",
            param="context_length",
        )
    return asked


def _dtype(keys: Keys) -> str | None:
    name = keys.content.get("dtype", keys.content.get("torch_dtype"))
    if name is not None and name not in STORED_DTYPES:
        raise keys.refuse("dtype", name, ", ".join(STORED_DTYPES))
    return name


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None


def _generation_defaults(generation: Keys) -> dict[str, float]:
    found = {key: generation.content.get(key) for key in SAMPLING_DEFAULTS}
    for key, value in found.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise generation.refuse(key, value, "a number")
    return {key: value for key, value in found.items() if value is not None}


def _check_shapes(config: ModelConfig, keys: Keys) -> None:
    if config.num_heads % config.num_kv_heads:
        allowed = f"a divisor of num_attention_heads ({config.num_heads})"
        raise keys.refuse("num_key_value_heads", config.num_kv_heads, allowed)
    if config.head_dim % 2:
        raise keys.refuse("head_dim", config.head_dim, "an even number")
    for name, ids in (
        ("eos_token_id", config.eos_token_ids),
        ("bos_token_id", (config.bos_token_id,)),
    ):
        for token in ids:
            if token is not None and not 0 <= token < config.vocab_size:
                raise keys.refuse(name, token, f"0 to {config.vocab_size - 1}")
