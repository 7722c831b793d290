"""What the documents say of the GPU is what the committed results say."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEVELS = (1, 8, 48)
DRAFTERS = ("NGRAM", "EAGLE3", "STANDALONE")
# By a row's first words: flags that its runs have, flags they lack, whether it is a second pass.
ROWS: dict[str, tuple[tuple[str, ...], tuple[str, ...], bool]] = {
    "no speculation": ((), ("--speculative-algorithm",), False),
    "EAGLE3, trees of 8": (("EAGLE3", "--simulate-acc-len 3"), (), False),
    "EAGLE3, chains of 3": (("EAGLE3", "--simulate-acc-len 2"), (), False),
    "NGRAM, 8 nodes": (("NGRAM",), ("--speculative-ngram-index",), False),
    "the same prompts again": (("NGRAM",), ("--speculative-ngram-index",), True),
    "EAGLE3 as shipped": (("EAGLE3",), ("--simulate-acc-len",), False),
    "STANDALONE as shipped": (("STANDALONE",), (), False),
}
README_ROWS = list(ROWS)[:4]
# By a row's first words: what its requests ask for.
SETTINGS = {
    "nothing": ("bench96", {}),
    "a frequency penalty of 0.3": ("bench96", {"sampling_params": {"frequency_penalty": 0.3}}),
    "5 log-probabilities": ("bench96", {"return_logprob": True, "top_logprobs_num": 5}),
    "the mix": ("/tmp/mix.jsonl", {}),
}
# By a row's first words: steps of the draft and whether whole trees are verified.
SHAPES = {
    "the controller": (7, False),
    "none |": (None, False),
    "trees of 32 (7": (7, True),
    "trees of 8 (5": (5, True),
    "chains of 3 (3": (3, True),
}


def results(name: str) -> list[dict[str, Any]]:
    text = (ROOT / "docs/results" / f"{name}.json").read_text()
    return [json.loads(line) for line in text.splitlines()]


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs/results" / f"{name}.json").read_text())
    return found


def measured(name: str) -> list[dict[str, Any]]:
    """The first run's levels, in order."""
    has, lacks, again = ROWS[name]
    found: dict[int, dict[str, Any]] = {}
    for row in results("serving-h200"):
        flags = " ".join(row["start"]["flags"])
        fits = all(flag in flags for flag in has) and not any(flag in flags for flag in lacks)
        if fits and row["again"] is again:
            found.setdefault(row["level"]["concurrency"], row["level"])
    return [found[level] for level in LEVELS]


def cells(document: str, name: str) -> list[str]:
    """Of the table row that begins so."""
    lines = (ROOT / document).read_text().splitlines()
    (line,) = [one for one in lines if one.startswith(f"| {name}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def speeds(levels: list[dict[str, Any]]) -> list[int]:
    return [round(one["tokens_per_s"]) for one in levels]


@pytest.mark.parametrize("name", ROWS)
def test_the_table_is_what_was_measured(name: str) -> None:
    title, *figures = cells("docs/measured.md", name)[:4]
    levels = measured(name)
    assert [int(figure) for figure in figures] == speeds(levels)
    lengths = re.search(r"\((?:accept length )?([\d.]+) / ([\d.]+) / ([\d.]+)\)", title)
    if lengths is not None:
        assert list(lengths.groups()) == [f"{one['accept_length']:.2f}" for one in levels]
    assert all(one["errors"] == 0 for one in levels)


@pytest.mark.parametrize("name", README_ROWS)
def test_the_readme_repeats_the_table(name: str) -> None:
    _, ours, *others = cells("README.md", name)
    assert [int(figure) for figure in ours.split(" / ")] == speeds(measured(name))
    assert others == cells("docs/measured.md", name)[4:]


@pytest.mark.parametrize("name", SETTINGS)
def test_what_requests_ask_for(name: str) -> None:
    prompts, more = SETTINGS[name]
    found: dict[bool, dict[int, int]] = {False: {}, True: {}}
    for row in results("settings-h200"):
        if (row["workload"]["prompts"], row["workload"]["more"]) == (prompts, more):
            level, drafts = row["level"], row["server"]["speculative_algorithm"] is not None
            assert level["errors"] == 0
            found[drafts][level["concurrency"]] = round(level["tokens_per_s"])
    figures = [int(cell) if cell else None for cell in cells("docs/measured.md", name)[1:]]
    expected = [found[False].get(level) for level in LEVELS]
    assert figures == [*expected, found[True].get(1), found[True].get(48)]


@pytest.mark.parametrize("name", SHAPES)
def test_the_controller_beside_single_shapes(name: str) -> None:
    steps, whole = SHAPES[name]
    found = {
        row["level"]["concurrency"]: str(round(row["level"]["tokens_per_s"]))
        for row in results("controller-h200")
        if row["server"]["speculative_num_steps"] == steps
        and row["server"]["speculative_verify_whole_trees"] is whole
    }
    expected = [found.get(level, "") for level in (1, 4, 8, 16, 48, 96)]
    assert cells("docs/measured.md", name)[1:] == expected


def table(document: str, head: str) -> list[list[str]]:
    """The rows below the head that begins so."""
    lines = (ROOT / document).read_text().splitlines()
    (start,) = [i for i, line in enumerate(lines) if line.startswith(head)]
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def shown(level: dict[str, Any]) -> str:
    """Tokens per second, and the accept length where there is one."""
    assert level["errors"] == 0
    length = level["accept_length"]
    return f"{level['tokens_per_s']:.0f}" + (f" ({length:.2f})" if length else "")


def test_what_a_grammar_costs() -> None:
    found: list[str] = []
    for _, load in itertools.groupby(results("grammar-h200"), load_of):
        levels = {row["level"]["concurrency"]: shown(row["level"]) for row in load}
        found.append(" | ".join(levels.get(level, "") for level in LEVELS))
    written = [" | ".join(row[2:]) for row in table("docs/measured.md", "| | | 1 | 8 | 48 |")]
    assert sorted(written) == sorted(found)


def load_of(row: dict[str, Any]) -> tuple[str, ...]:
    """What one load on one server has in common."""
    algorithm = row["server"]["speculative_algorithm"]
    return str(algorithm), str(row["workload"]["more"]), str(row["server"]["random_seed"])


def test_what_strict_costs() -> None:
    found: dict[tuple[str, str], list[str]] = {}
    for row in results("strict-h200"):
        key = str(row["server"]["speculative_algorithm"]), row["label"]
        found.setdefault(key, []).append(shown(row["level"]))
    for row, algorithm in zip(
        table("docs/strict.md", "| | default | `--strict` | tokens |"),
        ("None", "EAGLE3", "NGRAM"),
        strict=True,
    ):
        for cell, label in zip(row[1:3], ("default", "--strict"), strict=True):
            assert cell == " / ".join(found[algorithm, label])


def test_the_table_is_of_one_commit() -> None:
    rows = [*results("serving-h200"), *results("round-h200"), *results("transformers-h200")]
    later = [*results("controller-h200"), *results("grammar-h200"), *results("strict-h200")]
    assert len({row["commit"] for row in rows}) == len({row["commit"] for row in later}) == 1
    rows += later
    assert not any(row["dirty"] for row in rows)


def test_everything_passed_on_the_gpu() -> None:
    tests = result("gpu-tests")
    assert (tests["failed"], tests["error"]) == (0, 0)
    skipped = [one["test"] for one in tests["tests"] if one["outcome"] == "skipped"]
    assert len(skipped) == tests["skipped"] <= 1, "FlashInfer need not be there"
    assert tests["passed"] == len(tests["tests"]) - len(skipped) > 200


def test_the_sanitizer_found_nothing() -> None:
    row = result("sanitizer-h200")
    runs = [f"{kind} {drafter}" for kind in ("eager", "graphs") for drafter in DRAFTERS]
    assert {row[run]["summary"][-1] for run in runs} == {"0 errors"}


def test_nothing_was_lost_under_load() -> None:
    for row, drafter in zip(results("soak-h200"), ("EAGLE3", "NGRAM"), strict=True):
        assert row["argv"][4:6] == ["--requests", "2000"]
        assert drafter in row["argv"]
        assert row["problems"] == []
