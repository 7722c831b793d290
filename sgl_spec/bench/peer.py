"""transformers' `generate` on this device: one request at a time, greedy, EOS ignored.

The common baseline beside `serving`, on the first of its prompts. A run of one token tells what a
prompt costs; a second run is measured.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from sgl_spec.bench.offline import Case, Run, Transformers
from sgl_spec.bench.report import provenance, table, write_row
from sgl_spec.bench.serving import read_prompts
from sgl_spec.engine.device import resolve_device
from sgl_spec.errors import ConfigError
from sgl_spec.models.checkpoint import resolve_checkpoint
from sgl_spec.models.config import STORED_DTYPES
from sgl_spec.text import load_tokenizer


def main(argv: Sequence[str]) -> None:
    """`python -m sgl_spec.bench peer`."""
    options = _parser().parse_args(argv)
    device = resolve_device(options.device)
    dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    directory = resolve_checkpoint(options.model_path)
    prompts = _prompts(options, load_tokenizer(directory))
    peer = Transformers(directory, getattr(torch, dtype), device)
    peer.run(Case("warm", prompts[:1], 1), 8)
    runs = [_measured(peer, Case(str(i), [ids], 1), options) for i, ids in enumerate(prompts)]
    found = {
        "model_path": options.model_path,
        "dtype": dtype,
        "device": device.type,
        "prompts": options.prompts,
        "new_tokens": options.max_tokens,
        "tokens_per_s": [run.speed for run in runs],
        "whole_tokens_per_s": [run.whole_speed for run in runs],
    }
    median = statistics.median(run.speed for run in runs)
    whole = statistics.median(run.whole_speed for run in runs)
    header = ["transformers", "prompts", "tokens/s", "with the prompt", "ms a token"]
    print(table(header, [[dtype, len(runs), median, whole, 1e3 / median]]))
    if options.json:
        command = ["python", "-m", "sgl_spec.bench", "peer", *argv]
        write_row(Path(options.json), provenance(command) | found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sgl_spec.bench peer", description=__doc__)
    parser.add_argument("--model-path", default="smollm2")
    parser.add_argument("--prompts", type=int, default=4, help="the first of bench96")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", choices=STORED_DTYPES, help="default: bfloat16 on a GPU")
    parser.add_argument("--json", help="append one JSON row to this file")
    return parser


def _prompts(options: argparse.Namespace, tokenizer: Tokenizer) -> list[list[int]]:
    lines = read_prompts("bench96")
    if not 1 <= options.prompts <= len(lines):
        raise ConfigError(f"--prompts must be from 1 to {len(lines)}, got {options.prompts}.")
    return [tokenizer.encode(line["prompt"]).ids for line in lines[: options.prompts]]


def _measured(peer: Transformers, case: Case, options: argparse.Namespace) -> Run:
    prefill = peer.run(case, 1).seconds
    return replace(peer.run(case, options.max_tokens), prefill=prefill)
