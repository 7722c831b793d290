"""FlashInfer's attention, which can stand in for our kernel on the fused path."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fused_runs import NEAR, batch_of, both, compare
from kernel_runs import INTERPRETED, relative_error
from model_runs import Piece, Run
from tiny import make_tiny
from torch import Tensor

from sgl_spec.layers.backend import Backend
from sgl_spec.layers.device_attention import attention_of
from sgl_spec.models.decoder import Decoder
from sgl_spec.models.loader import load_model

PARENTS = [-1, 0, 0, 1, 2, 4]
CHUNKS = [
    [Piece(0, 0, range(5, 14)), Piece(2, 0, [9])],
    [Piece(1, 0, range(30, 35)), Piece(0, 9, range(60, 64)), Piece(2, 1, [8, 3])],
]
TREES = [[Piece(0, 13, [3, 4, 5, 6, 7, 8], PARENTS), Piece(2, 3, [7], [-1])]]


class Wrapper:
    """FlashInfer's wrapper as its documentation describes it, plainly: pages of one slot."""

    def __init__(self, space: Tensor, layout: str, backend: str = "auto") -> None:
        assert space.dtype is torch.uint8
        assert layout == "NHD"
        self.masks = backend == "fa2"

    def plan(
        self, q_starts: Tensor, starts: Tensor, slots: Tensor, last: Tensor, **kw: Any
    ) -> None:
        assert all(t.dtype is torch.int32 for t in (q_starts, starts, slots, last))
        assert (last == 1).all()
        assert kw["page_size"] == 1
        assert (kw["custom_mask"] is None) == kw["causal"]
        assert kw["causal"] or self.masks
        self.rows, self.columns = pairwise(q_starts.tolist()), pairwise(starts.tolist())
        self.spans = list(zip(self.rows, self.columns, strict=True))
        self.slots, self.kw = slots.long(), kw

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
        assert q.is_contiguous()
        out, at, group = torch.empty_like(q), 0, q.shape[1] // self.kw["num_kv_heads"]
        assert q.shape[1] == self.kw["num_qo_heads"]
        for (r0, r1), (c0, c1) in self.spans:
            n, m = r1 - r0, c1 - c0
            k, v = (page[self.slots[c0:c1], 0].repeat_interleave(group, 1) for page in pages)
            seen = torch.ones(n, m, dtype=torch.bool).tril(m - n)
            if self.kw["custom_mask"] is not None:
                seen = self.kw["custom_mask"][at : at + n * m].view(n, m)
                at += n * m
            scores = torch.einsum("ihd,jhd->hij", q[r0:r1], k) * self.kw["sm_scale"]
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[r0:r1] = torch.einsum("hij,jhd->ihd", weights, v)
        return out


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("llama"))


def use(model: Decoder, name: str) -> None:
    """Another backend's attention in a model that is there."""
    fused = model.stack.fused
    assert fused is not None
    fused._attention = attention_of(Backend(name, "triton"), fused._attention._heads)


@INTERPRETED
def test_flashinfer(flashinfer: None, tiny: Path) -> None:
    plain, fused = both(tiny)
    use(fused, "flashinfer")
    fused.reserve(2, 2)
    compare(plain, fused, [*CHUNKS, *TREES])


@INTERPRETED
def test_flashinfer_under_a_growing_tree(flashinfer: None, tiny: Path) -> None:
    """Columns of the tree that are there, and a word with its sign bit set."""
    plain, fused = both(tiny)
    use(fused, "flashinfer")
    found = []
    for model in (plain, fused):
        run = Run(model, 1, 80)
        run.logits(Piece(0, 0, range(5, 14)))
        tree = batch_of(run, Piece(0, 9, range(64), [-1] * 64))
        with torch.inference_mode():
            model.forward(tree, run.kv)
            rows = {
                name: getattr(tree, name)[61:]
                for name in ("tokens", "positions", "slots", "mask_words")
            }
            part = replace(
                tree, **rows, q_starts=torch.tensor([0, 3]), tree_lens=torch.tensor([61])
            )
            found.append(model.forward(part, run.kv))
    torch.testing.assert_close(found[1], found[0], **NEAR)


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="not installed")
def test_flashinfer_on_the_gpu(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, hidden=128, heads=2, kv_heads=1)  # heads of 64
    exact = load_model(directory, device="cuda", dtype="float32", attention_backend="torch")
    half = load_model(directory, device="cuda", dtype="bfloat16", attention_backend="flashinfer")
    assert (half.kernels, half.backend.capturable) == ("triton", False)
    check_half(exact, half)


def check_half(exact: Decoder, half: Decoder) -> None:
    """Logits of the steps in bfloat16 against float32."""
    runs = [Run(model, 3, 60) for model in (exact, half)]
    for pieces in [*CHUNKS, *TREES]:
        found = []
        for run in runs:
            with torch.inference_mode():
                found.append(run.model.logits(run.model.forward(batch_of(run, *pieces), run.kv)))
        assert relative_error(found[1], found[0]) < 4e-2
