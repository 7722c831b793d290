"""A few rounds of a storm: one end for each request, and slots, descriptors and memory flat."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from scripted import starter
from serving import Launch
from storm import Storm

GROWTH = 0.08  # of the engine's memory, in the few rounds in which new shapes of batches still come


@pytest.mark.parametrize("algorithm", ["none", "NGRAM"])
def test_a_storm_leaves_nothing_behind(launch: Launch, algorithm: str) -> None:
    flags = ("--max-total-tokens", "1600", "--max-running-requests", "16")
    speculation = ("--speculative-algorithm", algorithm, "--speculative-verify-whole-trees")
    server = launch(*flags, *(speculation if algorithm != "none" else ()))
    storm = Storm(server, streams=24, mixed=30, new=12)
    first, *_, before, last = [storm.round() for _ in range(5)]
    assert first.free_tokens == last.free_tokens == 1600
    assert last.ends["vanished"] == 8
    assert last.ends["abort"] > 0
    assert last.engine.descriptors == first.engine.descriptors
    assert last.engine.threads <= before.engine.threads + 1
    assert last.api.threads <= before.api.threads + 1
    assert last.api.descriptors < 80, "those of clients that keep their connections open"
    assert last.engine.memory_mb < before.engine.memory_mb * (1 + GROWTH)


def test_the_schema_that_it_shows_is_served(tmp_path: Path) -> None:
    """No request that /openapi.json allows, and none that it does not, is a fault of the server."""
    with starter(tmp_path) as start:
        server = start("--enable-metrics", step_s=0.001, tokens=8)
        done = subprocess.run(
            [
                *(str(Path(sys.executable).parent / "schemathesis"), "run"),
                *(f"{server.url}/openapi.json", "--checks", "not_a_server_error", "--seed", "1"),
                *("--max-examples", "10", "--phases", "examples,fuzzing", "--no-color"),
                # A profile is a trace on disk.
                *("--exclude-path-regex", "profile", "--generation-database", "none"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        log = server.stderr.read_text()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    for route in ("/v1/chat/completions", "/v1/responses", "/generate", "/abort_request"):
        assert f'"POST {route} HTTP/1.1" 4' in log, route
    assert '"POST /v1/tokenize HTTP/1.1" 200' in log
