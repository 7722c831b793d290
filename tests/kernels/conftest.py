"""Random inputs of kernel tests: the same each time in CI's interpreter, fresh ones on a GPU."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def _inputs() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        torch.manual_seed(0)
    else:
        print("seed of the inputs:", torch.seed())  # shown where the test fails


@pytest.fixture
def few_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is split less than it would be for a card: the interpreter is slow."""
    if request.node.get_closest_marker("gpu") is None:
        from sgl_spec_kernels import tree_attn

        monkeypatch.setattr(tree_attn, "_PROGRAMS", 8)
