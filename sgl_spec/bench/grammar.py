"""Time of constrained output: compiling, masks of a round's trees, and taking accepted tokens.

No model runs: texts are random walks through the grammar that avoid blanks, and trees branch off
them with drafts of which one in four leaves the grammar.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from sgl_spec.bench.report import provenance, say, table, write_row
from sgl_spec.engine.grammar import Compile, make_compiler
from sgl_spec.models.checkpoint import resolve_checkpoint
from sgl_spec.models.config import ModelConfig
from sgl_spec.request import Grammar
from sgl_spec.speculative.grammar import Automaton, Constraint, Place, Words, bit, mask_tree
from sgl_spec.speculative.tree import TokenTree
from sgl_spec.text import load_tokenizer, token_bytes

MS = 1e3
US = 1e6
_PERSON = (
    '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, '
    '"tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}}, "home": {"anyOf": '
    '[{"type": "null"}, {"type": "object", "properties": {"street": {"type": "string"}, "no": '
    '{"type": "integer", "minimum": 1, "maximum": 999}}, "required": ["street", "no"], '
    '"additionalProperties": false}]}}, "required": ["name", "age", "tags", "home"], '
    '"additionalProperties": false}'
)
GRAMMARS: dict[str, Grammar] = {
    "JSON schema": Grammar("json_schema", _PERSON, ""),
    "any JSON object": Grammar("json_schema", '{"type": "object"}', ""),
    "regex, dates": Grammar("regex", r"(\d{4}-\d{2}-\d{2}, ){20}", ""),
    "regex, free text": Grammar("regex", r"[^\n]{200,400}", ""),
    "EBNF, recursive": Grammar("ebnf", 'root ::= "[" (root | [a-z]+)* "]"', ""),
}


@dataclass(frozen=True, slots=True)
class Row:
    """compile_ms: the first time. nodes: masks in a round, the mean. round_ms: a round's walk over
    all trees, the median; worst_ms: the longest. node_us: a round's time over its masks, the
    median. commit_us: taking one token, with the mask of the next."""

    grammar: str
    compile_ms: float
    nodes: float
    round_ms: float
    worst_ms: float
    node_us: float
    commit_us: float


class GrammarBench:
    """One tokenizer, `requests` requests of one grammar at a time."""

    def __init__(self, options: argparse.Namespace) -> None:
        directory = resolve_checkpoint(options.model_path)
        config = ModelConfig.from_hf(directory)
        tokenizer = load_tokenizer(directory)
        self.options, self.vocab, self.eos = options, config.vocab_size, config.eos_token_ids
        start = time.perf_counter()
        self.compile: Compile = make_compiler(tokenizer, self.vocab, self.eos)
        self.start_ms = (time.perf_counter() - start) * MS
        blank = [t for t in range(self.vocab) if not token_bytes(tokenizer, t).strip()]
        self.ends = mask_of(self.eos, self.vocab)
        self.sense = ~(mask_of(blank, self.vocab) | self.ends)
        self.rng = random.Random(0)

    def run(self) -> list[Row]:
        """All grammars."""
        return [self._row(name, grammar) for name, grammar in GRAMMARS.items()]

    def _row(self, name: str, grammar: Grammar) -> Row:
        say(f"Timing: {name}.")
        start = time.perf_counter()
        automaton = self.compile(grammar)
        compiled = time.perf_counter() - start
        requests = [_Request(self, automaton) for _ in range(self.options.requests)]
        rounds, nodes, commits = [], [], []
        for _ in range(self.options.rounds):
            tree = self._trees(requests)
            start = time.perf_counter()
            masked = mask_tree(tree, [request.constraint for request in requests])
            rounds.append(time.perf_counter() - start)
            assert masked.allowed is not None
            nodes.append(int((masked.allowed.row_of >= 0).sum()))
            commits += [request.move() for request in requests]
        return Row(
            grammar=name,
            compile_ms=compiled * MS,
            nodes=statistics.mean(nodes),
            round_ms=statistics.median(rounds) * MS,
            worst_ms=max(rounds) * MS,
            node_us=statistics.median(t / n for t, n in zip(rounds, nodes, strict=True)) * US,
            commit_us=statistics.median(commits) * US,
        )

    def pick(self, words: Words) -> int:
        """An allowed token, not a blank and not an end if there are others."""
        for narrower in (words & self.sense, words & ~self.ends, words):
            if narrower.any():
                bits = np.unpackbits(narrower.view(np.uint8), bitorder="little")
                return int(self.rng.choice(np.flatnonzero(bits)))
        raise AssertionError("an open place has tokens")

    def _trees(self, requests: Sequence[_Request]) -> TokenTree:
        """A chain in the grammar for each, with a random sibling at every other node."""
        size = (len(requests), self.options.nodes)
        tokens, parents = np.zeros(size, np.int64), np.full(size, -1, np.int64)
        for i, request in enumerate(requests):
            chain, tip, node = iter(request.ahead(size[1])), 0, 1
            while node < size[1]:
                right = next(chain, 0)
                wrong = (right + self.rng.randrange(1, self.vocab)) % self.vocab
                kids = [right, wrong] if node % 2 and node + 1 < size[1] else [right]
                for token in kids:
                    tokens[i, node], parents[i, node] = token, tip
                    node += 1
                tip = node - len(kids)
        counts = torch.full((len(requests),), size[1])
        return TokenTree(torch.from_numpy(tokens), torch.from_numpy(parents), counts)


def mask_of(tokens: Iterable[int], vocab: int) -> Words:
    """The mask of these tokens."""
    words: Words = np.zeros(-(-vocab // 32), dtype=np.int32)
    for token in tokens:
        words[token >> 5] |= bit(token)
    return words


class _Request:
    """A text that grows, and starts again where its grammar ends."""

    def __init__(self, bench: GrammarBench, automaton: Automaton) -> None:
        self._bench, self._automaton = bench, automaton
        self._start()
        for _ in range(bench.rng.randrange(12)):
            self.move()

    def _start(self) -> None:
        self.constraint = self._new()
        self._ids: list[int] = []

    def _new(self) -> Constraint:
        return Constraint(self._automaton.restart(), self._bench.eos, self._bench.vocab)

    def move(self) -> float:
        """Take a token; the seconds that it took."""
        token = self._bench.pick(self.constraint.words)
        start = time.perf_counter()
        place = self.constraint.commit(token)
        seconds = time.perf_counter() - start
        self._ids.append(token)
        if place is not Place.OPEN:
            self._start()
        return seconds

    def ahead(self, count: int) -> list[int]:
        """Up to so many tokens that may come next, one after the other."""
        probe = self._new()
        for token in self._ids:
            probe.commit(token)
        found: list[int] = []
        while len(found) < count and probe.place is Place.OPEN:
            found.append(self._bench.pick(probe.words))
            probe.commit(found[-1])
        return found


def main(argv: Sequence[str]) -> None:
    """`python -m sgl_spec.bench grammar`."""
    options = _parser().parse_args(argv)
    bench = GrammarBench(options)
    rows = bench.run()
    print(f"Tokenizer of {bench.vocab} tokens read in {bench.start_ms:.0f} ms.")
    header = [
        "grammar",
        "compile ms",
        "masks/round",
        "round ms",
        "worst ms",
        "us/mask",
        "commit us",
    ]
    print(table(header, [list(asdict(row).values()) for row in rows]))
    if options.json:
        conditions = provenance(argv=["python", "-m", "sgl_spec.bench", "grammar", *argv], seed=0)
        shape = {k: v for k, v in vars(options).items() if k != "json"}
        found = {"start_ms": bench.start_ms, "rows": [asdict(row) for row in rows]}
        write_row(Path(options.json), {**conditions, **shape, **found})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sgl_spec.bench grammar", description=__doc__)
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--nodes", type=int, default=12, help="nodes of each tree, root included")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", help="append one JSON row to this file")
    return parser
