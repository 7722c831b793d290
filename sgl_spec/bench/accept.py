"""Accept length on Spec-Bench: tokens per verify, by group and tree shape.

First turns of the bundled development questions, in the model's chat template. Whole trees are
verified, whether or not they pay on this machine, so the figures depend on models and shapes alone.
The last round of a request, which its end cuts short, does not count. Other options are the
server's: python -m sgl_spec.bench accept --speculative-algorithm EAGLE3 --shapes 5,4,8 7,8,32
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sgl_spec.args import ServerArgs
from sgl_spec.bench.offline import CHAT, TASKS, Question, questions
from sgl_spec.bench.report import provenance, say, table, write_row
from sgl_spec.engine.engine import Engine
from sgl_spec.errors import ConfigError
from sgl_spec.request import SamplingParams, TokenizedRequest
from sgl_spec.server.tokenizer import ServerTokenizer

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


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group of questions under one shape. accept_length: tokens of whole rounds, over these
    rounds. proposed: draft tokens verified per round. looping: share of output tokens in repeating
    text. stopped: share of answers that ended by themselves."""

    shape: str
    group: str
    questions: int
    tokens: int
    rounds: int
    accept_length: float
    proposed: float
    looping: float
    stopped: float


def main(argv: Sequence[str]) -> None:
    """`python -m sgl_spec.bench accept`."""
    options, server = _parser().parse_known_args(argv)
    rows, facts = [], {}
    for shape in options.shapes or [None]:
        bench = AcceptBench(options, _server_args(server, shape, options))
        rows += bench.run()
        facts = bench.facts
        print(_table(rows[-len(TASKS) - 2 :] if shape else rows), flush=True)
    if options.json:
        command = ["python", "-m", "sgl_spec.bench", "accept", *argv]
        conditions = provenance(argv=command, seed=options.seed)
        write_row(
            Path(options.json), {**conditions, **facts, "rows": [asdict(row) for row in rows]}
        )


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


class AcceptBench:
    """One engine and the questions for it."""

    def __init__(self, options: argparse.Namespace, args: ServerArgs) -> None:
        self.options = options
        self.engine = Engine(args)
        self.tokenizer = ServerTokenizer.from_dir(self.engine.tokenizer_dir)
        done = self.engine.args
        parts = (done.speculative_num_steps, done.speculative_eagle_topk, done.tree_nodes)
        self.shape = ",".join("-" if part is None else str(part) for part in parts)
        self.facts = {
            "model_path": done.model_path,
            "algorithm": done.speculative_algorithm,
            "draft_model_path": done.speculative_draft_model_path,
            "draft_sampling": done.speculative_draft_sampling,
            "acceptance_rule": self.engine.rule.name,
            "temperature": options.temperature,
            "max_new_tokens": options.max_new_tokens,
        }

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

    def _answer(self, asked: Sequence[Question]) -> list[Answer]:
        answers: dict[str, Answer] = {}
        for i, question in enumerate(asked):
            answers[str(i)] = Answer(question.group)
            self.engine.submit(self._request(i, question))
        done = 0
        while self.engine.has_work:
            for chunk in self.engine.step():
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

    def _request(self, number: int, question: Question) -> TokenizedRequest:
        options = self.options
        sampling = SamplingParams(
            temperature=options.temperature,
            max_new_tokens=options.max_new_tokens,
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
    )


def _ratio(total: float, count: int) -> float:
    return total / count if count else float("nan")


def _table(rows: Sequence[GroupRow]) -> str:
    header = ["shape", "group", "questions", "tokens", "rounds", "accept", "drafted", "looping"]
    values: list[list[Any]] = [list(asdict(row).values()) for row in rows]
    return table([*header, "stopped"], values)
