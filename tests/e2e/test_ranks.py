"""A model that ranks share: one rank's text whatever is asked for, one end for all of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from drafting import drafter_options
from heads import make_eagle, make_eagle3
from serving import Launch, Server
from talk import body, generate

from sgl_spec import LLM, Completion
from sgl_spec.errors import ConfigError, EngineDeadError

PROMPTS = [
    "The harbour master kept a ledger of every boat",
    "1, 2, 3, 5, 8, 13,",
    "One evening a girl from the school",
    "def count(boats: list[str]",
    "a",
]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "seed": 4, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.2, "logit_bias": {70: 2.0}},
    {"temperature": 1.0, "seed": 6, "regex": "[a-z ]{20,40}"},
]
SIZES = {"max_total_tokens": 2048, "max_running_requests": 8, "chunked_prefill_size": 16}
END_S = 5.0


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each rank: there are more of them than cores."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def answers(llm: LLM, new: int = 40) -> list[list[int]]:
    """Greedy texts of all prompts, and one prompt with all settings."""
    greedy = [SETTINGS[0] | {"max_new_tokens": new, "ignore_eos": True}] * len(PROMPTS)
    mixed = [given | {"max_new_tokens": new} for given in SETTINGS]
    done: list[Completion] = llm.generate(PROMPTS, greedy)
    done += llm.generate([PROMPTS[0]] * len(mixed), mixed)
    return [one.output_ids for one in done]


@pytest.fixture(scope="module")
def expected(tiny_model_dir: Path) -> list[list[int]]:
    """What one rank says without speculation."""
    with LLM(str(tiny_model_dir), **SIZES) as llm:
        return answers(llm)


def options_of(drafter: str, model: Path, made: Path) -> dict[str, Any]:
    if drafter not in ("EAGLE", "EAGLE3"):
        return drafter_options(drafter, model)
    make = make_eagle if drafter == "EAGLE" else make_eagle3
    head = make(made / drafter, model)
    return {"speculative_algorithm": drafter, "speculative_draft_model_path": str(head)}


@pytest.mark.parametrize("drafter", ["none", "NGRAM", "STANDALONE", "EAGLE", "EAGLE3", "SELF"])
def test_two_ranks_say_what_one_says(
    tiny_model_dir: Path, tmp_path: Path, expected: list[list[int]], drafter: str
) -> None:
    """Every tree is verified, and every step's decisions are compared."""
    options = options_of(drafter, tiny_model_dir, tmp_path)
    options["speculative_verify_whole_trees"] = drafter != "none"
    with LLM(str(tiny_model_dir), tp_size=2, check_ranks=True, **SIZES, **options) as llm:
        assert answers(llm) == expected
        proposed = llm.engine.state().spec_proposed_total
    assert (proposed > 0) == (drafter != "none")


@pytest.mark.parametrize("drafter", ["NGRAM", "STANDALONE"])
def test_what_is_measured_is_rank_0s(
    tiny_model_dir: Path, tmp_path: Path, expected: list[list[int]], drafter: str
) -> None:
    """Costs decide what is drafted, and no two processes measure the same. Compared each step:
    other trees on one rank would be other shapes of its collectives."""
    options = options_of(drafter, tiny_model_dir, tmp_path)
    with LLM(str(tiny_model_dir), tp_size=2, check_ranks=True, **SIZES, **options) as llm:
        assert answers(llm) == expected


def test_four_ranks_with_a_kv_head_on_two(tiny_model_dir: Path, expected: list[list[int]]) -> None:
    """The tiny model has two KV heads."""
    options = drafter_options("NGRAM", tiny_model_dir)
    with LLM(str(tiny_model_dir), tp_size=4, check_ranks=True, **SIZES, **options) as llm:
        assert answers(llm) == expected


# --- ends -----------------------------------------------------------------------------------------


def ranks_of(server: Server) -> tuple[psutil.Process, psutil.Process]:
    """Rank 0 and rank 1 of a server with two."""
    (leader,) = psutil.Process(server.process.pid).children()
    (other,) = leader.children()
    return leader, other


@pytest.fixture
def server(launch: Launch) -> Server:
    return launch("--tp-size", "2", "--max-total-tokens", "4096", ready_timeout=200)


@contextlib.contextmanager
def streaming(server: Server) -> Iterator[Iterator[str]]:
    """A long answer under way."""
    request = body("x", stream=True, max_new_tokens=1500, ignore_eos=True)
    with server.client.stream("POST", "/generate", json=request) as reply:
        lines = (line for line in reply.iter_lines() if line)
        next(lines)
        yield lines


@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_a_rank_ends_the_server(server: Server, rank: int) -> None:
    """With its reason, within seconds, in the middle of an answer; nobody is left."""
    with streaming(server) as lines:
        ranks_of(server)[rank].kill()
        killed = time.monotonic()
        with contextlib.suppress(httpx.TransportError):
            list(lines)
    server.expect_end(1)
    assert time.monotonic() - killed < END_S
    said = "Rank 1 was killed by signal 9." if rank else "The engine process ended with exit code"
    assert said in server.stderr.read_text()


def test_no_rank_outlives_the_server(server: Server) -> None:
    ranks = ranks_of(server)
    assert len(generate(server, "x", max_new_tokens=4)["output_ids"]) == 4
    server.stopped = True
    server.process.kill()
    server.process.wait()
    _, alive = psutil.wait_procs(ranks, timeout=END_S)
    assert not alive


def test_llm_says_why_its_ranks_are_gone(tiny_model_dir: Path) -> None:
    """The call under way and every later one; and another engine can be made."""
    options = {"tp_size": 2, "max_total_tokens": 2048}
    with LLM(str(tiny_model_dir), **options) as llm:
        for child in psutil.Process().children(recursive=True):
            if "sgl_spec.server.child" in child.cmdline():
                child.kill()
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=r"Rank 1 was killed by signal 9\."):
                llm.generate(["x"] * 4, {"max_new_tokens": 400, "ignore_eos": True})
    with LLM(str(tiny_model_dir), **options) as llm:
        assert llm.generate("x", {"max_new_tokens": 2})[0].output_ids


def test_a_size_that_does_not_divide_is_refused_before_anything_starts(
    tiny_model_dir: Path,
) -> None:
    with pytest.raises(ConfigError, match="--tp-size 8 does not divide the model, which has 4"):
        LLM(str(tiny_model_dir), tp_size=8)
    assert not psutil.Process().children()
