"""Plans and their mistakes, arrivals, and what a table makes of rows whose figures are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from docs_commands import ROOT, documents

from sgl_spec.bench import tables
from sgl_spec.bench.__main__ import main
from sgl_spec.bench.experiment import Store, arrivals
from sgl_spec.bench.plan import Cell, Load, Plan, Server, cells_of, read_plan
from sgl_spec.bench.plots import draw
from sgl_spec.bench.published import fill
from sgl_spec.errors import ConfigError

PLAN = """
name = "test"
repeats = 2
[[server]]
flags = ["--model-path", "smollm2"]
[grid]
algorithm = ["none", "NGRAM", "EAGLE3"]
shape = ["3,1,4", "2,2,4"]
max_running_requests = [4]
concurrency = [1, 8]
temperature = [0, 0.7]
group = ["qa"]
"""


def cells(tmp_path: Path, text: str) -> list[Cell]:
    file = tmp_path / "plan.toml"
    file.write_text(text)
    return cells_of(read_plan(file), file)


def test_a_grid_without_what_changes_nothing(tmp_path: Path) -> None:
    """Plain decoding reads no shape and NGRAM only its nodes, which are 4 in both."""
    found = cells(tmp_path, PLAN)
    assert len(found) == (1 + 1 + 2) * 2 * 2 * 2  # variants, concurrencies, temperatures, repeats
    assert len({cell.id for cell in found}) == len(found)
    variants = list(dict.fromkeys(cell.variant for cell in found))
    assert [variant.speculation for variant in variants] == ["none", "NGRAM", "EAGLE3", "EAGLE3"]
    nodes = ["--max-running-requests", "4"]
    assert variants[0].flags == ["--model-path", "smollm2", *nodes]
    assert variants[1].flags[2:6] == [
        *("--speculative-algorithm", "NGRAM", "--max-running-requests", "4")
    ]
    assert variants[3].flags[-6:] == [
        *("--speculative-num-steps", "2", "--speculative-eagle-topk", "2"),
        *("--speculative-num-draft-tokens", "4"),
    ]
    again = cells(tmp_path, PLAN.replace('name = "test"', 'name = "renamed"'))
    assert [cell.id for cell in again] == [cell.id for cell in found]
    longer = cells(tmp_path, PLAN.replace("repeats", "max_tokens = 9\nrepeats"))
    assert not {cell.id for cell in longer} & {cell.id for cell in found}


CELLS = {
    "experiment.toml": 3 * 2 * 2 * 2,
    "experiments/accept_cpu.toml": 4 * 3 * 6,
    "experiments/speedup_cpu.toml": 3 * 2 * 3,
}


def test_the_examples_are_plans() -> None:
    files = sorted((ROOT / "examples").rglob("*.toml"))
    found = {f.relative_to(ROOT / "examples").as_posix(): f for f in files}
    assert {name: len(cells_of(read_plan(f), f)) for name, f in found.items()} == CELLS


def test_an_algorithm_among_the_flags_counts_as_one_of_the_grid(tmp_path: Path) -> None:
    tables = PLAN.replace('algorithm = ["none", "NGRAM", "EAGLE3"]\n', "")
    flags = '[[server]]\nflags = ["--model-path", "smollm2", "--speculative-algorithm", "EAGLE3"]\n'
    found = cells(tmp_path, tables.replace("[grid]", flags + "[grid]"))
    variants = list(dict.fromkeys(cell.variant for cell in found))
    assert [variant.speculation for variant in variants] == ["none", "EAGLE3", "EAGLE3"]
    assert variants[0].flags == ["--model-path", "smollm2", "--max-running-requests", "4"]


def test_servers_that_are_not_ours_take_the_loads_alone(tmp_path: Path) -> None:
    others = '[[server]]\nlabel = "vLLM"\nurl = "http://h:1"\nbackend = "openai"\n'
    found = cells(tmp_path, PLAN.replace("[[server]]", others + "[[server]]", 1))
    theirs = [cell for cell in found if cell.variant.label == "vLLM"]
    assert len(theirs) == 2 * 2 * 2
    assert {cell.variant.speculation for cell in theirs} == {"none"}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("repeats = 2", "repeat = 2", "repeat is no key (did you mean repeats?); allowed: name,"),
        ("repeats = 2", 'repeats = "2"', "repeats = '2': Input should be a valid integer"),
        ("repeats = 2", "repeats = 0", "repeats = 0: Input should be greater than or equal to 1"),
        ("[[server]]", '[[server]]\nbackend = "x"', "server.0.backend = 'x': Input should be 'sg"),
        ("[[server]]", '[[server]]\nurl = "http://h:1"', "one of flags, command and url, got flag"),
        ("concurrency", "concurency", "grid.concurency is no axis (did you mean concurrency?)"),
        ("concurrency = [1, 8]", "concurrency = []", "grid.concurrency is empty"),
        ("concurrency = [1, 8]", "concurrency = [0]", "grid.concurrency must be an integer, 1 or"),
        ("[0, 0.7]", '["hot"]', "grid.temperature must be a number from 0, got 'hot'"),
        ('["qa"]', '["poems"]', "grid.group 'poems': bench96 has ['math_reasoning', 'mt_bench',"),
        ('"2,2,4"', '"2,2"', "grid.shape must be STEPS,TOPK,NODES, got '2,2'"),
        ('"NGRAM"', '"NGRAMS"', "--speculative-algorithm"),
        ("max_running_requests = [4]", "max_running_requests = [-4]", "--max-running-requests"),
        ("[grid]", "[grid", "Cannot read the plan"),
    ],
)
def test_a_bad_plan_is_told_by_key_and_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    file = tmp_path / "plan.toml"
    assert old in PLAN
    file.write_text(PLAN.replace(old, new, 1))
    assert main(["experiment", str(file)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert str(file) in error
    assert list(tmp_path.iterdir()) == [file]


def load(**given: Any) -> Load:
    none = {"concurrency": None, "request_rate": None, "trace": None, "temperature": 0.0}
    return Load(**{**none, "group": None, "seed": 0, **given})


def test_arrivals(tmp_path: Path) -> None:
    poisson = arrivals(load(request_rate=4.0), 2000)
    assert (
        poisson
        == arrivals(load(request_rate=4.0), 2000)
        != arrivals(load(request_rate=4.0, seed=1), 2000)
    )
    assert poisson[0] == 0
    assert poisson == sorted(poisson)
    assert 1999 / poisson[-1] == pytest.approx(4, rel=0.1)
    trace = tmp_path / "trace"
    trace.write_text("0\n0.5\n2\n")
    assert arrivals(load(trace=str(trace)), 5) == [0, 0.5, 2, 2, 2.5]
    trace.write_text("1\n0.5\n")
    with pytest.raises(ConfigError, match="must list rising seconds"):
        arrivals(load(trace=str(trace)), 5)


def row(id: str, speed: float, speculation: str = "none", **more: Any) -> dict[str, Any]:
    """A cell's row with what the tables read."""
    level = {"tokens_per_s": speed, "accept_length": None, "errors": 0}
    fields: dict[str, Any] = {
        "id": id,
        "label": "sgl-spec",
        "speculation": speculation,
        "axes": {"speculative_algorithm": speculation, "max_running_requests": 4},
        "load": vars_of(load(concurrency=2)),
        "repeat": 0,
        "status": "ok",
        "level": level,
        "ttft_ms": [10.0, 20.0, 90.0],
        "tpot_ms": [float(i) for i in range(1, 101)],
        "histogram": [],
        "memory_mb": {"server": 1.0, "gpu": None},
        "busy": 0.0,
        "server": {"model_path": "m", "dtype": "float32"},
        "conditions": {
            "commit": "abcdef0123",
            "time": "now",
            "hardware": {"gpus": [], "cores": 2, "cpu": "a processor"},
            "versions": {"torch": "2"},
        },
    }
    return fields | more


def vars_of(load: Load) -> dict[str, Any]:
    return {name: getattr(load, name) for name in Load.__dataclass_fields__}


def test_the_table(tmp_path: Path) -> None:
    """Two repeats each: means and spread, a speed-up per repeat, texts side by side."""
    store = Store(tmp_path)
    texts = {"a": [[1, 2, 3], [4, 5]], "b": [[1, 2, 3], [4, 5]], "c": [[1, 2, 9], [4, 5]]}
    for name, ids in texts.items():
        (tmp_path / "answers" / f"{name}.json").write_text(json.dumps(ids))
    length = {"tokens_per_s": 30.0, "accept_length": 2.0, "errors": 1}
    failed = row("e", 0.0, "EAGLE3") | {"status": "failed", "error": "oops", "log": ["1", "oops"]}
    rows = [
        row("a", 10.0),
        row("b", 20.0, repeat=1),
        row("c", 30.0, "NGRAM", level=length, histogram=[1, 2, 1], busy=0.5),
        row("d", 30.0, "NGRAM", repeat=1, level=length, histogram=[2, 1, 1]),
        {k: failed[k] for k in failed if k not in ("level", "ttft_ms", "tpot_ms", "busy")},
    ]
    (tmp_path / "answers" / "d.json").write_text(json.dumps(texts["a"]))
    plain, ngram, broken = tables.summarise(rows, store.answers)
    assert (plain.setting, ngram.setting, plain.load, plain.runs) == ("none", "NGRAM", "2", 2)
    assert (plain.tokens_per_s, plain.spread, plain.speedup) == (15.0, 10 / 15, 1.0)
    assert (ngram.speedup, ngram.spread) == ((30 / 10 + 30 / 20) / 2, 0.0)
    assert (ngram.agreement, ngram.first_difference) == (0.75, 2)
    assert (plain.agreement, ngram.accept_length, ngram.errors) == (None, 2.0, 2)
    assert (plain.memory_mb, broken.memory_mb) == (1.0, None)
    assert ngram.kept == [5 / 8, 2 / 8]
    assert (plain.ttft_ms, plain.tpot_ms, plain.tpot_p99_ms) == (20.0, 50.5, 99.0)
    assert (broken.tokens_per_s, broken.error, broken.log) == (None, "oops", ["1", "oops"])
    plan = Plan(name="n", server=(Server(flags=()),))
    tables.write([plain, ngram, broken], plan, rows, tmp_path)
    written = json.loads((tmp_path / "table.json").read_text())
    assert [one["tokens_per_s"] for one in written["rows"]] == [15.0, 30.0, None]
    said = tables.conditions(plan, rows)
    assert "m in float32 on 2 cores of a processor" in said
    assert "others used up to 50% of the machine" in said
    page = (tmp_path / "table.md").read_text()
    assert said in page
    assert "    1\n    oops" in page
    header, first, *_ = (tmp_path / "table.csv").read_text().splitlines()
    assert header.split(",")[:2] == ["setting", "load"]
    assert first.split(",")[5] == "15.0"
    drawn = draw([plain, ngram, broken], said, tmp_path / "plots")
    names = {path.stem for path in drawn}
    assert names == {"speedup", "accept_by_group", "accept_by_depth", "latency", "agreement"}
    assert all(path.stat().st_size > 10_000 for path in drawn)


def test_a_line_that_was_cut_is_measured_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add({"id": "a", "status": "ok"})
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write('{"id": "b", "sta')
    assert set(Store(tmp_path).rows) == {"a"}


def test_tables_of_a_document_are_those_of_the_json(tmp_path: Path) -> None:
    groups = [row(name, 10.0 + i) for i, name in enumerate("ab")]
    groups[1]["load"] = groups[1]["load"] | {"group": "qa"}
    plan = Plan(name="n", server=(Server(flags=(), api_key="secret"),))
    tables.write(tables.summarise(groups, lambda row: []), plan, groups, tmp_path)
    assert "secret" not in (tmp_path / "table.json").read_text()
    document = tmp_path / "page.md"
    text = "Before\n<!-- table table.json: {} -->\nold\n<!-- end -->\nafter\n"
    document.write_text(text.format("setting tokens_per_s where group=qa"))
    assert main(["published", str(document)]) == 0
    filled = document.read_text()
    assert "| setting | tokens_per_s |\n|---|---|\n| none | 11 |\n\nn: m in float32" in filled
    assert filled.startswith("Before\n<!--")
    assert filled.endswith("\n<!-- end -->\nafter\n")
    assert fill(document) == filled
    document.write_text(text.format("setting by group of tokens_per_s"))
    assert "| setting | group  | group qa |\n|---|---|---|\n| none | 10 | 11 |" in fill(document)
    for wrong, said in (("speed", "has no speed"), ("setting where group=rag", "has no rows")):
        document.write_text(text.format(wrong))
        with pytest.raises(ConfigError, match=said):
            fill(document)


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_tables_of_the_documents_are_up_to_date(path: Path) -> None:
    assert fill(path) == path.read_text()


def test_a_plan_without_a_name_is_one_short_line(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text("repeats = 2\n")
    with pytest.raises(ConfigError) as refusal:
        read_plan(file)
    assert refusal.value.message == f"{file}: name is missing."


@pytest.mark.parametrize(
    ("program", "usage"),
    [("/x/sgl-spec", "usage: sgl-spec bench COMMAND"), ("x", "usage: python -m sgl_spec.bench")],
)
def test_usage_shows_the_command_as_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], program: str, usage: str
) -> None:
    monkeypatch.setattr("sys.argv", [program])
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.startswith(usage)
