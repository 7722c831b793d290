"""`python -m sgl_spec.training data`: token shards of prompts with the target's own answers."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from sgl_spec.errors import ConfigError
from sgl_spec.models.checkpoint import resolve_checkpoint
from sgl_spec.models.loader import load_model
from sgl_spec.training.checks import check_directory, chosen_device
from sgl_spec.training.maker import Maker, Options
from sgl_spec.training.writing import ChatText

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> None:
    """Write or complete one part of a data directory."""
    started = time.monotonic()
    options = parse(argv)
    directory = resolve_checkpoint(options.model_path)
    dtype = "float32" if torch.device(options.device).type == "cpu" else "bfloat16"
    if torch.device(options.device).index is not None:
        torch.cuda.set_device(options.device)  # CUDA graphs are captured on the current device
    model = load_model(directory, device=options.device, dtype=dtype)
    writer = Maker(options, model, ChatText(directory)).run()
    logger.info(
        "part %d of %d holds %d sequences, %d tokens; this run took %.0f s",
        options.part,
        options.parts,
        sum(shard["sequences"] for shard in writer.manifest["shards"]),
        writer.num_tokens,
        time.monotonic() - started,
    )


def parse(argv: Sequence[str]) -> Options:
    """Options from the command line; `ConfigError` for values out of range."""
    args = _parser().parse_args(argv)
    part, parts = _part(args.part)
    low, high = args.temperature
    checks = {
        "--tokens": (args.tokens, args.tokens >= 1, "at least 1"),
        "--greedy-share": (args.greedy_share, 0 <= args.greedy_share <= 1, "0 to 1"),
        "--temperature": ((low, high), 0 < low <= high <= 2, "two numbers, 0 < low <= high <= 2"),
        "--max-new-tokens": (args.max_new_tokens, args.max_new_tokens >= 1, "at least 1"),
        "--max-prompt-tokens": (args.max_prompt_tokens, args.max_prompt_tokens >= 8, "at least 8"),
        "--time-limit": (args.time_limit, args.time_limit > 0, "above 0"),
    }
    for flag, (value, fine, allowed) in checks.items():
        if not fine:
            raise ConfigError(f"{flag} {value} is out of range; allowed: {allowed}.")
    check_directory(args.out)
    on_cpu = chosen_device(args.device).type == "cpu"
    if args.attention == "triton" and on_cpu:
        raise ConfigError("--attention triton needs a GPU; allowed on a CPU: torch.")
    batch_size = args.batch_size or (8 if on_cpu else 1536)
    if batch_size < 1:
        raise ConfigError(f"--batch-size {batch_size} is out of range; allowed: at least 1.")
    return Options(
        model_path=args.model_path,
        out=args.out,
        prompts=args.prompts,
        exclude=tuple(args.exclude),
        tokens=-(-args.tokens // parts),
        device=args.device,
        batch_size=batch_size,
        seed=args.seed,
        greedy_share=args.greedy_share,
        temperatures=(low, high),
        max_new=args.max_new_tokens,
        max_prompt=args.max_prompt_tokens,
        part=part,
        parts=parts,
        deadline=time.monotonic() + args.time_limit,
        attention=args.attention or ("torch" if on_cpu else "triton"),
        graphs=args.graphs,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_spec.training data",
        description="Let a model answer prompts, many at a time, and keep prompts and answers as "
        "token shards. A run that ended early is completed by the same command.",
    )
    add = parser.add_argument
    add("--model-path", default="smollm2", help="directory, hub id or smollm2 (default)")
    add("--out", type=Path, required=True, help="data directory to write")
    add("--prompts", type=Path, help=".jsonl with a `prompt` in each row; default: the package's")
    add(
        "--exclude",
        type=Path,
        nargs="*",
        default=[],
        help=".jsonl files whose texts must not be trained on: prompts like them are dropped",
    )
    add("--tokens", type=int, default=1_000_000, help="tokens of all parts together (default 1M)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--batch-size", type=int, help="rows generated at a time (default: GPU 1536, CPU 8)")
    add("--seed", type=int, default=0)
    add("--greedy-share", type=float, default=0.65, help="share of greedy answers (default 0.65)")
    add(
        "--temperature",
        type=float,
        nargs=2,
        default=(0.3, 1.0),
        metavar=("LOW", "HIGH"),
        help="range of the other answers' temperatures (default 0.3 1.0)",
    )
    add("--max-new-tokens", type=int, default=256, help="of an answer (default 256)")
    add("--max-prompt-tokens", type=int, default=1536, help="longer prompts are dropped")
    add("--part", default="0/1", metavar="I/N", help="this process writes part I of N (from 0)")
    add("--time-limit", type=float, default=float("inf"), help="seconds, loading included")
    add("--attention", choices=("triton", "torch"), help="default: triton on a GPU")
    add("--no-graphs", dest="graphs", action="store_false", help="no CUDA graphs")
    return parser


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts) <= 100):
        raise ConfigError(f"--part {text} is not I/N with 0 <= I < N <= 100.")
    return int(part), int(parts)
