"""Where the model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sgl_spec.errors import ConfigError
from sgl_spec.kept import cpu_name


def resolve_device(asked: str) -> torch.device:
    """The device that --device names; auto is the GPU when torch sees one. `ConfigError` for a GPU
    that is not there."""
    if asked == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        # float32 is to be float32: a text must not depend on the shape of a product.
        torch.set_float32_matmul_precision("highest")
        return torch.device("cuda", torch.cuda.current_device())
    if asked == "auto":
        return torch.device("cpu")
    built = torch.version.cuda
    reason = (
        f"this torch {torch.__version__} was built without CUDA (one with it, "
        "several GB, comes with the PIP_ARGS of the Makefile)"
        if built is None
        else (f"torch {torch.__version__}, built for CUDA {built}, sees none")
    )
    raise ConfigError(
        f"--device must be cpu or auto, got cuda: it needs an NVIDIA GPU, and {reason}.",
        param="device",
    )


@contextmanager
def fitting(what: str, device: torch.device) -> Iterator[None]:
    """`ConfigError` instead of torch's own error where a GPU's memory does not hold `what`."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        total = torch.cuda.get_device_properties(device).total_memory
        raise ConfigError(
            f"{what} do not fit the {device_name(device)} and its {total / 1e9:.1f} GB, or others "
            f"use it too: {str(error).splitlines()[0]}"
        ) from error


def device_name(device: torch.device) -> str:
    """What the device calls itself, for reports."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name()
