"""`python -m sgl_spec.training data`: token shards of prompts with the target's own answers.

The serving engine answers them, so all server flags work here, speculation included. Prompts are
lines of {"prompt": text, "kind": name}; `examples/make_prompts.py` makes such a file. A run that
ended early is completed by the same command.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sgl_spec.args import ServerArgs
from sgl_spec.bench.report import versions
from sgl_spec.engine.device import device_name
from sgl_spec.engine.engine import Engine
from sgl_spec.errors import ConfigError
from sgl_spec.request import SamplingParams, TokenizedRequest
from sgl_spec.server.tokenizer import ServerTokenizer
from sgl_spec.training.checks import check_directory
from sgl_spec.training.shards import ShardWriter, TokenSequence

logger = logging.getLogger(__name__)

DEFAULT_KIND = "chat"
_AHEAD = 2  # requests in the engine, as a multiple of those that run


@dataclass(frozen=True, slots=True)
class FiledPrompt:
    """A user's turn, and what kind of task it is."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt to answer. index: unique in its part."""

    index: int
    kind: str
    ids: list[int]
    temperature: float


def main(argv: Sequence[str]) -> None:
    """Write or complete one part of a data directory."""
    started = time.monotonic()
    options, server = parse(argv)
    part, _ = options.part
    prompts = read_prompts(options.prompts)
    engine = Engine(_server_args(server, options.batch_size))
    if not ServerTokenizer.from_dir(engine.tokenizer_dir).has_chat_template:
        raise ConfigError(f"{engine.args.model_path} has no chat template; answers need one.")
    maker = Maker(options, engine, prompts, deadline=started + options.time_limit)
    writer = maker.run()
    logger.info(
        "part %d holds %d sequences, %d tokens; this run took %.0f s",
        part,
        sum(shard["sequences"] for shard in writer.manifest["shards"]),
        writer.num_tokens,
        time.monotonic() - started,
    )


class Maker:
    """One part: its prompts, the engine that answers them, the writer of what it said."""

    def __init__(
        self,
        options: argparse.Namespace,
        engine: Engine,
        prompts: Sequence[FiledPrompt],
        deadline: float,
    ) -> None:
        self.options, self.engine, self.deadline = options, engine, deadline
        self.part, self.parts = options.part
        self.tokens = -(-options.tokens // self.parts)
        self.kinds = sorted({prompt.kind for prompt in prompts})
        tokenizer = ServerTokenizer.from_dir(engine.tokenizer_dir)
        mine = prompts[self.part :: self.parts]
        room = min(
            options.max_prompt_tokens,
            engine.scheduler.limits.max_request_tokens - options.max_new_tokens,
        )
        encoded = [
            (prompt.kind, tokenizer.encode_chat([{"role": "user", "content": prompt.text}]))
            for prompt in mine
        ]
        self.prompts = [one for one in encoded if len(one[1]) <= room]
        if not self.prompts:
            raise ConfigError(
                f"None of {len(mine)} prompts has at most {room} tokens (--max-prompt-tokens, and "
                "what --max-new-tokens leaves of a request)."
            )
        self.writer = self._writer()

    def run(self) -> ShardWriter:
        """Answer until there are enough tokens or time is up. What is finished is on disk however
        the run ends."""
        writer = self.writer
        with tqdm(
            total=self.tokens,
            initial=writer.num_tokens,
            unit="tok",
            desc="Answering",
            disable=None,
        ) as bar:
            try:
                for sequence in self._answers():
                    writer.add(sequence)
                    bar.update(len(sequence.tokens))
            finally:
                writer.flush()
        return writer

    def _answers(self) -> Iterator[TokenSequence]:
        """Finished answers, with always enough requests in the engine to keep its batch full."""
        jobs = (job for job in self._jobs() if job.index not in self.writer.done)
        asked: dict[str, Job] = {}
        most = _AHEAD * self.options.batch_size
        while self.writer.num_tokens < self.tokens and time.monotonic() < self.deadline:
            for job in islice(jobs, most - len(asked)):
                asked[str(job.index)] = job
                self.engine.submit(self._request(job))
            for chunk in self.engine.step():
                if chunk.finish is None:
                    continue
                job = asked.pop(chunk.rid)
                if chunk.finish.kind == "abort":
                    raise ConfigError(f"The engine refused a prompt: {chunk.finish.message}")
                tokens = np.array([*job.ids, *chunk.ids], dtype=np.int64)
                kind = self.kinds.index(job.kind)
                yield TokenSequence(tokens, len(job.ids), kind, job.temperature, job.index)

    def _request(self, job: Job) -> TokenizedRequest:
        sampling = SamplingParams(
            temperature=job.temperature,
            max_new_tokens=self.options.max_new_tokens,
            seed=job.index,
        )
        return TokenizedRequest(rid=str(job.index), input_ids=job.ids, sampling=sampling)

    def _jobs(self) -> Iterator[Job]:
        """All prompts in a random order, again and again. Two greedy answers to one prompt would be
        the same, so that later passes sample."""
        low, high = self.options.temperature
        for turn in count():
            rng = random.Random(f"{self.options.seed}/{self.part}/{turn}")
            order = rng.sample(range(len(self.prompts)), len(self.prompts))
            for place, number in enumerate(order):
                greedy = turn == 0 and rng.random() < self.options.greedy_share
                temperature = 0.0 if greedy else rng.uniform(low, high)
                kind, ids = self.prompts[number]
                yield Job(turn * len(order) + place, kind, ids, temperature)

    def _writer(self) -> ShardWriter:
        options, args = self.options, self.engine.args
        identity = {
            "target": Path(args.model_path).name,
            "vocab_size": self.engine.model.config.vocab_size,
            "kinds": self.kinds,
            "seed": options.seed,
            "part": self.part,
            "parts": self.parts,
        }
        model = self.engine.model
        notes: dict[str, Any] = {
            "greedy_share": options.greedy_share,
            "temperatures": list(options.temperature),
            "max_new_tokens": options.max_new_tokens,
            "batch_size": options.batch_size,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": device_name(model.device),
            "versions": versions(),
        }
        return ShardWriter(options.out, identity, notes)


def read_prompts(path: Path | None) -> list[FiledPrompt]:
    """Lines of {"prompt": text} with an optional "kind"; None for the package's own file."""
    source = files("sgl_spec.training") / "data" / "train_prompts.jsonl"
    try:
        content = (source if path is None else path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read --prompts {path}: {error}.") from error
    found = []
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number} is not JSON: {error}.") from error
        text = row.get("prompt") if isinstance(row, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"{path}, line {number}: no `prompt` text.")
        is_math = "grade-school-math" in str(row.get("source", ""))
        found.append(FiledPrompt(row.get("kind") or ("math" if is_math else DEFAULT_KIND), text))
    if not found:
        raise ConfigError(f"--prompts {path} holds no prompt.")
    return found


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's own options, `part` as (number, parts), and the server's flags; `ConfigError`
    for values out of range."""
    args, server = parser().parse_known_args(argv)
    low, high = args.temperature
    checks = {
        "--tokens": (args.tokens, args.tokens >= 1, "at least 1"),
        "--batch-size": (args.batch_size, args.batch_size >= 1, "at least 1"),
        "--greedy-share": (args.greedy_share, 0 <= args.greedy_share <= 1, "0 to 1"),
        "--temperature": ((low, high), 0 < low <= high <= 2, "two numbers, 0 < low <= high <= 2"),
        "--max-new-tokens": (args.max_new_tokens, args.max_new_tokens >= 1, "at least 1"),
        "--max-prompt-tokens": (args.max_prompt_tokens, args.max_prompt_tokens >= 8, "at least 8"),
        "--time-limit": (args.time_limit, args.time_limit > 0, "above 0"),
    }
    for flag, (value, fine, allowed) in checks.items():
        if not fine:
            raise ConfigError(f"{flag} {value} is out of range; allowed: {allowed}.")
    args.part = _part(args.part)
    check_directory(args.out)
    return args, server


def parser() -> argparse.ArgumentParser:
    """Options of the command; those it does not know are the server's."""
    found = argparse.ArgumentParser(
        prog="python -m sgl_spec.training data", description=__doc__, allow_abbrev=False
    )
    add = found.add_argument
    add("--out", type=Path, required=True, help="data directory to write")
    add("--prompts", type=Path, help=".jsonl with a `prompt` in each row; default: the package's")
    add("--tokens", type=_number, default=1_000_000, help="of all parts together, like 20M")
    add("--batch-size", type=int, default=48, help="requests that run together (default 48)")
    add("--seed", type=int, default=0)
    add("--greedy-share", type=float, default=0.65, help="of first answers (default 0.65)")
    add(
        "--temperature",
        type=float,
        nargs=2,
        default=(0.3, 1.0),
        metavar=("LOW", "HIGH"),
        help="range of the other answers' temperatures (default 0.3 1.0)",
    )
    add("--max-new-tokens", type=int, default=256, help="of an answer (default 256)")
    add("--max-prompt-tokens", type=int, default=1536, help="longer prompts are dropped")
    add("--part", default="0/1", metavar="I/N", help="this process writes part I of N (from 0)")
    add("--time-limit", type=float, default=float("inf"), help="seconds, loading included")
    return found


def _number(text: str) -> int:
    """An integer, with K or M behind it for thousands or millions."""
    scale = {"K": 10**3, "M": 10**6}.get(text[-1:].upper())
    return int(float(text[:-1]) * scale) if scale else int(text)


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts) <= 100):
        raise ConfigError(f"--part {text} is not I/N with 0 <= I < N <= 100.")
    return int(part), int(parts)


def _server_args(server: Sequence[str], batch_size: int) -> ServerArgs:
    flags = [] if "--model-path" in server else ["--model-path", "smollm2"]
    return ServerArgs.from_cli([*flags, *server, "--max-running-requests", str(batch_size)])
