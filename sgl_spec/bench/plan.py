"""What an experiment measures: a TOML file, checked as a whole before anything starts.

    name = "speculation on and off"
    prompts = "bench96"          # a bundled file or a path; `cat` of a line is its group
    requests = 8                 # of each cell
    max_tokens = 64
    repeats = 2

    [[server]]
    flags = ["--model-path", "smollm2", "--disable-radix-cache"]

    [grid]                       # every combination is a cell
    algorithm = ["none", "NGRAM"]
    max_running_requests = [48]
    concurrency = [1, 8]
    temperature = [0.0]

Keys of [grid] are those of a load (`LOAD_AXES`), short names (`SHORT`), or any server option. A
server is one of ours (`flags`), any other that `command` starts on port {port}, or one that runs at
`url`; server options of the grid apply to ours alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from sgl_spec.args import ServerArgs
from sgl_spec.bench.serving import read_prompts
from sgl_spec.errors import ConfigError
from sgl_spec.options import near

LOAD_AXES = ("concurrency", "request_rate", "trace", "temperature", "group", "seed")
SHORT = {
    "algorithm": "speculative_algorithm",
    "num_steps": "speculative_num_steps",
    "topk": "speculative_eagle_topk",
    "draft_tokens": "speculative_num_draft_tokens",
    "draft_model": "speculative_draft_model_path",
}
SHAPE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
NONE = "none"
ALGORITHM = "speculative_algorithm"
# Server options that would change nothing, by algorithm; cells that differ in no other are one.
_OF_MODELS = {*SHAPE[:2], "speculative_draft_model_path", "speculative_draft_sampling"}
_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)
Scalar = str | int | float | bool


class Server(BaseModel):
    """A server to measure. label: what tables call it; speculation: what it does, for a server that
    is not ours ("none": others are compared with it)."""

    model_config = _STRICT

    label: str = ""
    flags: tuple[str, ...] | None = Field(None, strict=False)
    command: tuple[str, ...] | None = Field(None, strict=False)
    url: str | None = None
    backend: Literal["sgl-spec", "sglang", "openai"] = "sgl-spec"
    speculation: str = NONE
    flush_path: str | None = None
    api_key: str | None = None
    health: str = "/health"
    ready_timeout: float = Field(600.0, gt=0, strict=False)


class Plan(BaseModel):
    """The file."""

    model_config = _STRICT

    name: str
    prompts: str = "bench96"
    requests: int = Field(8, ge=1)
    max_tokens: int = Field(64, ge=1)
    ignore_eos: bool = True
    repeats: int = Field(1, ge=1)
    warmup: int = Field(2, ge=1)
    timeout: float = Field(600.0, gt=0, strict=False)
    extra_request_body: dict[str, Any] = {}
    server: tuple[Server, ...] = Field((), strict=False)
    grid: dict[str, list[Scalar]] = {}


@dataclass(frozen=True, slots=True)
class Variant:
    """A server with its options. axes: those of the grid, by option name."""

    server: Server
    axes: tuple[tuple[str, Scalar], ...]

    @property
    def label(self) -> str:
        """Of the server, without its axes."""
        return self.server.label or self.server.url or "sgl-spec"

    @property
    def flags(self) -> list[str]:
        """The command line of a server of ours."""
        found = list(self.server.flags or ())
        for name, value in self.axes:
            flag = f"--{name.replace('_', '-')}"
            if value is True:
                found.append(flag)
            elif value is not False and value != NONE:
                found += [flag, str(value)]
        return found

    @property
    def speculation(self) -> str:
        """The algorithm, NONE for plain decoding."""
        given = dict(self.axes).get(ALGORITHM)
        if given is not None:
            return str(given)
        flags = list(self.server.flags or ())
        flag = f"--{ALGORITHM.replace('_', '-')}"
        return flags[flags.index(flag) + 1] if flag in flags else self.server.speculation


@dataclass(frozen=True, slots=True)
class Load:
    """What a server is asked. One of concurrency (closed loop), request_rate (per second, Poisson)
    and trace (a file with the second of each arrival) is given. group: of prompts, None: all."""

    concurrency: int | None
    request_rate: float | None
    trace: str | None
    temperature: float
    group: str | None
    seed: int

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"concurrency {self.concurrency}"
        return (
            f"{self.request_rate:g}/s" if self.request_rate is not None else f"trace {self.trace}"
        )


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement. id: of all that decides it, so that a finished one is found again."""

    variant: Variant
    load: Load
    repeat: int
    id: str


def read_plan(path: Path) -> Plan:
    """The plan in a file; `ConfigError` names the key, the value and what is allowed."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"Cannot read the plan {path}: {error}.") from error
    try:
        plan = Plan.model_validate(content)
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {_told(one)}" for one in error.errors())) from error
    for number, server in enumerate(plan.server):
        given = [name for name in ("flags", "command", "url") if getattr(server, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"{path}: server {number} must have one of flags, command and url, got "
                f"{', '.join(given) or 'none'}."
            )
    return plan


def _told(error: Any) -> str:
    where = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        model = Server if error["loc"][0] == "server" else Plan
        allowed = list(model.model_fields)
        return f"{where} is no key{near(str(error['loc'][-1]), allowed)}; allowed: " + ", ".join(
            allowed
        )
    if error["type"] == "missing":
        return f"{where} is missing."
    return f"{where} = {error['input']!r}: {error['msg']}"


def cells_of(plan: Plan, where: Path) -> list[Cell]:
    """All cells, those of one server together. where: of the file, for messages. `ConfigError` for
    axes or options that there are not, and for options that contradict each other."""
    grid = _grid(plan, where)
    loads = list(_loads(grid, where))
    _check_groups(plan, loads, where)
    found: dict[str, Cell] = {}
    for server in plan.server or (Server(flags=()),):
        for variant in _variants(server, grid, where):
            for repeat in range(plan.repeats):
                for load in loads:
                    cell = _cell(plan, variant, load, repeat)
                    found.setdefault(cell.id, cell)
    return list(found.values())


def _grid(plan: Plan, where: Path) -> dict[str, list[Any]]:
    """The grid by full names."""
    found: dict[str, list[Any]] = {}
    options = ServerArgs.__dataclass_fields__
    for key, values in plan.grid.items():
        name = SHORT.get(key, key)
        if name not in (*LOAD_AXES, "shape") and name not in options:
            known = [*LOAD_AXES, *SHORT, "shape", *options]
            raise ConfigError(
                f"{where}: grid.{key} is no axis{near(key, known)}; allowed: "
                f"{', '.join((*LOAD_AXES, *SHORT, 'shape'))} and server options."
            )
        if not values:
            raise ConfigError(f"{where}: grid.{key} is empty; it must list values.")
        found[name] = values
    return found


def _loads(grid: Mapping[str, list[Any]], where: Path) -> Iterator[Load]:
    arrivals: list[dict[str, Any]] = []
    for name, kind, least in (("concurrency", int, 1), ("request_rate", float, 1e-6)):
        for value in grid.get(name, []):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or value < least or (kind is int and value != int(value)):
                what = "an integer, 1 or more" if kind is int else "a number above 0"
                raise ConfigError(f"{where}: grid.{name} must be {what}, got {value!r}.")
            arrivals.append({name: kind(value)})
    arrivals += [{"trace": str(value)} for value in grid.get("trace", [])]
    rest = ("temperature", "group", "seed")
    defaults: dict[str, list[Any]] = {"temperature": [0.0], "group": [None], "seed": [0]}
    axes = [grid.get(name, defaults[name]) for name in rest]
    for arrival, values in itertools.product(
        arrivals or [{"concurrency": 1}], itertools.product(*axes)
    ):
        none = {"concurrency": None, "request_rate": None, "trace": None}
        given: dict[str, Any] = none | arrival | dict(zip(rest, values, strict=True))
        yield Load(**given | {"temperature": _temperature(given["temperature"], where)})


def _temperature(value: Any, where: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ConfigError(f"{where}: grid.temperature must be a number from 0, got {value!r}.")
    return float(value)


def _check_groups(plan: Plan, loads: Sequence[Load], where: Path) -> None:
    lines = read_prompts(plan.prompts)
    for group in {load.group for load in loads}:
        count = sum(group in (None, line.get("cat")) for line in lines)
        if count == 0:
            known = sorted({line["cat"] for line in lines if "cat" in line})
            raise ConfigError(f"{where}: grid.group {group!r}: {plan.prompts} has {known}.")
    for load in loads:
        if load.trace is not None:
            read_trace(load.trace)


def read_trace(path: str) -> list[float]:
    """The seconds at which requests arrive, one a line, rising."""
    try:
        times = [float(line) for line in Path(path).read_text().split()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read the trace {path}: {error}.") from error
    if not times or times != sorted(times) or times[0] < 0:
        raise ConfigError(f"The trace {path} must list rising seconds from 0.")
    return times


def _variants(server: Server, grid: Mapping[str, list[Any]], where: Path) -> Iterator[Variant]:
    """The server with every combination of the options that matter to it."""
    if server.flags is None:
        yield Variant(server, ())
        return
    names = [name for name in grid if name not in LOAD_AXES]
    seen = set()
    for values in itertools.product(*(grid[name] for name in names)):
        axes = _spread(dict(zip(names, values, strict=True)), where)
        algorithm = Variant(server, tuple(axes.items())).speculation
        variant = Variant(server, tuple(_effective(axes, algorithm).items()))
        if variant.axes in seen:
            continue
        seen.add(variant.axes)
        try:
            ServerArgs.from_cli(variant.flags).resolve()
        except ConfigError as error:
            raise ConfigError(f"{where}: {' '.join(variant.flags)}: {error}") from error
        yield variant


def _spread(axes: dict[str, Any], where: Path) -> dict[str, Any]:
    """`shape` as the three options that it stands for."""
    shape = axes.pop("shape", None)
    if shape is None:
        return axes
    parts = str(shape).split(",")
    if len(parts) != len(SHAPE) or not all(part.strip().isdecimal() for part in parts):
        raise ConfigError(f"{where}: grid.shape must be STEPS,TOPK,NODES, got {shape!r}.")
    return axes | dict(zip(SHAPE, map(int, parts), strict=True))


def _effective(axes: dict[str, Any], algorithm: str) -> dict[str, Any]:
    """Without what this algorithm does not read."""
    if algorithm == NONE:
        return {
            name: value
            for name, value in axes.items()
            if name == ALGORITHM or not name.startswith("speculative_")
        }
    if algorithm == "NGRAM":
        return {name: value for name, value in axes.items() if name not in _OF_MODELS}
    return axes


def _cell(plan: Plan, variant: Variant, load: Load, repeat: int) -> Cell:
    workload = plan.model_dump(
        include={"prompts", "requests", "max_tokens", "ignore_eos", "extra_request_body"}
    )
    server = variant.server.model_dump(exclude={"api_key", "ready_timeout", "label"})
    what = [workload, server, variant.axes, asdict(load), repeat]
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    return Cell(variant, load, repeat, digest[:12])
