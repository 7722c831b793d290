"""Tokens per second of the engine in this process, beside transformers and beside the floor.

One run measures every row, in turns (transformers, plain, NGRAM, transformers, ...), because the
speed of a shared machine drifts: ratios are taken within a turn, and the median turn is reported.
The text of every greedy run is compared with the plain run's.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from sgl_spec.bench.report import provenance, say, write_row
from sgl_spec.llm import LLM, Completion

COPY_WORDS = 20
_READ_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Row:
    """One measured configuration.

    tokens_per_s: decoding only, median over the turns; ratio: median of this row's decoding over
    its baseline's, turn by turn; whole_tokens_per_s: the prompts' prefill counted too.
    """

    name: str
    baseline: str
    tokens_per_s: float
    ratio: float
    whole_tokens_per_s: float
    accept_length: float | None
    same_text: bool


@dataclass(frozen=True, slots=True)
class Case:
    """A set of prompts that run together, `batch` at a time."""

    name: str
    prompts: list[list[int]]
    batch: int


def main(argv: Sequence[str]) -> None:
    """`python -m sgl_spec.bench offline`."""
    options = _parser().parse_args(argv)
    bench = OfflineBench(options)
    rows = bench.run()
    print_rows(rows, bench.facts)
    if options.json:
        conditions = provenance(argv=["python", "-m", "sgl_spec.bench", "offline", *argv])
        write_row(
            Path(options.json),
            {**conditions, **bench.facts, "rows": [asdict(row) for row in rows]},
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sgl_spec.bench offline", description=__doc__)
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--against", choices=("transformers", "none"), default="none")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=8, help="prompts of each kind")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", help="append one JSON row to this file")
    return parser


class OfflineBench:
    """Loads every contestant once and measures them in turns."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.new_tokens: int = options.max_new_tokens
        say(f"Loading {options.model_path} for every contestant.")
        self.plain = LLM(options.model_path, disable_radix_cache=True)
        self.ngram = LLM(
            options.model_path, disable_radix_cache=True, speculative_algorithm="NGRAM"
        )
        self.peer = Transformers.beside(self.plain) if options.against == "transformers" else None
        self.free = [self.plain.encode(p) for p in free_prompts(options.prompts)]
        self.copy = [self.plain.encode(p) for p in copy_prompts(options.prompts)]
        self.facts = floor(self.plain) | {"new_tokens": self.new_tokens}

    def run(self) -> list[Row]:
        """All rows."""
        rows: list[Row] = []
        for case in (Case("free", self.free, 1), Case("free", self.free, 8)):
            rows += self._case(case, peer=self.peer is not None)
        rows += self._case(Case("copy", self.copy, 1), peer=False)
        return rows

    def _case(self, case: Case, *, peer: bool) -> list[Row]:
        contestants: dict[str, Callable[[Case, int], Run]] = {}
        if peer and self.peer is not None:
            contestants["transformers"] = self.peer.run
        contestants |= {"plain": self._plain, "NGRAM": self._ngram}
        turns: list[dict[str, Run]] = []
        label = f"{case.name}, batch {case.batch}"
        for turn in range(self.options.turns):
            say(f"{label}: turn {turn + 1} of {self.options.turns}, {', '.join(contestants)}")
            turns.append({name: self._turn(case, run) for name, run in contestants.items()})
        baselines = {"transformers": "transformers", "NGRAM": "plain"}
        baselines["plain"] = "transformers" if "transformers" in contestants else "plain"
        return [row_of(f"{label}: {n}", n, baselines[n], turns) for n in contestants]

    def _turn(self, case: Case, run: Callable[[Case, int], Run]) -> Run:
        """A run of one token tells what the prompts cost; a second one is measured."""
        prefill = run(case, 1).seconds
        return replace(run(case, self.new_tokens), prefill=prefill)

    def _plain(self, case: Case, new_tokens: int) -> Run:
        return generate(self.plain, case, new_tokens)

    def _ngram(self, case: Case, new_tokens: int) -> Run:
        self.ngram.engine.control("flush_cache")  # a cold trie: it learns from this run alone
        return generate(self.ngram, case, new_tokens)


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


def row_of(label: str, name: str, baseline: str, turns: list[dict[str, Run]]) -> Row:
    """A contestant's medians over the turns."""
    lengths = [turn[name].accept_length for turn in turns]
    return Row(
        name=label,
        baseline=baseline,
        tokens_per_s=statistics.median(turn[name].speed for turn in turns),
        ratio=statistics.median(turn[name].speed / turn[baseline].speed for turn in turns),
        whole_tokens_per_s=statistics.median(turn[name].whole_speed for turn in turns),
        accept_length=lengths[-1],
        same_text=all(turn[name].ids == turn["plain"].ids for turn in turns),
    )


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


def free_prompts(count: int) -> list[str]:
    """Chat prompts that ask for free writing, from the bundled benchmark file."""
    lines = bundled("bench96.jsonl")
    chosen = [line["prompt"] for line in lines if line["cat"] == "mt_bench"]
    return chosen[:count]


def copy_prompts(count: int) -> list[str]:
    """Prompts whose continuation repeats a passage they hold: the passage, then its first words."""
    passages = [line["turns"][0] for line in bundled("spec_bench_dev.jsonl")]
    long = [p for p in passages if 800 <= len(p) <= 2400]
    return [f"{p}\n\n{p}\n\n{' '.join(p.split(' ')[:COPY_WORDS])}" for p in long[:count]]


def bundled(name: str) -> list[dict[str, Any]]:
    """The lines of a file of prompts in `sgl_spec/bench/data`."""
    text = files("sgl_spec.bench").joinpath("data", name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def floor(llm: LLM) -> dict[str, Any]:
    """What reading the weights once a step allows."""
    model = llm.engine.model
    # A step reads every weight but looks up single rows of the embedding.
    weight_bytes = model.weight_bytes - model.embedding.nbytes
    bandwidth = read_bandwidth()
    return {
        "step_bytes": weight_bytes,
        "read_bandwidth_gb_s": bandwidth / 1e9,
        "floor_tokens_per_s_batch_1": bandwidth / weight_bytes,
        "threads": torch.get_num_threads(),
    }


def read_bandwidth() -> float:
    """Bytes per second that all threads read from memory together, best of five."""
    block = torch.ones(_READ_BYTES // 4)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        block.sum()
        best = max(best, _READ_BYTES / (time.perf_counter() - start))
    del block
    gc.collect()
    return best


def print_rows(rows: Sequence[Row], facts: dict[str, Any]) -> None:
    """The table, below the floor."""
    print(
        f"floor at batch 1: {facts['step_bytes'] / 1e6:.0f} MB of weights, read at "
        f"{facts['read_bandwidth_gb_s']:.1f} GB/s: "
        f"{facts['floor_tokens_per_s_batch_1']:.1f} tokens/s"
    )
    print(
        f"{'decoding':34s} {'tokens/s':>9s} {'x baseline':>18s} {'accept':>7s}  same text as plain"
    )
    for row in rows:
        accept = "" if row.accept_length is None else f"{row.accept_length:.2f}"
        ratio = f"{row.ratio:.2f} {row.baseline}"
        same = "yes" if row.same_text else "no"
        print(f"{row.name:34s} {row.tokens_per_s:9.1f} {ratio:>18s} {accept:>7s}  {same}")
