"""EAGLE3 heads saved by the package `speculators`, with the logits that it computes from them.

Run as a script, it records them for machines that do not have the package:

    python tests/speculators_heads.py tests/data/speculators
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from heads import eagle3_config, eagle3_weights, write_head
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

VOCAB, DRAFT_VOCAB, HIDDEN, ROWS = 272, 64, 16, 40
CAPTURE = [1, 3, 2]
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"norm_before_residual": False}),
    "qwen3": ("qwen3", {"norm_before_residual": True, "norm_output": True, "fc_norm": True}),
    "llama-normed": ("llama", {"norm_before_residual": True, "norm_before_fc": True}),
}
"""Model type of the layer and options, by name."""
EAGLE_LAYOUT = "eagle-layout"  # saved as EAGLE's repositories do, and converted by the package


def save_head(name: str, directory: Path) -> dict[str, Tensor]:
    """Save a head with random weights into `directory`; what it computes from random inputs.

    tokens [ROWS], captured [ROWS, 3 * HIDDEN], and logits [ROWS, DRAFT_VOCAB] of two steps: the
    second step's row p is the first step's row p continued by the next token.
    """
    if name == EAGLE_LAYOUT:
        return save_eagle_head(directory)
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    kind, options = HEADS[name]
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config(kind),
        draft_vocab_size=DRAFT_VOCAB,
        eagle_aux_hidden_state_layer_ids=CAPTURE,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="target", architectures=["LlamaForCausalLM"]),
        ),
        **options,
    )
    model = Eagle3DraftModel(config).float().eval()
    fill(model)
    model.save_pretrained(directory)
    return inputs() | compute(model)


def save_eagle_head(directory: Path) -> dict[str, Tensor]:
    """A head in EAGLE3's own layout, run by the package after its own conversion."""
    from speculators.convert.eagle.eagle3_converter import Eagle3Converter
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel

    target = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 4}
    changes = {"draft_vocab_size": DRAFT_VOCAB, "rms_norm_eps": 1e-3, "head_dim": 8}
    config = eagle3_config(target, **changes)
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [id_ - 1 for id_ in CAPTURE]
    weights = eagle3_weights(config)
    weights["embed_tokens.weight"] = weights["lm_head.weight"].repeat(5, 1)[:VOCAB].contiguous()
    write_head(directory, config, weights)
    with tempfile.TemporaryDirectory() as scratch:
        verifier, converted = Path(scratch) / "verifier", Path(scratch) / "converted"
        verifier.mkdir()
        LlamaConfig(**target, num_attention_heads=2).save_pretrained(verifier)
        Eagle3Converter().convert(
            directory,
            converted,
            str(verifier),
            validate=False,
            eagle_aux_hidden_state_layer_ids=CAPTURE,
        )
        config = Eagle3SpeculatorConfig.from_pretrained(converted)
        config.transformer_layer_config._attn_implementation = "eager"
        model = Eagle3DraftModel(config).float().eval()
        left = model.load_state_dict(load_file(converted / "model.safetensors"), strict=False)
    assert not left.unexpected_keys
    assert all(name.startswith("verifier_") for name in left.missing_keys)
    return inputs() | compute(model)


def layer_config(kind: str) -> Any:
    """Values that are the class's default are not saved by every version: leave some at it."""
    config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=32,
    )
    config._attn_implementation = "eager"
    return config


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(11)
    for name, weight in model.named_parameters():
        if not name.startswith("verifier_"):
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if weight.dim() == 1 else noise / weight.shape[1] ** 0.5)
    ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    model.d2t.copy_(ids - torch.arange(DRAFT_VOCAB))
    model.t2d.copy_(torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True))


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(12)
    return {
        "tokens": torch.randint(3, VOCAB, (ROWS,), generator=generator),
        "captured": torch.randn(ROWS, len(CAPTURE) * HIDDEN, generator=generator),
    }


@torch.no_grad()
def compute(model: torch.nn.Module) -> dict[str, Tensor]:
    seen: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    given = inputs()
    model(
        hidden_states=given["captured"][None],
        input_ids=given["tokens"][None],
        document_ids=torch.zeros(1, ROWS, dtype=torch.int64),
        ttt_steps=2,
    )
    hook.remove()
    return {"first": seen[0].clone(), "second": seen[1].clone()}


def main(root: Path) -> None:
    for name in (*HEADS, EAGLE_LAYOUT):
        save_file(save_head(name, root / name), root / name / "expected.safetensors")
        (root / name / "config.py").unlink(missing_ok=True)  # the package's code, not ours to keep


if __name__ == "__main__":
    main(Path(sys.argv[1]))
