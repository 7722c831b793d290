"""`python -m sgl_spec.training eval`: acceptance by kind of prompt and tree shape, offline.

The engine answers prompts of the data that training never saw, whole trees verified, so the figures
depend on the models and shapes alone; `bench accept` says what they are. Other options are the
server's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from sgl_spec.bench.accept import Asked, add_options, measure, shaped
from sgl_spec.errors import ConfigError
from sgl_spec.models.checkpoint import resolve_checkpoint, resolve_draft
from sgl_spec.models.config import ModelConfig, read_json
from sgl_spec.training.shards import TokenShards
from sgl_spec.training.standalone import UNFOLDED

DEFAULT_SHAPES = ["5,1,6", "5,4,8"]


def main(argv: Sequence[str]) -> None:
    """Measure each shape and print the tables. Raises `ConfigError` for what does not fit."""
    options, server = parser().parse_known_args(argv)
    if options.limit < 1:
        raise ConfigError(f"--limit must be 1 or more, got {options.limit}.")
    algorithm, directory = draft_kind(resolve_draft(options.draft))
    flags = ["--model-path", options.model_path, "--speculative-algorithm", algorithm]
    flags += ["--speculative-draft-model-path", str(directory), *server]
    every = shaped(flags, options)
    prompts = held_out_prompts(options.data, options.held_out, options.limit)
    vocab_size = ModelConfig.from_hf(resolve_checkpoint(options.model_path)).vocab_size
    largest = max(max(prompt.ids) for prompt in prompts)
    if largest >= vocab_size:
        raise ConfigError(
            f"--data holds token id {largest}, --model-path {options.model_path} has {vocab_size}."
        )
    command = ["python", "-m", "sgl_spec.training", "eval", *argv]
    measure(options, every, lambda bench: prompts, command)


def parser() -> argparse.ArgumentParser:
    """Options of the command; those it does not know are the server's."""
    found = argparse.ArgumentParser(
        prog="python -m sgl_spec.training eval", description=__doc__, allow_abbrev=False
    )
    add = found.add_argument
    add("--model-path", default="smollm2", help="the target; default smollm2")
    add("--draft", required=True, help="--out of a training, or the name of a shipped draft")
    add("--data", type=Path, nargs="+", required=True, help="directories of the `data` command")
    add("--held-out", type=float, default=0.02, help="as in the training (default 0.02)")
    add("--limit", type=int, default=8, help="prompts of each kind (default 8)")
    add_options(found, new_tokens=128)
    found.set_defaults(shapes=DEFAULT_SHAPES, costs=False)
    return found


def held_out_prompts(data: Sequence[Path], share: float, limit: int) -> list[Asked]:
    """Up to `limit` distinct prompts of each kind that training never saw."""
    shards = TokenShards(data, share)
    shards.require_held_out()
    found: dict[tuple[int, ...], Asked] = {}
    left = dict.fromkeys(shards.kind_names, limit)
    for index in shards.held_out():
        kind = shards.kind_names[shards.kinds[index]]
        ids = shards.sequence(int(index))[: shards.prompt_lens[index]].tolist()
        if left[kind] and tuple(ids) not in found:
            found[tuple(ids)] = Asked(kind, ids)
            left[kind] -= 1
    return list(found.values())


def draft_kind(out: Path) -> tuple[str, Path]:
    """The algorithm that a training's output is for, and the directory that serving loads."""
    architectures = read_json(out / "config.json").get("architectures")
    if architectures == ["LlamaForCausalLMEagle3"]:
        return "EAGLE3", out
    unfolded = out / UNFOLDED
    return "STANDALONE", unfolded if unfolded.is_dir() else out
