"""A whole experiment from one file: servers are started, loads are sent, results are compared.

Each cell of the plan's grid is measured `repeats` times. What is done is kept in the results'
directory, so the same command goes on after an interruption; a cell that fails is a row with the
server's last words, and the others are measured all the same. At the end, and for what is there
after an interruption, table.json, table.csv, table.md and plots are written. `bench.plan` says what
a plan holds; examples/experiment.toml is one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import subprocess
import time
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop
from tqdm import tqdm

from sgl_spec.bench import plots, tables
from sgl_spec.bench.client import Call, Reply, Target, closed_loop, extra, open_loop
from sgl_spec.bench.own_server import OwnServer, end_of, other_server, own_server
from sgl_spec.bench.plan import Cell, Load, Plan, Variant, cells_of, read_plan, read_trace
from sgl_spec.bench.report import provenance, say, write_row
from sgl_spec.bench.serving import (
    Backend,
    Workload,
    answers_to,
    model_of,
    read_prompts,
    warm_up,
)
from sgl_spec.bench.streams import Answer, level_of, tpot
from sgl_spec.errors import SglSpecError

Row = dict[str, Any]
BUSY = 0.2  # of the machine, in use by others: what is measured beside it says so
_LAST_LINES = 12


class Store:
    """Finished cells on disk: a JSON row each, and the answers in a file of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "answers").mkdir(parents=True, exist_ok=True)
        self._file = directory / "cells.jsonl"
        self.rows: dict[str, Row] = {}
        if self._file.exists():
            for line in self._file.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):  # the line that an interruption cut
                    row = json.loads(line)
                    self.rows[row["id"]] = row

    def add(self, row: Row) -> None:
        """Keep a cell's row, the last of its id."""
        self.rows[row["id"]] = row
        write_row(self._file, row)

    def keep_answers(self, cell: Cell, answers: Sequence[Answer]) -> None:
        """Ids where the server told them, else texts."""
        texts = [answer.ids or answer.text for answer in answers]
        path = self.directory / "answers" / f"{cell.id}.json"
        path.write_text(json.dumps(texts), encoding="utf-8")

    def answers(self, row: Row) -> list[Any]:
        """What a cell's requests were answered."""
        path = self.directory / "answers" / f"{row['id']}.json"
        found: list[Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        return found


@dataclass(frozen=True, slots=True)
class Ready:
    """A server that answers. own: None where it was not started here."""

    url: str
    own: OwnServer | None


class Experiment:
    """A plan, its store, and the bar that counts requests."""

    def __init__(self, plan: Plan, cells: Sequence[Cell], store: Store, bar: Any) -> None:
        self.plan, self.cells, self.store, self.bar = plan, cells, store, bar
        self.prompts = read_prompts(plan.prompts)
        self.warm = read_prompts("warm36")
        self._started, self._done = time.monotonic(), 0

    def run(self) -> None:
        """Measure all cells, server by server."""
        for variant, group in itertools.groupby(self.cells, key=lambda cell: cell.variant):
            waiting = list(group)
            while waiting:
                waiting = self._serve(variant, waiting)

    def _serve(self, variant: Variant, cells: list[Cell]) -> list[Cell]:
        """Measure cells with one start of a server; those that are left if it ended."""
        busy = _busy_share()
        try:
            with _server(variant) as ready:
                for done, cell in enumerate(cells, 1):
                    self.bar.set_postfix_str(f"{_named(variant)} {cell.load}", refresh=False)
                    self._take(cell, ready, busy)
                    self._tell()
                    if ready.own is not None and not psutil.pid_exists(ready.own.pid):
                        return cells[done:]
        except SglSpecError as error:
            for cell in cells:
                self._fail(cell, str(error), "")
        return []

    def _tell(self) -> None:
        """How far it is, where no bar says so."""
        self._done += 1
        if self.bar.disable:
            each = (time.monotonic() - self._started) / self._done
            left = each * (len(self.cells) - self._done)
            say(f"{self._done} of {len(self.cells)} cells, about {left:.0f} s to go")

    def _take(self, cell: Cell, ready: Ready, busy: float) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                row = runner.run(self._measure(cell, ready))
        except SglSpecError as error:
            self._fail(cell, str(error), "" if ready.own is None else end_of(ready.own.log))
            return
        self.store.add(row | {"busy": busy})

    def _fail(self, cell: Cell, error: str, log: str) -> None:
        """A row for a cell that could not be measured; the others go on."""
        lines = (error + "\n" + log).strip().splitlines()
        say(f"failed: {_named(cell.variant)}, {cell.load}: {lines[0]}")
        self.store.add(
            _coordinates(cell)
            | {"status": "failed", "error": lines[0], "log": lines[-_LAST_LINES:]}
        )

    async def _measure(self, cell: Cell, ready: Ready) -> Row:
        plan, load, server = self.plan, cell.load, cell.variant.server
        target = Target(ready.url, server.api_key, plan.timeout)
        seed = load.seed * 1_000_003 if load.temperature else None
        workload = Workload(
            plan.max_tokens, load.temperature, plan.ignore_eos, plan.extra_request_body, seed
        )
        backend = Backend(server.backend, target, workload, await model_of(target))
        lines = [line for line in self.prompts if load.group in (None, line.get("cat"))]
        lines = list(itertools.islice(itertools.cycle(lines), plan.requests))
        calls = [backend.call(line, number) for number, line in enumerate(lines)]
        await warm_up(backend, self.warm[: plan.warmup], load.concurrency or 1, server.flush_path)
        answers = await answers_to(backend, self._send(target, calls, load))
        level = level_of(answers, load.concurrency or 0, plan.max_tokens)
        if level.errors == level.requests:
            raise SglSpecError(f"No request was answered: {level.problems[0]}")
        self.store.keep_answers(cell, answers)
        return _coordinates(cell) | {
            "status": "ok",
            "level": asdict(level),
            "ttft_ms": [1e3 * (a.arrivals[0][0] - a.sent) for a in answers if a.arrivals],
            "tpot_ms": [1e3 * tpot(a) for a in answers if a.arrivals and a.tokens > 1],
            "histogram": _summed([a.histogram for a in answers]),
            "server": await backend.about(),
            "start": None if ready.own is None else asdict(ready.own.started),
            "memory_mb": _memory(ready.own),
            "conditions": provenance(["sgl-spec", "experiment", plan.name], load.seed),
        }

    def _send(self, target: Target, calls: Sequence[Call], load: Load) -> Awaitable[list[Reply]]:
        def count(_: Reply) -> None:
            self.bar.update()

        if load.concurrency is not None:
            return closed_loop(target, calls, load.concurrency, count)
        return open_loop(target, calls, arrivals(load, len(calls)), count)


def arrivals(load: Load, count: int) -> list[float]:
    """When each request of an open loop is sent, in seconds from the start."""
    if load.trace is not None:
        times = read_trace(load.trace)
        turns = -(-count // len(times))
        return [turn * times[-1] + time for turn in range(turns) for time in times][:count]
    assert load.request_rate is not None
    rng = random.Random(load.seed)
    gaps = [rng.expovariate(load.request_rate) for _ in range(count - 1)]
    return list(itertools.accumulate(gaps, initial=0.0))


@contextlib.contextmanager
def _server(variant: Variant) -> Iterator[Ready]:
    """One that answers: started here, or at its URL."""
    server = variant.server
    if server.url is not None:
        yield Ready(server.url, None)
        return
    if server.command is not None:
        start = other_server(server.command, server.ready_timeout, server.health)
    else:
        start = own_server(variant.flags, server.ready_timeout)
    with start as own:
        yield Ready(own.url, own)


def _named(variant: Variant) -> str:
    return " ".join([variant.label, *(f"{name}={value}" for name, value in variant.axes)])


def _coordinates(cell: Cell) -> Row:
    return {
        "id": cell.id,
        "label": cell.variant.label,
        "speculation": cell.variant.speculation,
        "axes": dict(cell.variant.axes),
        "load": asdict(cell.load),
        "repeat": cell.repeat,
    }


def _summed(histograms: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in itertools.zip_longest(*histograms, fillvalue=0)]


def _busy_share() -> float:
    """Share of the machine that others use, before a server is started."""
    share = psutil.cpu_percent(interval=0.5) / 100
    if share > BUSY:
        say(f"Others use {share:.0%} of this machine's processors; what follows is marked as busy.")
    return float(share)


def _memory(own: OwnServer | None) -> dict[str, float | None]:
    """Resident memory of a server started here, and what is in use on the first GPU."""
    found: dict[str, float | None] = {"server": None, "gpu": None}
    if own is None:
        return found
    total = 0
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getsid(process.pid) == own.pid:
                total += process.memory_info().rss
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found["gpu"] = float(done.stdout.splitlines()[0])
    return found | {"server": total / 1e6}


def main(argv: Sequence[str]) -> None:
    """`python -m sgl_spec.bench experiment`. Raises `SglSpecError` when nothing could be
    measured."""
    options = _parser().parse_args(argv)
    plan = read_plan(options.plan)
    cells = cells_of(plan, options.plan)
    if options.plots and not options.dry_run:
        extra("matplotlib")  # before hours of measuring
    store = Store(options.out or Path(f"{options.plan.stem}-results"))
    retried = ("failed",) if options.retry_failed else ()
    done = {cell.id for cell in cells if cell.id in store.rows}
    done -= {id for id in done if store.rows[id]["status"] in retried}
    todo = [cell for cell in cells if cell.id not in done]
    say(
        f"{len(cells)} cells, {len(done)} of them done, {len(todo) * plan.requests} requests to go."
    )
    if options.dry_run:
        for cell in todo:
            print(_named(cell.variant), cell.load, cell.load.group or "", f"#{cell.repeat}")
        return
    start = time.monotonic()
    total, before = len(cells) * plan.requests, len(done) * plan.requests
    with tqdm(total=total, initial=before, unit="request", disable=None) as bar:
        try:
            Experiment(plan, todo, store, bar).run()
        except SystemExit:
            say("Stopped; what was measured is kept, and the same command goes on.")
            raise
        finally:
            rows = [store.rows[cell.id] for cell in cells if cell.id in store.rows]
            _report(plan, rows, store, draw=options.plots)
    say(f"Done after {time.monotonic() - start:.0f} s: {store.directory}")
    if all(store.rows[cell.id]["status"] == "failed" for cell in cells):
        raise SglSpecError("No cell could be measured; the table has the reasons.")


def _report(plan: Plan, rows: Sequence[Row], store: Store, *, draw: bool) -> None:
    """The tables and the plots."""
    if not rows:
        return
    found = tables.summarise(rows, store.answers)
    tables.write(found, plan, rows, store.directory)
    print(tables.text(found))
    if draw:
        plots.draw(found, tables.conditions(plan, rows), store.directory / "plots")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sgl-spec experiment", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add("plan", type=Path, metavar="PLAN.toml")
    add("--out", type=Path, help="the results' directory (default: PLAN-results)")
    add("--retry-failed", action="store_true", help="measure failed cells again")
    add("--dry-run", action="store_true", help="check the plan and list what is to be measured")
    add("--plots", action=argparse.BooleanOptionalAction, default=True, help="default: drawn")
    return parser
