"""`python -m sgl_spec.training eval`: accept length by kind of prompt and tree shape, offline.

The engine answers held-out prompts of the data greedily, whole trees verified, so the figures
depend on the models and shapes alone: tokens of a round, over the rounds that an answer's end did
not cut. Other options are the server's.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan, nan
from pathlib import Path
from statistics import fmean

from tqdm import tqdm

from sgl_spec.args import ServerArgs
from sgl_spec.bench.report import table
from sgl_spec.engine.engine import Engine
from sgl_spec.errors import ConfigError
from sgl_spec.models.checkpoint import resolve_draft
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
class Answer:
    """What became of a request. counts: tokens that it emitted, the prompt's own draw first, then
    round by round; refusal: why the engine did not take it, if it did not."""

    counts: list[int] = field(default_factory=list)
    refusal: str | None = None

    @property
    def whole(self) -> list[int]:
        """Rounds that the end did not cut."""
        return self.counts[1:-1]


def main(argv: Sequence[str]) -> None:
    """Measure each shape and print one table. Raises `ConfigError` for what does not fit."""
    options, server = parser().parse_known_args(argv)
    for name in ("limit", "max_new_tokens", "batch"):
        if getattr(options, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} {getattr(options, name)} is out of range; allowed: 1 and more."
            )
    args = {shape: _server_args(options, server, shape) for shape in options.shapes}
    prompts = held_out_prompts(options.data, options.held_out, options.limit)
    answers = {
        shape: answer(of_shape, prompts, options.max_new_tokens) for shape, of_shape in args.items()
    }
    print(report(prompts, answers))


def report(prompts: Sequence[HeldOutPrompt], answers: Mapping[str, Sequence[Answer]]) -> str:
    """The table of accept lengths, of prompts that every shape's engine took. A kind none of whose
    rounds is whole has `nan`, and no part in the means of any shape, which stay comparable."""
    taken = _taken(answers)
    kinds = sorted({prompts[index].kind for index in taken})
    indices = {kind: [i for i in taken if prompts[i].kind == kind] for kind in kinds}
    columns = {
        shape: {kind: _mean_round([given[i] for i in indices[kind]]) for kind in kinds}
        for shape, given in answers.items()
    }
    measured = [kind for kind in kinds if not any(isnan(of[kind]) for of in columns.values())]
    if not measured:
        raise ConfigError("No kind of prompt has a whole round; raise --max-new-tokens or --limit.")
    if measured != kinds:
        missing = ", ".join(kind for kind in kinds if kind not in measured)
        logger.warning("no whole round, not in the means: %s; raise --max-new-tokens", missing)
    rows: list[list[object]] = [
        [kind, len(indices[kind])] + [of[kind] for of in columns.values()] for kind in kinds
    ]
    means = [fmean(of[kind] for kind in measured) for of in columns.values()]
    rows.append(["mean of kinds", sum(len(indices[kind]) for kind in measured), *means])
    return table(["kind", "prompts", *columns], rows)


def _taken(answers: Mapping[str, Sequence[Answer]]) -> list[int]:
    """The prompts that every shape's engine took; says how many others there are."""
    refusals: dict[int, str] = {}
    for given in answers.values():
        refusals |= {i: item.refusal for i, item in enumerate(given) if item.refusal is not None}
    count = max(len(given) for given in answers.values())
    if len(refusals) == count:
        raise ConfigError(
            f"The engine refused all {count} prompts (--max-new-tokens, --context-length, "
            f"--max-total-tokens and the like): {refusals[0]}"
        )
    if refusals:
        reason = refusals[min(refusals)]
        logger.warning(
            "%d of %d prompts were refused and are not counted: %s", len(refusals), count, reason
        )
    return [index for index in range(count) if index not in refusals]


def _mean_round(answers: Sequence[Answer]) -> float:
    rounds = [count for answer in answers for count in answer.whole]
    return fmean(rounds) if rounds else nan


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


def answer(args: ServerArgs, prompts: Sequence[HeldOutPrompt], max_new_tokens: int) -> list[Answer]:
    """Each prompt's greedy answer. Raises `ConfigError` for a target of another vocabulary."""
    engine = Engine(args)
    largest, vocab_size = max(max(prompt.ids) for prompt in prompts), engine.model.config.vocab_size
    if largest >= vocab_size:
        raise ConfigError(
            f"--data holds token id {largest}, --model-path {args.model_path} has {vocab_size} ids."
        )
    sampling = SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens, seed=0)
    answers = [Answer() for _ in prompts]
    for number, prompt in enumerate(prompts):
        engine.submit(
            TokenizedRequest(rid=str(number), input_ids=prompt.ids, sampling=sampling, stream=True)
        )
    with tqdm(total=len(prompts), desc="answers", unit="answer", leave=False, disable=None) as bar:
        while engine.has_work:
            for chunk in engine.step():
                of_request = answers[int(chunk.rid)]
                of_request.counts.append(len(chunk.ids))
                if chunk.finish is not None:
                    bar.update()
                    if chunk.finish.kind == "abort":
                        of_request.refusal = chunk.finish.message or "no reason given"
    return answers


def _server_args(options: argparse.Namespace, server: Sequence[str], shape: str) -> ServerArgs:
    """The engine's options for one of --shapes; refuses one that the server would change."""
    values = shape.split(",")
    if len(values) != 3 or not all(value.isdecimal() for value in values):
        raise ConfigError(f"--shapes must be STEPS,TOPK,NODES each, got {shape!r}.")
    algorithm, directory = draft_kind(resolve_draft(options.draft))
    flags = ["--model-path", options.model_path, "--speculative-algorithm", algorithm]
    flags += ["--speculative-draft-model-path", str(directory)]
    names = ("num-steps", "eagle-topk", "num-draft-tokens")
    for name, value in zip(names, values, strict=True):
        flags += [f"--speculative-{name}", value]
    flags += ["--max-running-requests", str(options.batch), *server]
    args = replace(ServerArgs.from_cli(flags), speculative_verify_whole_trees=True)
    found = args.resolve()
    nodes = found.speculative_num_draft_tokens
    used = f"{found.speculative_num_steps},{found.speculative_eagle_topk},{nodes}"
    if used != ",".join(str(int(value)) for value in values):
        raise ConfigError(f"--shapes {shape} would be measured as {used}; ask for that.")
    return args


def draft_kind(out: Path) -> tuple[str, Path]:
    """The algorithm that a training's output is for, and the directory that serving loads."""
    architectures = read_json(out / "config.json").get("architectures")
    if architectures == ["LlamaForCausalLMEagle3"]:
        return "EAGLE3", out
    unfolded = out / UNFOLDED
    return "STANDALONE", unfolded if unfolded.is_dir() else out
