"""Host time and memory of the n-gram drafter, a round of the server at a time.

A trie is filled with text, then rounds are timed: `propose` (the query), `observe` (learning) and
`settle` (insertion), each by itself, while the trie goes on growing. They are called as on a GPU
server, where `settle` runs behind the target's forward and the other two are waited for; a CPU
server waits for all three. The text follows itself: requests take
phrases from a Zipf-weighted book, repeat their own past and now and then say something new, or they
read documents given by --texts. Times are in milliseconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch

from sgl_spec.bench.report import provenance, say, table, write_row
from sgl_spec.errors import ConfigError
from sgl_spec.speculative.base import DraftBatch
from sgl_spec.speculative.ngram import NgramDrafter
from sgl_spec.speculative.ngram_options import NgramOptions
from sgl_spec.speculative.tree import AcceptResult, TokenTree

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]

_WIDTH = 16384  # tokens of a request row
_VOCAB = 49152
_CALLS = ("propose", "observe", "both", "settle")


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds per round: percentiles of each call, and of `propose` and `observe` together.
    tokens: gained by a request in a round, on average."""

    name: str
    rounds: int
    requests: int
    tokens: float
    propose: tuple[float, float, float]
    observe: tuple[float, float, float]
    waited: tuple[float, float, float]
    settle: tuple[float, float, float]

    def cells(self) -> list[object]:
        """The row of the printed table."""
        calls = (self.propose, self.observe, self.waited, self.settle)
        return [self.name, self.rounds, self.requests, self.tokens, *sum(calls, ())]


class Text:
    """An endless token stream: documents in random order, or made-up text."""

    def __init__(self, rng: np.random.Generator, documents: list[Ints32] | None) -> None:
        self._rng = rng
        self._documents = documents
        self._book = [_words(rng, int(rng.integers(2, 12))) for _ in range(20000)]

    def take(self, length: int) -> Ints32:
        """The next `length` tokens."""
        parts: list[Ints32] = []
        while sum(map(len, parts)) < length:
            parts.append(self._part(parts))
        return np.concatenate(parts)[:length]

    def _part(self, before: list[Ints32]) -> Ints32:
        if self._documents is not None:
            return self._documents[self._rng.integers(len(self._documents))]
        kind = self._rng.random()
        if kind < 0.1 and before:  # repeat a stretch of this text
            source = before[self._rng.integers(len(before))]
            return np.tile(source, 3)[: int(self._rng.integers(8, 40))]
        if kind < 0.75:
            return self._book[min(int(self._rng.zipf(1.2)), len(self._book)) - 1]
        return _words(self._rng, int(self._rng.integers(1, 10)))


def _words(rng: np.random.Generator, count: int) -> Ints32:
    return np.minimum(rng.zipf(1.25, count), _VOCAB - 1).astype(np.int32)


class Server:
    """Requests that gain `accepted` tokens a round on average.

    The target of this server agrees with the tree's preferred path as far as that takes it, then
    says the next token of the request's own text.
    """

    def __init__(
        self, drafter: NgramDrafter, text: Text, rows: int, accepted: float, seed: int
    ) -> None:
        self.drafter = drafter
        self.clear_times()
        self._rng = np.random.default_rng(seed)
        self._accepted = accepted
        self._text = text
        self._rows = np.arange(rows)
        self._tokens = np.zeros((rows, _WIDTH), np.int32)
        self._lengths = np.zeros(rows, np.int64)
        self._own = np.zeros((rows, _WIDTH), np.int32)  # what the target says by itself
        self._owing = np.zeros(rows)  # tokens by which a request is behind the average
        for row in range(rows):
            self._start(row, 200)

    def _start(self, row: int, prompt: int) -> None:
        self.drafter.finish(row)
        self._own[row] = self._text.take(_WIDTH)
        self._tokens[row, :prompt] = self._text.take(prompt)
        self._lengths[row] = prompt
        self.drafter.begin(row, self._tokens[row, :prompt], 0)

    def add_prompt(self, row: int, length: int) -> None:
        """A request with a prompt of `length` tokens takes the place of the one in `row`."""
        self._start(row, length)

    def clear_times(self) -> None:
        """Start measuring."""
        self.propose_s: list[float] = []
        self.observe_s: list[float] = []
        self.settle_s: list[float] = []
        self.emitted = 0

    def round(self) -> None:
        """One round of all requests."""
        for row in np.flatnonzero(self._lengths > _WIDTH - 100):
            self._start(int(row), 200)
        nodes = np.full(self._rows.size, self.drafter.options.num_draft_tokens)
        batch = DraftBatch(self._rows, self._lengths.copy(), nodes, self._tokens)
        begin = time.perf_counter()
        tree = self.drafter.propose(batch)
        self.propose_s.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        self.drafter.settle()
        self.settle_s.append(time.perf_counter() - begin)
        accepted = self._verify(batch, tree)
        begin = time.perf_counter()
        self.drafter.observe(batch, tree, accepted)
        self.observe_s.append(time.perf_counter() - begin)

    def _verify(self, batch: DraftBatch, tree: TokenTree) -> AcceptResult:
        self._owing = np.minimum(self._owing + self._accepted, 8.0)
        steps = np.maximum(1, np.floor(self._owing + self._rng.random(self._rows.size)))
        tokens, parents = tree.tokens.numpy(), tree.parents.numpy()
        inner = tree.used().numpy() & (np.arange(tree.width) > 0)
        path = np.zeros((self._rows.size, tree.width), np.int64)
        drawn = self._own[self._rows[:, None], batch.lengths[:, None] + np.arange(tree.width)]
        drawn = drawn.astype(np.int64)
        counts = np.ones(self._rows.size, np.int64)
        for step in range(1, tree.width):
            below = (parents == path[:, step - 1 : step]) & inner
            goes_on = below.any(axis=1) & (counts == step) & (step < steps)
            path[:, step] = np.argmax(below, axis=1) * goes_on
            drawn[goes_on, step - 1] = tokens[goes_on, path[goes_on, step]]
            counts += goes_on
        self._owing -= counts
        self.emitted += int(counts.sum())
        at = batch.lengths[:, None] + np.arange(tree.width)
        self._tokens[self._rows[:, None], at] = drawn
        self._lengths += counts
        return AcceptResult(*map(torch.from_numpy, (drawn, path, counts)))

    def timing(self, name: str) -> Timing:
        """Percentiles since `clear_times`."""
        return Timing(
            name,
            len(self.propose_s),
            self._rows.size,
            self.emitted / (self._rows.size * len(self.propose_s)),
            _percentiles(self.propose_s),
            _percentiles(self.observe_s),
            _percentiles(list(map(sum, zip(self.propose_s, self.observe_s, strict=True)))),
            _percentiles(self.settle_s),
        )


def _percentiles(seconds: list[float]) -> tuple[float, float, float]:
    p50, p90, p99 = np.percentile(np.array(seconds) * 1e3, [50, 90, 99])
    return float(p50), float(p90), float(p99)


class NgramBench:
    """The measurement."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._text = Text(np.random.default_rng(options.seed), _documents(options))
        self.facts: dict[str, Any] = {}

    def run(self) -> list[Timing]:
        """All rows of the table."""
        before = _resident()
        server = self._server(self._options.capacity)
        self._fill(server)
        start = server.drafter.trie.num_nodes
        rows = [self._measure(server, f"{start} nodes and growing")]
        stats = server.drafter.stats()
        self.facts = {
            "nodes_before": start,
            "nodes": int(stats["trie_nodes"]),
            "bytes_per_node": stats["trie_bytes"] / stats["trie_nodes"],
            "resident_bytes_per_node": (_resident() - before) / stats["trie_nodes"],
            "stats": stats,
        }
        rows.append(self._long_prompt(server))
        rows.append(self._single(server.drafter))
        del server
        full = self._server(self._options.nodes)
        self._fill(full)
        rows.append(self._measure(full, "full trie, evicting"))
        return rows

    def _server(self, capacity: int) -> Server:
        options = NgramOptions(
            num_draft_tokens=self._options.draft_tokens,
            max_trie_depth=self._options.depth,
            match_type=self._options.match_type,
            capacity=capacity,
        )
        drafter = NgramDrafter(self._options.requests, options, seed=self._options.seed)
        return self._serve(drafter, self._options.requests)

    def _serve(self, drafter: NgramDrafter, rows: int) -> Server:
        return Server(drafter, self._text, rows, self._options.accepted, self._options.seed)

    def _fill(self, server: Server) -> None:
        """Rounds until the trie has the wanted number of nodes, or has begun to evict."""
        trie = server.drafter.trie
        say(f"Filling a trie with {self._options.nodes} nodes.")
        while trie.num_nodes < self._options.nodes and not trie.nodes.evicted:
            server.round()

    def _measure(self, server: Server, name: str, rounds: int | None = None) -> Timing:
        say(f"Timing: {name}.")
        server.clear_times()
        gc.collect()
        for _ in range(rounds or self._options.rounds):
            server.round()
        return server.timing(name)

    def _long_prompt(self, server: Server) -> Timing:
        """Rounds while one prompt after the other is inserted in slices."""
        say("Timing: long prompts.")
        server.clear_times()
        rounds, taken = 0, []
        for row in range(max(1, self._options.rounds // 100)):
            server.add_prompt(row % self._options.requests, self._options.prompt)
            begin = rounds
            while server.drafter.stats()["queued_tokens"]:
                server.round()
                rounds += 1
            taken.append(rounds - begin)
        self.facts["prompt_rounds"] = float(np.mean(taken))
        return server.timing(f"a {self._options.prompt}-token prompt being inserted")

    def _single(self, drafter: NgramDrafter) -> Timing:
        server = self._serve(drafter, 1)
        while drafter.stats()["queued_tokens"]:
            server.round()
        return self._measure(server, "one request", self._options.rounds)


def _resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def _documents(options: argparse.Namespace) -> list[Ints32] | None:
    """Token ids of the `prompt`, `text` or `turns` field of each line of --texts."""
    if options.texts is None:
        return None
    if options.tokenizer is None:
        raise ConfigError("--texts needs --tokenizer, the path of a tokenizer.json")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(options.tokenizer)
    documents = []
    for line in Path(options.texts).read_bytes().splitlines():
        row = json.loads(line)
        text = row.get("prompt") or row.get("text") or "\n".join(row.get("turns", []))
        ids = np.array(tokenizer.encode(text).ids, np.int32)
        if ids.size:
            documents.append(ids)
    if not documents:
        raise ConfigError(f"--texts {options.texts}: no line has a prompt, text or turns field")
    return documents


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sgl_spec.bench ngram", description=__doc__)
    add = parser.add_argument
    add("--nodes", type=int, default=1_000_000, help="trie nodes before timing starts")
    add("--capacity", type=int, default=10_000_000, help="most trie nodes")
    add("--requests", type=int, default=48, help="running requests")
    add("--accepted", type=float, default=2.5, help="tokens a request gains per round")
    add("--depth", type=int, default=18, help="longest n-gram")
    add("--draft-tokens", type=int, default=12, help="nodes of a tree, root included")
    add("--match-type", choices=("BFS", "PROB"), default="BFS")
    add("--prompt", type=int, default=4000, help="tokens of the long prompt")
    add("--rounds", type=int, default=2000, help="rounds timed per row")
    add("--seed", type=int, default=0)
    add("--texts", help="JSON lines with a prompt, text or turns field, instead of made-up text")
    add("--tokenizer", help="tokenizer.json for --texts")
    add("--json", help="append the result as one JSON line to this file")
    add("--quick", action="store_true", help="20,000 nodes and 100 rounds: a smoke test")
    return parser


def main(argv: Sequence[str]) -> None:
    """`python -m sgl_spec.bench ngram`."""
    options = _parser().parse_args(argv)
    if options.quick:
        options.nodes, options.rounds, options.prompt = 20_000, 100, 500
    bench = NgramBench(options)
    rows = bench.run()
    header = ["round (ms)", "rounds", "requests", "tokens"]
    header += [f"{call} {p}" for call in _CALLS for p in ("p50", "p90", "p99")]
    print(table(header, [row.cells() for row in rows]))
    facts = bench.facts
    print(
        f"{facts['nodes']} nodes then, {facts['bytes_per_node']:.1f} bytes a node in use "
        f"({facts['resident_bytes_per_node']:.1f} resident, rows of text included); a "
        f"{options.prompt}-token prompt went in within {facts['prompt_rounds']:.0f} rounds"
    )
    if options.json:
        command = ["python", "-m", "sgl_spec.bench", "ngram", *argv]
        timings = [dict(zip(header, row.cells(), strict=True)) for row in rows]
        write_row(
            Path(options.json),
            {
                **provenance(command, options.seed),
                **facts,
                "options": vars(options),
                "rows": timings,
            },
        )
