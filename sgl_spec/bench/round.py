"""How long a round takes over its floor, and which marks, operators or kernels take the time.

The floor is the time in which the target's weights and the keys and values of the batch can be read
once, at the bandwidth that was measured just before. Other options are the server's:
python -m sgl_spec.bench round --batch 8 --speculative-algorithm EAGLE3
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sgl_spec.args import ServerArgs
from sgl_spec.bench.machine import PartRow, Parts, parts_of, read_bandwidth
from sgl_spec.bench.offline import bundled, step_bytes
from sgl_spec.bench.report import provenance, say, table, write_row
from sgl_spec.engine.engine import Engine
from sgl_spec.engine.ranks import exit_at_once
from sgl_spec.errors import ConfigError
from sgl_spec.request import SamplingParams, TokenizedRequest

WARM_ROUNDS = 5
TRACED_ROUNDS = 10
_BLOCK = 5  # rounds timed together: one may be launched before the last one's tokens are there
_LONGEST_ROUND = 64  # tokens that one may give


class RoundBench:
    """One engine and a batch of requests that stay in it for all rounds."""

    def __init__(self, options: argparse.Namespace, args: ServerArgs) -> None:
        self.options = options
        self.engine = Engine.start(args, exit_at_once)
        self.device = self.engine.model.device
        self.facts: dict[str, Any] = {
            "args": {k: v for k, v in self.engine.args.public().items() if v is not None},
            "acceptance_rule": self.engine.rule.name,
            "batch": options.batch,
            "prompt_tokens": options.prompt_tokens,
            "rounds": options.rounds,
        }

    def run(self) -> Parts:
        """Time the rounds, of which `facts` then tell; then trace some more."""
        rate = read_bandwidth(self.device)
        self._submit()
        self._fill()
        for _ in range(WARM_ROUNDS):
            self._round()
        before, held = self._emitted(), self._held()
        seconds = self._times()
        emitted, verified = (now - then for now, then in zip(self._emitted(), before, strict=True))
        model = self.engine.model
        read = step_bytes(model) + (held + self._held()) / 2 * model.kv_bytes_per_token
        median, floor = statistics.median(seconds) * 1e3, read / rate * 1e3
        self.facts |= {
            "read_bandwidth_gb_s": rate / 1e9,
            "round_ms": median,
            "round_ms_least": min(seconds) * 1e3,
            "read_mb": read / 1e6,
            "floor_ms": floor,
            "over_floor": median / floor,
            "tokens_per_request_and_round": emitted / verified if verified else 1.0,
        }
        return parts_of(self._traced, TRACED_ROUNDS, self.device)

    def _traced(self) -> None:
        for _ in range(TRACED_ROUNDS):
            self._round()

    def _times(self) -> list[float]:
        """Seconds of a round, by blocks."""
        found = []
        for _ in range(-(-self.options.rounds // _BLOCK)):
            before, start = self.engine.counters.rounds, time.perf_counter()
            for _ in range(_BLOCK):
                self._round()
            seconds = time.perf_counter() - start
            found.append(seconds / (self.engine.counters.rounds - before))
        return found

    def _held(self) -> int:
        """Tokens in the KV cache of the batch."""
        return sum(req.held.committed_len for req in self.engine.scheduler.running)

    def _round(self) -> None:
        """A step of the whole batch: a round, which may be collected in the next."""
        self.engine.step()
        if len(self.engine.scheduler.running) != self.options.batch:
            raise ConfigError("The batch did not stay whole; raise --max-total-tokens.")

    def _emitted(self) -> tuple[int, int]:
        return self.engine.counters.emitted, self.engine.counters.verify_ct

    def _submit(self) -> None:
        options, limits = self.options, self.engine.scheduler.limits
        if limits.max_running < options.batch:
            raise ConfigError(f"--batch must be at most {limits.max_running}, got {options.batch}.")
        # Enough that nothing ends, however much a round gives.
        rounds = options.rounds + _BLOCK + WARM_ROUNDS + TRACED_ROUNDS
        tokens = rounds * min(self.engine.args.tree_nodes, _LONGEST_ROUND) + 1
        most = limits.max_request_tokens
        if options.prompt_tokens + tokens > most:
            raise ConfigError(
                f"{rounds} rounds may need {tokens} tokens behind {options.prompt_tokens} of the "
                f"prompt, a request may have {most}; lower --rounds or --prompt-tokens."
            )
        for number, ids in enumerate(self._prompts()):
            sampling = SamplingParams(
                temperature=options.temperature,
                max_new_tokens=tokens,
                ignore_eos=True,
                seed=number,
            )
            self.engine.submit(
                TokenizedRequest(rid=str(number), input_ids=ids, sampling=sampling, stream=True)
            )

    def _prompts(self) -> list[list[int]]:
        """The first tokens of bundled prompts, told apart by their first."""
        text = [line["prompt"] for line in bundled("bench96.jsonl")]
        length, vocab = self.options.prompt_tokens, self.engine.model.config.vocab_size
        found: list[list[int]] = []
        for number in range(self.options.batch):
            ids: list[int] = []
            while len(ids) < length:
                ids += self.engine.tokenizer.encode(text[(number + len(found)) % len(text)]).ids
            found.append([number % vocab, *ids][:length])
        return found

    def _fill(self) -> None:
        """Prefill, until every request decodes."""
        waiting = set(map(str, range(self.options.batch)))
        while waiting:
            waiting -= {chunk.rid for chunk in self.engine.step() if chunk.ids}


def main(argv: Sequence[str]) -> None:
    """`python -m sgl_spec.bench round`."""
    options, server = _parser().parse_known_args(argv)
    flags = [] if "--model-path" in server else ["--model-path", "smollm2"]
    flags += [*server, "--max-running-requests", str(options.batch)]
    bench = RoundBench(options, ServerArgs.from_cli(flags))
    say(f"Measuring {options.rounds} rounds of {options.batch} requests.")
    parts = bench.run()
    facts = bench.facts
    print(
        f"A round takes {facts['round_ms']:.3f} ms, {facts['over_floor']:.2f} times its floor of "
        f"{facts['floor_ms']:.3f} ms ({facts['read_mb']:.0f} MB at "
        f"{facts['read_bandwidth_gb_s']:.1f} GB/s), and gives "
        f"{facts['tokens_per_request_and_round']:.2f} tokens to a request."
    )
    for title, rows in (("mark", parts.marks), ("operation", parts.operations)):
        shown: Sequence[PartRow] = rows[: options.rows]
        print(table([title, "ms", "calls"], [[row.name[:80], row.ms, row.calls] for row in shown]))
    if options.json:
        conditions = provenance(argv=["python", "-m", "sgl_spec.bench", "round", *argv], seed=0)
        write_row(Path(options.json), {**conditions, **facts, **asdict(parts)})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_spec.bench round", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--batch", type=int, default=1, help="requests in every round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rows", type=int, default=16, help="operations shown")
    parser.add_argument("--json", help="append one JSON row to this file")
    return parser
