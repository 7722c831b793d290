"""Where a round's time is: each stage with what it reads, its floor, and how far it is above it.

The floor of a stage is the time in which its bytes (weights and keys and values, each read once a
forward) can be read at the bandwidth that was measured just before. Times are of the CPU's clock,
or on a GPU of events on its stream, which are captured with the round's graph; there the kernels
that take longest follow. Other options are the server's:
python -m sgl_spec.bench round --batch 8 --speculative-algorithm EAGLE3
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sgl_spec.args import ServerArgs
from sgl_spec.bench.device_times import KernelRow, bandwidth, kernel_rows
from sgl_spec.bench.offline import bundled, read_bandwidth
from sgl_spec.bench.report import provenance, say, table, write_row
from sgl_spec.bench.stages import (
    HOST,
    PARTS,
    STAGES,
    EventClock,
    HostClock,
    Recorder,
    RoundTimes,
    watched,
)
from sgl_spec.engine.engine import Engine
from sgl_spec.errors import ConfigError
from sgl_spec.request import SamplingParams, TokenizedRequest

WARM_ROUNDS = 5
TRACED_ROUNDS = 10
_LONGEST_ROUND = 64  # tokens that one may give


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage of a round: means over the middle half of the rounds by duration, which add up. ms:
    without stages that have their own row. mb: bytes read / 1e6. floor_ms, over_floor: None where
    no bytes are counted."""

    stage: str
    ms: float
    share: float
    calls: float
    mb: float
    floor_ms: float | None
    over_floor: float | None


class RoundBench:
    """One engine and a batch of requests that stay in it for all rounds."""

    def __init__(self, options: argparse.Namespace, args: ServerArgs) -> None:
        self.options = options
        self.engine = Engine(args)
        self.on_gpu = self.engine.model.device.type == "cuda"
        self.whole_rounds = hasattr(self.engine.scheduler.worker, "rounds")  # that need no host
        self.facts: dict[str, Any] = {
            "args": {k: v for k, v in self.engine.args.public().items() if v is not None},
            "acceptance_rule": self.engine.rule.name,
            "batch": options.batch,
            "prompt_tokens": options.prompt_tokens,
        }

    def run(self) -> tuple[list[StageRow], float]:
        """The rows, the whole round last, and what the wrapping costs: measured rounds over rounds
        without it."""
        rate = self._read_bandwidth()
        self._submit()
        self._fill()
        self._warm_up()
        before = self._emitted()
        in_blocks = self.on_gpu or self.whole_rounds
        plain, rounds = self._in_blocks() if in_blocks else self._in_turns()
        emitted, verified = (now - then for now, then in zip(self._emitted(), before, strict=True))
        rows = rows_of(rounds, rate)
        plain_ms = statistics.median(plain) * 1e3
        self.facts |= {
            "rounds": len(rounds),
            "plain_round_ms": plain_ms,
            "plain_over_floor": plain_ms / floor if (floor := rows[-1].floor_ms) else None,
            "tokens_per_request_and_round": emitted / verified if verified else 1.0,
        }
        return rows, rows[-1].ms / plain_ms

    def kernels(self) -> list[KernelRow]:
        """Those of plain rounds, on a GPU."""

        def work() -> None:
            for _ in range(TRACED_ROUNDS):
                self._round()

        if not self.on_gpu or not self.options.kernels:
            return []
        try:
            return kernel_rows(work, TRACED_ROUNDS)
        except RuntimeError as error:  # a machine whose profiler is closed; the stages are measured
            say(f"No kernels: {error}")
            return []

    def _read_bandwidth(self) -> float:
        if not self.on_gpu:
            rate = read_bandwidth()
        else:
            both = bandwidth(self.engine.model.device)
            torch.cuda.empty_cache()
            rate = both.read
            self.facts["copy_bandwidth_gb_s"] = both.copy / 1e9
        self.facts["read_bandwidth_gb_s"] = rate / 1e9
        return rate

    def _in_turns(self) -> tuple[list[float], list[RoundTimes]]:
        """Seconds of plain rounds, and measured rounds between them: a CPU's speed drifts."""
        plain, rounds, recorder = [], [], Recorder(HostClock())
        for _ in range(self.options.rounds):
            plain.append(self._seconds(1))
            with self._watched(recorder):
                rounds.append(self._measured(recorder))
        return plain, rounds

    def _in_blocks(self) -> tuple[list[float], list[RoundTimes]]:
        """The same one after the other, since a round may be launched before the last one's tokens
        are there, and graphs are made anew to be measured. Plain rounds by five."""
        block = min(5, self.options.rounds)
        plain = [self._seconds(block) for _ in range(self.options.rounds // block)]
        recorder = Recorder(EventClock() if self.on_gpu else HostClock())
        with self._watched(recorder):
            for _ in range(WARM_ROUNDS):
                self._measured(recorder)
            rounds = [self._measured(recorder) for _ in range(self.options.rounds)]
        self._warm_up()
        return plain, rounds

    @contextmanager
    def _watched(self, recorder: Recorder) -> Iterator[None]:
        if self.whole_rounds:
            from sgl_spec.bench.device_stages import watched_device  # needs triton

            with watched_device(self.engine, recorder):
                yield
            return
        with watched(self.engine, recorder):
            yield

    def _seconds(self, rounds: int) -> float:
        """Of one of so many rounds in a row."""
        before, start = self.engine.counters.rounds, time.perf_counter()
        for _ in range(rounds):
            self._round()
        seconds = time.perf_counter() - start
        done = self.engine.counters.rounds - before
        assert done == rounds, f"{done} rounds in {rounds} steps"
        return seconds / rounds

    def _measured(self, recorder: Recorder) -> RoundTimes:
        with recorder.stage(HOST):
            self._round()
        return recorder.round(self._held())

    def _held(self) -> int:
        """Tokens whose KV a round reads, trees included."""
        running = self.engine.scheduler.running
        committed = sum(req.held.committed_len for req in running)
        return committed + len(running) * self.engine.args.tree_nodes

    def _warm_up(self) -> None:
        for _ in range(WARM_ROUNDS):
            self._round()

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
        rounds = 2 * options.rounds + 3 * WARM_ROUNDS + TRACED_ROUNDS + 2
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


def rows_of(rounds: Sequence[RoundTimes], bandwidth: float) -> list[StageRow]:
    """A row for each stage that took time, in the order of a round. bandwidth: bytes per second."""
    names = [stage + part for stage in STAGES for part in PARTS]
    seen = {name for times in rounds for name in times.seconds}
    assert seen <= set(names), f"a stage without a row: {seen - set(names)}"
    cut = len(rounds) // 4
    kept = sorted(rounds, key=lambda times: times.total)[cut : len(rounds) - cut]
    whole = statistics.mean(times.total for times in kept)
    rows = []
    for name in [name for name in names if name in seen]:
        seconds = statistics.mean(times.seconds[name] for times in kept)
        calls = statistics.mean(times.calls[name] for times in kept)
        read = statistics.mean(times.bytes[name] for times in kept)
        rows.append(_row(name, seconds, whole, calls, read / bandwidth, read))
    read = statistics.mean(sum(times.bytes.values()) for times in kept)
    return [*rows, _row("round", whole, whole, 1.0, read / bandwidth, read)]


def _row(
    name: str, seconds: float, whole: float, calls: float, floor: float, read: float
) -> StageRow:
    return StageRow(
        stage=name,
        ms=seconds * 1e3,
        share=seconds / whole,
        calls=calls,
        mb=read / 1e6,
        floor_ms=floor * 1e3 if read else None,
        over_floor=seconds / floor if read else None,
    )


def main(argv: Sequence[str]) -> None:
    """`python -m sgl_spec.bench round`."""
    options, server = _parser().parse_known_args(argv)
    flags = [] if "--model-path" in server else ["--model-path", "smollm2"]
    flags += [*server, "--max-running-requests", str(options.batch)]
    bench = RoundBench(options, ServerArgs.from_cli(flags))
    say(f"Measuring {options.rounds} rounds of {options.batch} requests.")
    rows, overhead = bench.run()
    header = ["stage", "ms", "share", "calls", "MB", "floor ms", "x floor"]
    print(table(header, [["-" if v is None else v for v in asdict(row).values()] for row in rows]))
    facts = bench.facts
    over = facts["plain_over_floor"]
    print(
        f"{facts['tokens_per_request_and_round']:.2f} tokens per request and round; rounds that "
        f"nothing is measured in take {facts['plain_round_ms']:.3f} ms"
        f"{'' if over is None else f', {over:.2f} times the floor'}, these {overhead:.2f} times "
        f"as long; floors at {facts['read_bandwidth_gb_s']:.1f} GB/s."
    )
    kernels = bench.kernels()
    if kernels:
        shown = [[row.kernel[:80], row.ms, row.calls] for row in kernels[: options.kernels]]
        print(table(["kernel", "ms", "calls"], shown))
    if options.json:
        conditions = provenance(argv=["python", "-m", "sgl_spec.bench", "round", *argv], seed=0)
        found = {**facts, "overhead": overhead, "rows": [asdict(row) for row in rows]}
        found["kernels"] = [asdict(row) for row in kernels]
        write_row(Path(options.json), {**conditions, **found})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_spec.bench round", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--batch", type=int, default=1, help="requests in every round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--kernels", type=int, default=16, help="shown on a GPU; 0: none traced")
    parser.add_argument("--json", help="append one JSON row to this file")
    return parser
