"""The load client against a real server: both interfaces, all levels, and what goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from serving import ROOT, Launch, Server

from sgl_spec.bench.serving import read_prompts

TOKENS = 20


@pytest.fixture(scope="module")
def server(launch_shared: Launch) -> Server:
    # A forward of the tiny model takes hardly longer than asking for drafts.
    drafts = ("--speculative-algorithm", "NGRAM", "--speculative-verify-whole-trees")
    return launch_shared(*drafts, "--max-total-tokens", "8192")


def serving(server_url: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sgl_spec.bench", "serving", "--url", server_url]
    command += ["--max-tokens", str(TOKENS), *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def levels(server: Server, tmp_path: Path, *flags: str) -> tuple[list[dict[str, Any]], str]:
    """The rows, one for each level, and the table."""
    out = tmp_path / "row.json"
    done = serving(server.url, "--json", str(out), *flags)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()], done.stdout


def check(level: dict[str, Any], concurrency: int, requests: int) -> None:
    assert (level["concurrency"], level["requests"]) == (concurrency, requests)
    assert (level["errors"], level["problems"], level["short"]) == (0, [], 0)
    assert level["output_tokens"] == requests * TOKENS
    assert level["tokens_per_s"] == pytest.approx(requests * TOKENS / level["seconds"])
    assert 0 < level["ttft_ms"]["p50"] <= level["ttft_ms"]["p99"] < level["seconds"] * 1e3
    # A first chunk of several tokens counts for the one alone.
    assert 0 < level["tpot_ms"]["mean"] <= level["itl_ms"]["mean"] * 1.001
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
    rows, shown = levels(server, tmp_path, *flags)
    after = server.client.get("/server_info").json()["internal_states"][0]
    for row, (concurrency, requests) in zip(rows, [(1, 2), (3, 5)], strict=True):
        check(row["level"], concurrency, requests)
        assert row["flushed"]
        assert not row["again"]
        assert row["server"]["speculative_algorithm"] == "NGRAM"
        assert row["workload"]["max_tokens"] == TOKENS
        assert row["hardware"]["cores"]
    # The warm-up came first, and nothing was found in a cache behind it.
    assert after["requests_total"] - before["requests_total"] == 2 + 2 + 3 + 5
    assert len(shown.splitlines()) == 3


def test_again_with_what_was_learned(server: Server, tmp_path: Path) -> None:
    """The same prompts once more, nothing flushed: the n-grams of the whole answers are there."""
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": line["prompt"]} for line in read_prompts("bench96")[:2]]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows, shown = levels(server, tmp_path, "--levels", "2:2", "--again", "--prompts", str(file))
    assert [row["again"] for row in rows] == [False, True]
    cold, again = (row["level"] for row in rows)
    assert again["output_tokens"] == cold["output_tokens"] == 2 * TOKENS
    assert again["accept_length"] > cold["accept_length"]
    assert shown.splitlines()[2].startswith("2 again")


def test_completions_of_any_openai_server(server: Server, tmp_path: Path) -> None:
    flags = ("--backend", "openai", "--prompts", str(prompts(tmp_path, "generate")))
    (row,), shown = levels(server, tmp_path, *flags, "--levels", "2:4")
    level = row["level"]
    check(level | {"accept_length": 1}, 2, 4)
    assert level["accept_length"] is None  # not told without being asked, nor in vLLM's counters
    assert (row["flushed"], row["server"]) == (False, {})
    assert shown.splitlines()[-1].endswith("-")


def test_errors_and_refusals(server: Server, tmp_path: Path) -> None:
    """Some requests fail: they are counted. All fail, or nobody listens: so is the run."""
    file = tmp_path / "prompts.jsonl"
    long = {"prompt": "word " * 9000}
    file.write_text("".join(json.dumps(line) + "\n" for line in [{"prompt": "a b"}, long]))
    (row,), _ = levels(server, tmp_path, "--levels", "2:2", "--prompts", str(file))
    level = row["level"]
    assert (level["errors"], level["output_tokens"]) == (1, TOKENS)
    assert "HTTP 400" in level["problems"][0]
    file.write_text(json.dumps(long) + "\n")
    failed = serving(server.url, "--levels", "1:1", "--prompts", str(file))
    assert failed.returncode == 2
    assert "No request of a level was answered" in failed.stderr
    both = serving(server.url, "--launch", "--model-path", "x")
    assert both.returncode == 2
    assert "--launch starts a server of ours" in both.stderr
    nobody = serving("http://127.0.0.1:9")
    assert nobody.returncode == 2
    assert "/v1/models: ClientConnectorError" in nobody.stderr
    assert "Traceback" not in nobody.stderr


def bench(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sgl_spec.bench", *argv]
    environment = os.environ | env
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


def test_a_server_of_its_own(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Started, measured, gone; how it started stands in the row."""
    out = tmp_path / "row.json"
    flags = ["--levels", "2:3", "--max-tokens", "8", "--json", str(out), "--launch"]
    flags += ["--model-path", str(tiny_model_dir), "--disable-radix-cache"]
    cache = tmp_path / "cache"
    (cache / "one").mkdir(parents=True)
    env = {"TRITON_CACHE_DIR": str(cache), "SGL_SPEC_COMMIT": "abc+dirty"}
    done = bench("serving", *flags, **env)
    assert done.returncode == 0, done.stderr
    assert "ready after" in done.stdout
    assert ("triton" in done.stdout) == torch.cuda.is_available()
    row = json.loads(out.read_text())
    assert (row["commit"], row["dirty"]) == ("abc", True)
    assert row["start"]["flags"] == flags[flags.index("--launch") + 1 :]
    assert row["start"]["triton_cache"] == str(cache)
    assert row["start"]["triton_cache_entries"][0] == 1
    assert 0.1 < row["start"]["seconds"] < 100
    assert row["server"]["disable_radix_cache"] is True
    assert row["level"]["output_tokens"] == 3 * 8
    mine = [p for p in psutil.process_iter(["cmdline"]) if str(tiny_model_dir) in _words(p)]
    assert not [p for p in mine if "--disable-radix-cache" in _words(p)]


def test_a_run_that_is_stopped_takes_its_server_along(tiny_model_dir: Path) -> None:
    mark = f"--served-model-name=stopped-{os.getpid()}"
    flags = ["--levels", "1:96", "--launch", "--model-path", str(tiny_model_dir), mark]
    command = [sys.executable, "-m", "sgl_spec.bench", "serving", *flags]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("Ready after")
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not [p for p in psutil.process_iter(["cmdline"]) if mark in _words(p)]


def _words(process: psutil.Process) -> list[str]:
    return process.info["cmdline"] or []


def test_a_server_that_does_not_start() -> None:
    done = bench("serving", "--launch", "--model-path", "/nowhere/at/all", "--port", "31987")
    assert done.returncode == 2
    assert "The server ended with code 2:" in done.stderr
    assert "/nowhere/at/all" in done.stderr
    assert "Traceback" not in done.stderr
    assert "--port must be an integer" in bench("serving", "--launch", "--port", "x").stderr
