"""`python -m sgl_spec.training eagle3`: train an EAGLE3 head by training-time test."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_spec.errors import ConfigError
from sgl_spec.models.config import read_json
from sgl_spec.training.acceptance import OUTSIDE
from sgl_spec.training.eagle3_head import (
    Head,
    HeadInputs,
    HeadShape,
    Weights,
    default_layers,
    initial_weights,
)
from sgl_spec.training.feed import Batch
from sgl_spec.training.held_out import MAX_STEPS, HeldOut
from sgl_spec.training.loop import Loop, StepStats
from sgl_spec.training.losses import CHUNK_ROWS, soft_label_loss, wide_logits
from sgl_spec.training.options import (
    Setting,
    add_common,
    earlier_weights,
    prepare,
    provenance,
    stored_tensors,
    write_json,
    write_tensors,
)
from sgl_spec.training.shards import TokenBatch
from sgl_spec.training.vocabulary import DraftVocabulary

logger = logging.getLogger(__name__)

DRAFT_VOCAB = 8192  # of a new head
NORMED = "eagle3.1"


class Eagle3Draft:
    """The head with what it learns from; see `eagle3_head` for its function."""

    def __init__(self, setting: Setting) -> None:
        args = setting.args
        self.setting, self.target = setting, setting.target
        config = self.target.config
        self.steps = args.ttt_steps
        self.layers = _layers(args.layers, config.num_layers)
        self.vocabulary = _vocabulary(setting)
        self.shape = HeadShape.beside(
            config, len(self.vocabulary.ids), args.intermediate, normed=args.shape == NORMED
        )
        self.head = Head(self.shape, compiled=setting.compiled)
        weights = initial_weights(self.shape, self.target, self.vocabulary.ids, args.seed)
        # Powers of two: scaling by them is exact in every dtype.
        self.constants = {"fc_scale": torch.exp2(-self._feature_rms().log2().round())}
        if args.init_from is not None:
            weights = earlier_weights(args.init_from, weights)
            weights["fc.weight"] /= self.constants["fc_scale"]
        self.weights = {name: torch.nn.Parameter(value) for name, value in weights.items()}
        self._ids = self.vocabulary.ids.to(self.target.device)
        self._columns = self.vocabulary.columns().to(self.target.device)
        decay = torch.tensor([args.step_decay**step for step in range(self.steps)])
        self._step_weights = (decay / decay.sum()).tolist()
        self._held_out = HeldOut(
            setting.shards,
            tokens=args.eval_tokens,
            batch_tokens=args.batch_tokens,
            max_len=min(args.max_len, args.batch_tokens),
        )
        covered = self.vocabulary.coverage(setting.shards, setting.shards.held_out())
        self.coverage = {
            "coverage": self.vocabulary.coverage(setting.shards, setting.shards.training()),
            "coverage_held_out": covered,
        }
        logger.info(
            "draft vocabulary of %d tokens covers %.2f %% of the answers (%.2f %% held out); "
            "%.2f M weights",
            len(self._ids),
            100 * self.coverage["coverage"],
            100 * covered,
            sum(weight.numel() for weight in weights.values()) / 1e6,
        )

    def matrices(self) -> set[str]:
        """All but the norms and the output layer."""
        return {
            name
            for name, weight in self.weights.items()
            if weight.dim() == 2 and name != "lm_head.weight"
        }

    def loss(self, batch: Batch) -> StepStats:
        """Soft-label loss at every learned row that each step predicts."""
        hidden = self.target.forward(batch.tokens, self.layers)
        assert hidden.captured is not None
        weights = self._cast()
        rows = self.head.steps(weights, self._inputs(batch.tokens, hidden.captured), self.steps)
        probs, best = self._labels(hidden.final.flatten(0, 1)[batch.rows])
        losses, hits = [], []
        for step, weight in enumerate(self._step_weights):
            # Row p of step j predicts token p + 2 + j, whose distribution the target gives at
            # p + 1 + j.
            at = rows[step].flatten(0, 1).index_select(0, batch.rows - 1 - step)
            per_row = torch.full((len(at),), weight / len(at), device=at.device)
            found = soft_label_loss(
                at,
                weights["lm_head.weight"],
                lambda start, end: (probs[start:end], best[start:end]),
                per_row,
                kind=self.setting.args.loss,
            )
            losses.append(found.loss)
            hits.append(found.hits.float().mean())
        each = torch.stack(losses).detach() / torch.tensor(self._step_weights, device=at.device)
        figures = {"by step": each, "top-1": torch.stack(hits)}
        return StepStats(torch.stack(losses).sum(), figures)

    def evaluate(self) -> dict[str, float]:
        """Accept lengths and agreement on held-out greedy answers."""
        weights = self._cast()
        return self._held_out.judge(lambda batch: self._ranks(batch, weights))

    def save(self, run: dict[str, Any]) -> None:
        """config.json, model.safetensors and provenance.json in --out."""
        out: Path = self.setting.args.out
        tensors = {
            name: weight.detach().to("cpu", torch.bfloat16).contiguous()
            for name, weight in self._effective().items()
        }
        ids = self.vocabulary.ids
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = self.vocabulary.columns() >= 0
        write_tensors(out, tensors)
        write_json(out / "config.json", self.config())
        extra = {
            "algorithm": "EAGLE3",
            "ttt_steps": self.steps,
            "shape": self.setting.args.shape,
            "step_decay": self.setting.args.step_decay,
            "captured_layers": list(self.layers),
            "draft_vocab_size": len(ids),
            **{name: round(value, 5) for name, value in self.coverage.items()},
        }
        write_json(out / "provenance.json", provenance(self.setting, run, extra))

    def config(self) -> dict[str, Any]:
        """config.json of the published layout, rotary settings and special ids the target's."""
        shape, theirs = self.shape, read_json(self.target.directory / "config.json")
        kept = (
            "bos_token_id",
            "eos_token_id",
            "hidden_act",
            "max_position_embeddings",
            "rms_norm_eps",
            "rope_scaling",
            "rope_parameters",
        )
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **{key: theirs[key] for key in kept if theirs.get(key) is not None},
            "rope_theta": self.target.config.rope.theta,
            "attention_bias": False,
            "draft_vocab_size": shape.vocab,
            "eagle_config": {
                # Written as the layers whose outputs are read, one below those they enter.
                "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in self.layers],
                "use_aux_hidden_state": True,
            },
            # vLLM reads the layers from here alone, as those whose inputs are read.
            "eagle_aux_hidden_state_layer_ids": list(self.layers),
            "head_dim": shape.head_dim,
            **({"fc_norm": True, "norm_output": True} if shape.normed else {}),
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "mlp_bias": False,
            "num_attention_heads": shape.heads,
            "num_aux_hidden_states": len(self.layers),
            "num_hidden_layers": 1,
            "num_key_value_heads": shape.kv_heads,
            "target_hidden_size": shape.hidden,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocabulary.vocab_size,
        }

    @torch.no_grad()
    def _feature_rms(self) -> Tensor:
        """[3 H_t] float32: root mean square of each captured channel over one training batch."""
        args, shards = self.setting.args, self.setting.shards
        length = min(args.max_len, args.batch_tokens)
        batches = shards.batches(
            shards.training(), tokens=args.batch_tokens, max_len=length, seed=args.seed
        )
        # The first rows of a text have features far larger than all others. A batch of short
        # sequences may hold no other; the feed has seen to it that not all are like that.
        batch = next(batch for batch in batches if int(batch.lens.max()) > self.steps)
        captured = self.target.forward(batch.tokens.to(self.target.device), self.layers).captured
        assert captured is not None
        columns = torch.arange(batch.tokens.shape[1])
        inside = (columns >= self.steps) & (columns < batch.lens[:, None])
        rows = captured[inside.to(captured.device)].float()
        if self.shape.normed:
            width = (self.shape.hidden,)
            parts = rows.chunk(len(self.layers), dim=-1)
            rows = torch.cat([F.rms_norm(part, width, eps=self.shape.eps) for part in parts], -1)
        return rows.square().mean(dim=0).sqrt().clamp(min=1e-6)

    def _effective(self) -> Weights:
        """The weights that the head computes with. Captured channels differ by orders of magnitude;
        the parameter of `fc` is for channels of unit size, so that one learning rate fits it."""
        weights: Weights = dict(self.weights)
        return weights | {"fc.weight": weights["fc.weight"] * self.constants["fc_scale"]}

    def _cast(self) -> Weights:
        return {name: weight.to(self.target.dtype) for name, weight in self._effective().items()}

    def _inputs(self, tokens: Tensor, captured: Tensor) -> HeadInputs:
        rotary = self.target.rotary(tokens.shape[1] + max(self.steps, MAX_STEPS))
        return HeadInputs(tokens, captured, self.target.embedding, rotary)

    @torch.no_grad()
    def _labels(self, final: Tensor) -> tuple[Tensor, Tensor]:
        """Target probabilities [N, W] of the draft's columns, and the best token's column."""
        probs = torch.empty((len(final), len(self._ids)), dtype=final.dtype, device=final.device)
        best = torch.empty(len(final), dtype=torch.int64, device=final.device)
        temperature = self.setting.args.label_temperature
        for start in range(0, len(final), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            logits = wide_logits(final[part], self.target.head)
            scaled = logits / temperature
            norm = scaled.logsumexp(dim=-1, keepdim=True)
            probs[part] = (scaled.index_select(1, self._ids) - norm).exp()
            best[part] = self._columns[logits.argmax(dim=-1)]
        return probs, best

    def _ranks(self, batch: TokenBatch, weights: Weights) -> Tensor:
        """See `RankFunction`: root position r is the head's row r - 1."""
        tokens = batch.tokens.to(self.target.device)
        hidden = self.target.forward(tokens, self.layers)
        assert hidden.captured is not None
        rows = self.head.steps(weights, self._inputs(tokens, hidden.captured), MAX_STEPS)
        padded = F.pad(tokens, (0, MAX_STEPS + 1))
        length = tokens.shape[1]
        ranks = torch.full((*tokens.shape, MAX_STEPS), OUTSIDE, device=tokens.device)
        for step, normed in enumerate(rows):
            wanted = self._columns[padded[:, step + 1 : step + 1 + length]]  # of roots 0 .. S - 1
            for row in range(len(tokens)):  # one sequence's logits at a time
                logits = wide_logits(normed[row, :-1], weights["lm_head.weight"])
                column = wanted[row, 1:, None]
                score = logits.gather(1, column.clamp(min=0))
                rank = (logits > score).sum(dim=-1)
                ranks[row, 1:, step] = torch.where(column[:, 0] < 0, OUTSIDE, rank)
        return ranks.cpu()


def _layers(asked: list[int] | None, num_layers: int) -> tuple[int, ...]:
    layers = tuple(asked) if asked else default_layers(num_layers)
    valid = len(set(layers)) == 3 and all(1 <= layer < num_layers for layer in layers)
    if not valid:
        raise ConfigError(
            f"--layers {' '.join(map(str, layers))} cannot be captured of {num_layers} layers; "
            f"allowed: three different ones from 1 to {num_layers - 1}."
        )
    return layers


def _vocabulary(setting: Setting) -> DraftVocabulary:
    """The most frequent tokens; a run that goes on from weights keeps theirs, whatever the data is
    now."""
    args, vocab_size = setting.args, setting.shards.vocab_size
    earlier = args.out if args.resume else args.init_from
    if earlier is None:
        return DraftVocabulary.most_frequent(setting.shards, args.draft_vocab or DRAFT_VOCAB)
    path, offsets = earlier / "model.safetensors", stored_tensors(earlier).get("d2t")
    if offsets is None:
        raise ConfigError(f"{path} has no d2t; it is no EAGLE3 head.")
    if args.draft_vocab not in (None, len(offsets)):
        raise ConfigError(
            f"{path} was made with --draft-vocab {len(offsets)}, this run has {args.draft_vocab}."
        )
    ids = offsets + torch.arange(len(offsets))
    if not bool(((ids >= 0) & (ids < vocab_size)).all()):
        raise ConfigError(f"{path} has token ids beyond the {vocab_size} of --model-path.")
    return DraftVocabulary(ids, vocab_size)


def parser() -> argparse.ArgumentParser:
    """Options of the command."""
    found = argparse.ArgumentParser(prog="python -m sgl_spec.training eagle3", description=__doc__)
    add_common(found, lr=1e-3, optimizer="adamw")
    add = found.add_argument
    about = f"output tokens (default {DRAFT_VOCAB}, or those of the head that is gone on with)"
    add("--draft-vocab", type=int, help=about)
    add("--intermediate", type=int, help="MLP width (default: the target's)")
    add("--shape", choices=("eagle3", NORMED), default="eagle3", help="default eagle3")
    add("--layers", type=int, nargs=3, help="captured layers (default 2, n // 2, n - 3)")
    add("--ttt-steps", type=int, default=7, help="steps of the training-time test (default 7)")
    add("--step-decay", type=float, default=0.8, help="weight of each step's loss in the last's")
    return found


def main(argv: Sequence[str]) -> None:
    """Train, writing to --out. Raises `ConfigError` for options or data that do not fit."""
    args = parser().parse_args(argv)
    if args.draft_vocab is not None and args.draft_vocab < 1:
        raise ConfigError(f"--draft-vocab {args.draft_vocab} is out of range; allowed: 1 and more.")
    if not 1 <= args.ttt_steps <= 16:
        raise ConfigError(f"--ttt-steps {args.ttt_steps} is out of range; allowed: 1 to 16.")
    setting = prepare(args)
    feed = setting.feed(reach=args.ttt_steps)
    Loop(Eagle3Draft(setting), feed, setting.loop).run()
