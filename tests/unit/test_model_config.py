"""Every value of a config is either served or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sgl_spec.errors import ConfigError, UnsupportedModelError
from sgl_spec.models.config import ModelConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1000,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": None}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"]}
DROP = object()


def read(
    directory: Path,
    base: dict[str, Any],
    generation: dict[str, Any] | None = None,
    context: int | None = None,
    **changes: Any,
) -> ModelConfig:
    content = {k: v for k, v in (base | changes).items() if v is not DROP}
    (directory / "config.json").write_text(json.dumps(content))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_hf(directory, context)


def yarn(**changes: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 500} | changes


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {"architectures": ["GemmaForCausalLM"]}, "architectures = ['GemmaForCausalLM']"),
    (LLAMA, {"architectures": DROP}, "architectures = None"),
    (LLAMA, {"architectures": ["LlamaForCausalLM", "X"]}, "architectures = "),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    (LLAMA, {"hidden_size": DROP}, "hidden_size = None"),
    (LLAMA, {"hidden_size": "64"}, "hidden_size = '64'"),
    (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers = True"),
    (LLAMA, {"vocab_size": 0}, "vocab_size = 0"),
    (LLAMA, {"attention_bias": 1}, "attention_bias = 1"),
    (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads = 3"),
    (LLAMA, {"head_dim": 15}, "head_dim = 15"),
    (LLAMA, {"quantization_config": {"quant_method": "awq"}}, "quantization_config = 'awq'"),
    (LLAMA, {"torch_dtype": "float8_e4m3fn"}, "dtype = 'float8_e4m3fn'"),
    (LLAMA, {"eos_token_id": 512}, "eos_token_id = 512"),
    (LLAMA, {"eos_token_id": ["2"]}, "eos_token_id = ['2']"),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
    (LLAMA, {"rope_parameters": {"rope_type": "longrope"}}, "rope_type = 'longrope'"),
    (LLAMA, {"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type = ['yarn']"),
    (LLAMA, {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor = None"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_parameters.factor = '2'"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": -2}}, "rope_parameters.factor = -2"),
    (LLAMA, {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor = None"),
    (LLAMA, {"rope_scaling": yarn(twist=1)}, "['twist']"),
    (LLAMA, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
    (LLAMA, {"rope_parameters": ["default"]}, "rope_parameters = ['default']"),
    (LLAMA, {"rope_theta": "many"}, "rope_parameters.rope_theta = 'many'"),
    (LLAMA, {"rope_theta": float("nan")}, "rope_parameters.rope_theta = nan"),
    (LLAMA, {"rms_norm_eps": -1}, "rms_norm_eps = -1 "),
    (QWEN3, {"rms_norm_eps": 0}, "rms_norm_eps = 0 "),
    (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
    (MISTRAL, {"rms_norm_eps": float("inf")}, "rms_norm_eps = inf"),
    (LLAMA, {"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5'"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    (MISTRAL, {"sliding_window": 999}, "sliding_window = 999"),
    (MISTRAL, {"sliding_window": DROP, "max_position_embeddings": 8192}, "sliding_window = 4096"),
    (QWEN2, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "window"),
    (
        QWEN3,
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        "sliding_window = 8",
    ),
    (QWEN2, {"layer_types": ["linear_attention", "full_attention"]}, "['linear_attention']"),
]


@pytest.mark.parametrize(("base", "changes", "named"), REFUSED, ids=[case[2] for case in REFUSED])
def test_refused_by_name(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    read(tmp_path, base)
    with pytest.raises(UnsupportedModelError) as refusal:
        read(tmp_path, base, **changes)
    assert named in refusal.value.message
    assert "allowed: " in refusal.value.message
    assert "config.json" in refusal.value.message


@pytest.mark.parametrize(
    ("base", "changes", "context"),
    [
        (MISTRAL, {"sliding_window": 1000}, None),
        (MISTRAL, {"sliding_window": 128}, 128),
        (QWEN2, {"use_sliding_window": False, "sliding_window": 8}, None),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, None),
        (LLAMA, {"sliding_window": 8}, None),
    ],
)
def test_a_window_that_hides_nothing_is_served(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], context: int | None
) -> None:
    config = read(tmp_path, base, context=context, **changes)
    assert config.context_length == (context or 1000)


def test_flags_of_the_families(tmp_path: Path) -> None:
    def flags(base: dict[str, Any], **changes: Any) -> tuple[bool, ...]:
        config = read(tmp_path, base, **changes)
        return config.attention_bias, config.output_bias, config.mlp_bias, config.qk_norm

    assert flags(LLAMA) == (False, False, False, False)
    assert flags(LLAMA, attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert flags(MISTRAL) == (False, False, False, False)
    assert flags(QWEN2) == (True, False, False, False)
    assert flags(QWEN3) == (False, False, False, True)
    assert flags(QWEN3, attention_bias=True) == (True, True, False, True)


def test_shapes_left_out(tmp_path: Path) -> None:
    llama = read(tmp_path, LLAMA, num_key_value_heads=None)
    assert (llama.num_kv_heads, llama.head_dim, llama.tie_word_embeddings) == (4, 16, False)
    assert read(tmp_path, QWEN3).head_dim == 128
    wide = MISTRAL | {"num_attention_heads": 16}
    assert read(tmp_path, wide, num_key_value_heads=DROP).num_kv_heads == 8


def test_old_and_new_rope_keys_mean_the_same(tmp_path: Path) -> None:
    old = read(tmp_path, LLAMA, rope_theta=5e5, rope_scaling=yarn(type="yarn"))
    new = read(tmp_path, LLAMA, rope_parameters=yarn(rope_theta=500000))
    assert old.rope == new.rope
    assert (new.rope.kind, new.rope.theta, new.rope.factor) == ("yarn", 5e5, 4.0)
    assert new.rope.original_positions == 500
    assert new.rope.attention_factor is None


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        (None, 1000),
        ({"rope_type": "linear", "factor": 4.0}, 4000),
        (yarn(), 2000),
        (yarn(original_max_position_embeddings=100), 1000),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4},
            1000,
        ),
    ],
)
def test_context_length(tmp_path: Path, rope: dict[str, Any] | None, context: int) -> None:
    assert read(tmp_path, LLAMA, rope_parameters=rope).context_length == context
    assert read(tmp_path, LLAMA, rope_parameters=rope, context=77).context_length == 77
    for bad in (0, 1, context + 1):
        with pytest.raises(ConfigError, match=f"integer from 2 to {context},.*got {bad}"):
            read(tmp_path, LLAMA, rope_parameters=rope, context=bad)


def test_special_ids_and_sampling_defaults(tmp_path: Path) -> None:
    plain = read(tmp_path, LLAMA, eos_token_id=[5, 6], bos_token_id=1)
    assert (plain.eos_token_ids, plain.bos_token_id, plain.generation_defaults) == ((5, 6), 1, {})
    generation = {"eos_token_id": 9, "temperature": 0.6, "top_k": 20, "top_p": None, "x": 1}
    chosen = read(tmp_path, LLAMA, generation, bos_token_id=None, dtype="bfloat16")
    assert (chosen.eos_token_ids, chosen.bos_token_id) == ((9,), None)
    assert chosen.generation_defaults == {"temperature": 0.6, "top_k": 20}
    assert chosen.dtype == "bfloat16"
    with pytest.raises(UnsupportedModelError, match="temperature = 'hot'"):
        read(tmp_path, LLAMA, {"temperature": "hot"})


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_unreadable_config(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"Cannot read .*config.json"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config.json (is not valid JSON|must hold)"):
        ModelConfig.from_hf(tmp_path)
