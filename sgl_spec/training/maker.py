"""Makes one part of a data directory: in rounds, the model writes prompts, then answers them."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from sgl_spec.errors import ConfigError
from sgl_spec.models.decoder import Decoder
from sgl_spec.training.generate import Continuation, Generator, Job, kv_bytes
from sgl_spec.training.grammar import Grammar
from sgl_spec.training.mixture import Sources, compose, counts
from sgl_spec.training.prompts import KINDS, Overlap, Prompt, read_prompts
from sgl_spec.training.provenance import device_name, versions
from sgl_spec.training.shards import ShardWriter, TokenSequence
from sgl_spec.training.writing import ARTICLE_TOKENS, PASSAGE_TOKENS, Author, ChatText, Task

logger = logging.getLogger(__name__)

_LEAST_PROMPT = 64  # tokens of the context that answers must leave
_WINDOW = 16  # batches of jobs that are sorted by length together
_WRITE_SHARE = 0.4  # of the time left, for what the model writes before it answers
_ROUND = 1 << 32  # job numbers of a round start at a multiple; those of its texts half-way on
_TEXTS = 1 << 31


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, checked. tokens: of this part alone; deadline: of `time.monotonic`."""

    model_path: str
    out: Path
    prompts: Path | None
    exclude: tuple[Path, ...]
    tokens: int
    device: str
    batch_size: int
    seed: int
    greedy_share: float
    temperatures: tuple[float, float]
    max_new: int
    max_prompt: int
    part: int
    parts: int
    deadline: float
    attention: str
    graphs: bool


class Maker:
    """One part: its writer, and the model that writes and answers."""

    def __init__(self, options: Options, model: Decoder, chat: ChatText) -> None:
        self.options, self._model, self._chat = options, model, chat
        most = model.config.context_length - _LEAST_PROMPT
        if options.max_new > most:
            raise ConfigError(
                f"--max-new-tokens {options.max_new} leaves no room for prompts in the model's "
                f"context of {model.config.context_length}; allowed: up to {most}.",
                param="max_new_tokens",
            )
        self._grammar = Grammar.load()
        self._dropped = Overlap(options.exclude)
        self._filed = read_prompts(options.prompts)[options.part :: options.parts]
        self._writer = _writer(options, model)

    def run(self) -> ShardWriter:
        """Rounds until there are enough tokens or time is up.

        One round is planned to be enough; another follows where the plan was short, or where an
        earlier run was asked for less. What is finished is on disk however the run ends.
        """
        writer, options = self._writer, self.options
        try:
            for number in count():
                before = writer.num_tokens
                if before >= options.tokens or time.monotonic() > options.deadline:
                    break
                prompts = self._prompts(number)
                self._answer(number, prompts)
                writer.flush()
                logger.info("round %d: %d tokens", number, writer.num_tokens)
        finally:
            writer.flush()
        return writer

    def _prompts(self, number: int) -> list[Prompt]:
        """The round's prompts: of an earlier run if it got that far, else made now."""
        options = self.options
        path = options.out / f"prompts-{options.part:02d}-{number}.jsonl"
        if path.is_file():
            lines = path.read_text(encoding="utf-8").split("\n")
            rows = [json.loads(line) for line in lines if line]
            logger.info("%s: %d prompts of an earlier run", path.name, len(rows))
            return [Prompt(row["kind"], row["text"]) for row in rows]
        rng = random.Random(f"{options.seed}/{options.part}/{number}")
        wanted = counts(options.tokens - self._writer.num_tokens, options.max_new)
        author = Author(self._chat, self._grammar, rng, self._dropped)
        self._write(number, author, wanted)
        sources = Sources(self._filed, author.turns, author.articles, author.questions)
        prompts = compose(wanted, sources, self._grammar, rng, self._dropped)
        partial = path.with_name(f".{path.name}.partial")
        rows = [{"kind": item.kind, "text": item.text} for item in prompts]
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        partial.rename(path)
        return prompts

    def _write(self, number: int, author: Author, wanted: dict[str, int]) -> None:
        """Let the model write turns and texts, then questions about the texts."""

        def keep(found: Continuation) -> None:
            """Texts are numbered in the order in which they were asked for, and asked for first."""
            job = number * _ROUND + _TEXTS + found.job.index
            if job not in self._writer.done:
                self._writer.add(_sequence(found, "writing", job))

        generator = self._generator(PASSAGE_TOKENS, ARTICLE_TOKENS)
        now = time.monotonic()
        deadline = now + _WRITE_SHARE * (self.options.deadline - now)
        texts = author.write_articles(wanted["writing"], keep)
        _run(generator, chain(texts, author.write_turns(wanted)), "Writing", deadline)
        _run(generator, author.write_questions(wanted["rag"] * 2 // 3), "Asking", deadline)
        self._writer.flush()

    def _answer(self, number: int, prompts: Sequence[Prompt]) -> None:
        options, writer = self.options, self._writer
        generator = self._generator(options.max_prompt, options.max_new)
        jobs = self._jobs(number, prompts, generator.max_prompt)
        initial = writer.num_tokens
        with tqdm(
            total=options.tokens, initial=initial, unit="tok", desc="Answering", mininterval=1
        ) as bar:
            for found in generator.run(jobs):
                kind = prompts[found.job.index % _ROUND].kind
                sequence = _sequence(found, kind, found.job.index)
                writer.add(sequence)
                bar.update(len(sequence.tokens))
                if writer.num_tokens >= options.tokens or time.monotonic() > options.deadline:
                    break
        if writer.num_tokens == initial and len(prompts) > len(writer.done):
            raise ConfigError(
                f"None of {len(prompts)} prompts has at most {generator.max_prompt} tokens "
                "(--max-prompt-tokens, and what --max-new-tokens leaves of the context).",
                param="max_prompt_tokens",
            )

    def _jobs(self, number: int, prompts: Sequence[Prompt], max_prompt: int) -> Iterator[Job]:
        """Jobs whose neighbours are about equally long, every stretch of them a fair mixture;
        prompts of more than `max_prompt` tokens are left out.

        A window of jobs is sorted by length, and every second window the other way round, so that
        lengths change slowly throughout.
        """
        options, texts = self.options, set[str]()
        size = _WINDOW * options.batch_size
        for window, start in enumerate(range(0, len(prompts), size)):
            part = [prompt.text for prompt in prompts[start : start + size]]
            jobs: list[Job] = []
            for offset, ids in enumerate(self._chat.prompts(part)):
                index = number * _ROUND + start + offset
                # Two greedy answers to one prompt would be the same.
                temperature = _temperature(options, index, again=part[offset] in texts)
                texts.add(part[offset])
                if index not in self._writer.done and len(ids) <= max_prompt:
                    jobs.append(Job(index, ids, options.max_new, temperature))
            yield from sorted(jobs, key=lambda job: len(job.prompt), reverse=window % 2 == 1)

    def _generator(self, max_prompt: int, max_new: int) -> Generator:
        """Refuses a batch whose KV does not fit beside a reserve for activations."""
        options, model = self.options, self._model
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # of the generator before this one
            room = int(0.85 * torch.cuda.mem_get_info(model.device)[0])
            row = kv_bytes(model, max_prompt + max_new)
            if options.batch_size * row > room:
                raise ConfigError(
                    f"--batch-size {options.batch_size} needs {options.batch_size * row / 1e9:.0f} "
                    f"GB of KV; {room / 1e9:.0f} GB allow {room // row}."
                )
        return Generator(
            model,
            batch_size=options.batch_size,
            max_prompt=min(max_prompt, model.config.context_length - max_new),
            max_new=max_new,
            seed=options.seed * 100 + options.part,
            attention=options.attention,
            graphs=options.graphs,
        )


def _writer(options: Options, model: Decoder) -> ShardWriter:
    identity = {
        "target": Path(options.model_path).name,
        "vocab_size": model.config.vocab_size,
        "kinds": list(KINDS),
        "seed": options.seed,
        "part": options.part,
        "parts": options.parts,
    }
    notes = {
        "greedy_share": options.greedy_share,
        "temperatures": list(options.temperatures),
        "max_new_tokens": options.max_new,
        "batch_size": options.batch_size,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device_name(model.device),
        "versions": versions(),
    }
    return ShardWriter(options.out, identity, notes)


def _temperature(options: Options, index: int, *, again: bool) -> float:
    rng = random.Random(f"{options.seed}/{options.part}/{index}")
    greedy = rng.random() < options.greedy_share
    drawn = rng.uniform(*options.temperatures)
    return 0.0 if greedy and not again else drawn


def _sequence(found: Continuation, kind: str, job: int) -> TokenSequence:
    tokens = np.concatenate((found.job.prompt, found.tokens))
    prompt_len, temperature = len(found.job.prompt), found.job.temperature
    return TokenSequence(tokens, prompt_len, KINDS.index(kind), temperature, job)


def _run(generator: Generator, tasks: Iterable[Task], label: str, deadline: float) -> None:
    """Hand every task its continuation, or those that time allows."""
    listed = list(tasks)
    jobs = [
        Job(index, task.prompt, task.max_new, task.temperature)
        for index, task in enumerate(listed)
        if len(task.prompt) <= generator.max_prompt
    ]
    with tqdm(total=len(jobs), unit="text", desc=label, mininterval=1) as bar:
        for found in generator.run(jobs):
            listed[found.job.index].take(found)
            bar.update()
            if time.monotonic() > deadline:
                logger.warning("%s ended after %d of %d: time is up", label, bar.n, len(jobs))
                break
