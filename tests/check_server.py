"""`make check-server`: storms against a started server for each algorithm, then the faults.

For each algorithm a server is started, goes through rounds of `storm.Storm`, and must hold as much
at the end as it did in the middle. Then engines are killed and stopped under load: every open
request must end with a 503. The row with all figures goes to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
from draft_rig import make_draft
from serving import Server, start
from storm import Calm, Storm
from talk import body
from tiny import make_tiny

from sgl_spec.bench.report import provenance, write_row

FLAGS = ("--max-total-tokens", "1600", "--max-running-requests", "48")
WATCHDOG_S = 4
FLAT = 0.01
READY_S = 300.0


def begin(directory: Path, model: str, algorithm: str, *flags: str) -> Server:
    """A server that drafts by `algorithm`; `tiny` as a model makes one, with its drafts."""
    where = str(tiny(directory) if model == "tiny" else model)
    if algorithm != "none":
        flags = (*flags, "--speculative-algorithm", algorithm, "--speculative-verify-whole-trees")
    if model == "tiny" and algorithm in ("EAGLE3", "STANDALONE"):
        draft = make_draft(algorithm, directory / algorithm, Path(where))
        flags = (*flags, "--speculative-draft-model-path", str(draft))
    server = start(directory, where, *FLAGS, *flags)
    server.wait_until_ready(READY_S)
    return server


def tiny(directory: Path) -> Path:
    """A tiny target, made once in this directory."""
    made = directory / "tiny"
    return made if made.exists() else make_tiny(made, layers=4)


def storms(server: Server, rounds: int, streams: int, mixed: int) -> list[Calm]:
    """Rounds, each told as it ends."""
    storm, calms = Storm(server, streams=streams, mixed=mixed), []
    for number in range(rounds):
        calms.append(storm.round())
        print(number + 1, json.dumps(msgspec.to_builtins(calms[-1])), file=sys.stderr, flush=True)
    return calms


def problems(calms: Sequence[Calm]) -> list[str]:
    """What is not flat: between the middle and the last third of the rounds."""
    third = len(calms) // 3
    middle, last = calms[third : 2 * third], calms[-third:]
    found = []
    for name in ("api", "engine"):
        for what in ("memory_mb", "descriptors", "threads"):
            before, after = (
                statistics.median(getattr(getattr(calm, name), what) for calm in some)
                for some in (middle, last)
            )
            bound = before * (1 + FLAT) if what == "memory_mb" else before + 2
            if after > bound:
                found.append(f"{name}: {what} went from {before} to {after}")
    if len({calm.free_tokens for calm in calms}) > 1:
        found.append("KV slots were lost")
    return found


def fault(server: Server, number: int, seconds: float) -> dict[str, Any]:
    """A signal to the engine under load: how the open requests ended, and how long it took."""
    (engine,) = [p for p in server.family() if p.pid != server.process.pid]
    request = body("One two three four", max_new_tokens=1000, ignore_eos=True)

    def ask() -> int:
        return server.client.post("/generate", json=request).status_code

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask) for _ in range(8)]
        time.sleep(1.0)
        threading.Thread(target=psutil.Process(engine.pid).send_signal, args=(number,)).start()
        began = time.monotonic()
        ends = [one.result(seconds + 30) for one in asked]
    took = time.monotonic() - began
    code = server.process.wait(30)
    assert set(ends) == {503}, ends
    assert code == 1, code
    return {"signal": signal.Signals(number).name, "ends": ends, "seconds": took, "exit": code}


def check(options: argparse.Namespace, algorithm: str) -> dict[str, Any]:
    """All of one algorithm."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        watch = ("--watchdog-timeout", str(WATCHDOG_S))
        servers: list[Server] = []
        try:
            servers.append(begin(directory, options.model, algorithm))
            calms = storms(servers[0], options.rounds, options.streams, options.mixed)
            faults = [fault(servers[0], signal.SIGKILL, 0)]
            servers.append(begin(directory, options.model, algorithm, *watch))
            faults.append(fault(servers[1], signal.SIGSTOP, WATCHDOG_S))
        finally:
            for server in servers:
                server.kill()
    rounds = [msgspec.to_builtins(calm) for calm in calms]
    return {"problems": problems(calms), "faults": faults, "rounds": rounds}


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(prog="make check-server", description=__doc__)
    made.add_argument("--model", default="smollm2", help="or tiny, which makes one")
    made.add_argument("--algorithms", nargs="+", default=["none", "NGRAM", "EAGLE3", "STANDALONE"])
    made.add_argument("--rounds", type=int, default=30)
    made.add_argument("--streams", type=int, default=48)
    made.add_argument("--mixed", type=int, default=100)
    made.add_argument("--json", type=Path, help="file that the row is added to")
    return made


def main() -> int:
    """1 if something was not flat; what must never be ends the run at once."""
    made = parser()
    options = made.parse_args()
    if options.rounds < 3:
        made.error("--rounds must be at least 3: memory is compared between thirds of them")
    argv = ["python", "tests/check_server.py", *sys.argv[1:]]
    row: dict[str, Any] = provenance(argv) | {"algorithms": {}}
    for algorithm in options.algorithms:
        try:
            row["algorithms"][algorithm] = check(options, algorithm)
        except (AssertionError, httpx.HTTPError) as error:
            row["algorithms"][algorithm] = {"problems": [f"{type(error).__name__}: {error}"]}
        print(algorithm, row["algorithms"][algorithm]["problems"] or "is flat", flush=True)
    if options.json is not None:
        write_row(options.json, row)
    return any(one["problems"] for one in row["algorithms"].values())


if __name__ == "__main__":
    sys.exit(main())
