"""Clients that leave, a server that is busy, an engine that dies, flags that cannot work."""

from __future__ import annotations

import contextlib
import functools
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from drafting import PLUGINS
from serving import ROOT, Launch, Server, free_port
from solo import Solo
from talk import (
    Canary,
    accepted,
    body,
    busy,
    drained,
    generate,
    send,
    speculated,
    state,
    together,
    wait_for,
)

VOCAB, CONTEXT = 512, 2048
GREEDY = {"temperature": 0, "ignore_eos": True}
# A forward of the tiny model takes hardly longer than asking for drafts.
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-verify-whole-trees")
GONE_S = 3.0


def some(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(count)]


@pytest.fixture(scope="module")
def solo(tiny_model_dir: Path) -> Solo:
    return Solo(tiny_model_dir)


@pytest.fixture(scope="module")
def roomy(launch_shared: Launch) -> Server:
    return launch_shared(*NGRAM, "--max-total-tokens", "24000", "--page-size", "4")


class TestBatchesThatShrink:
    """Batches of every size, merging and running out."""

    def test_long_outputs_end_in_waves(self, roomy: Server, solo: Solo) -> None:
        rng = random.Random(1)
        lengths = list(range(40, 680, 20))
        prompts = [some(rng, 1 + i % 30) for i in range(len(lengths))]
        calls = [
            functools.partial(generate, roomy, p, max_new_tokens=n, **GREEDY)
            for p, n in zip(prompts, lengths, strict=True)
        ]
        replies = together(calls, 32)
        for i in range(0, len(lengths), 5):
            expected = solo.ids(prompts[i], max_new_tokens=lengths[i], **GREEDY)
            assert replies[i]["output_ids"] == expected
        assert speculated(replies)
        drained(roomy)

    def crowds(self, server: Server, solo: Solo, seconds: float) -> None:
        """Hold each number of clients for so long; every text is the solo text."""
        rng = random.Random(2)
        prompts = [some(rng, 1 + i % 20) for i in range(8)]
        for clients in (3, 5, 7, 9, 13, 31):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                chosen = [(rng.choice(prompts), rng.randint(20, 80)) for _ in range(2 * clients)]
                calls = [
                    functools.partial(generate, server, p, max_new_tokens=n, **GREEDY)
                    for p, n in chosen
                ]
                for (prompt, n), reply in zip(chosen, together(calls, clients), strict=True):
                    assert reply["output_ids"] == solo.ids(prompt, max_new_tokens=80, **GREEDY)[:n]
        drained(server)

    def test_crowds_of_odd_sizes(self, roomy: Server, solo: Solo) -> None:
        self.crowds(roomy, solo, 0.3)

    @pytest.mark.slow
    def test_crowds_of_odd_sizes_for_longer(self, roomy: Server, solo: Solo) -> None:
        self.crowds(roomy, solo, 20)


# --- clients that leave ---------------------------------------------------------------------------


class Leaver:
    """Clients that hang up, each at one moment of a request's life."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.rng = random.Random(seed)

    def request(self, prompt_len: int, stream: bool, budget: int | None = None) -> dict[str, Any]:
        """A request for all the context left, or for `budget` tokens."""
        tokens = CONTEXT - prompt_len if budget is None else budget
        prompt = some(self.rng, prompt_len)
        return body(prompt, stream=stream, max_new_tokens=tokens, ignore_eos=True)

    def before_prefill(self, stream: bool) -> None:
        connection = send(self.server, self.request(20, stream))
        time.sleep(self.rng.uniform(0, 0.004))
        connection.close()

    def in_a_long_prefill(self, stream: bool) -> None:
        connection = send(self.server, self.request(1500, stream))
        time.sleep(0.05)
        connection.close()

    def at_the_first_chunk(self, stream: bool) -> None:
        connection = send(self.server, self.request(10, True))
        self.read_tokens(connection, 1)
        connection.close()

    def in_the_middle(self, stream: bool) -> None:
        connection = send(self.server, self.request(10, stream))
        if stream:
            self.read_tokens(connection, 40)
        else:
            time.sleep(0.2)
        connection.close()

    def in_the_last_steps(self, stream: bool) -> None:
        connection = send(self.server, self.request(10, True, budget=30))
        self.read_tokens(connection, 25)
        connection.close()

    def behind_a_full_batch(self, stream: bool) -> None:
        long = [send(self.server, self.request(10, True)) for _ in range(4)]
        for connection in long:
            self.read_tokens(connection, 1)
        waiting = [send(self.server, self.request(10, stream)) for _ in range(4)]
        wait_for(lambda: state(self.server)["queued"] >= 1, 2, "nobody waits")
        for connection in (*waiting, *long):
            connection.close()

    def read_tokens(self, connection: socket.socket, count: int) -> None:
        """Read a stream until it has given `count` tokens."""
        data = b""
        while not any(int(n) >= count for n in re.findall(rb'"completion_tokens":(\d+)', data)):
            part = connection.recv(65536)
            assert part, "the server hung up first"
            data += part


MOMENTS = [
    "before_prefill",
    "in_a_long_prefill",
    "at_the_first_chunk",
    "in_the_middle",
    "in_the_last_steps",
    "behind_a_full_batch",
]


@pytest.fixture(scope="module")
def crowded(launch_shared: Launch) -> Server:
    """Room for four requests at once, prompts in small pieces."""
    small = ("--max-running-requests", "4", "--chunked-prefill-size", "16")
    return launch_shared(*NGRAM, *small, "--max-total-tokens", "12000")


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_client_that_leaves_takes_its_request_along(crowded: Server, moment: str) -> None:
    canary = Canary(crowded, [5, 6, 7])
    before = state(crowded)["aborted_total"]
    sent = 0
    for i in range(16 if moment != "behind_a_full_batch" else 3):
        leaver = Leaver(crowded, i)
        getattr(leaver, moment)(stream=i % 2 == 0)
        sent += 8 if moment == "behind_a_full_batch" else 1
    wait_for(lambda: busy(crowded) == 0, GONE_S, "requests run on without a client")
    aborted = state(crowded)["aborted_total"] - before
    # One that was hung up on at once may never have started, one in its last steps may have ended.
    least = {"before_prefill": 1, "in_the_last_steps": 1}.get(moment, 0.9 * sent)
    assert aborted >= least
    drained(crowded)
    canary.alive()


def test_leaving_is_nothing_to_log(crowded: Server) -> None:
    lines = crowded.stderr.read_text().splitlines()
    loud = [line for line in lines if " INFO " not in line and "max-running" not in line]
    assert not loud


# --- health ---------------------------------------------------------------------------------------


def test_health_is_green_while_prompts_are_long(crowded: Server) -> None:
    rng = random.Random(3)
    prompts = [some(rng, 1900) for _ in range(12)]
    calls = [functools.partial(generate, crowded, p, max_new_tokens=2) for p in prompts]
    slowest, polls = 0.0, 0
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(together, calls, 12)
        while not work.done():
            start = time.monotonic()
            assert crowded.client.get("/health").status_code == 200
            slowest, polls = max(slowest, time.monotonic() - start), polls + 1
            time.sleep(0.1)
        work.result()
    assert polls >= 5, "the server was not busy"
    assert slowest < 5
    drained(crowded)


def test_a_dead_engine_ends_open_requests_and_the_server(launch: Launch) -> None:
    server = launch(*NGRAM, "--max-total-tokens", "4000")
    forever = body([5, 6, 7], max_new_tokens=1900, ignore_eos=True)
    (engine,) = [p for p in server.family() if p.pid != server.process.pid]
    started = threading.Event()
    outcomes: list[Any] = []

    def whole() -> None:
        outcomes.append(server.client.post("/generate", json=forever).status_code)

    def streamed() -> None:
        with server.client.stream("POST", "/generate", json=forever | {"stream": True}) as reply:
            for line in reply.iter_lines():
                started.set()
                if "error" in line:
                    outcomes.append(line)

    clients = [threading.Thread(target=client) for client in (whole, streamed)]
    for client in clients:
        client.start()
    wait_for(lambda: state(server)["running"] == 2, 5, "the requests do not run")
    assert started.wait(5)
    engine.send_signal(signal.SIGKILL)
    for client in clients:
        client.join(10)
        assert not client.is_alive(), "a client hangs"
    assert len(outcomes) == 2
    assert 503 in outcomes
    with contextlib.suppress(httpx.TransportError):  # it may have ended already
        assert server.client.get("/health").status_code == 503
    server.expect_end(1)


# --- flags ----------------------------------------------------------------------------------------

BAD_FLAGS: list[tuple[list[str], str]] = [
    ([*NGRAM, "--speculative-draft-model-path", "x"], "--speculative-draft-model-path"),
    ([*NGRAM, "--speculative-num-steps", "3"], "--speculative-num-steps"),
    ([*NGRAM, "--speculative-eagle-topk", "4"], "--speculative-eagle-topk"),
    ([*NGRAM, "--speculative-num-draft-tokens", "1"], "--speculative-num-draft-tokens"),
    ([*NGRAM, "--speculative-num-draft-tokens", "65"], "--speculative-num-draft-tokens"),
    ([*NGRAM, "--page-size", "16", "--chunked-prefill-size", "40"], "--chunked-prefill-size"),
    ([*NGRAM, "--max-total-tokens", "20"], "--max-total-tokens"),
    (["--speculative-algorithm", "EAGLE3"], "--speculative-algorithm EAGLE3"),
    (
        ["--speculative-algorithm", "OTHER", "--speculative-drafter-module", PLUGINS],
        "--speculative-algorithm",
    ),
    (
        ["--speculative-algorithm", "OTHER", "--speculative-drafter-module", "no/such.py"],
        "--speculative-drafter-module",
    ),
]


def test_flags_that_cannot_work_end_the_start(tiny_model_dir: Path) -> None:
    """With one sentence that names the flag, before the port serves."""

    def run(flags: list[str]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "launch_server.py", "--model-path", str(tiny_model_dir)]
        command += ["--port", str(free_port()), "--log-level", "error", *flags]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    runs = together([functools.partial(run, flags) for flags, _ in BAD_FLAGS], 2)
    for (flags, named), done in zip(BAD_FLAGS, runs, strict=True):
        assert done.returncode == 2, (flags, done.stderr)
        assert named in done.stderr
        assert "Traceback" not in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert "Ready" not in done.stdout


@pytest.mark.parametrize("nodes", ["2", "64"])
@pytest.mark.parametrize("page", ["1", "16"])
def test_smallest_and_largest_trees_serve(
    launch: Launch, solo: Solo, nodes: str, page: str
) -> None:
    flags = ("--speculative-num-draft-tokens", nodes, "--page-size", page)
    server = launch(*NGRAM, *flags, "--max-total-tokens", "8000")
    rng = random.Random(5)
    paragraphs = [some(rng, 30) for _ in range(4)]
    prompts = [
        *[p * 2 + p[:3] for p in paragraphs],
        *[list(range(70 + i, 80 + i)) * 4 for i in range(6)],
    ]
    calls = [functools.partial(generate, server, p, max_new_tokens=60, **GREEDY) for p in prompts]
    replies = together(calls, 5)
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply["output_ids"] == solo.ids(prompt, max_new_tokens=60, **GREEDY)
    rounds = sum(reply["meta_info"]["spec_verify_ct"] for reply in replies)
    assert sum(map(accepted, replies)) > 0.05 * rounds
    drained(server)
    server.stop()
