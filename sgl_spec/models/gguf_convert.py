"""GGUF (Llama architecture, byte-level BPE tokenizer) to a Hugging Face directory. Imports no
torch.

Two things differ between the formats. llama.cpp stores the rows of Q and K so that a rotary pair
is two neighbours, Hugging Face so that it is row i and row i + head_dim / 2: the rows are put
back. And a GGUF names its pre-tokenizer instead of describing it: "smollm" splits digits one by
one, then applies the byte-level pattern.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from sgl_spec.errors import UnsupportedModelError

Array = npt.NDArray[np.float32]

_CONTROL = 3  # gguf token type of special tokens
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def convert_gguf(source: Path, target: Path) -> None:
    """Write config, tokenizer and fp32 weights of the GGUF file `source` into directory `target`.

    Raises `UnsupportedModelError` for another architecture or tokenizer.
    """
    reader = gguf.GGUFReader(str(source))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _expect(fields, "general.architecture", "llama")
    _expect(fields, "tokenizer.ggml.model", "gpt2")
    _expect(fields, "tokenizer.ggml.pre", "smollm")
    _write_json(target / "config.json", _config(fields, _is_tied(reader)))
    _write_json(target / "generation_config.json", _special_ids(fields))
    _build_tokenizer(fields).save(str(target / "tokenizer.json"))
    _write_json(target / "tokenizer_config.json", _tokenizer_config(fields))
    _write_json(target / "special_tokens_map.json", _special_tokens(fields))
    weights = _read_weights(reader, fields)
    save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})


def unpermute_rope_rows(weight: Array, num_heads: int) -> Array:
    """Undo llama.cpp's row order of Q or K. weight: [num_heads * head_dim, in], copied."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _expect(fields: dict[str, Any], key: str, value: str) -> None:
    if fields.get(key) != value:
        raise UnsupportedModelError(f"GGUF {key} = {fields.get(key)!r}; allowed: {value!r}.")


def _is_tied(reader: gguf.GGUFReader) -> bool:
    return all(tensor.name != "output.weight" for tensor in reader.tensors)


def _special_ids(fields: dict[str, Any]) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: int(fields[f"tokenizer.ggml.{name}_token_id"]) for key, name in names.items()}


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    def shortest(key: str) -> float:
        """The shortest decimal of a stored float32: 1e-05, not 9.999999747378752e-06."""
        return float(str(np.float32(fields[key])))

    heads = int(fields["llama.attention.head_count"])
    hidden = int(fields["llama.embedding_length"])
    theta = shortest("llama.rope.freq_base")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "head_dim": hidden // heads,
        "max_position_embeddings": int(fields["llama.context_length"]),
        "rms_norm_eps": shortest("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "dtype": "float32",
        **_special_ids(fields),
    }


def _special_tokens(fields: dict[str, Any]) -> dict[str, str]:
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        key: tokens[int(fields[f"tokenizer.ggml.{name}_token_id"])] for key, name in names.items()
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(fields["llama.context_length"]),
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
        **_special_tokens(fields),
    }


def _build_tokenizer(fields: dict[str, Any]) -> Tokenizer:
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return tokenizer


def _read_weights(reader: gguf.GGUFReader, fields: dict[str, Any]) -> dict[str, Array]:
    heads = {
        "attn_q": int(fields["llama.attention.head_count"]),
        "attn_k": int(fields["llama.attention.head_count_kv"]),
    }
    weights: dict[str, Array] = {}
    for tensor in tqdm(reader.tensors, desc="Dequantising", unit="tensor"):
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = unpermute_rope_rows(weight, heads[part])
        weights[_hf_name(tensor.name)] = np.ascontiguousarray(weight)
    return weights


def _hf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    block, layer, part, kind = name.split(".")
    if block != "blk" or part not in _LAYER_NAMES or kind != "weight":
        raise UnsupportedModelError(f"GGUF tensor {name!r} is not part of a plain Llama model.")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
