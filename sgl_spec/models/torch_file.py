"""The one place that reads a file of `torch.save`: tensors and plain containers, never code."""

from __future__ import annotations

from pathlib import Path

import torch

from sgl_spec.errors import ConfigError


def load_torch_file(path: Path) -> object:
    """What the file holds, its tensors mapped to the file where its format allows that.

    Raises `ConfigError` naming the file if it cannot be read, or if it asks for anything but
    tensors, numbers, strings and containers of them.
    """
    try:
        with path.open("rb") as handle:
            zipped = handle.read(4) == b"PK\x03\x04"  # before torch 1.6 files were no archives
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:  # which of many depends on what is broken
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ConfigError(f"Cannot read {path} as tensors saved by torch: {reason}") from error
