"""The load client against a real server: both interfaces, all levels, and what goes wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import ROOT, Launch, Server

TOKENS = 20


@pytest.fixture(scope="module")
def server(launch_shared: Launch) -> Server:
    return launch_shared("--speculative-algorithm", "NGRAM", "--max-total-tokens", "8192")


def serving(server_url: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sgl_spec.bench", "serving", "--url", server_url]
    command += ["--max-tokens", str(TOKENS), *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def levels(server: Server, tmp_path: Path, *flags: str) -> tuple[dict[str, Any], str]:
    out = tmp_path / "row.json"
    done = serving(server.url, "--json", str(out), *flags)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


def check(level: dict[str, Any], concurrency: int, requests: int) -> None:
    assert (level["concurrency"], level["requests"]) == (concurrency, requests)
    assert (level["errors"], level["problems"], level["short"]) == (0, [], 0)
    assert level["output_tokens"] == requests * TOKENS
    assert level["tokens_per_s"] == pytest.approx(requests * TOKENS / level["seconds"])
    assert 0 < level["ttft_ms"]["p50"] <= level["ttft_ms"]["p99"] < level["seconds"] * 1e3
    assert level["itl_ms"]["mean"] == pytest.approx(level["tpot_ms"]["mean"], rel=0.3)
    assert level["tokens_per_chunk"] >= 1
    assert level["accept_length"] >= 1
    assert level["simulated"] is None


def prompts(tmp_path: Path, interface: str) -> Path:
    file = tmp_path / "prompts.jsonl"
    texts = [f"say {i} {i} {i}" for i in range(5)]
    lines = [{"prompt": text} for text in texts]
    if interface == "chat":
        lines = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.parametrize("interface", ["generate", "chat"])
def test_levels(server: Server, tmp_path: Path, interface: str) -> None:
    flags = ("--levels", "1:2", "3:5", "--prompts", str(prompts(tmp_path, interface)))
    before = server.client.get("/server_info").json()["internal_states"][0]
    row, shown = levels(server, tmp_path, *flags)
    after = server.client.get("/server_info").json()["internal_states"][0]
    for level, (concurrency, requests) in zip(row["levels"], [(1, 2), (3, 5)], strict=True):
        check(level, concurrency, requests)
    # The warm-up came first, and nothing was found in a cache behind it.
    assert after["requests_total"] - before["requests_total"] == 2 + 2 + 3 + 5
    assert row["flushed"]
    assert row["server"]["speculative_algorithm"] == "NGRAM"
    assert row["workload"]["max_tokens"] == TOKENS
    assert row["hardware"]["cores"]
    assert len(shown.splitlines()) == 3


def test_completions_of_any_openai_server(server: Server, tmp_path: Path) -> None:
    flags = ("--backend", "openai", "--prompts", str(prompts(tmp_path, "generate")))
    row, shown = levels(server, tmp_path, *flags, "--levels", "2:4")
    (level,) = row["levels"]
    check(level | {"accept_length": 1}, 2, 4)
    assert level["accept_length"] is None  # not told without being asked, nor in vLLM's counters
    assert (row["flushed"], row["server"]) == (False, {})
    assert shown.splitlines()[-1].endswith("-")


def test_errors_and_refusals(server: Server, tmp_path: Path) -> None:
    """Some requests fail: they are counted. All fail, or nobody listens: so is the run."""
    file = tmp_path / "prompts.jsonl"
    long = {"prompt": "word " * 9000}
    file.write_text("".join(json.dumps(line) + "\n" for line in [{"prompt": "a b"}, long]))
    row, _ = levels(server, tmp_path, "--levels", "2:2", "--prompts", str(file))
    (level,) = row["levels"]
    assert (level["errors"], level["output_tokens"]) == (1, TOKENS)
    assert "HTTP 400" in level["problems"][0]
    file.write_text(json.dumps(long) + "\n")
    failed = serving(server.url, "--levels", "1:1", "--prompts", str(file))
    assert failed.returncode == 2
    assert "No request of a level was answered" in failed.stderr
    nobody = serving("http://127.0.0.1:9")
    assert nobody.returncode == 2
    assert "/v1/models: ConnectionRefusedError" in nobody.stderr
    assert "Traceback" not in nobody.stderr
