"""Which code computes: plain torch, or the fused Triton kernels; and whose attention.

`--attention-backend` names one of three:
- torch: plain operations on any device, the reference;
- triton: the fused kernels, with their attention. Nothing in a forward reads the device, so it can
  be captured in a CUDA graph. The default on a GPU;
- flashinfer: the fused kernels with FlashInfer's attention, where that package is installed. It
  plans each forward on the host, which must know the lengths for it: not captured in a graph.

A model decides when it is built; whoever holds one asks `model.kernels`.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Literal

import torch

from sgl_spec.errors import ConfigError

Kernels = Literal["torch", "triton"]

BACKENDS = ("torch", "triton", "flashinfer")
_FLAG = "--attention-backend"
_TRITON_HEADS = (16, 256)
_FLASHINFER_HEADS = (64, 128, 256)
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Backend:
    """What a model runs on. name: one of `BACKENDS`. strict: a row's results depend on its own text
    alone, to the last bit, whatever the batch, the tree or the chunk."""

    name: str
    kernels: Kernels
    strict: bool = False

    @property
    def capturable(self) -> bool:
        """Whether a forward can be captured in a CUDA graph."""
        return self.name == "triton"


def kernels_for(device: torch.device, name: str | None = None) -> Kernels:
    """The kernels that run on `device` with `--attention-backend` name (None: not given).

    On a CPU the fused kernels run in Triton's interpreter, which is how they are tested: only where
    TRITON_INTERPRET=1, and only when asked for by name.
    """
    name = name or ("triton" if device.type == "cuda" else "torch")
    return "torch" if name == "torch" else "triton"


def resolve_backend(
    name: str | None,
    device: torch.device,
    head_dim: int,
    dtype: torch.dtype,
    *,
    strict: bool = False,
) -> Backend:
    """The backend of a model; errors as in `check_backend`."""
    name = name or kernels_for(device)
    check_backend(name, device, head_dim, dtype)
    if strict and name != "triton":
        raise ConfigError(
            f"--strict needs {_FLAG} triton, got {name}: the order of its sums is not known.",
            param="strict",
        )
    return Backend(name, kernels_for(device, name), strict)


def check_backend(name: str, device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    """Raise `ConfigError` unless `name` can run a model of these heads."""
    if name not in BACKENDS:
        raise ConfigError(f"{_FLAG} {name} is unknown; allowed: {', '.join(BACKENDS)}.")
    if name == "triton":
        _check_triton(device, head_dim, dtype)
    elif name == "flashinfer":
        _check_flashinfer(device, head_dim, dtype)


def _check_triton(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        raise _refusal("triton", f"a GPU, not {device}")
    if importlib.util.find_spec("triton") is None:
        raise _refusal("triton", "the package triton, which is not installed")
    low, high = _TRITON_HEADS
    if not low <= head_dim <= high or head_dim % 2:
        raise _refusal("triton", f"an even head_dim of {low} to {high}, not {head_dim}")
    # The interpreter's products of bfloat16 are wrong without a word.
    allowed = (torch.float32, torch.float16) if interpreted else (torch.float32, *_HALF)
    _check_dtype("triton", dtype, allowed)


def _check_flashinfer(device: torch.device, head_dim: int, dtype: torch.dtype) -> None:
    if device.type != "cuda":
        raise _refusal("flashinfer", f"a GPU, not {device}")
    if importlib.util.find_spec("flashinfer") is None:
        raise _refusal("flashinfer", "the package flashinfer (pip install .[flashinfer])")
    if head_dim not in _FLASHINFER_HEADS:
        heads = ", ".join(map(str, _FLASHINFER_HEADS))
        raise _refusal("flashinfer", f"a head_dim of {heads}, not {head_dim}")
    _check_dtype("flashinfer", dtype, _HALF)


def _check_dtype(name: str, dtype: torch.dtype, allowed: tuple[torch.dtype, ...]) -> None:
    if dtype not in allowed:
        names = ", ".join(str(one).removeprefix("torch.") for one in allowed)
        raise _refusal(name, f"one of the dtypes {names}, not {str(dtype).removeprefix('torch.')}")


def _refusal(name: str, need: str) -> ConfigError:
    return ConfigError(
        f"{_FLAG} {name} needs {need}; {_FLAG} torch runs everywhere.", param="attention_backend"
    )
