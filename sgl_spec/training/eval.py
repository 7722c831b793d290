"""`python -m sgl_spec.training eval`: accept length by kind of prompt and tree shape, offline.

The engine answers held-out prompts of the data greedily, whole trees verified, so the figures
depend on the models and shapes alone: tokens of a round, over the rounds that an answer's end did
not cut. Other options are the server's.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from sgl_spec.args import ServerArgs
from sgl_spec.bench.report import table
from sgl_spec.engine.engine import Engine
from sgl_spec.errors import ConfigError
from sgl_spec.models.config import read_json
from sgl_spec.request import SamplingParams, TokenizedRequest
from sgl_spec.training.shards import TokenShards
from sgl_spec.training.standalone import UNFOLDED

logger = logging.getLogger(__name__)

DEFAULT_SHAPES = ("5,1,6", "5,4,8")


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """ids of the prompt, and the kind of data that it is."""

    kind: str
    ids: list[int]


@dataclass(slots=True)
class _Rounds:
    """Token counts of what a request emitted: the prompt's own draw first, then round by round."""

    counts: list[int] = field(default_factory=list)

    @property
    def whole(self) -> list[int]:
        """Rounds that the end did not cut."""
        return self.counts[1:-1]


def main(argv: Sequence[str]) -> None:
    """Measure each shape and print one table. Raises `ConfigError` for what does not fit."""
    options, server = parser().parse_known_args(argv)
    prompts = held_out_prompts(options.data, options.held_out, options.limit)
    columns = {
        shape: accept_lengths(_server_args(options, server, shape), prompts, options)
        for shape in options.shapes
    }
    kinds = sorted({prompt.kind for prompt in prompts})
    rows: list[list[object]] = [
        [kind, sum(prompt.kind == kind for prompt in prompts)]
        + [columns[shape][kind] for shape in options.shapes]
        for kind in kinds
    ]
    means = [float(np.mean(list(columns[shape].values()))) for shape in options.shapes]
    rows.append(["mean of kinds", len(prompts), *means])
    print(table(["kind", "prompts", *options.shapes], rows))


def parser() -> argparse.ArgumentParser:
    """Options of the command; those it does not know are the server's."""
    found = argparse.ArgumentParser(
        prog="python -m sgl_spec.training eval", description=__doc__, allow_abbrev=False
    )
    add = found.add_argument
    add("--model-path", default="smollm2", help="the target; default smollm2")
    add("--draft", type=Path, required=True, help="--out of a training")
    add("--data", type=Path, nargs="+", required=True, help="directories of the `data` command")
    add("--held-out", type=float, default=0.02, help="as in the training (default 0.02)")
    add("--limit", type=int, default=8, help="prompts of each kind (default 8)")
    add("--shapes", nargs="+", default=list(DEFAULT_SHAPES), metavar="STEPS,TOPK,NODES")
    add("--max-new-tokens", type=int, default=128)
    add("--batch", type=int, default=8, help="requests that run together (default 8)")
    return found


def held_out_prompts(data: Sequence[Path], share: float, limit: int) -> list[HeldOutPrompt]:
    """Up to `limit` distinct prompts of each kind that training never saw."""
    shards = TokenShards(data, share)
    shards.require_held_out()
    found: dict[tuple[int, ...], HeldOutPrompt] = {}
    left = dict.fromkeys(shards.kind_names, limit)
    for index in shards.held_out():
        kind = shards.kind_names[shards.kinds[index]]
        ids = shards.sequence(int(index))[: shards.prompt_lens[index]].tolist()
        if left[kind] and tuple(ids) not in found:
            found[tuple(ids)] = HeldOutPrompt(kind, ids)
            left[kind] -= 1
    return list(found.values())


def accept_lengths(
    args: ServerArgs, prompts: Sequence[HeldOutPrompt], options: argparse.Namespace
) -> dict[str, float]:
    """Tokens of a round by kind, over whole rounds of all answers (nan without any)."""
    engine = Engine(args)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=options.max_new_tokens, seed=0)
    answers = [_Rounds() for _ in prompts]
    for number, prompt in enumerate(prompts):
        engine.submit(
            TokenizedRequest(rid=str(number), input_ids=prompt.ids, sampling=sampling, stream=True)
        )
    with tqdm(total=len(prompts), desc="answers", unit="answer", leave=False) as bar:
        while engine.has_work:
            for chunk in engine.step():
                answers[int(chunk.rid)].counts.append(len(chunk.ids))
                bar.update(chunk.finish is not None)
    found = {}
    for kind in {prompt.kind for prompt in prompts}:
        of_kind = [a for a, prompt in zip(answers, prompts, strict=True) if prompt.kind == kind]
        rounds = [count for answer in of_kind for count in answer.whole]
        found[kind] = sum(rounds) / len(rounds) if rounds else float("nan")
    return found


def _server_args(options: argparse.Namespace, server: Sequence[str], shape: str) -> ServerArgs:
    values = shape.split(",")
    if len(values) != 3:
        raise ConfigError(f"--shapes must be STEPS,TOPK,NODES each, got {shape!r}.")
    algorithm, directory = draft_kind(options.draft)
    flags = ["--model-path", options.model_path, "--speculative-algorithm", algorithm]
    flags += ["--speculative-draft-model-path", str(directory)]
    names = ("num-steps", "eagle-topk", "num-draft-tokens")
    for name, value in zip(names, values, strict=True):
        flags += [f"--speculative-{name}", value]
    flags += ["--max-running-requests", str(options.batch), *server]
    return replace(ServerArgs.from_cli(flags), speculative_verify_whole_trees=True)


def draft_kind(out: Path) -> tuple[str, Path]:
    """The algorithm that a training's output is for, and the directory that serving loads."""
    architectures = read_json(out / "config.json").get("architectures")
    if architectures == ["LlamaForCausalLMEagle3"]:
        return "EAGLE3", out
    unfolded = out / UNFOLDED
    return "STANDALONE", unfolded if unfolded.is_dir() else out
