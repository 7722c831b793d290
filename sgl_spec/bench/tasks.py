"""Speed of every drafter by task, one request at a time, beside plain decoding and transformers.

First turns of the bundled Spec-Bench questions, greedy, `--max-new-tokens` each whatever the model
would end with. All contestants answer a group in turns, so that a machine whose speed drifts treats
them alike; the ratio of a turn is taken within it, and the median turn is reported. Unlike
`accept`, drafting is weighed against its cost as it is in the server.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from sgl_spec.bench.accept import CHAT, TASKS, questions
from sgl_spec.bench.offline import (
    Case,
    Row,
    Run,
    Transformers,
    floor,
    generate,
    print_rows,
    row_of,
)
from sgl_spec.bench.report import provenance, say, write_row
from sgl_spec.llm import LLM
from sgl_spec.server.tokenizer import ServerTokenizer

ALGORITHMS = ("EAGLE3", "STANDALONE", "NGRAM")
GROUPS = (*TASKS, CHAT)


def main(argv: Sequence[str]) -> None:
    """`python -m sgl_spec.bench tasks`."""
    options = _parser().parse_args(argv)
    bench = TaskBench(options)
    rows = bench.run()
    print_rows(rows, bench.facts)
    if options.json:
        conditions = provenance(argv=["python", "-m", "sgl_spec.bench", "tasks", *argv])
        found = {**conditions, **bench.facts, "rows": [asdict(row) for row in rows]}
        write_row(Path(options.json), found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sgl_spec.bench tasks", description=__doc__)
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=ALGORITHMS)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument("--against", choices=("transformers", "none"), default="none")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--questions", type=int, default=4, help="of each group")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--draft-shape", metavar="STEPS,TOPK,NODES", help="of the model drafters")
    parser.add_argument("--json", help="append one JSON row to this file")
    return parser


class TaskBench:
    """Loads every contestant once; see the module."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        say(f"Loading {options.model_path} for every contestant.")
        self.plain = self._load()
        self.tokenizer = ServerTokenizer.from_dir(self.plain.engine.tokenizer_dir)
        self.drafted = {name: self._load(name) for name in options.algorithms}
        self.peer = Transformers.beside(self.plain) if options.against == "transformers" else None
        shape = {} if options.draft_shape is None else {"draft_shape": options.draft_shape}
        self.facts = floor(self.plain) | {"new_tokens": options.max_new_tokens} | shape

    def _load(self, algorithm: str | None = None) -> LLM:
        flags: dict[str, Any] = {"disable_radix_cache": True, "max_total_tokens": 8192}
        flags |= {"max_running_requests": 1, "speculative_algorithm": algorithm}
        if algorithm not in (None, "NGRAM") and self.options.draft_shape is not None:
            names = ("num_steps", "eagle_topk", "num_draft_tokens")
            values = map(int, self.options.draft_shape.split(","))
            flags |= {f"speculative_{n}": v for n, v in zip(names, values, strict=True)}
        return LLM(self.options.model_path, **flags)

    def run(self) -> list[Row]:
        """A row per group and contestant, then the means over the groups."""
        groups = {name: self._group(name) for name in self.options.groups}
        means = [_mean(rows) for rows in zip(*groups.values(), strict=True)]
        return [row for rows in groups.values() for row in rows] + means

    def _group(self, group: str) -> list[Row]:
        asked = questions([group], self.options.questions)
        chats = [[{"role": "user", "content": one.text}] for one in asked]
        case = Case(group, [self.tokenizer.encode_chat(chat) for chat in chats], 1)
        turns: list[dict[str, Run]] = []
        for turn in range(self.options.turns):
            say(f"{group}: turn {turn + 1} of {self.options.turns}")
            turns.append({name: self._turn(run, case) for name, run in self._runs().items()})
        return [row_of(f"{group}: {n}", n, self._baseline(n), turns) for n in turns[0]]

    def _runs(self) -> dict[str, Callable[[Case, int], Run]]:
        runs: dict[str, Callable[[Case, int], Run]] = {}
        if self.peer is not None:
            runs["transformers"] = self.peer.run
        runs["plain"] = partial(generate, self.plain)
        return runs | {name: partial(_cold, llm) for name, llm in self.drafted.items()}

    def _turn(self, run: Callable[[Case, int], Run], case: Case) -> Run:
        """A run of one token tells what the prompts cost; a second one is measured."""
        prefill = run(case, 1).seconds
        return replace(run(case, self.options.max_new_tokens), prefill=prefill)

    def _baseline(self, name: str) -> str:
        if name in self.drafted:
            return "plain"
        return "plain" if self.peer is None else "transformers"


def _cold(llm: LLM, case: Case, new_tokens: int) -> Run:
    llm.engine.control("flush_cache")  # a trie learns from this run alone
    return generate(llm, case, new_tokens)


def _mean(rows: Sequence[Row]) -> Row:
    """Means over the groups of one contestant."""
    lengths = [row.accept_length for row in rows if row.accept_length is not None]
    name = rows[0].name.split(": ")[1]
    return Row(
        name=f"mean: {name}",
        baseline=rows[0].baseline,
        tokens_per_s=statistics.mean(row.tokens_per_s for row in rows),
        ratio=statistics.mean(row.ratio for row in rows),
        whole_tokens_per_s=statistics.mean(row.whole_tokens_per_s for row in rows),
        accept_length=statistics.mean(lengths) if lengths else None,
        same_text=all(row.same_text for row in rows),
    )
