"""Options, device and provenance that the training commands share."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sgl_spec.bench.report import versions
from sgl_spec.engine.device import device_name
from sgl_spec.errors import ConfigError
from sgl_spec.models.checkpoint import resolve_checkpoint
from sgl_spec.training import chain_attention, losses
from sgl_spec.training.checks import check_directory, chosen_device
from sgl_spec.training.feed import Feed
from sgl_spec.training.loop import CHECKPOINT, LoopOptions
from sgl_spec.training.losses import LOSSES
from sgl_spec.training.shards import TokenShards
from sgl_spec.training.target import Target

logger = logging.getLogger(__name__)

OPTIMIZERS = ("adamw", "muon")
DTYPES = ("bfloat16", "float32")


def add_common(parser: argparse.ArgumentParser, *, lr: float, optimizer: str) -> None:
    """What every trained draft is told. lr, optimizer: this draft's defaults."""
    add = parser.add_argument
    add("--model-path", dest="target", default="smollm2", help="the target; default smollm2")
    add("--data", type=Path, nargs="+", required=True, help="directories of the `data` command")
    add("--out", type=Path, required=True, help="where weights, config and checkpoint go")
    add("--steps", type=int, help="train for this many batches")
    add("--time-limit", type=float, metavar="SECONDS", help="train for this long, start included")
    add("--resume", action="store_true", help="go on from the checkpoint in --out")
    add("--init-from", type=Path, metavar="DIR", help="start from the weights of an earlier --out")
    add("--lr", type=float, default=lr, help=f"peak learning rate (default {lr})")
    add("--optimizer", choices=OPTIMIZERS, default=optimizer, help=f"default {optimizer}")
    add("--warmup", type=float, default=0.02, help="share of the run (default 0.02)")
    add("--weight-decay", type=float, default=0.01, help="default 0.01")
    add("--batch-tokens", type=int, default=32768, help="padded tokens of a batch (default 32768)")
    add("--max-len", type=int, default=2048, help="longer sequences are cut (default 2048)")
    add(
        "--prompt-share",
        type=float,
        default=0.1,
        help="share of prompt positions learned beside the answers (default 0.1)",
    )
    add("--loss", choices=LOSSES, default="kl", help="tv, lk: of the share accepted (default kl)")
    add("--label-temperature", type=float, default=1.0, help="of the target's labels (default 1)")
    add("--held-out", type=float, default=0.02, help="share of prompts kept apart (default 0.02)")
    add("--eval-tokens", type=int, default=65536, help="held-out tokens judged (default 65536)")
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=DTYPES, help="of the computation (default bfloat16; float32 on a CPU)")
    add("--compile", action=argparse.BooleanOptionalAction, help="fuse kernels (default: on CUDA)")
    add("--save-every", type=float, default=120, metavar="SECONDS")
    add("--eval-every", type=float, default=60, metavar="SECONDS")
    add("--log-every", type=float, default=10, metavar="SECONDS")


@dataclass(frozen=True, slots=True)
class Setting:
    """The parsed options with what they stand for."""

    args: argparse.Namespace
    target: Target
    shards: TokenShards
    loop: LoopOptions
    compiled: bool

    def feed(self, reach: int) -> Feed:
        """The training batches; see `Feed` for `reach`."""
        args = self.args
        return Feed(
            self.shards,
            tokens=args.batch_tokens,
            max_len=min(args.max_len, args.batch_tokens),
            seed=args.seed,
            prompt_share=args.prompt_share,
            reach=reach,
            device=self.target.device,
        )


def prepare(args: argparse.Namespace) -> Setting:
    """Load data and target. Raises `ConfigError` for values out of range, an --out that holds a
    trained draft, a --held-out that holds nothing out, and data of another target's vocabulary."""
    started = time.monotonic()
    _check(args)
    if args.resume and args.init_from is not None:
        raise ConfigError("Give one of --resume and --init-from.")
    _check_out(args.out, args.resume)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = chosen_device(args.device)
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    compiled = device.type == "cuda" if args.compile is None else args.compile
    if compiled:
        # Lengths and batch sizes vary; past the limit a function would run unfused.
        torch._dynamo.config.recompile_limit = 32
        chain_attention.compile_rows()
        losses.compile_rows()
    shards = TokenShards(args.data, args.held_out)
    shards.require_held_out()
    shards.require_training()
    target = Target(resolve_checkpoint(args.target), dtype=dtype, device=device, compiled=compiled)
    if shards.vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"The data was made by {shards.target} with {shards.vocab_size} token ids, "
            f"--model-path {args.target} has {target.config.vocab_size}."
        )
    logger.info(
        "%d sequences, %d tokens, %d of the sequences held out; %s in %s on %s",
        len(shards),
        shards.num_tokens,
        len(shards.held_out()),
        args.target,
        str(dtype).removeprefix("torch."),
        device_name(device),
    )
    return Setting(args, target, shards, _loop_options(args, started), compiled)


def _check_out(out: Path, resume: bool) -> None:
    """A run that does not go on from what is in --out must not replace it."""
    check_directory(out)
    found = [name for name in ("model.safetensors", CHECKPOINT) if (out / name).exists()]
    if found and not resume:
        raise ConfigError(
            f"--out {out} holds {' and '.join(found)} of an earlier run; give --resume to go on "
            "from there, or another --out."
        )


def _loop_options(args: argparse.Namespace, started: float) -> LoopOptions:
    return LoopOptions(
        out=args.out,
        started=started,
        steps=args.steps,
        seconds=args.time_limit,
        lr=args.lr,
        optimizer=args.optimizer,
        warmup=args.warmup,
        weight_decay=args.weight_decay,
        save_every=args.save_every,
        eval_every=args.eval_every,
        log_every=args.log_every,
        resume=args.resume,
    )


def _check(args: argparse.Namespace) -> None:
    limits = {
        "steps": (1, float("inf")),
        "time_limit": (1, float("inf")),
        "lr": (1e-9, 10.0),
        "warmup": (1e-6, 0.9),
        "weight_decay": (0.0, 1.0),
        "batch_tokens": (1, 1 << 24),
        "max_len": (8, 1 << 20),
        "prompt_share": (0.0, 1.0),
        "label_temperature": (0.05, 10.0),
        "eval_tokens": (1, 1 << 30),
    }
    for name, (low, high) in limits.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} {value} is out of range; allowed: {low:g} to {high:g}.")


def provenance(setting: Setting, run: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Everything that says where weights came from; holds no path of the machine."""
    args, shards = setting.args, setting.shards
    used = ("batch_tokens", "max_len", "prompt_share", "loss", "label_temperature", "seed")
    return {
        "target": Path(args.target).name,
        "data": [manifest for folder in args.data for manifest in _manifests(folder)],
        "sequences": len(shards),
        "tokens": shards.num_tokens,
        "held_out_share": args.held_out,
        **{name: getattr(args, name) for name in used},
        **run,
        **extra,
        "device": device_name(setting.target.device),
        "dtype": str(setting.target.dtype).removeprefix("torch."),
        "versions": versions(),
    }


def stored_tensors(directory: Path) -> dict[str, Tensor]:
    """The tensors of an earlier run's model.safetensors, on the CPU."""
    path = directory / "model.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"Cannot read the weights in {path}: {error}.") from error


def earlier_weights(directory: Path, fresh: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights that `fresh` names, as stored in `directory`."""
    stored = stored_tensors(directory)
    found = {}
    for name, weight in fresh.items():
        earlier = stored.get(name)
        if earlier is None or earlier.shape != weight.shape:
            seen = "absent" if earlier is None else f"of shape {list(earlier.shape)}"
            raise ConfigError(
                f"--init-from {directory}: {name} is {seen}, this run needs {list(weight.shape)}."
            )
        found[name] = earlier.to(weight)
    return found


def write_tensors(out: Path, tensors: dict[str, Tensor]) -> None:
    """model.safetensors, complete or not there at all."""
    partial = out / ".model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.rename(out / "model.safetensors")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Indented, with a newline at the end."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _manifests(folder: Path) -> list[dict[str, Any]]:
    """Each part's manifest without its list of shards, and the digest of the whole file."""
    found = []
    for path in sorted(folder.glob("part-[0-9][0-9].json")):
        content = path.read_bytes()
        manifest = json.loads(content)
        shards = manifest.pop("shards")
        totals = {key: sum(shard[key] for shard in shards) for key in ("sequences", "tokens")}
        digest = hashlib.sha256(content).hexdigest()
        found.append(manifest | totals | {"manifest_sha256": digest})
    return found
