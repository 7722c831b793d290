"""Acceptance on Spec-Bench by group, depth and rank among siblings, beside what theory expects.

First turns of the bundled development questions, in the model's chat template. Whole trees are
verified, whether or not they pay on this machine, so the figures depend on models and shapes alone.
The last round of a request, which its end cuts short, does not count. The time of full rounds is
compared with plain decoding's, and the fastest shape for what was measured is named. Other options
are the server's: python -m sgl_spec.bench accept --speculative-algorithm EAGLE3 --shapes 5,4,8
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sgl_spec.args import ServerArgs
from sgl_spec.bench.accept_tables import (
    GroupRow,
    ShapeRow,
    best_of,
    depth_table,
    group_table,
    shape_table,
    told,
)
from sgl_spec.bench.acceptance import (
    RankTally,
    by_depth,
    expected_tokens,
)
from sgl_spec.bench.offline import CHAT, TASKS, Question, questions
from sgl_spec.bench.report import provenance, say, write_row
from sgl_spec.engine.engine import Engine
from sgl_spec.errors import ConfigError
from sgl_spec.messages import OutputChunk
from sgl_spec.request import SamplingParams, TokenizedRequest
from sgl_spec.server.tokenizer import ServerTokenizer
from sgl_spec.speculative.base import DraftBatch, Drafter
from sgl_spec.speculative.tree import AcceptResult, TokenTree

LONGEST_PERIOD = 64
FEWEST_LOOPING = 16  # tokens that repeat, for text to count as looping


@dataclass(slots=True)
class Answer:
    """What became of a question. chunks: the tokens of the prompt's own draw, then of each round.
    verified: rounds, the one that the end cut included; proposed: draft tokens of all of them."""

    group: str
    chunks: list[list[int]] = field(default_factory=list)
    finish: str = ""
    verified: int = 0
    proposed: int = 0

    @property
    def ids(self) -> list[int]:
        """All tokens."""
        return [token for chunk in self.chunks for token in chunk]

    @property
    def whole_rounds(self) -> list[list[int]]:
        """Tokens of the rounds that the end did not cut."""
        return self.chunks[1:-1]


def main(argv: Sequence[str]) -> None:
    """`python -m sgl_spec.bench accept`."""
    options, server = _parser().parse_known_args(argv)
    every = [_server_args(server, shape, options) for shape in options.shapes or [None]]
    plain_ms = AcceptBench(options, _without_drafts(every[0])).plain_ms() if options.costs else None
    rows: list[GroupRow] = []
    shapes: list[ShapeRow] = []
    facts: dict[str, Any] = {"plain_ms": plain_ms}
    for args in every:
        _free_memory()
        bench = AcceptBench(options, args)
        rows += bench.run()
        shapes.append(bench.shape_row(rows[-1], plain_ms))
        facts |= bench.facts
    best = best_of(shapes)
    print(group_table(rows), depth_table(rows), shape_table(shapes), told(best), sep="\n\n")
    if options.json:
        command = ["python", "-m", "sgl_spec.bench", "accept", *argv]
        found: dict[str, Any] = {"rows": [asdict(row) for row in rows]}
        found["shapes"] = [asdict(row) for row in shapes]
        found["best"] = None if best is None else asdict(best)
        conditions = provenance(argv=command, seed=options.seed)
        write_row(Path(options.json), {**conditions, **facts, **found})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_spec.bench accept", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--shapes", nargs="+", metavar="STEPS,TOPK,NODES", help="default: what the flags give"
    )
    parser.add_argument("--limit", type=int, help="questions of each group, spread over it")
    parser.add_argument("--groups", nargs="+", choices=(*TASKS, CHAT), default=(*TASKS, CHAT))
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="the first question's; rising by 1")
    parser.add_argument("--batch", type=int, default=8, help="requests that run together")
    parser.add_argument(
        "--costs",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="time rounds beside plain decoding, which is run first (default: yes)",
    )
    parser.add_argument("--json", help="append one JSON row to this file")
    return parser


def _server_args(
    server: Sequence[str], shape: str | None, options: argparse.Namespace
) -> ServerArgs:
    flags = ["--model-path", "smollm2"] if "--model-path" not in server else []
    flags += [*server, "--max-running-requests", str(options.batch)]
    if shape is not None:
        names = ("num-steps", "eagle-topk", "num-draft-tokens")
        values = shape.split(",")
        if len(values) != len(names):
            raise ConfigError(f"--shapes must be STEPS,TOPK,NODES each, got {shape!r}.")
        for name, value in zip(names, values, strict=True):
            flags += [f"--speculative-{name}", value]
    args = ServerArgs.from_cli(flags)
    if args.speculative_algorithm is None:
        raise ConfigError("accept measures drafts: --speculative-algorithm is required.")
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
        self.engine = Engine(args)
        self.tokenizer = ServerTokenizer.from_dir(self.engine.tokenizer_dir)
        done = self.engine.args
        parts = (done.speculative_num_steps, done.speculative_eagle_topk, done.tree_nodes)
        self.shape = ",".join("-" if part is None else str(part) for part in parts)
        self.tally = RankTally()
        self._full = _Rounds()
        if self.engine.drafter is not None:
            self._listen(self.engine.drafter)
        self.facts = {
            "model_path": done.model_path,
            "algorithm": done.speculative_algorithm,
            "draft_model_path": done.speculative_draft_model_path,
            "draft_sampling": done.speculative_draft_sampling,
            "acceptance_rule": self.engine.rule.name,
            "temperature": options.temperature,
            "max_new_tokens": options.max_new_tokens,
        }

    def _listen(self, drafter: Drafter) -> None:
        """Hear what the drafter is told."""
        told = drafter.observe

        def observe(batch: DraftBatch, tree: TokenTree, accepted: AcceptResult) -> None:
            self.tally.observe(batch, tree, accepted)
            told(batch, tree, accepted)

        drafter.observe = observe  # type: ignore[method-assign]

    def plain_ms(self) -> float:
        """Milliseconds of a round without drafts, with as many requests as run together."""
        asked = questions(self.options.groups, None)[:: max(1, 280 // self.options.batch)]
        self._answer(asked[: self.options.batch], ignore_eos=True)
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

    def run(self) -> list[GroupRow]:
        """A row per group, and their mean."""
        start = time.perf_counter()
        answers = self._answer(questions(self.options.groups, self.options.limit))
        rows = [
            _row(self.shape, group, [a for a in answers if a.group == group])
            for group in self.options.groups
        ]
        seconds = time.perf_counter() - start
        say(f"{self.shape}: {len(answers)} questions in {seconds:.0f} s")
        return [*rows, _mean(rows)]

    def _answer(self, asked: Sequence[Question], *, ignore_eos: bool = False) -> list[Answer]:
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

    def _request(self, number: int, question: Question, ignore_eos: bool) -> TokenizedRequest:
        options = self.options
        sampling = SamplingParams(
            temperature=options.temperature,
            max_new_tokens=options.max_new_tokens,
            ignore_eos=ignore_eos,
            seed=options.seed + number,
        )
        chat = [{"role": "user", "content": question.text}]
        ids = self.tokenizer.encode_chat(chat)
        total = len(ids) + options.max_new_tokens
        if total > self.engine.scheduler.limits.max_request_tokens:
            raise ConfigError(
                f"Question {number} needs {total} tokens; this engine serves at most "
                f"{self.engine.scheduler.limits.max_request_tokens} to a request."
            )
        return TokenizedRequest(rid=str(number), input_ids=ids, sampling=sampling, stream=True)


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


def looping(ids: Sequence[int]) -> int:
    """Tokens that continue a repetition: those in a stretch where each token equals the one `p`
    before it, for some p up to 64, that is at least 2 p and 16 tokens long (so the block of p
    stands there at least three times)."""
    text = np.asarray(ids)
    marked = np.zeros(len(text), dtype=bool)
    for period in range(1, min(LONGEST_PERIOD, len(text) - 1) + 1):
        same = np.concatenate(([False], text[period:] == text[:-period], [False]))
        (edges,) = np.nonzero(same[1:] != same[:-1])
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            if end - start >= max(2 * period, FEWEST_LOOPING):
                marked[period + start : period + end] = True
    return int(marked.sum())


def _row(shape: str, group: str, answers: Sequence[Answer]) -> GroupRow:
    tokens = sum(len(a.ids) for a in answers)
    rounds = sum(len(a.whole_rounds) for a in answers)
    emitted = sum(len(ids) for a in answers for ids in a.whole_rounds)
    return GroupRow(
        shape=shape,
        group=group,
        questions=len(answers),
        tokens=tokens,
        rounds=rounds,
        accept_length=_ratio(emitted, rounds),
        proposed=_ratio(sum(a.proposed for a in answers), sum(a.verified for a in answers)),
        looping=_ratio(sum(looping(a.ids) for a in answers), tokens),
        stopped=_ratio(sum(a.finish == "stop" for a in answers), len(answers)),
        depths=by_depth([len(ids) for a in answers for ids in a.whole_rounds]),
    )


def _mean(rows: Sequence[GroupRow]) -> GroupRow:
    """The groups' mean; counts are summed."""

    def mean(name: str) -> float:
        return _ratio(sum(getattr(row, name) for row in rows), len(rows))

    return GroupRow(
        shape=rows[0].shape,
        group="mean",
        questions=sum(row.questions for row in rows),
        tokens=sum(row.tokens for row in rows),
        rounds=sum(row.rounds for row in rows),
        accept_length=mean("accept_length"),
        proposed=mean("proposed"),
        looping=mean("looping"),
        stopped=mean("stopped"),
        depths=[
            _ratio(sum(known), len(known))
            for depth in range(max(len(row.depths) for row in rows))
            if (known := [row.depths[depth] for row in rows if depth < len(row.depths)])
        ],
    )


def _ratio(total: float, count: int) -> float:
    return total / count if count else float("nan")
