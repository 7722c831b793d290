"""Which backend runs where, and what each refuses by name."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from sgl_spec.errors import ConfigError
from sgl_spec.layers.backend import (
    BACKENDS,
    Backend,
    check_backend,
    kernels_for,
    resolve_backend,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(params=[True, False], ids=["interpreted", "compiled"])
def interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setenv("TRITON_INTERPRET", "1" if request.param else "0")
    return bool(request.param)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Packages that are there; tests take some away."""
    there = {"triton", "flashinfer"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in there else None)
    return there


def refused(*args: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_backend(*args)
    assert caught.value.message.startswith(f"--attention-backend {args[0]} ")
    return caught.value.message


def test_defaults(installed: set[str]) -> None:
    assert (kernels_for(GPU), kernels_for(CPU)) == ("triton", "torch")
    assert kernels_for(torch.device("meta")) == "torch"
    assert resolve_backend(None, GPU, 128, BF16) == Backend("triton", "triton")
    assert resolve_backend(None, CPU, 10, BF16) == Backend("torch", "torch")
    assert resolve_backend("torch", GPU, 10, FP32) == Backend("torch", "torch")
    assert resolve_backend("flashinfer", GPU, 128, BF16) == Backend("flashinfer", "triton")


def test_what_goes_into_a_graph() -> None:
    kinds = {name: Backend(name, kernels_for(GPU, name)) for name in BACKENDS}
    capturable = {name: kind.capturable for name, kind in kinds.items()}
    assert capturable == {"torch": False, "triton": True, "flashinfer": False}


def test_unknown() -> None:
    assert refused("fa3", GPU, 64, BF16).endswith("is unknown; allowed: torch, triton, flashinfer.")


def test_triton(interpreted: bool, installed: set[str]) -> None:
    for dtype in (FP32, BF16, FP16):
        check_backend("triton", GPU, 256, dtype)
    assert "dtypes float32, float16, bfloat16, not float64" in refused(
        "triton", GPU, 64, torch.float64
    )
    for dim in (8, 17, 258):
        assert f"an even head_dim of 16 to 256, not {dim};" in refused("triton", GPU, dim, BF16)
    installed.remove("triton")
    assert "triton, which is not installed" in refused("triton", GPU, 64, BF16)


def test_triton_on_a_cpu(interpreted: bool, installed: set[str]) -> None:
    if interpreted:
        check_backend("triton", CPU, 16, FP32)
        check_backend("triton", CPU, 16, FP16)
        assert "float32, float16, not bfloat16" in refused("triton", CPU, 16, BF16)
    else:
        assert "needs a GPU, not cpu; --attention-backend torch" in refused("triton", CPU, 16, FP32)


def test_flashinfer(interpreted: bool, installed: set[str]) -> None:
    check_backend("flashinfer", GPU, 128, BF16)
    check_backend("flashinfer", GPU, 64, FP16)
    assert "needs a GPU, not cpu" in refused("flashinfer", CPU, 128, BF16)
    assert "float16, bfloat16, not float32" in refused("flashinfer", GPU, 128, FP32)
    assert "64, 128, 256, not 80" in refused("flashinfer", GPU, 80, BF16)
    installed.remove("flashinfer")
    missing = refused("flashinfer", GPU, 128, BF16)
    assert "the package flashinfer (pip install .[flashinfer])" in missing
