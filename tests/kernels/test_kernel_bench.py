"""The kernel benchmark's cases run, in the interpreter at toy sizes and on a GPU as they are."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_runs import INTERPRETED

from sgl_spec.bench import kernel_cases, kernels, tree_cases
from sgl_spec.errors import ConfigError
from sgl_spec_kernels import filters, gated_gemm, reject, sample

TOY = {
    "HIDDEN": 32,
    "HEADS": 4,
    "KV_HEADS": 2,
    "DIM": 16,
    "INNER": 32,
    "VOCAB": 40,
    "DRAFT_VOCAB": 24,
    "DEVICE": "cpu",
    "_BF16": torch.float32,  # the interpreter does not multiply bfloat16
}


@INTERPRETED
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_case_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TOY.items():
        monkeypatch.setattr(kernel_cases, name, value)
    monkeypatch.setattr(filters, "BLOCK", 64)
    monkeypatch.setattr(sample, "BLOCK", 64)
    monkeypatch.setattr(reject, "BLOCK", 64)
    monkeypatch.setitem(kernel_cases.LINEARS, "qkv", (128, 32))
    monkeypatch.setitem(kernel_cases.LINEARS, "o", (32, 64))
    monkeypatch.setitem(kernel_cases.LINEARS, "gate_up", (64, 32))
    monkeypatch.setitem(kernel_cases.LINEARS, "down", (32, 32))
    cases = [
        kernel_cases.attention(1, 2, 30),
        kernel_cases.chunk(3),
        kernel_cases.linear("o", 2, 32, 64),
        kernel_cases.linear("qkv", 1, 48, 32),
        kernel_cases.norm(2),
        kernel_cases.rope(2),
        kernel_cases.gate(2),
        kernel_cases.gated(2, gated_gemm.GatedShape(16, 16, 4, 3)),
        kernel_cases.layer(1, 2, 9),
        tree_cases.topk(1, 24),
        tree_cases.topk(1, 40),
        tree_cases.trees(1),
        tree_cases.moving(2, layers=1),
        tree_cases.ends(2),
        tree_cases.walk(1, warm=False),
        tree_cases.walk(1, warm=True, kind="top_k, top_p"),
        *(tree_cases.cuts(1, kind) for kind in tree_cases.FILTERED),
        tree_cases.levels(1, warm=True),
        tree_cases.rejection(1),
    ]
    for case in cases:
        case.prepare()()
        if case.baseline is not None:
            case.baseline()()
        assert case.bytes > 0


def test_all_cases_have_names_of_their_own() -> None:
    cases = [*kernel_cases.model_cases(), *tree_cases.tree_cases()]
    names = [case.name for case in cases]
    assert len(names) == len(set(names))
    assert len(names) > 30


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="CUDA"):
        kernels.main([])


@pytest.mark.gpu
def test_times_are_above_the_floor() -> None:
    bandwidth = kernels.read_bandwidth()
    for case in (kernel_cases.linear("o", 8, 4096, 4096), kernel_cases.attention(48, 8, 600)):
        row = kernels.measure(case, bandwidth)
        assert row["over_floor"] > 0.95, "faster than memory: the inputs lie in a cache"
        assert math.isfinite(row["us"])
