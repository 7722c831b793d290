"""What the training commands refuse before they load anything."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from sgl_spec.errors import ConfigError


def chosen_device(asked: str) -> torch.device:
    """The device that --device names: cpu, cuda or cuda:N. `ConfigError` for another one, and for
    a GPU that is not there."""
    kind, _, number = asked.partition(":")
    known = asked == "cpu" or (kind == "cuda" and (number.isdecimal() or asked == "cuda"))
    if not known:
        raise ConfigError(f"--device {asked} is unknown; allowed: cpu, cuda or cuda:N.")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(number or 0) >= found:
        raise ConfigError(f"--device {asked} is not there; torch {torch.__version__} sees {found}.")
    return torch.device(asked)


def check_directory(out: Path) -> None:
    """`ConfigError` unless --out is a directory that can be written to, or can be made."""
    try:
        nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be used: {error.strerror}.") from error
    if not nearest.is_dir():
        raise ConfigError(f"--out {out} cannot be a directory: {nearest} is a file.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {out} cannot be written: {nearest} allows it to others only.")
