"""Load on a running server: a closed loop of streamed requests at each of some concurrencies.

Tokens per second, time to first token, time per token, inter-token latencies (`bench.streams` says
what these are) and accept length, of this server, SGLang (/generate) or any server with OpenAI's
completions. Before each level some warm-up prompts are served at its concurrency, then the caches
are flushed. Lines of a prompt file are {"prompt": text} or {"messages": [...]}; the latter go to
/v1/chat/completions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson
import uvloop

from sgl_spec.bench.load import Call, Target, ask, closed_loop
from sgl_spec.bench.report import provenance, say, table, write_row
from sgl_spec.bench.streams import Level, level_of, read_answer
from sgl_spec.errors import ConfigError, SglSpecError

BACKENDS = ("sgl-spec", "sglang", "openai")
_SHOWN = re.compile(
    r"version|model_path|dtype|device|attention_backend|page_size|max_running_requests|"
    r"max_total_\w*tokens|mem_fraction_static|disable_\w+|cuda_graph_\w+|chunked_prefill_size|"
    r"acceptance_rule|simulate_acc_len|speculative_\w+|random_seed|schedule_policy"
)
_VLLM_ROUNDS = "vllm:spec_decode_num_drafts_total"
_VLLM_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


@dataclass(frozen=True, slots=True)
class Workload:
    """How every request is answered."""

    max_tokens: int
    temperature: float
    ignore_eos: bool


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

    def call(self, line: dict[str, Any]) -> Call:
        """The request for a line of a prompt file."""
        if "messages" in line:
            body = {**self._openai, "messages": line["messages"]}
            return Call("/v1/chat/completions", body)
        if self.kind == "openai":
            return Call("/v1/completions", {**self._openai, "prompt": line["prompt"]})
        params = {
            "max_new_tokens": self.workload.max_tokens,
            "temperature": self.workload.temperature,
            "ignore_eos": self.workload.ignore_eos,
        }
        return Call(
            "/generate", {"text": line["prompt"], "sampling_params": params, "stream": True}
        )

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


async def run_level(backend: Backend, calls: Sequence[Call], concurrency: int) -> Level:
    """One closed loop."""
    before = await backend.vllm_rounds()
    replies = await closed_loop(backend.target, calls, concurrency)
    answers = [read_answer(reply) for reply in replies]
    after = await backend.vllm_rounds()
    if before is not None and after is not None and after[0] > before[0]:
        answers[0].verified = int(after[0] - before[0])
        answers[0].emitted = after[0] - before[0] + after[1] - before[1]
    return level_of(answers, concurrency, backend.workload.max_tokens)


async def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[Level]]:
    """All levels, and the conditions under which they ran."""
    target = Target(options.url, options.api_key, options.timeout)
    prompts, warm = read_prompts(options.prompts), read_prompts(options.warmup)
    levels = read_levels(options.levels, len(prompts))
    workload = Workload(options.max_tokens, options.temperature, options.ignore_eos)
    model = options.model
    if model is None:
        model = (await _json(target, "/v1/models"))["data"][0]["id"]
    backend = Backend(options.backend, target, workload, model)
    found, flushed = [], False
    for concurrency, count in levels:
        say(f"Concurrency {concurrency}: warming up, then {count} requests.")
        warming = [backend.call(line) for line in warm[: max(2, concurrency)]]
        failed = [r.problem for r in await closed_loop(target, warming, concurrency) if r.problem]
        if failed:
            say(f"  {len(failed)} of {len(warming)} warm-up requests failed: {failed[0]}")
        flushed = await backend.flush(options.flush_path)
        calls = [backend.call(line) for line in prompts[:count]]
        found.append(await run_level(backend, calls, concurrency))
        for problem in found[-1].problems:
            say(f"  {found[-1].errors} of {count} failed, for instance: {problem}")
    conditions = {
        "backend": options.backend,
        "model": model,
        "workload": asdict(workload) | {"prompts": options.prompts, "warmup": options.warmup},
        "flushed": flushed,
        "server": await backend.about(),
    }
    return conditions, found


def print_levels(levels: Sequence[Level]) -> None:
    """The table; times in ms."""
    header = ["concurrency", "requests", "errors", "tokens/s", "requests/s"]
    header += ["TTFT p50", "p99", "TPOT p50", "p99", "ITL p50", "p99", "accept length"]
    rows = []
    for level in levels:
        times: list[object] = []
        for ms in (level.ttft_ms, level.tpot_ms, level.itl_ms):
            times += ["-", "-"] if ms is None else [ms.p50, ms.p99]
        length = "-" if level.accept_length is None else f"{level.accept_length:.3f}"
        mark = "" if level.simulated is None else " simulated"
        first = [level.concurrency, level.requests, level.errors]
        rows.append([*first, level.tokens_per_s, level.requests_per_s, *times, f"{length}{mark}"])
    print(table(header, rows))


def main(argv: Sequence[str]) -> None:
    """`python -m sgl_spec.bench serving`. Raises `SglSpecError` when a level had no answer."""
    options = _parser().parse_args(argv)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        conditions, levels = runner.run(run(options))
    print_levels(levels)
    if options.json:
        command = ["python", "-m", "sgl_spec.bench", "serving", *_without_key(argv)]
        row = {**provenance(command), **conditions, "levels": [asdict(one) for one in levels]}
        write_row(Path(options.json), row)
    if any(level.errors == level.requests for level in levels):
        raise SglSpecError("No request of a level was answered.")


def _without_key(argv: Sequence[str]) -> list[str]:
    shown = list(argv)
    for i, word in enumerate(shown):
        if word == "--api-key":
            shown[i + 1] = "..."
        elif word.startswith("--api-key="):
            shown[i] = "--api-key=..."
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sgl_spec.bench serving", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--backend", default="sgl-spec", choices=BACKENDS)
    parser.add_argument(
        "--levels",
        nargs="+",
        default=["1:6", "8:24", "48:96"],
        metavar="C:N",
        help="concurrency, and how many of the first prompts are sent",
    )
    parser.add_argument("--prompts", default="bench96", help="a bundled file's name, or a path")
    parser.add_argument("--warmup", default="warm36", help="likewise")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--model", help="for OpenAI's interface; default: the first of /v1/models")
    parser.add_argument("--flush-path", help="POSTed before a level (openai: default none)")
    parser.add_argument("--api-key")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of one request")
    parser.add_argument("--json", help="append one JSON row to this file")
    return parser
