"""Host time of a round outside the model's forward, with every sampling setting on.

The drafter here knows each text from a first run, and guesses so often wrong that rounds are like a
server's: whole trees are verified, and only rows on the walk are drawn. Every text is compared with
that of the first run, which did not speculate.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from sgl_spec.bench.offline import free_prompts
from sgl_spec.bench.report import provenance, say, table, write_row
from sgl_spec.llm import LLM
from sgl_spec.speculative.base import DraftBatch, DrafterContext, register_drafter
from sgl_spec.speculative.tree import AcceptResult, TokenTree

MS = 1000.0
BIAS = {str(7 * i + 11): (i - 10) / 5 for i in range(20)}
EVERYTHING: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 200,
    "top_p": 0.95,
    "min_p": 0.005,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.3,
    "repetition_penalty": 1.1,
    "logit_bias": BIAS | {"5": -100, "6": -100},
    "min_new_tokens": 8,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "top_k, top_p, min_p": {"top_k": 200, "top_p": 0.95, "min_p": 0.005},
    "penalties": {k: v for k, v in EVERYTHING.items() if k.endswith("penalty")},
    "everything": EVERYTHING,
}


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds in which all requests verify whole trees, in milliseconds.

    draw: drawing, following and counting what was drawn. host: the whole step but the forward; it
    holds `draw`. share: host over forward, the median of the rounds' own.
    """

    settings: str
    rounds: int
    emitted: float
    forward_ms: float
    draw_ms: float
    host_ms: float
    share: float
    same_text: bool


class _Knowing:
    """Trees around texts that it was shown: a chain that goes wrong at each node with a chance of
    one in three, each link beside random siblings."""

    def __init__(self, context: DrafterContext) -> None:
        self.nodes, self.vocab = context.draft_tokens, context.vocab_size
        self.texts: dict[tuple[int, ...], list[int]] = {}
        self.rng = np.random.default_rng(0)
        self._text_of: dict[int, list[int]] = {}

    def begin(self, row: int, tokens: npt.NDArray[np.int32], known: int) -> None:
        """Finds the text by its beginning."""
        text = tokens.tolist()
        whole = (v for k, v in self.texts.items() if tuple(text[: len(k)]) == k)
        self._text_of[row] = next(whole, [])

    def propose(self, batch: DraftBatch) -> TokenTree:
        """Two of three nodes lie on the chain."""
        shape = (len(batch.rows), self.nodes)
        tokens = self.rng.integers(0, self.vocab, shape)
        tokens[:, 0] = batch.tokens[batch.rows, batch.lengths - 1]
        node = np.arange(self.nodes)
        parents = np.where(node % 3 == 2, node - 2, node - 1)
        chain = node[(node > 0) & (node % 3 != 2)]
        for i, (row, length) in enumerate(zip(batch.rows, batch.lengths, strict=True)):
            after = self._text_of[int(row)][length : length + len(chain)]
            right = self.rng.random(len(after)) < 2 / 3
            tokens[i, chain[: len(after)][right]] = np.array(after, dtype=np.int64)[right]
        twins = (node % 3 == 2) & (tokens == np.roll(tokens, 1, axis=1))
        tokens[twins] = (tokens[twins] + 1) % self.vocab
        counts = np.minimum(batch.max_nodes, self.nodes)
        return TokenTree(
            torch.from_numpy(tokens),
            torch.from_numpy(np.broadcast_to(parents, shape).copy()),
            torch.from_numpy(counts),
        )

    def observe(self, batch: DraftBatch, tree: TokenTree, accepted: AcceptResult) -> None:
        """Learns nothing."""

    def finish(self, row: int) -> None:
        """See `begin`."""

    def flush(self) -> None:
        """Keeps its texts."""

    def stats(self) -> dict[str, float]:
        """Nothing to report."""
        return {}


@dataclass(slots=True)
class _Clock:
    """Stands in for a callable and adds up the time spent in it."""

    target: Any
    seconds: float = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = self.target(*args, **kwargs)
        self.seconds += time.perf_counter() - start
        return result


class SamplingBench:
    """One engine; its worker's forward and draw are timed from outside."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        drafters: list[_Knowing] = []

        def build(context: DrafterContext) -> _Knowing:
            drafters.append(_Knowing(context))
            return drafters[-1]

        register_drafter("KNOWING", build)
        self.llm = LLM(
            options.model_path,
            speculative_algorithm="KNOWING",
            speculative_drafter_module=__name__,
            speculative_num_draft_tokens=options.nodes,
            max_running_requests=options.requests,
            disable_radix_cache=True,
        )
        (self.drafter,) = drafters
        self.worker = cast(Any, self.llm.engine.scheduler.worker)
        self.worker.costs = None  # whole trees, also where they do not pay
        self.verify = self.worker._verify = _Clock(self.worker._verify)
        self.draw = self.worker.rule = _Clock(self.worker.rule)
        rows = self.worker.sampling
        self.count = rows.count = _Clock(rows.count)
        texts = free_prompts(options.requests)
        prompts = [self.llm.encode(text) for text in texts]
        size = options.prompt_tokens
        self.prompts = [(ids * (1 + size // len(ids)))[:size] for ids in prompts]

    def run(self) -> list[Row]:
        """All settings."""
        return [self._row(name, given) for name, given in SETTINGS.items()]

    def _row(self, name: str, given: dict[str, Any]) -> Row:
        say(f"Timing: {name}.")
        base = {"max_new_tokens": self.options.new_tokens, "ignore_eos": True}
        sampling = [base | given | {"seed": i} for i in range(len(self.prompts))]
        plain = self.llm.generate(self.prompts, [s | {"speculation": False} for s in sampling])
        self.drafter.texts = {
            tuple(prompt): prompt + done.output_ids
            for prompt, done in zip(self.prompts, plain, strict=True)
        }
        rounds: list[tuple[float, float, float]] = []
        same, emitted, verified = True, 0, 0
        for _ in range(self.options.turns):
            with _rounds(self) as found:
                again = self.llm.generate(self.prompts, sampling)
            rounds += found
            same &= [d.output_ids for d in again] == [d.output_ids for d in plain]
            emitted += sum(d.spec.emitted for d in again if d.spec is not None)
            verified += sum(d.spec.verify_ct for d in again if d.spec is not None)
        forward, draw, host = (statistics.median(column) for column in zip(*rounds, strict=True))
        return Row(
            settings=name,
            rounds=len(rounds),
            emitted=emitted / verified,
            forward_ms=forward * MS,
            draw_ms=draw * MS,
            host_ms=host * MS,
            share=statistics.median(h / f for f, _, h in rounds),
            same_text=same,
        )


class _rounds:
    """Records (forward, draw, host) of every full round of the engine while it is entered."""

    def __init__(self, bench: SamplingBench) -> None:
        self.bench = bench
        self.found: list[tuple[float, float, float]] = []

    def __enter__(self) -> list[tuple[float, float, float]]:
        self.engine = self.bench.llm.engine
        self.step = self.engine.step
        self.engine.step = self._step  # type: ignore[method-assign]
        return self.found

    def __exit__(self, *_: object) -> None:
        self.engine.step = self.step  # type: ignore[method-assign]

    def _step(self) -> Any:
        bench, counters = self.bench, self.engine.counters
        clocks = (bench.verify, bench.draw, bench.count)
        for clock in clocks:
            clock.seconds = 0.0
        before = counters.proposed
        start = time.perf_counter()
        chunks = self.step()
        step = time.perf_counter() - start
        forward, draw, count = (clock.seconds for clock in clocks)
        full = bench.options.requests * (bench.options.nodes - 1)
        if counters.proposed - before == full:
            self.found.append((forward, draw + count, step - forward))
        return chunks


def main(argv: Sequence[str]) -> None:
    """`python -m sgl_spec.bench sampling`."""
    options = _parser().parse_args(argv)
    rows = SamplingBench(options).run()
    header = ["settings", "rounds", "tokens/round", "forward ms", "draw ms", "host ms", "share"]
    header.append("same text")
    print(table(header, [list(asdict(row).values()) for row in rows]))
    if options.json:
        conditions = provenance(argv=["python", "-m", "sgl_spec.bench", "sampling", *argv], seed=0)
        shape = {k: v for k, v in vars(options).items() if k != "json"}
        rows_json = [asdict(row) for row in rows]
        write_row(Path(options.json), {**conditions, **shape, "rows": rows_json})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sgl_spec.bench sampling", description=__doc__)
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--nodes", type=int, default=12, help="nodes of each tree, root included")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--json", help="append one JSON row to this file")
    return parser
