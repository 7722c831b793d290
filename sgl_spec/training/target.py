"""The frozen target: hidden states of whole sequences, for the drafts to learn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sgl_spec.errors import ConfigError, UnsupportedModelError
from sgl_spec.models.config import ModelConfig
from sgl_spec.training.blocks import (
    LayerSizes,
    LayerWeights,
    Rotary,
    forward_layer,
    rms_norm,
)


@dataclass(frozen=True, slots=True)
class Hidden:
    """What the target computed for a batch.

    final: [B, S, H], the final-normed hidden, whose product with the head is the logits.
    captured: [B, S, layers * H], the residual streams that enter the captured layers.
    """

    final: Tensor
    captured: Tensor | None


class Target:
    """A Llama, Mistral, Qwen2 or Qwen3 checkpoint, run over padded batches without gradients.

    Rows after a sequence's end hold padding: attention is causal, so they change nothing before
    them, and nobody reads them. embedding, head: [vocab, H] in `dtype`.
    """

    def __init__(
        self, directory: Path, *, dtype: torch.dtype, device: torch.device, compiled: bool = False
    ) -> None:
        self.config = ModelConfig.from_hf(directory)
        self.directory = directory
        self.dtype, self.device = dtype, device
        if self.config.mlp_bias:
            raise UnsupportedModelError(
                f"{directory}: mlp_bias = true cannot be trained for; allowed: false."
            )
        weights = read_weights(directory)

        def take(name: str) -> Tensor:
            if name not in weights:
                raise UnsupportedModelError(f"{directory} misses weights: {name}.")
            return weights[name].to(device=device, dtype=dtype)

        self.embedding = take("model.embed_tokens.weight")
        tied = self.config.tie_word_embeddings
        self.head = self.embedding if tied else take("lm_head.weight")
        self.norm = take("model.norm.weight")
        self.layers = [self._layer(index, take) for index in range(self.config.num_layers)]
        config = self.config
        self._shape = LayerSizes(
            config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
        )
        self._rotary: Rotary | None = None
        self._run_layer = torch.compile(forward_layer) if compiled else forward_layer

    def _layer(self, index: int, take: Callable[[str], Tensor]) -> LayerWeights:
        config, prefix = self.config, f"model.layers.{index}"
        qkv = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
        attention = f"{prefix}.self_attn"
        return LayerWeights(
            input_norm=take(f"{prefix}.input_layernorm.weight"),
            qkv=torch.cat([take(f"{name}.weight") for name in qkv]),
            qkv_bias=torch.cat([take(f"{name}.bias") for name in qkv])
            if config.attention_bias
            else None,
            qk_norm=(take(f"{attention}.q_norm.weight"), take(f"{attention}.k_norm.weight"))
            if config.qk_norm
            else None,
            output=take(f"{attention}.o_proj.weight"),
            output_bias=take(f"{attention}.o_proj.bias") if config.output_bias else None,
            post_norm=take(f"{prefix}.post_attention_layernorm.weight"),
            gate=take(f"{prefix}.mlp.gate_proj.weight"),
            up=take(f"{prefix}.mlp.up_proj.weight"),
            down=take(f"{prefix}.mlp.down_proj.weight"),
        )

    @torch.no_grad()
    def forward(self, tokens: Tensor, capture: tuple[int, ...] = ()) -> Hidden:
        """Hidden states of `tokens` [B, S] (any id where padded).

        capture: layers whose incoming residual stream is kept, in this order.
        """
        rotary = self.rotary(tokens.shape[1])
        hidden = F.embedding(tokens, self.embedding)
        kept: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in capture:
                kept[index] = hidden
            hidden = self._run_layer(hidden, layer, rotary.cos, rotary.sin, self._shape)
        captured = torch.cat([kept[index] for index in capture], dim=-1) if capture else None
        return Hidden(rms_norm(hidden, self.norm, self._shape.eps), captured)

    def rotary(self, length: int) -> Rotary:
        """Rows for positions 0 .. length - 1."""
        if self._rotary is None or self._rotary.cos.shape[0] < length:
            self._rotary = Rotary.build(self.config, max(length, 2048), self.dtype, self.device)
        return self._rotary.rows(0, length)


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a Hugging Face directory, on the CPU, as stored."""
    files = sorted(directory.glob("model*.safetensors"))
    if not files:
        raise ConfigError(f"{directory} holds no model*.safetensors.")
    weights: dict[str, Tensor] = {}
    try:
        for file in files:
            weights.update(load_file(file))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"Cannot read the weights in {file}: {error}.") from error
    return weights
