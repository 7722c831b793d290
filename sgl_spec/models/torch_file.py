"""The one place that reads a file of `torch.save`: tensors and plain containers, never code."""

from __future__ import annotations

from pathlib import Path

import torch

from sgl_spec.errors import ConfigError


def load_torch_file(path: Path, flag: str | None = None) -> object:
    """What the file holds, its tensors mapped to the file where its format allows that.

    Raises `ConfigError` naming the file, and the flag it was given with, if it cannot be read or
    asks for anything but tensors, numbers, strings and containers of them.
    """
    named = path if flag is None else f"{flag} {path}"
    try:
        with path.open("rb") as handle:
            zipped = handle.read(4) == b"PK\x03\x04"  # before torch 1.6 files were no archives
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except OSError as error:
        raise ConfigError(f"Cannot read {named}: {error.strerror or error}.") from error
    except Exception as error:  # which of many depends on what is broken
        raise ConfigError(
            f"Cannot read {named}: it is damaged, no file of torch.save, or holds more than "
            "tensors, numbers, strings and containers of them."
        ) from error
