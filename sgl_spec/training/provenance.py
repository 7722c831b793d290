"""What data and weights say about where they come from; no path of the machine."""

from __future__ import annotations

import platform
from importlib import metadata

import torch


def device_name(device: torch.device) -> str:
    """The card's name, or the processor's architecture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide the numbers."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("sgl-spec", "numpy", "tokenizers", "safetensors"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
