"""The self-check of --strict in the interpreter: equal bits on the path of a GPU, and the name of a
rule that is broken. On a GPU, with more shapes: tests/gpu/test_strict.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernel_runs import INTERPRETED
from tiny import make_tiny

from sgl_spec.engine import strict
from sgl_spec.engine.strict import Case, check_strict, require_strict
from sgl_spec.errors import ConfigError
from sgl_spec.layers import device_attention, linear
from sgl_spec.layers.context import AttnBatch
from sgl_spec.layers.device_attention import Attend, OrderedAttention, TritonAttention
from sgl_spec.layers.unsplit import Pin, Unsplit
from sgl_spec.models.decoder import Decoder
from sgl_spec.models.loader import load_model
from sgl_spec_kernels import ordered_attn, tree_attn
from sgl_spec_kernels.skinny_gemm import GemmShape, GemmWork

pytestmark = INTERPRETED
CASES = (
    Case("a chain"),
    Case("a tree", decoys=1),
    Case("last of 3", (1, 1, 1), others=2, last=True),
)


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow."""
    monkeypatch.setattr(strict, "_TESTED", 3)
    monkeypatch.setattr(strict, "_PREFIX", 14)
    monkeypatch.setattr(strict, "_OTHERS", 2)
    monkeypatch.setattr(strict, "_MOST", 4)
    monkeypatch.setattr(strict, "_cases", lambda prefix, every: iter(CASES))
    monkeypatch.setattr(ordered_attn, "_PROGRAMS", 4)
    for module in (ordered_attn, device_attention):
        monkeypatch.setattr(module, "tile_columns", lambda *_: 16)
    monkeypatch.setattr(tree_attn, "_PROGRAMS", 4)
    monkeypatch.setattr(tree_attn, "_tile", lambda *_: (16, 4, 2))
    monkeypatch.setattr(tree_attn, "MIN_SPLIT", 16)


def strict_model(directory: Path) -> Decoder:
    path = make_tiny(directory, layers=1, peaked=False)
    return load_model(path, attention_backend="triton", dtype="float32", strict=True)


def test_nothing_differs(tmp_path: Path) -> None:
    model = strict_model(tmp_path)
    assert model.backend.strict
    require_strict(model)


def test_a_tree_in_the_order_of_its_slots_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordered = OrderedAttention.plan

    def plan(self: OrderedAttention, batch: AttnBatch) -> Attend:
        if batch.mask_words is None or batch.max_q_len == 1:
            return ordered(self, batch)
        TritonAttention._grow(self, TritonAttention._need(self, 8, 8, 0))
        return TritonAttention.plan(self, batch)

    monkeypatch.setattr(OrderedAttention, "plan", plan)
    model = strict_model(tmp_path)
    found = check_strict(model)
    assert "a tree" in {one.case for one in found}
    assert {one.part for one in found} == {"layer 0, attention"}
    with pytest.raises(ConfigError, match=r"layer 0, attention differs.*--no-strict"):
        require_strict(model)


def test_a_product_that_splits_k_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "form_of", lambda weight: linear.PLAIN)
    model = strict_model(tmp_path)
    down = model.stack.layers[0].down
    assert isinstance(down.skinny, Unsplit)
    down.skinny._work = GemmWork(torch.empty(1 << 16), torch.zeros(64, dtype=torch.int32))
    key = (*down.weight.shape, 1, False)
    # Two steps of K each: one a split would add up in the order of the unsplit loop.
    down.skinny.pins[key] = Pin("kernel", GemmShape(64, 32, 2))
    found = check_strict(model)
    assert {one.part for one in found} == {"layer 0, the down product"}


def test_only_ways_with_the_right_bits_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, like = torch.randn(32, 256), torch.zeros(3, 256)
    shared = Unsplit([(32, 256)], weight.device)
    shared._work = GemmWork(torch.empty(1 << 16), torch.zeros(64, dtype=torch.int32))
    split, right = Pin("kernel", GemmShape(16, 32, 4)), Pin("kernel", GemmShape(64, 128, 1))
    monkeypatch.setattr("sgl_spec.layers.unsplit._ways", lambda *_: iter((split, right)))
    assert shared.shape(like, weight, biased=False) == right.shape
    assert shared.pins == {(32, 256, 3, False): right}
