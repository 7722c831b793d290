"""`python -m sgl_spec.training standalone`: distil a small Llama from the target."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_spec.errors import ConfigError
from sgl_spec.models.config import read_json
from sgl_spec.models.shipped import unfold_standalone
from sgl_spec.training.blocks import Rotary
from sgl_spec.training.feed import Batch
from sgl_spec.training.held_out import MAX_STEPS, HeldOut
from sgl_spec.training.loop import Loop, StepStats
from sgl_spec.training.losses import soft_label_loss, wide_logits
from sgl_spec.training.options import (
    Setting,
    add_common,
    earlier_weights,
    prepare,
    provenance,
    write_json,
    write_tensors,
)
from sgl_spec.training.shards import TokenBatch
from sgl_spec.training.standalone_model import (
    DraftShape,
    Student,
    Weights,
    initial_weights,
    output_layer,
)

logger = logging.getLogger(__name__)

UNFOLDED = "model"
"""Folder in --out with the draft as an ordinary checkpoint, for serving."""

_CHUNK_ROWS = 4096  # rows over the whole vocabulary at a time
_REACH = 1  # the first token of a text is given


class StandaloneDraft:
    """The small Llama with what it learns from; see `standalone_model` for its function."""

    def __init__(self, setting: Setting) -> None:
        args = setting.args
        self.setting, self.target = setting, setting.target
        config = self.target.config
        self.shape = DraftShape(
            hidden=args.hidden,
            intermediate=args.intermediate,
            layers=args.num_layers,
            heads=args.heads,
            kv_heads=args.kv_heads,
            head_dim=args.head_dim,
            eps=config.rms_norm_eps,
            target_hidden=config.hidden_size,
        )
        self.student = Student(self.shape, compiled=setting.compiled)
        weights = initial_weights(self.shape, self.target.embedding, args.seed)
        if args.init_from is not None:
            weights = earlier_weights(args.init_from, weights)
        self.weights = {name: torch.nn.Parameter(value) for name, value in weights.items()}
        self.constants: dict[str, Tensor] = {}
        self._rotary: Rotary | None = None
        self._held_out = HeldOut(
            setting.shards,
            tokens=args.eval_tokens,
            batch_tokens=args.batch_tokens,
            max_len=min(args.max_len, args.batch_tokens),
        )
        logger.info("%.2f M weights", sum(weight.numel() for weight in weights.values()) / 1e6)

    def matrices(self) -> set[str]:
        """The layers' projections; those of the vocabulary are left to AdamW."""
        return {
            name
            for name, weight in self.weights.items()
            if weight.dim() == 2 and name.startswith("model.layers.")
        }

    def loss(self, batch: Batch) -> StepStats:
        """Soft-label loss over the whole vocabulary at every learned row."""
        final = self.target.forward(batch.tokens).final.flatten(0, 1)[batch.rows]
        weights = self._cast()
        hidden = self._forward(weights, batch.tokens).flatten(0, 1).index_select(0, batch.rows)
        per_row = torch.full((len(hidden),), 1.0 / len(hidden), device=hidden.device)
        found = soft_label_loss(
            hidden,
            output_layer(weights, self.target.embedding),
            lambda start, end: self._labels(final[start:end]),
            per_row,
            _CHUNK_ROWS,
            self.setting.args.loss,
        )
        return StepStats(found.loss, {"top-1": found.hits.float().mean()})

    def evaluate(self) -> dict[str, float]:
        """Accept lengths and agreement on held-out greedy answers."""
        weights = self._cast()
        return self._held_out.judge(lambda batch: self._ranks(batch, weights))

    def save(self, run: dict[str, Any]) -> None:
        """config.json, model.safetensors and provenance.json in --out, and, at the end of a
        schedule, the ordinary checkpoint that they stand for in --out/model."""
        out: Path = self.setting.args.out
        tensors = {
            name: weight.detach().to("cpu", torch.bfloat16).contiguous()
            for name, weight in self.weights.items()
        }
        write_tensors(out, tensors)
        write_json(out / "config.json", self.config())
        extra = {"algorithm": "STANDALONE"}
        write_json(out / "provenance.json", provenance(self.setting, run, extra))
        if run["schedule_share"] == 1.0:
            (out / UNFOLDED).mkdir(exist_ok=True)
            unfold_standalone(out, self.target.directory, out / UNFOLDED)

    def config(self) -> dict[str, Any]:
        """config.json of the Llama that the projections stand for."""
        shape, theirs = self.shape, read_json(self.target.directory / "config.json")
        kept = (
            "bos_token_id",
            "eos_token_id",
            "hidden_act",
            "max_position_embeddings",
            "pad_token_id",
            "rms_norm_eps",
            "rope_scaling",
            "rope_parameters",
        )
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **{key: theirs[key] for key in kept if theirs.get(key) is not None},
            "rope_theta": self.target.config.rope.theta,
            "attention_bias": False,
            "head_dim": shape.head_dim,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "mlp_bias": False,
            "num_attention_heads": shape.heads,
            "num_hidden_layers": shape.layers,
            "num_key_value_heads": shape.kv_heads,
            "target_hidden_size": shape.target_hidden,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": self.target.config.vocab_size,
        }

    def _cast(self) -> Weights:
        return {name: weight.to(self.target.dtype) for name, weight in self.weights.items()}

    def _forward(self, weights: Weights, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if self._rotary is None or self._rotary.cos.shape[0] < length:
            config = replace(self.target.config, head_dim=self.shape.head_dim)
            target = self.target
            self._rotary = Rotary.build(config, max(length, 2048), target.dtype, target.device)
        rows = self._rotary.rows(0, length)
        return self.student.forward(weights, tokens, self.target.embedding, rows)

    @torch.no_grad()
    def _labels(self, final: Tensor) -> tuple[Tensor, Tensor]:
        """The target's distributions [n, vocab] and best tokens [n]."""
        logits = wide_logits(final, self.target.head)
        scaled = logits / self.setting.args.label_temperature
        return scaled.softmax(dim=-1), logits.argmax(dim=-1)

    def _ranks(self, batch: TokenBatch, weights: Weights) -> Tensor:
        """See `RankFunction`: depth j at root r is the row r + j, whose prefix is the answer's."""
        tokens = batch.tokens.to(self.target.device)
        hidden = self._forward(weights, tokens)
        head = output_layer(weights, self.target.embedding)
        wanted = F.pad(tokens, (0, 1))[:, 1:]
        ranks = torch.zeros(tokens.shape, dtype=torch.int64, device=tokens.device)
        for row in range(len(tokens)):  # one sequence's logits at a time
            logits = wide_logits(hidden[row], head)
            score = logits.gather(1, wanted[row, :, None])
            ranks[row] = (logits > score).sum(dim=-1)
        shifted = F.pad(ranks, (0, MAX_STEPS)).unfold(1, MAX_STEPS, 1)
        return shifted[:, : tokens.shape[1]].cpu()


def parser() -> argparse.ArgumentParser:
    """Options of the command."""
    found = argparse.ArgumentParser(
        prog="python -m sgl_spec.training standalone", description=__doc__
    )
    add_common(found, lr=1e-3, optimizer="adamw")
    add = found.add_argument
    add("--hidden", type=int, default=320, help="width (default 320)")
    add("--intermediate", type=int, default=960, help="MLP width (default 960)")
    add("--num-layers", type=int, default=6, help="default 6")
    add("--heads", type=int, default=10, help="query heads (default 10)")
    add("--kv-heads", type=int, default=5, help="default 5")
    add("--head-dim", type=int, default=32, help="default 32")
    return found


def main(argv: Sequence[str]) -> None:
    """Train, writing to --out. Raises `ConfigError` for options or data that do not fit."""
    args = parser().parse_args(argv)
    for name in ("hidden", "intermediate", "num_layers", "heads", "kv_heads", "head_dim"):
        if getattr(args, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} {getattr(args, name)} is out of range; allowed: 1 and more.")
    if args.heads % args.kv_heads:
        raise ConfigError(f"--kv-heads {args.kv_heads} does not divide --heads {args.heads}.")
    if args.head_dim % 2:
        raise ConfigError(f"--head-dim {args.head_dim} is odd; rotary pairs need an even one.")
    setting = prepare(args)
    draft = StandaloneDraft(setting)
    Loop(draft, setting.feed(reach=_REACH), setting.loop).run()
