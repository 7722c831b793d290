"""Draft heads with random weights in the published layouts, and what they compute, plainly.

The plain forms follow the formulas in fp32 over whole sequences: no cache, no fused weights, no
code of the package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from model_runs import Piece, Run
from safetensors.torch import load_file, save_file
from torch import Tensor

from sgl_spec.models.draft import DraftModel

Weights = dict[str, Tensor]
DROP = object()  # in place of a value: take the key or the tensor away


def read_target(directory: Path) -> tuple[dict[str, Any], Weights]:
    """Config and weights of a target checkpoint."""
    config = json.loads((directory / "config.json").read_text())
    return config, load_file(directory / "model.safetensors")


def head_config(target: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A config as EAGLE's repositories have it, of the target's size unless changed.

    Its rotary base and its position limit are its own, and smaller than the target's.
    """
    own = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": target["vocab_size"],
        "hidden_size": target["hidden_size"],
        "intermediate_size": 3 * target["hidden_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 48,
        "rope_theta": 5000.0,
        "rms_norm_eps": 1e-4,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    return own | changes


def eagle3_config(target: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """`head_config` for EAGLE3: a quarter of the vocabulary, the outputs of three target layers."""
    last = target["num_hidden_layers"] - 2  # the output of the very last is not offered
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": target["vocab_size"] // 4,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, (last + 1) // 2, last]},
    }
    return head_config(target, **(own | changes))


def layer_weights(config: Mapping[str, Any], seed: int, columns: int) -> Weights:
    """One decoder layer under un-prefixed names; attention reads `columns`."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = dim * config["num_attention_heads"], dim * config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (q, columns),
        "self_attn.k_proj": (kv, columns),
        "self_attn.v_proj": (kv, columns),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        weights[f"{name}.weight"] = noise(generator, *shape) / shape[1] ** 0.5
        if config.get("attention_bias") and "self_attn" in name:
            weights[f"{name}.bias"] = 0.3 * noise(generator, shape[0])
        if config.get("mlp_bias") and "mlp" in name:
            weights[f"{name}.bias"] = 0.3 * noise(generator, shape[0])
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{name}.weight"] = 1 + 0.3 * noise(generator, hidden)
    if config.get("model_type") == "qwen3":
        for name in ("q_norm", "k_norm"):
            weights[f"self_attn.{name}.weight"] = 1 + 0.3 * noise(generator, dim)
    return weights


def noise(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def eagle_weights(config: Mapping[str, Any], seed: int = 1) -> Weights:
    """A head in EAGLE's layout."""
    hidden = config["hidden_size"]
    generator = torch.Generator().manual_seed(seed)
    weights = {"fc.weight": noise(generator, hidden, 2 * hidden) / hidden**0.5}
    if config.get("bias", True):
        weights["fc.bias"] = 0.3 * noise(generator, hidden)
    for index in range(config["num_hidden_layers"]):
        layer = layer_weights(config, seed + index, hidden)
        if index == 0:
            del layer["input_layernorm.weight"]
        weights |= {f"layers.{index}.{name}": weight for name, weight in layer.items()}
    if config.get("qkv_bias"):
        for name in ("q", "k", "v"):
            rows = len(weights[f"layers.0.self_attn.{name}_proj.weight"])
            bias = 0.3 * noise(generator, rows)
            weights[f"layers.0.self_attn.{name}_proj.bias"] = bias
    return weights


def eagle3_weights(config: Mapping[str, Any], seed: int = 1, features: int = 3) -> Weights:
    """A head in EAGLE3's layout, without the optional norms and without an embedding."""
    hidden = config["hidden_size"]
    columns = features * (config.get("target_hidden_size") or hidden)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        "fc.weight": noise(generator, hidden, columns) / columns**0.5,
        "norm.weight": 1 + 0.3 * noise(generator, hidden),
    }
    if config.get("bias"):
        weights["fc.bias"] = 0.3 * noise(generator, hidden)
    for index in range(config["num_hidden_layers"]):
        layer = layer_weights(config, seed + index, hidden if index else 2 * hidden)
        prefix = f"layers.{index}" if index else "midlayer"
        weights |= {f"{prefix}.{name}": weight for name, weight in layer.items()}
    weights["midlayer.hidden_norm.weight"] = 1 + 0.3 * noise(generator, hidden)
    rows, vocab = config["draft_vocab_size"], config["vocab_size"]
    if rows is not None:
        weights["lm_head.weight"] = noise(generator, rows, hidden) / hidden**0.5
        if rows < vocab:
            ids = torch.randperm(vocab, generator=generator)[:rows].sort().values
            weights["d2t"] = ids - torch.arange(rows)
            weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    return weights


def write_head(directory: Path, config: Mapping[str, Any], weights: Weights) -> Path:
    """A head's directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    stored = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def make_eagle3(directory: Path, target_dir: Path, seed: int = 1, **changes: Any) -> Path:
    """A random EAGLE3 head for the target in `target_dir`; `changes` go into its config."""
    config = eagle3_config(read_target(target_dir)[0], **changes)
    return write_head(directory, config, eagle3_weights(config, seed))


def make_eagle(directory: Path, target_dir: Path, seed: int = 1, **changes: Any) -> Path:
    """A random head in EAGLE's layout for the target in `target_dir`."""
    config = head_config(read_target(target_dir)[0], **changes)
    return write_head(directory, config, eagle_weights(config, seed))


def edit_config(directory: Path, **changes: Any) -> Path:
    """Set or drop keys of config.json."""
    path = directory / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not DROP}))
    return directory


def edit(directory: Path, **changes: object) -> Path:
    """Replace or drop stored tensors; "__" stands for a dot."""
    path = directory / "model.safetensors"
    stored = load_file(path) | {name.replace("__", "."): value for name, value in changes.items()}
    kept = {name: value for name, value in stored.items() if isinstance(value, Tensor)}
    save_file(kept, path, metadata={"format": "pt"})
    return directory


# --- what they compute ---


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def turned(x: Tensor, theta: float) -> Tensor:
    """Row r of x [T, heads, d] turned by r: pair (i, i + d/2) by the angle r theta^(-2i/d)."""
    half = x.shape[-1] // 2
    speeds = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * speeds
    cos, sin = angles.cos().float(), angles.sin().float()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def plain_layer(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], residual: Tensor, attended: Tensor
) -> Tensor:
    """One layer whose attention reads `attended` [T, columns], on `residual` [T, hidden]."""
    eps, heads = config["rms_norm_eps"], config["num_attention_heads"]

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    q, k, v = (
        linear(f"self_attn.{name}_proj", attended).view(
            len(attended), heads if name == "q" else config["num_key_value_heads"], -1
        )
        for name in ("q", "k", "v")
    )
    if "self_attn.q_norm.weight" in weights:
        q = normed(q, weights["self_attn.q_norm.weight"], eps)
        k = normed(k, weights["self_attn.k_norm.weight"], eps)
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    q, k = turned(q, theta), turned(k, theta)
    group = heads // config["num_key_value_heads"]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
    later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    out = torch.einsum("hij,jhd->ihd", scores.masked_fill(later, -torch.inf).softmax(-1), v)
    hidden = residual + linear("self_attn.o_proj", out.reshape(len(q), -1))
    inner = normed(hidden, weights["post_attention_layernorm.weight"], eps)
    gated = F.silu(linear("mlp.gate_proj", inner)) * linear("mlp.up_proj", inner)
    return hidden + linear("mlp.down_proj", gated)


def part(weights: Mapping[str, Tensor], prefix: str) -> Weights:
    """The weights below a prefix."""
    return {
        name.removeprefix(f"{prefix}."): weight
        for name, weight in weights.items()
        if name.startswith(f"{prefix}.")
    }


def plain_fuse(config: Mapping[str, Any], weights: Weights, captured: Tensor) -> Tensor:
    """EAGLE3's features of captured rows."""
    eps = config["rms_norm_eps"]
    if "input_norm.weight" in weights:
        captured = normed(captured, weights["input_norm.weight"], eps)
    norms = [weights[name] for name in sorted(weights) if name.startswith("fc_norm.")]
    if norms:
        parts = captured.split(len(norms[0]), dim=-1)
        both = zip(parts, norms, strict=True)
        captured = torch.cat([normed(x, weight, eps) for x, weight in both], dim=-1)
    return F.linear(captured, weights["fc.weight"], weights.get("fc.bias"))


def plain_eagle3(
    config: Mapping[str, Any], weights: Weights, embedding: Tensor, tokens: Tensor, features: Tensor
) -> Tensor:
    """Rows [T, hidden] after the layers, before the final norm. Names: midlayer, layers.1, ..."""
    eps, first = config["rms_norm_eps"], part(weights, "midlayer")
    feature = normed(features, first["hidden_norm.weight"], eps)
    embedded = normed(embedding[tokens], first["input_layernorm.weight"], eps)
    residual = feature if config.get("norm_before_residual") else features
    hidden = plain_layer(config, first, residual, torch.cat((embedded, feature), dim=-1))
    for index in range(1, config["num_hidden_layers"]):
        layer = part(weights, f"layers.{index}")
        hidden = plain_layer(
            config, layer, hidden, normed(hidden, layer["input_layernorm.weight"], eps)
        )
    return hidden


def plain_eagle(
    config: Mapping[str, Any], weights: Weights, embedding: Tensor, tokens: Tensor, features: Tensor
) -> Tensor:
    """Rows [T, hidden] of EAGLE's head."""
    both = torch.cat((embedding[tokens], features), dim=-1)
    hidden = F.linear(both, weights["fc.weight"], weights.get("fc.bias"))
    for index in range(config["num_hidden_layers"]):
        layer = part(weights, f"layers.{index}")
        attended = hidden
        if index:
            attended = normed(hidden, layer["input_layernorm.weight"], config["rms_norm_eps"])
        hidden = plain_layer(config, layer, hidden, attended)
    return hidden


class DraftRun(Run):
    """`Run` for a head: rows come with features, and give hidden rows."""

    def __init__(self, model: DraftModel, requests: int, width: int, seed: int = 0) -> None:
        super().__init__(model, requests, width, seed)  # type: ignore[arg-type]

    @torch.inference_mode()
    def hidden(self, piece: Piece, features: Tensor) -> Tensor:
        """[rows, H] of one piece."""
        return self.model.forward(self._batch([piece]), features, self.kv)  # type: ignore[call-arg]


def capture(target_run: Run, ids: Sequence[int], layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """`Decoder.forward_features` over a text in a fresh run."""
    batch = target_run._batch([Piece(0, 0, ids)])
    with torch.inference_mode():
        return target_run.model.forward_features(replace(batch), target_run.kv, layers)
