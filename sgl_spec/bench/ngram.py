"""Accept length and host time of the n-gram trie over recorded texts, without a model.

Greedy texts are recorded once, without speculation. Then they are served again as if a target wrote
them: a draft is accepted where the record goes on with it, so accept lengths are exact. Whole trees
are verified, nothing is known at the start, and the next prompt comes in when a text has ended.
Times are those of a CPU server: `begin`, `propose` and `observe`, medians in ms.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from sgl_spec.bench.offline import CHAT, TASKS, bundled, questions
from sgl_spec.bench.report import provenance, say, table, write_row
from sgl_spec.llm import LLM
from sgl_spec.server.tokenizer import ServerTokenizer
from sgl_spec.speculative.base import DraftBatch
from sgl_spec.speculative.ngram import IndexSize, NgramDrafter, NgramOptions
from sgl_spec.speculative.tree import AcceptResult, TokenTree

SETS = ("bench96", "spec_bench")
MATCH_TYPES = ("BFS", "PROB")


@dataclass(frozen=True, slots=True)
class Text:
    """A recorded answer. prompt, output: token ids."""

    name: str
    prompt: list[int]
    output: list[int]


@dataclass(frozen=True, slots=True)
class Row:
    """accept_length: tokens per request and round. The times are medians in ms: of a prompt, and of
    a round of all requests."""

    texts: str
    nodes: int
    requests: int
    accept_length: float
    begin_ms: float
    propose_ms: float
    observe_ms: float


@dataclass(slots=True)
class _Times:
    """Seconds of each call."""

    begin: list[float] = field(default_factory=list)
    propose: list[float] = field(default_factory=list)
    observe: list[float] = field(default_factory=list)


def record(options: argparse.Namespace) -> list[Text]:
    """The greedy texts of all prompts; written to --texts, or read from there."""
    path = Path(options.texts) if options.texts else None
    if path is not None and path.exists():
        return [Text(**json.loads(line)) for line in path.read_text().splitlines()]
    with LLM(options.model_path, max_running_requests=16) as llm:
        tokenizer = ServerTokenizer.from_dir(llm.engine.tokenizer_dir)
        asked: list[tuple[str, list[int]]] = []
        if "bench96" in options.sets:
            lines = bundled("bench96.jsonl")[: options.limit and 6 * options.limit]
            asked += [
                ("bench96", tokenizer.encode(line["prompt"], add_special_tokens=False))
                for line in lines
            ]
        if "spec_bench" in options.sets:
            chats = questions((*TASKS, CHAT), options.limit)
            asked += [
                ("spec_bench", tokenizer.encode_chat([{"role": "user", "content": each.text}]))
                for each in chats
            ]
        say(f"Recording {len(asked)} texts.")
        params = {"temperature": 0, "max_new_tokens": options.max_new_tokens}
        done = llm.generate([ids for _, ids in asked], params)
    texts = [
        Text(name, list(ids), list(each.output_ids))
        for (name, ids), each in zip(asked, done, strict=True)
    ]
    if path is not None:
        path.write_text("".join(json.dumps(asdict(text)) + "\n" for text in texts))
    return texts


class Replay:
    """A server of `requests` rows whose target says what was recorded."""

    def __init__(self, drafter: NgramDrafter, texts: Sequence[Text], requests: int) -> None:
        self.drafter, self.times = drafter, _Times()
        self._todo = list(reversed(texts))
        self._left: dict[int, list[int]] = {}  # what each row's text goes on with
        longest = max(len(text.prompt) + len(text.output) for text in texts)
        self._tokens = np.zeros((requests, longest), np.int32)
        self._lengths = np.zeros(requests, np.int64)
        self.emitted = self.rounds = 0

    def run(self) -> None:
        """Serve all texts."""
        while self._fill():
            self._round()

    def _fill(self) -> bool:
        """Give every free row a text. Whether any runs."""
        for row in range(len(self._lengths)):
            while row not in self._left and self._todo:
                self._begin(row, self._todo.pop())
        return bool(self._left)

    def _begin(self, row: int, text: Text) -> None:
        """The prompt's own draw is there when drafting starts."""
        if len(text.output) < 2:
            return
        known = [*text.prompt, text.output[0]]
        self._tokens[row, : len(known)] = known
        self._lengths[row] = len(known)
        self._left[row] = text.output[1:]
        self.drafter.expect(row, len(text.prompt) + len(text.output))
        start = time.perf_counter()
        self.drafter.begin(row, self._tokens[row, : len(known)], 0)
        self.drafter.sync()
        self.times.begin.append(time.perf_counter() - start)

    def _round(self) -> None:
        rows = np.array(sorted(self._left))
        left = np.array([len(self._left[row]) for row in rows.tolist()])
        most = np.minimum(left, self.drafter.nodes)
        batch = DraftBatch(rows, self._lengths[rows], most, self._tokens)
        start = time.perf_counter()
        tree = self.drafter.propose(batch)
        self.times.propose.append(time.perf_counter() - start)
        accepted = self._follow(batch, tree)
        start = time.perf_counter()
        self.drafter.observe(batch, tree, accepted)
        self.times.observe.append(time.perf_counter() - start)
        self._lengths[rows] += accepted.counts.numpy()
        self.emitted += int(accepted.counts.sum())
        self.rounds += len(rows)
        for row in [row for row, text in self._left.items() if not text]:
            del self._left[row]
            self.drafter.finish(row)

    def _follow(self, batch: DraftBatch, tree: TokenTree) -> AcceptResult:
        tokens, path = torch.zeros_like(tree.tokens), torch.zeros_like(tree.tokens)
        counts = torch.ones_like(tree.num_nodes)
        drafts = zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)
        for i, (row, (mine, parents)) in enumerate(zip(batch.rows.tolist(), drafts, strict=True)):
            size, text = int(tree.num_nodes[i]), self._left[row]
            below = {(parents[node], mine[node]): node for node in range(1, size)}
            taken = [0]
            while len(taken) < len(text) and (taken[-1], text[len(taken) - 1]) in below:
                taken.append(below[taken[-1], text[len(taken) - 1]])
            count, length = len(taken), int(batch.lengths[i])
            path[i, :count], tokens[i, :count] = torch.tensor(taken), torch.tensor(text[:count])
            batch.tokens[row, length : length + count] = text[:count]
            self._left[row], counts[i] = text[count:], count
        return AcceptResult(tokens, path, counts)


def measure(texts: Sequence[Text], name: str, nodes: int, requests: int, match_type: str) -> Row:
    """One row of the table, from an empty trie."""
    width = max(len(text.prompt) + len(text.output) for text in texts)
    options = NgramOptions(num_draft_tokens=nodes, match_type=match_type)
    replay = Replay(
        NgramDrafter(requests, options, IndexSize.of(options.capacity, width, requests)),
        texts,
        requests,
    )
    replay.run()
    times = [
        1e3 * float(np.median(each))
        for each in (replay.times.begin, replay.times.propose, replay.times.observe)
    ]
    return Row(name, nodes, requests, replay.emitted / replay.rounds, *times)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sgl_spec.bench ngram", description=__doc__)
    add = parser.add_argument
    add("--model-path", default="smollm2")
    add("--sets", nargs="+", choices=SETS, default=SETS, help="prompts; each is served by itself")
    add("--limit", type=int, help="prompts of each of the six groups of questions")
    add("--max-new-tokens", type=int, default=256)
    add("--texts", help="file of the recorded texts, written if it is not there")
    add("--nodes", type=int, nargs="+", default=[4, 8, 16], help="of a tree, root included")
    add("--requests", type=int, nargs="+", default=[1, 8, 48], help="running requests")
    add("--match-type", choices=MATCH_TYPES, default="BFS")
    add("--json", help="append the result as one JSON line to this file")
    return parser


def main(argv: Sequence[str]) -> None:
    """`python -m sgl_spec.bench ngram`."""
    options = _parser().parse_args(argv)
    texts = record(options)
    rows = []
    for name in options.sets:
        mine = [text for text in texts if text.name == name]
        for nodes in options.nodes:
            for requests in options.requests:
                rows.append(measure(mine, name, nodes, requests, options.match_type))
                say(" ".join(str(cell) for cell in asdict(rows[-1]).values()))
    header = list(asdict(rows[0]))
    print(table(header, [list(asdict(row).values()) for row in rows]))
    if options.json:
        command = ["python", "-m", "sgl_spec.bench", "ngram", *argv]
        facts = {"options": vars(options), "texts": len(texts)}
        found = {**provenance(command), **facts, "rows": [asdict(row) for row in rows]}
        write_row(Path(options.json), found)
