"""Load on a running server: a closed loop of streamed requests at each of some concurrencies.

Tokens per second, time to first token, time per token, inter-token latencies (`bench.streams` says
what these are) and accept length, of this server, SGLang (/generate) or any server with OpenAI's
completions. Before each level some warm-up prompts are served at its concurrency, then the caches
are flushed. Lines of a prompt file are {"prompt": text} or {"messages": [...]}; the latter go to
/v1/chat/completions. What a line has as "more" is laid over that request's body. --launch starts a
server of ours and stops it at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import orjson
import torch
import uvloop

from sgl_spec.bench.client import Call, Reply, Target, ask, closed_loop
from sgl_spec.bench.own_server import OwnServer, own_server
from sgl_spec.bench.report import provenance, say, table, write_row
from sgl_spec.bench.streams import Answer, Level, level_of, read_answer
from sgl_spec.errors import ConfigError, SglSpecError

BACKENDS = ("sgl-spec", "sglang", "openai")
_SHOWN = re.compile(
    r"version|model_path|dtype|device|attention_backend|page_size|max_running_requests|"
    r"max_total_\w*tokens|mem_fraction_static|disable_\w+|cuda_graph_\w+|chunked_prefill_size|"
    r"acceptance_rule|strict|simulate_acc_len|speculative_\w+|random_seed|schedule_policy"
)
DEFAULT_URL = "http://127.0.0.1:30000"
_VLLM_ROUNDS = "vllm:spec_decode_num_drafts_total"
_VLLM_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


@dataclass(frozen=True, slots=True)
class Workload:
    """How every request is answered. more: laid over every body; objects within are merged. seed:
    of the first request's draws, rising by 1; None leaves it to the server."""

    max_tokens: int
    temperature: float
    ignore_eos: bool
    more: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None


class Backend:
    """How to talk to a server. model: the name that OpenAI's interface asks for."""

    def __init__(self, kind: str, target: Target, workload: Workload, model: str) -> None:
        self.kind = kind
        self.target = target
        self.workload = workload
        self._openai = {
            "model": model,
            "max_tokens": workload.max_tokens,
            "temperature": workload.temperature,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if workload.ignore_eos:
            self._openai["ignore_eos"] = True
        if kind != "openai":
            self._openai["return_spec_tokens_details"] = True

    def call(self, line: dict[str, Any], number: int = 0) -> Call:
        """The request for a line of a prompt file, the `number`th of its level."""
        path, body = self._asked(line)
        if self.workload.seed is not None:
            seed = self.workload.seed + number
            own = path == "/generate"
            more = {"sampling_params": {"sampling_seed": seed}} if own else {"seed": seed}
            body = _laid_over(body, more)
        return Call(path, _laid_over(_laid_over(body, self.workload.more), line.get("more", {})))

    def _asked(self, line: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if "messages" in line:
            return "/v1/chat/completions", {**self._openai, "messages": line["messages"]}
        if self.kind == "openai":
            return "/v1/completions", {**self._openai, "prompt": line["prompt"]}
        params = {
            "max_new_tokens": self.workload.max_tokens,
            "temperature": self.workload.temperature,
            "ignore_eos": self.workload.ignore_eos,
        }
        return "/generate", {"text": line["prompt"], "sampling_params": params, "stream": True}

    async def flush(self, path: str | None) -> bool:
        """Drop the server's caches; whether there was a way to. Raises when it fails."""
        if path is None:
            if self.kind == "openai":
                return False
            path = "/flush_cache?timeout=30"
        reply = await ask(self.target, "POST", path)
        if reply.problem:
            raise SglSpecError(f"{self.target.url}{path}: {reply.problem}")
        return True

    async def about(self) -> dict[str, Any]:
        """What the server says of itself, as far as it bears on speed."""
        if self.kind == "openai":
            return {}
        info = await _json(self.target, "/server_info")
        return {key: value for key, value in info.items() if _SHOWN.fullmatch(key)}

    async def vllm_rounds(self) -> tuple[float, float] | None:
        """vLLM's counters of rounds and accepted drafts; None of other servers."""
        if self.kind != "openai":
            return None
        reply = await ask(self.target, "GET", "/metrics")
        sums = [_sum_of(name, reply.content.decode()) for name in (_VLLM_ROUNDS, _VLLM_ACCEPTED)]
        return None if None in sums else (float(sums[0] or 0), float(sums[1] or 0))


def _laid_over(body: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The body with the keys of `more`; objects in both are merged."""
    found = dict(body)
    for key, value in more.items():
        merges = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = _laid_over(found[key], value) if merges else value
    return found


def read_more(text: str) -> dict[str, Any]:
    """--extra-request-body; `ConfigError` if it is no JSON object."""
    try:
        found = orjson.loads(text)  # which writes it again
    except ValueError as error:
        raise ConfigError(f"--extra-request-body must be JSON, got {text!r}: {error}.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--extra-request-body must be a JSON object, got {text!r}.")
    return found


async def model_of(target: Target) -> str:
    """The first model that a server lists."""
    return str((await _json(target, "/v1/models"))["data"][0]["id"])


async def _json(target: Target, path: str) -> dict[str, Any]:
    reply = await ask(target, "GET", path)
    if reply.problem:
        raise ConfigError(f"{target.url}{path}: {reply.problem}")
    content: dict[str, Any] = orjson.loads(reply.content)
    return content


def _sum_of(name: str, text: str) -> float | None:
    found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)", text, re.MULTILINE)
    return sum(map(float, found)) if found else None


def read_prompts(path: str) -> list[dict[str, Any]]:
    """The lines of a file, or of one in `sgl_spec/bench/data` by name without ending."""
    bundled = files("sgl_spec.bench").joinpath("data", f"{path}.jsonl")
    try:
        text = (bundled if bundled.is_file() else Path(path)).read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read the prompts in {path}: {error}.") from error
    for number, line in enumerate(lines, 1):
        if not isinstance(line, dict) or not line.keys() & {"prompt", "messages"}:
            raise ConfigError(f"{path}, line {number}: must have `prompt` or `messages`.")
    return lines


def read_levels(texts: Sequence[str], prompts: int) -> list[tuple[int, int]]:
    """(concurrency, prompts) of each C:N, or C for all prompts."""
    levels = []
    for text in texts:
        found = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", text)
        if found is None:
            raise ConfigError(f"--levels must be CONCURRENCY:PROMPTS, got {text!r}.")
        count = int(found[2] or prompts)
        if count > prompts:
            raise ConfigError(f"--levels {text}: there are {prompts} prompts.")
        levels.append((int(found[1]), count))
    return levels


async def answers_to(backend: Backend, load: Awaitable[list[Reply]]) -> list[Answer]:
    """What a load's replies say, with the rounds of servers that count them for all requests."""
    before = await backend.vllm_rounds()
    answers = [read_answer(reply) for reply in await load]
    after = await backend.vllm_rounds()
    if before is not None and after is not None and after[0] > before[0]:
        answers[0].verified = int(after[0] - before[0])
        answers[0].emitted = after[0] - before[0] + after[1] - before[1]
    return answers


async def run_level(backend: Backend, calls: Sequence[Call], concurrency: int) -> Level:
    """One closed loop."""
    answers = await answers_to(backend, closed_loop(backend.target, calls, concurrency))
    return level_of(answers, concurrency, backend.workload.max_tokens)


@dataclass(frozen=True, slots=True)
class Measured:
    """A level. again: its prompts had been served just before, and nothing was flushed since."""

    level: Level
    again: bool


Take = Callable[[dict[str, Any], Measured], None]


async def run(options: argparse.Namespace, take: Take) -> list[Measured]:
    """All levels; each goes to `take`, with the conditions under which it ran, when it is there."""
    target = Target(options.url, options.api_key, options.timeout)
    prompts, warm = read_prompts(options.prompts), read_prompts(options.warmup)
    levels = read_levels(options.levels, len(prompts))
    workload = Workload(
        options.max_tokens,
        options.temperature,
        options.ignore_eos,
        options.extra_request_body,
    )
    model = options.model
    if model is None:
        model = await model_of(target)
    backend = Backend(options.backend, target, workload, model)
    conditions = {
        "backend": options.backend,
        "model": model,
        "workload": asdict(workload) | {"prompts": options.prompts, "warmup": options.warmup},
        "server": await backend.about(),
    }
    found = []
    for concurrency, count in levels:
        say(f"Concurrency {concurrency}: warming up, then {count} requests.")
        conditions["flushed"] = await warm_up(backend, warm, concurrency, options.flush_path)
        calls = [backend.call(line, number) for number, line in enumerate(prompts[:count])]
        for again in (False, True)[: 1 + options.again]:
            found.append(Measured(await run_level(backend, calls, concurrency), again))
            for problem in found[-1].level.problems:
                say(f"  {found[-1].level.errors} of {count} failed, for instance: {problem}")
            take(conditions, found[-1])
    return found


async def warm_up(
    backend: Backend, prompts: Sequence[dict[str, Any]], concurrency: int, flush_path: str | None
) -> bool:
    """Serve some prompts at a level's concurrency, forget them; whether they could be forgotten."""
    warming = [backend.call(line) for line in islice(cycle(prompts), max(2, concurrency))]
    replies = await closed_loop(backend.target, warming, concurrency)
    failed = [reply.problem for reply in replies if reply.problem]
    if failed:
        say(f"  {len(failed)} of {len(warming)} warm-up requests failed: {failed[0]}")
    return await backend.flush(flush_path)


def print_levels(found: Sequence[Measured]) -> None:
    """The table; times in ms."""
    header = ["concurrency", "requests", "errors", "tokens/s", "requests/s"]
    header += ["TTFT p50", "p99", "TPOT p50", "p99", "ITL p50", "p99", "accept length"]
    rows = []
    for one in found:
        level = one.level
        times: list[object] = []
        for ms in (level.ttft_ms, level.tpot_ms, level.itl_ms):
            times += ["-", "-"] if ms is None else [ms.p50, ms.p99]
        length = "-" if level.accept_length is None else f"{level.accept_length:.3f}"
        mark = "" if level.simulated is None else " simulated"
        first = [f"{level.concurrency}{' again' if one.again else ''}", level.requests]
        first += [level.errors, level.tokens_per_s, level.requests_per_s]
        rows.append([*first, *times, f"{length}{mark}"])
    print(table(header, rows))


def main(argv: Sequence[str]) -> None:
    """`python -m sgl_spec.bench serving`. Raises `SglSpecError` when a level had no answer."""
    options = _parser().parse_args(argv)
    options.extra_request_body = read_more(options.extra_request_body)
    if options.launch is None:
        options.url = options.url or DEFAULT_URL
        _measure(options, argv, None)
        return
    if options.url is not None or options.backend != "sgl-spec":
        raise ConfigError("--launch starts a server of ours: --url and --backend say another.")
    with own_server(options.launch, options.ready_timeout) as server:
        options.url = server.url
        say(f"Ready after {server.started.seconds:.1f} s.")
        _measure(options, argv, server)


def _measure(options: argparse.Namespace, argv: Sequence[str], server: OwnServer | None) -> None:
    command = ["python", "-m", "sgl_spec.bench", "serving", *_without_key(argv)]
    own = {} if server is None else {"start": asdict(server.started)}

    def take(conditions: dict[str, Any], one: Measured) -> None:
        if options.json:
            row = {**provenance(command), **conditions, **own}
            write_row(Path(options.json), row | {"again": one.again, "level": asdict(one.level)})

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(run(options, take))
    print_levels(found)
    if any(one.level.short for one in found):
        counts = ", ".join(str(one.level.short) for one in found)
        print(f"answers of fewer than {options.max_tokens} tokens: {counts}")
    if server is not None:
        print(_started(server))
    if any(one.level.errors == one.level.requests for one in found):
        raise SglSpecError("No request of a level was answered.")


def _started(server: OwnServer) -> str:
    ready = f"ready after {server.started.seconds:.1f} s"
    if not torch.cuda.is_available():
        return ready
    before, after = server.started.triton_cache_entries
    return f"{ready}; kernels in the triton cache before {before or 0}, after {after or 0}"


def _without_key(argv: Sequence[str]) -> list[str]:
    shown = list(argv)
    for i, word in enumerate(shown):
        if word == "--api-key":
            shown[i + 1] = "..."
        elif word.startswith("--api-key="):
            shown[i] = "--api-key=..."
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_spec.bench serving", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--url", help=f"of a running server (default: {DEFAULT_URL})")
    parser.add_argument("--backend", default="sgl-spec", choices=BACKENDS)
    parser.add_argument(
        "--levels",
        nargs="+",
        default=["1:6", "8:24", "48:96"],
        metavar="C:N",
        help="concurrency, and how many of the first prompts are sent (C alone: all of them)",
    )
    parser.add_argument("--prompts", default="bench96", help="a bundled file's name, or a path")
    parser.add_argument("--warmup", default="warm36", help="likewise")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--extra-request-body",
        default="{}",
        metavar="JSON",
        help="laid over every request's body, such as "
        '\'{"sampling_params": {"frequency_penalty": 0.5}}\'',
    )
    parser.add_argument("--model", help="for OpenAI's interface; default: the first of /v1/models")
    parser.add_argument("--flush-path", help="POSTed before a level (openai: default none)")
    parser.add_argument("--api-key")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of one request")
    parser.add_argument(
        "--again",
        action="store_true",
        help="each level twice: the second time an n-gram drafter has seen its texts",
    )
    parser.add_argument("--json", help="append a JSON row for each level to this file")
    parser.add_argument("--ready-timeout", type=float, default=600.0, help="seconds, with --launch")
    parser.add_argument(
        "--launch",
        nargs=argparse.REMAINDER,
        metavar="FLAG",
        help="start a server of ours with all the flags that follow, and stop it at the end",
    )
    return parser
