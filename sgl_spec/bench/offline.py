"""Tokens per second of the engine in this process, by kind of prompt, beside transformers.

One run measures every row, in turns (transformers, plain, NGRAM, transformers, ...), because the
speed of a shared machine drifts: ratios are taken within a turn, and the median turn is reported.
The text of every greedy run is compared with the plain run's. A case is a kind of prompt and how
many run together: free (chats), copy (a passage that the text repeats), or a group of Spec-Bench.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from sgl_spec.bench.machine import read_bandwidth
from sgl_spec.bench.report import provenance, say, table, write_row
from sgl_spec.errors import ConfigError
from sgl_spec.llm import LLM, Completion
from sgl_spec.models.decoder import Decoder
from sgl_spec.models.layer import total_bytes
from sgl_spec.server.tokenizer import ServerTokenizer

TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")
CHAT = "mt_bench"  # all other categories
GROUPS = (*TASKS, CHAT)
CASES = ("free:1", "free:8", "copy:1")
COPY_WORDS = 20
_TRANSFORMERS, _PLAIN = "transformers", "plain"


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt of one of the six groups."""

    group: str
    text: str


@dataclass(frozen=True, slots=True)
class Case:
    """A set of prompts that run together, `batch` at a time."""

    name: str
    prompts: list[list[int]]
    batch: int


@dataclass(frozen=True, slots=True)
class Run:
    """All prompts of a case once. prefill: seconds that the prompts alone take."""

    ids: list[list[int]]
    seconds: float
    accept_length: float | None
    prefill: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens per second after each prompt's first."""
        return sum(len(ids) - 1 for ids in self.ids) / (self.seconds - self.prefill)

    @property
    def whole_speed(self) -> float:
        """Tokens per second, prefill included."""
        return sum(map(len, self.ids)) / self.seconds


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant in one case.

    tokens_per_s: decoding only, median over the turns; ratio: median of this row's decoding over
    its baseline's, turn by turn; whole_tokens_per_s: the prompts' prefill counted too.
    """

    case: str
    name: str
    baseline: str
    tokens_per_s: float
    ratio: float
    whole_tokens_per_s: float
    accept_length: float | None
    same_text: bool


class OfflineBench:
    """Loads every contestant once and measures them in turns."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        say(f"Loading {options.model_path} for every contestant.")
        self.plain = self._load()
        self.tokenizer = ServerTokenizer.from_dir(self.plain.engine.tokenizer_dir)
        self.cases = [self._case(text) for text in options.cases]
        self.runs: dict[str, Callable[[Case, int], Run]] = {}
        if options.against == _TRANSFORMERS:
            self.runs[_TRANSFORMERS] = Transformers.beside(self.plain).run
        self.runs[_PLAIN] = partial(generate, self.plain)
        for name in options.algorithms:
            self.runs[name] = partial(_cold, self._load(name))
        self.facts = _floor(self.plain) | {"new_tokens": options.max_new_tokens}

    def _load(self, algorithm: str | None = None) -> LLM:
        flags: dict[str, Any] = {"disable_radix_cache": True, "device": self.options.device}
        flags |= {"max_running_requests": 8, "speculative_algorithm": algorithm}
        if algorithm not in (None, "NGRAM") and self.options.draft_shape is not None:
            names = ("num_steps", "eagle_topk", "num_draft_tokens")
            values = map(int, self.options.draft_shape.split(","))
            flags |= {f"speculative_{n}": v for n, v in zip(names, values, strict=True)}
        return LLM(self.options.model_path, **flags)

    def _case(self, text: str) -> Case:
        found = re.fullmatch(rf"(free|copy|{'|'.join(GROUPS)})(?::([1-9]\d*))?", text)
        if found is None:
            kinds = ", ".join(("free", "copy", *GROUPS))
            raise ConfigError(f"--cases must be KIND:BATCH, got {text!r}; KIND: {kinds}.")
        name, count = found[1], self.options.prompts
        if name in GROUPS:
            chats = [[{"role": "user", "content": q.text}] for q in questions([name], count)]
            ids = [self.tokenizer.encode_chat(chat) for chat in chats]
        else:
            texts = copy_prompts(count) if name == "copy" else free_prompts(count)
            ids = [self.plain.encode(prompt) for prompt in texts]
        return Case(name, ids, int(found[2] or 1))

    def run(self) -> Iterator[Row]:
        """The rows of each case, then the means over the groups of Spec-Bench."""
        found: list[Row] = []
        for case in self.cases:
            turns: list[dict[str, Run]] = []
            for turn in range(self.options.turns):
                say(f"{case.name}, batch {case.batch}: turn {turn + 1} of {self.options.turns}")
                turns.append({name: self._turn(case, run) for name, run in self.runs.items()})
            rows = [self._row(case, name, turns) for name in self.runs]
            found += rows if case.name in GROUPS else []
            yield from rows
        for name in self.runs if len(found) > len(self.runs) else ():
            yield _mean([row for row in found if row.name == name])

    def _turn(self, case: Case, run: Callable[[Case, int], Run]) -> Run:
        """A run of one token tells what the prompts cost; a second one is measured."""
        prefill = run(case, 1).seconds
        return replace(run(case, self.options.max_new_tokens), prefill=prefill)

    def _row(self, case: Case, name: str, turns: list[dict[str, Run]]) -> Row:
        baseline = _TRANSFORMERS if name == _PLAIN and _TRANSFORMERS in self.runs else _PLAIN
        baseline = _TRANSFORMERS if name == _TRANSFORMERS else baseline
        return Row(
            case=f"{case.name}, batch {case.batch}",
            name=name,
            baseline=baseline,
            tokens_per_s=statistics.median(turn[name].speed for turn in turns),
            ratio=statistics.median(turn[name].speed / turn[baseline].speed for turn in turns),
            whole_tokens_per_s=statistics.median(turn[name].whole_speed for turn in turns),
            accept_length=turns[-1][name].accept_length,
            same_text=all(turn[name].ids == turn[_PLAIN].ids for turn in turns),
        )


def generate(llm: LLM, case: Case, new_tokens: int) -> Run:
    """Greedy continuations of `new_tokens` each, EOS ignored."""
    params = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
    start = time.perf_counter()
    done: list[Completion] = []
    for i in range(0, len(case.prompts), case.batch):
        done += llm.generate(case.prompts[i : i + case.batch], params)
    seconds = time.perf_counter() - start
    rounds = sum(c.spec.verify_ct for c in done if c.spec is not None)
    emitted = sum(c.spec.emitted for c in done if c.spec is not None)
    return Run([c.output_ids for c in done], seconds, emitted / rounds if rounds else None)


def _cold(llm: LLM, case: Case, new_tokens: int) -> Run:
    llm.engine.control("flush_cache")  # n-grams are learned from this run alone
    return generate(llm, case, new_tokens)


class Transformers:
    """`generate` of a checkpoint, left-padded for batches."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        self.device = device
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        self.model.to(device).eval()
        self.model.generation_config.eos_token_id = None  # neither stops there nor avoids it

    @classmethod
    def beside(cls, llm: LLM) -> Transformers:
        """The same model in the same dtype."""
        model = llm.engine.model
        return cls(llm.engine.model_dir, model.dtype, model.device)

    def run(self, case: Case, new_tokens: int) -> Run:
        """Greedy continuations, EOS ignored."""
        start = time.perf_counter()
        ids = self._generate(case, new_tokens)
        return Run(ids, time.perf_counter() - start, None)

    @torch.inference_mode()
    def _generate(self, case: Case, new_tokens: int) -> list[list[int]]:
        ids: list[list[int]] = []
        for i in range(0, len(case.prompts), case.batch):
            part = case.prompts[i : i + case.batch]
            width = max(map(len, part))
            padded = torch.tensor([[0] * (width - len(p)) + p for p in part])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in part])
            out = self.model.generate(
                padded.to(self.device),
                attention_mask=mask.to(self.device),
                do_sample=False,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
            ids += out[:, width:].tolist()
        return ids


def questions(groups: Sequence[str], limit: int | None) -> list[Question]:
    """First turns of Spec-Bench, `limit` of each group (None: all), at equal distances in the
    file."""
    found: dict[str, list[Question]] = {group: [] for group in groups}
    for line in bundled("spec_bench_dev.jsonl"):
        group = line["category"] if line["category"] in TASKS else CHAT
        if group in found:
            found[group].append(Question(group, line["turns"][0]))
    chosen: list[Question] = []
    for every in found.values():
        count = len(every) if limit is None else min(limit, len(every))
        chosen += [every[i * len(every) // count] for i in range(count)]
    return chosen


def free_prompts(count: int) -> list[str]:
    """Chat prompts that ask for free writing, from the bundled benchmark file."""
    return [line["prompt"] for line in bundled("bench96.jsonl") if line["cat"] == CHAT][:count]


def copy_prompts(count: int) -> list[str]:
    """Prompts whose continuation repeats a passage they hold: the passage, then its first words."""
    passages = [line["turns"][0] for line in bundled("spec_bench_dev.jsonl")]
    long = [p for p in passages if 800 <= len(p) <= 2400]
    return [f"{p}\n\n{p}\n\n{' '.join(p.split(' ')[:COPY_WORDS])}" for p in long[:count]]


def bundled(name: str) -> list[dict[str, Any]]:
    """The lines of a file of prompts in `sgl_spec/bench/data`."""
    text = files("sgl_spec.bench").joinpath("data", name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def step_bytes(model: Decoder) -> int:
    """What a step reads: every weight once, but only single rows of the embedding."""
    linears = [*model.stack.linears(), model.lm_head]
    copies = [linear.few_weight for linear in linears if linear.few_weight is not None]
    return model.weight_bytes - model.embedding.nbytes - total_bytes(copies)


def _floor(llm: LLM) -> dict[str, Any]:
    """What reading the weights once a step allows."""
    model = llm.engine.model
    bandwidth = read_bandwidth(model.device)
    return {
        "step_bytes": step_bytes(model),
        "read_bandwidth_gb_s": bandwidth / 1e9,
        "floor_tokens_per_s_batch_1": bandwidth / step_bytes(model),
        "device": model.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def _mean(rows: Sequence[Row]) -> Row:
    """Means over the groups of one contestant."""
    lengths = [row.accept_length for row in rows if row.accept_length is not None]
    return Row(
        case="mean of groups",
        name=rows[0].name,
        baseline=rows[0].baseline,
        tokens_per_s=statistics.mean(row.tokens_per_s for row in rows),
        ratio=statistics.mean(row.ratio for row in rows),
        whole_tokens_per_s=statistics.mean(row.whole_tokens_per_s for row in rows),
        accept_length=statistics.mean(lengths) if lengths else None,
        same_text=all(row.same_text for row in rows),
    )


def main(argv: Sequence[str]) -> None:
    """`python -m sgl_spec.bench offline`."""
    options = _parser().parse_args(argv)
    bench = OfflineBench(options)
    rows = list(bench.run())
    facts = bench.facts
    print(
        f"Reading {facts['step_bytes'] / 1e6:.0f} MB of weights at "
        f"{facts['read_bandwidth_gb_s']:.1f} GB/s allows "
        f"{facts['floor_tokens_per_s_batch_1']:.1f} tokens/s at batch 1."
    )
    header = ["case", "contestant", "tokens/s", "ratio", "to", "with prompts", "accept"]
    cells = []
    for row in rows:
        length = "-" if row.accept_length is None else f"{row.accept_length:.2f}"
        speeds = [f"{row.tokens_per_s:.1f}", f"{row.ratio:.2f}", row.baseline]
        same = "yes" if row.same_text else "no"
        cells.append([row.case, row.name, *speeds, f"{row.whole_tokens_per_s:.1f}", length, same])
    print(table([*header, "same text"], cells))
    if options.json:
        conditions = provenance(argv=["python", "-m", "sgl_spec.bench", "offline", *argv])
        found = {**conditions, **facts, "rows": [asdict(row) for row in rows]}
        write_row(Path(options.json), found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_spec.bench offline", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model-path", default="smollm2")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--against", choices=(_TRANSFORMERS, "none"), default="none")
    add("--algorithms", nargs="*", default=["NGRAM"], help="beside plain decoding")
    add("--draft-shape", metavar="STEPS,TOPK,NODES", help="of draft models")
    add("--cases", nargs="+", default=list(CASES), metavar="KIND:BATCH")
    add("--max-new-tokens", type=int, default=64)
    add("--prompts", type=int, default=8, help="of each case")
    add("--turns", type=int, default=3)
    add("--json", help="append one JSON row to this file")
    return parser
