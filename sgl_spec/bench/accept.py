"""Acceptance on Spec-Bench by group, depth and rank among siblings, beside what theory expects.

First turns of the bundled development questions, in the model's chat template. Whole trees are
verified, whether or not they pay on this machine, so the figures depend on models and shapes alone.
The last round of a request, which its end cuts short, does not count. The time of full rounds is
compared with plain decoding's (trees are read in both), and the fastest shape for what was measured
is named. Other options are the server's:
python -m sgl_spec.bench accept --speculative-algorithm EAGLE3 --shapes 5,4,8
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sgl_spec.args import ServerArgs
from sgl_spec.bench.accept_tables import (
    Answer,
    GroupRow,
    ShapeRow,
    best_of,
    depth_table,
    group_row,
    group_table,
    mean_row,
    shape_table,
    told,
)
from sgl_spec.bench.acceptance import (
    RankTally,
    expected_tokens,
)
from sgl_spec.bench.offline import GROUPS, questions
from sgl_spec.bench.report import provenance, say, write_row
from sgl_spec.engine.engine import Engine
from sgl_spec.engine.ranks import exit_at_once
from sgl_spec.errors import ConfigError
from sgl_spec.messages import OutputChunk
from sgl_spec.request import SamplingParams, TokenizedRequest
from sgl_spec.server.tokenizer import ServerTokenizer

_SHAPE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt in tokens, and the group that it counts for."""

    group: str
    ids: list[int]


def main(argv: Sequence[str]) -> None:
    """`python -m sgl_spec.bench accept`."""
    parser = argparse.ArgumentParser(
        prog="python -m sgl_spec.bench accept", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--limit", type=int, help="questions of each group, spread over it")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS)
    add_options(parser, new_tokens=256)
    options, server = parser.parse_known_args(argv)
    flags = ["--model-path", "smollm2"] if "--model-path" not in server else []
    every = shaped([*flags, *server], options)

    def asked(bench: AcceptBench) -> list[Asked]:
        found = questions(options.groups, options.limit)
        chats = [[{"role": "user", "content": question.text}] for question in found]
        ids = [bench.tokenizer.encode_chat(chat) for chat in chats]
        return [Asked(question.group, one) for question, one in zip(found, ids, strict=True)]

    measure(options, every, asked, ["python", "-m", "sgl_spec.bench", "accept", *argv])


def add_options(parser: argparse.ArgumentParser, *, new_tokens: int) -> None:
    """What every measurement of acceptance is told. new_tokens: the default of the answers."""
    add = parser.add_argument
    add("--shapes", nargs="+", metavar="STEPS,TOPK,NODES", help="default: what the flags give")
    add("--max-new-tokens", type=int, default=new_tokens)
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0, help="the first question's; rising by 1")
    add("--batch", type=int, default=8, help="requests that run together")
    add(
        "--costs",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="time rounds beside plain decoding, which is run first (default: yes)",
    )
    add("--json", help="append one JSON row to this file")


def measure(
    options: argparse.Namespace,
    every: Sequence[ServerArgs],
    asked: Callable[[AcceptBench], list[Asked]],
    command: Sequence[str],
) -> None:
    """Let every shape's engine answer what is `asked`, and print the tables."""
    plain_ms = None
    if options.costs:
        plain = AcceptBench(options, _without_drafts(every[0]))
        plain_ms = plain.plain_ms(asked(plain))
    rows: list[GroupRow] = []
    shapes: list[ShapeRow] = []
    facts: dict[str, Any] = {"plain_ms": plain_ms}
    for args in every:
        _free_memory()
        bench = AcceptBench(options, args)
        rows += bench.run(asked(bench))
        shapes.append(bench.shape_row(rows[-1], plain_ms))
        facts |= bench.facts
    best = best_of(shapes)
    print(group_table(rows), depth_table(rows), shape_table(shapes), told(best), sep="\n\n")
    if options.json:
        found: dict[str, Any] = {"rows": [asdict(row) for row in rows]}
        found["shapes"] = [asdict(row) for row in shapes]
        found["best"] = None if best is None else asdict(best)
        conditions = provenance(argv=command, seed=options.seed)
        write_row(Path(options.json), {**conditions, **facts, **found})


def shaped(flags: Sequence[str], options: argparse.Namespace) -> list[ServerArgs]:
    """The engine's options for each of --shapes; refuses one that the server would change."""
    for name in ("max_new_tokens", "batch"):
        if getattr(options, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} must be 1 or more, got {getattr(options, name)}.")
    given = [*flags, "--max-running-requests", str(options.batch)]
    return [_server_args(given, shape) for shape in options.shapes or [None]]


def _server_args(given: Sequence[str], shape: str | None) -> ServerArgs:
    flags, values = list(given), [] if shape is None else shape.split(",")
    if shape is not None:
        if len(values) != len(_SHAPE) or not all(value.isdecimal() for value in values):
            raise ConfigError(f"--shapes must be STEPS,TOPK,NODES each, got {shape!r}.")
        for name, value in zip(_SHAPE, values, strict=True):
            flags += [f"--{name.replace('_', '-')}", value]
    args = ServerArgs.from_cli(flags)
    if args.speculative_algorithm is None:
        raise ConfigError("accept measures drafts: --speculative-algorithm is required.")
    done = args.resolve()
    used = [str(getattr(done, name)) for name in _SHAPE]
    if values and args.speculative_algorithm != "NGRAM" and used != values:
        raise ConfigError(f"--shapes {shape} would be measured as {','.join(used)}.")
    return replace(args, speculative_verify_whole_trees=True)


def _without_drafts(args: ServerArgs) -> ServerArgs:
    """The same server without speculation."""
    plain: dict[str, Any] = {
        name: option.default
        for name, option in ServerArgs.__dataclass_fields__.items()
        if name.startswith("speculative_")
    }
    return replace(args, **plain)


def _free_memory() -> None:
    """Of the engine before, for the next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class AcceptBench:
    """One engine and the questions for it."""

    def __init__(self, options: argparse.Namespace, args: ServerArgs) -> None:
        self.options = options
        self.engine = Engine.start(args, exit_at_once)
        self.tokenizer = ServerTokenizer.from_dir(self.engine.tokenizer_dir)
        done = self.engine.args
        parts = (done.speculative_num_steps, done.speculative_eagle_topk, done.tree_nodes)
        self.shape = ",".join("-" if part is None else str(part) for part in parts)
        self.tally = RankTally()
        self._full = _Rounds()
        self.facts = {
            "model_path": done.model_path,
            "algorithm": done.speculative_algorithm,
            "draft_model_path": done.speculative_draft_model_path,
            "draft_sampling": done.speculative_draft_sampling,
            "acceptance_rule": self.engine.rule.name,
            "temperature": options.temperature,
            "max_new_tokens": options.max_new_tokens,
        }

    def plain_ms(self, asked: Sequence[Asked]) -> float:
        """Milliseconds of a round without drafts, with as many requests as run together."""
        fitting = self._fitting(asked)
        self._answer(fitting[:: max(1, len(fitting) // self.options.batch)], ignore_eos=True)
        return self._full.ms()

    def shape_row(self, mean: GroupRow, plain_ms: float | None) -> ShapeRow:
        """What all groups together say of the shape."""
        args = self.engine.args
        nodes = args.tree_nodes
        steps = args.speculative_num_steps or nodes - 1
        a = mean.depths[0] if mean.depths else 0.0
        expected = expected_tokens(a, steps)
        cost = None if plain_ms is None else self._full.ms() / plain_ms
        return ShapeRow(
            shape=self.shape,
            a=a,
            expected=expected,
            measured=mean.accept_length,
            cost=cost,
            expected_speedup=None if cost is None else expected / cost,
            speedup=None if cost is None else mean.accept_length / cost,
            ranks=self.tally.ranks(),
            topk=args.speculative_eagle_topk or 1,
            steps=steps,
            nodes=nodes,
        )

    def run(self, asked: Sequence[Asked]) -> list[GroupRow]:
        """A row per group, and their mean."""
        start = time.perf_counter()
        answers = self._answer(self._fitting(asked))
        groups = dict.fromkeys(answer.group for answer in answers)
        rows = [
            group_row(self.shape, group, [a for a in answers if a.group == group])
            for group in groups
        ]
        seconds = time.perf_counter() - start
        say(f"{self.shape}: {len(answers)} questions in {seconds:.0f} s")
        return [*rows, mean_row(rows)]

    def _fitting(self, asked: Sequence[Asked]) -> list[Asked]:
        """The prompts that leave room for their answers; says how many others there are."""
        limit = self.engine.scheduler.limits.max_request_tokens
        room = limit - self.options.max_new_tokens
        found = [one for one in asked if len(one.ids) <= room]
        if not found:
            raise ConfigError(
                f"This engine serves at most {limit} tokens to a request: no prompt leaves room "
                f"for --max-new-tokens {self.options.max_new_tokens}."
            )
        if len(found) < len(asked):
            left = len(asked) - len(found)
            say(f"{left} of {len(asked)} prompts are longer than {room} tokens and are left out.")
        return found

    def _answer(self, asked: Sequence[Asked], *, ignore_eos: bool = False) -> list[Answer]:
        answers: dict[str, Answer] = {}
        for i, question in enumerate(asked):
            answers[str(i)] = Answer(question.group)
            self.engine.submit(self._request(i, question, ignore_eos))
        done, most = 0, min(len(asked), self.options.batch)
        while self.engine.has_work:
            for chunk in self._full.step(self.engine, most):
                answer = answers[chunk.rid]
                answer.chunks.append(chunk.ids)
                if chunk.finish is None:
                    for one in chunk.draft_trees:
                        self.tally.add(one)
                    continue
                if chunk.retractions:
                    raise ConfigError("A request was retracted; raise --max-total-tokens.")
                answer.finish = chunk.finish.kind
                if chunk.spec is not None:
                    answer.verified, answer.proposed = chunk.spec.verify_ct, chunk.spec.proposed
                    assert answer.verified == len(answer.chunks) - 1
                done += 1
                if done % 16 == 0:
                    say(f"{self.shape}: {done} of {len(answers)}")
        return list(answers.values())

    def _request(self, number: int, asked: Asked, ignore_eos: bool) -> TokenizedRequest:
        options = self.options
        sampling = SamplingParams(
            temperature=options.temperature,
            max_new_tokens=options.max_new_tokens,
            ignore_eos=ignore_eos,
            seed=options.seed + number,
        )
        return TokenizedRequest(
            rid=str(number), input_ids=asked.ids, sampling=sampling, stream=True, draft_trees=True
        )


class _Rounds:
    """The time of steps that were rounds of a full batch."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._count = 0

    def step(self, engine: Engine, full: int) -> list[OutputChunk]:
        """A step of the engine; full: requests that run together."""
        rounds, running = engine.counters.rounds, len(engine.scheduler.running)
        start = time.perf_counter()
        chunks = engine.step()
        done = engine.counters.rounds - rounds
        if done and running == full:
            self._seconds += time.perf_counter() - start
            self._count += done
        return chunks

    def ms(self) -> float:
        """Of a round; `ConfigError` where no batch was full."""
        if not self._count:
            raise ConfigError("No round had --batch requests; raise --limit or lower --batch.")
        return self._seconds / self._count * 1e3
