"""An experiment's rows as one table: repeats with their spread, speed-up and agreement beside the
same load without speculation."""

from __future__ import annotations

import csv
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sgl_spec.bench.plan import ALGORITHM, NONE, Plan
from sgl_spec.bench.report import table

Row = dict[str, Any]
Answers = Callable[[Row], list[Any]]
_SHORT = {
    "speculative_algorithm": "",
    "speculative_num_steps": "steps",
    "speculative_eagle_topk": "topk",
    "speculative_num_draft_tokens": "nodes",
    "max_running_requests": "running",
}
COLUMNS = {
    "setting": "the server and the options that the grid varies",
    "load": "concurrency of the closed loop, or arrivals of the open one",
    "temperature": "of every request",
    "group": "of the prompts, empty for all",
    "runs": "repeats and seeds that are in the row's means",
    "tokens_per_s": "output tokens per second, mean of the runs",
    "spread": "(largest - smallest) / mean of these",
    "speedup": "tokens_per_s over that of the same load without speculation; above 1 it pays",
    "ttft_ms": "median time to the first token",
    "tpot_ms": "median time per token behind the first chunk",
    "tpot_p99_ms": "99th percentile of the same",
    "accept_length": "tokens of a round, the bonus token included",
    "agreement": "share of prompts with the text of the same load without speculation",
    "first_difference": "token at which texts part, median of those that do",
    "memory_mb": "in use on the GPU at the end, without one the server's resident memory",
    "errors": "requests without a whole answer",
    "busy": "share of the machine that others used before, the most of the runs",
    "error": "why the last run of a cell failed",
}


@dataclass(frozen=True, slots=True)
class Summary:
    """A cell with all its runs. What `COLUMNS` names stands in the tables; rates, depths and times
    are for the plots: kept[d] is the share of rounds that kept at least d + 1 drafts."""

    setting: str
    load: str
    temperature: float
    group: str
    runs: int
    tokens_per_s: float | None
    spread: float | None
    speedup: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    tpot_p99_ms: float | None
    accept_length: float | None
    agreement: float | None
    first_difference: float | None
    memory_mb: float | None
    errors: int
    busy: float
    error: str
    log: list[str]
    speculation: str
    concurrency: int | None
    max_running_requests: int | None
    kept: list[float]
    ttfts: list[float]
    tpots: list[float]


def summarise(rows: Sequence[Row], answers: Answers) -> list[Summary]:
    """One summary for each cell, repeats and seeds joined, in the order of the rows."""
    varied = _varied(rows)
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(_key(row), []).append(row)
    return [_summary(group, _baselines(group, rows), varied, answers) for group in groups.values()]


def _key(row: Row) -> str:
    load = {name: value for name, value in row["load"].items() if name != "seed"}
    return json.dumps([row["label"], row["speculation"], row["axes"], load], sort_keys=True)


def _varied(rows: Sequence[Row]) -> set[str]:
    """The axes (and "label") of which there are two values, so that a setting must name them."""
    seen: dict[str, set[str]] = {}
    for row in rows:
        for name, value in (row["axes"] | {"label": row["label"]}).items():
            seen.setdefault(name, set()).add(str(value))
    return {name for name, values in seen.items() if len(values) > 1}


def _setting(row: Row, varied: set[str]) -> str:
    words = [row["label"]] if "label" in varied else []
    words += [row["speculation"]]
    for name, value in row["axes"].items():
        if name in varied and name != ALGORITHM:
            words.append(f"{_SHORT.get(name, name.removeprefix('speculative_'))}={value}")
    return " ".join(words)


def _baselines(group: Sequence[Row], rows: Sequence[Row]) -> dict[str, Row]:
    """For each row of a cell, by id, the one without speculation under the same load: of the same
    server with the same other options if there is one, else of a server with the same label."""
    found = {}
    for row in group:
        same = [
            other
            for other in rows
            if other["speculation"] == NONE
            and other["status"] == "ok"
            and other["load"] == row["load"]
            and other["repeat"] == row["repeat"]
        ]
        plain = {k: v for k, v in row["axes"].items() if not k.startswith("speculative_")}
        best = sorted(same, key=lambda other: _distance(other, row, plain))
        if best:
            found[row["id"]] = best[0]
    return found


def _distance(other: Row, row: Row, plain: dict[str, Any]) -> tuple[bool, int]:
    axes = {k: v for k, v in other["axes"].items() if not k.startswith("speculative_")}
    return other["label"] != row["label"], len(set(axes.items()) ^ set(plain.items()))


def _summary(
    group: Sequence[Row], baselines: dict[str, Row], varied: set[str], answers: Answers
) -> Summary:
    first, good = group[0], [row for row in group if row["status"] == "ok"]
    failed = [row for row in group if row["status"] != "ok"]
    levels = [row["level"] for row in good]
    speeds = [level["tokens_per_s"] for level in levels]
    ttfts = [ms for row in good for ms in row["ttft_ms"]]
    tpots = [ms for row in good for ms in row["tpot_ms"]]
    lengths = [x["accept_length"] for x in levels if x["accept_length"] is not None]
    pairs = [(row, baselines[row["id"]]) for row in good if row["id"] in baselines]
    faster = [row["level"]["tokens_per_s"] / other["level"]["tokens_per_s"] for row, other in pairs]
    places = [
        place
        for row, other in pairs
        if row is not other
        for place in _differences(answers(row), answers(other))
    ]
    parted = [place for place in places if place is not None]
    load = first["load"]
    memory = good[-1]["memory_mb"] if good else {"gpu": None, "server": None}
    return Summary(
        setting=_setting(first, varied),
        load=_load_name(load),
        temperature=load["temperature"],
        group=load["group"] or "",
        runs=len(good),
        tokens_per_s=_mean(speeds),
        spread=(max(speeds) - min(speeds)) / statistics.fmean(speeds) if len(speeds) > 1 else None,
        speedup=_mean(faster),
        ttft_ms=statistics.median(ttfts) if ttfts else None,
        tpot_ms=statistics.median(tpots) if tpots else None,
        tpot_p99_ms=sorted(tpots)[-(-99 * len(tpots) // 100) - 1] if tpots else None,
        accept_length=_mean(lengths),
        agreement=1 - len(parted) / len(places) if places else None,
        first_difference=statistics.median(parted) if parted else None,
        memory_mb=memory["gpu"] or memory["server"],
        errors=sum(level["errors"] for level in levels),
        busy=max((row["busy"] for row in good), default=0.0),
        error=failed[-1]["error"] if failed else "",
        log=failed[-1]["log"] if failed else [],
        speculation=first["speculation"],
        concurrency=load["concurrency"],
        max_running_requests=first["axes"].get("max_running_requests"),
        kept=_kept([row["histogram"] for row in good]),
        ttfts=ttfts,
        tpots=tpots,
    )


def _load_name(load: Row) -> str:
    if load["concurrency"] is not None:
        return str(load["concurrency"])
    return f"{load['request_rate']:g}/s" if load["request_rate"] is not None else load["trace"]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _differences(mine: Sequence[Any], others: Sequence[Any]) -> list[int | None]:
    """For each answer the first token (or letter) in which it differs, None where it does not."""
    found: list[int | None] = []
    for one, other in zip(mine, others, strict=True):
        pairs = itertools.zip_longest(one, other)
        found.append(next((i for i, (a, b) in enumerate(pairs) if a != b), None))
    return found


def _kept(histograms: Sequence[Sequence[int]]) -> list[float]:
    """Share of rounds that kept at least 1, 2, ... drafts."""
    counts = [sum(column) for column in itertools.zip_longest(*histograms, fillvalue=0)]
    total = sum(counts)
    return [sum(counts[depth:]) / total for depth in range(1, len(counts))] if total else []


def conditions(plan: Plan, rows: Sequence[Row]) -> str:
    """What every figure was measured with, in a line or two."""
    good = [row for row in rows if row["status"] == "ok"]
    if not good:
        return f"{plan.name}: nothing could be measured"
    told = good[-1]["conditions"]
    about, machine = good[-1]["server"], told["hardware"]
    server = next((row["server"] for row in good if row["server"]), about)
    where = ", ".join(machine["gpus"]) or f"{machine['cores']} cores of {machine['cpu']}"
    model = str(server.get("model_path", "?")).rpartition("/")[2]
    parts = [
        f"{plan.name}: {model} in {server.get('dtype', '?')} on {where}",
        f"{plan.requests} requests of {plan.prompts}, {plan.max_tokens} new tokens"
        f"{', EOS ignored' if plan.ignore_eos else ''}, {plan.repeats} runs",
        f"commit {(told['commit'] or '?')[:9]}, torch {told['versions']['torch']}, {told['time']}",
    ]
    busy = max(row["busy"] for row in good)
    parts += [f"others used up to {busy:.0%} of the machine"] if busy > 0.2 else []
    return "; ".join(parts)


def text(found: Sequence[Summary]) -> str:
    """For a terminal, without the columns that are empty throughout."""
    names = _shown(found)
    return table(names, [[cell(getattr(one, name)) for name in names] for one in found])


def write(found: Sequence[Summary], plan: Plan, rows: Sequence[Row], directory: Path) -> None:
    """table.json, table.csv and table.md."""
    listed = [asdict(one) for one in found]
    told_plan = plan.model_dump(exclude={"server": {"__all__": {"api_key"}}})
    content = {"plan": told_plan, "conditions": conditions(plan, rows), "rows": listed}
    text = json.dumps(content, indent=1, default=str) + "\n"
    (directory / "table.json").write_text(text, encoding="utf-8")
    with (directory / "table.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(COLUMNS), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(listed)
    names = _shown(found)
    shown = markdown(names, [[cell(getattr(one, name)) for name in names] for one in found])
    told = "\n".join(f"- {name}: {COLUMNS[name]}" for name in names)
    logs = [
        f"{one.setting}, {one.load}:\n\n    " + "\n    ".join(one.log) for one in found if one.log
    ]
    parts = [f"# {plan.name}", conditions(plan, rows), shown, told, *logs]
    (directory / "table.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def markdown(names: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    lines += ["| " + " | ".join(one.replace("|", "\\|") for one in row) + " |" for row in cells]
    return "\n".join(lines)


def _shown(found: Sequence[Summary]) -> list[str]:
    """The columns in which there is something."""
    empty = (None, "", 0.0)
    always = ("setting", "load", "tokens_per_s")
    return [
        name
        for name in (field.name for field in fields(Summary) if field.name in COLUMNS)
        if name in always or any(getattr(one, name) not in empty for one in found)
    ]


def cell(value: object) -> str:
    """A figure with three digits, "-" for none."""
    if value is None:
        return "-"
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value < 100
        else (f"{value:.0f}" if isinstance(value, float) else str(value))
    )
