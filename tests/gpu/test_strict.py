"""--strict on a GPU: the self-check finds nothing, names each rule that is broken, and what is not
attention or a product works row by row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import make_tiny

from sgl_spec.engine import strict
from sgl_spec.engine.strict import check_strict, require_strict
from sgl_spec.errors import ConfigError
from sgl_spec.layers.context import AttnBatch
from sgl_spec.layers.device_attention import Attend, OrderedAttention, TritonAttention
from sgl_spec.layers.unsplit import Pin, Unsplit
from sgl_spec.models.decoder import Decoder
from sgl_spec.models.loader import load_model
from sgl_spec_kernels.embed import embed_norm
from sgl_spec_kernels.filters import cut_heads, token_cuts
from sgl_spec_kernels.rms_norm import rms_norm
from sgl_spec_kernels.rope_kv import rope_kv
from sgl_spec_kernels.silu_mul import silu_mul
from sgl_spec_kernels.skinny_gemm import GemmShape, GemmWork

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path: Path = make_tiny(tmp_path_factory.mktemp("tiny"), hidden=256, heads=8, kv_heads=2)
    return load_model(path, device="cuda", dtype="bfloat16", strict=True)


def test_nothing_differs(model: Decoder) -> None:
    assert check_strict(model, every=True) == []
    require_strict(model)


def test_attention_split_by_load_is_named(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_load(self: OrderedAttention, batch: AttnBatch) -> Attend:
        TritonAttention._grow(self, TritonAttention._need(self, 64, 64, 0))
        return TritonAttention.plan(self, batch)

    monkeypatch.setattr(OrderedAttention, "plan", by_load)
    found = check_strict(model)
    assert any("of 64 requests" in one.case and "attention" in one.part for one in found), found
    with pytest.raises(ConfigError, match=r"attention differs.*--no-strict"):
        require_strict(model)


def test_a_tree_in_the_order_of_its_slots_is_named(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordered = OrderedAttention.plan

    def plan(self: OrderedAttention, batch: AttnBatch) -> Attend:
        if batch.mask_words is None or batch.max_q_len == 1:
            return ordered(self, batch)
        TritonAttention._grow(self, TritonAttention._need(self, 64, 64, 0))
        return TritonAttention.plan(self, batch)

    monkeypatch.setattr(OrderedAttention, "plan", plan)
    found = check_strict(model)
    assert {one.case for one in found} >= {"a tree"}, found
    assert all("tree" in one.case or "chain" in one.case for one in found), found
    assert all(one.part == "layer 0, attention" for one in found), found


def products(model: Decoder) -> Unsplit:
    """With work space for splits, which they do without otherwise."""
    found = model.stack.layers[0].down.skinny
    assert isinstance(found, Unsplit)
    room = torch.empty(1 << 22, device="cuda")
    found._work = GemmWork(room, torch.zeros(1 << 10, dtype=torch.int32, device="cuda"))
    return found


def test_a_product_that_splits_k_is_named(tmp_path: Path) -> None:
    """Of a size at which a split changes some of a thousand outputs."""
    path = make_tiny(tmp_path, hidden=1024, heads=8, kv_heads=2, layers=1, peaked=False)
    model = load_model(path, device="cuda", dtype="bfloat16", strict=True)
    assert check_strict(model) == []
    shared, weight = products(model), model.stack.layers[0].down.weight
    shared.pins[weight.shape[0], weight.shape[1], 1, False] = Pin("kernel", GemmShape(64, 64, 4))
    found = check_strict(model)
    assert found, "one row by a split, more rows without"
    assert all("the down product" in one.part for one in found), found


def test_ways_with_other_bits_are_not_pinned(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, weight = products(model), model.stack.layers[0].down.weight
    split, right = Pin("kernel", GemmShape(64, 64, 4)), Pin("kernel", GemmShape(64, 128, 1))
    monkeypatch.setattr("sgl_spec.layers.unsplit._ways", lambda *_: iter((split, right)))
    like = torch.zeros(3, weight.shape[1], dtype=weight.dtype, device="cuda")
    assert shared._first_right(like, weight, biased=False) == right


def rows_of(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, device="cuda").bfloat16()


@pytest.mark.parametrize("width", [576, 4096])
def test_norms_and_gates_work_row_by_row(width: int) -> None:
    x, weight, stream = rows_of(2048, width), rows_of(1, width)[0], rows_of(2048, width)
    table, tokens = rows_of(500, width), torch.arange(0, 500, 3, device="cuda")
    together = stream.clone()
    normed = rms_norm(x, weight, 1e-5, together)
    wide = rms_norm(x, weight, 1e-5)
    gated = silu_mul(torch.cat((x, stream), 1))
    _, embedded = embed_norm(table, tokens, weight, 1e-5)
    for at in (0, 1, 77, 2047):
        one, row = slice(at, at + 1), stream[at : at + 1].clone()
        copy = torch.empty_like(row)
        assert torch.equal(rms_norm(x[one], weight, 1e-5, row, None, copy), normed[one])
        assert torch.equal(row, together[one])
        assert torch.equal(copy, together[one])
        assert torch.equal(rms_norm(x[one], weight, 1e-5), wide[one])
        assert torch.equal(silu_mul(torch.cat((x[one], stream[one]), 1)), gated[one])
    for at in (0, 9, len(tokens) - 1):
        _, alone = embed_norm(table, tokens[at : at + 1], weight, 1e-5)
        assert torch.equal(alone, embedded[at : at + 1])
        assert torch.equal(alone, rms_norm(table[tokens[at : at + 1]], weight, 1e-5))


def test_rotation_works_row_by_row() -> None:
    qkv, norms = rows_of(300, 6144), (rows_of(1, 128)[0], rows_of(1, 128)[0])
    cos, sin = torch.rand(2, 400, 64, device="cuda")
    slots = torch.randperm(300, device="cuda")
    caches = [torch.zeros(300, 8, 128, device="cuda").bfloat16() for _ in range(4)]
    for norm in (None, norms):
        q = rope_kv(qkv.clone(), *caches[:2], cos, sin, slots, slots, norm, 1e-6)
        for at in (0, 150, 299):
            one = slice(at, at + 1)
            alone = rope_kv(
                qkv[one].clone(), *caches[2:], cos, sin, slots[one], slots[one], norm, 1e-6
            )
            assert torch.equal(alone, q[one])
            for together, by_itself in zip(caches[:2], caches[2:], strict=True):
                assert torch.equal(together[slots[at]], by_itself[slots[at]])


@pytest.mark.parametrize("vocab", [1000, 128256])
def test_filters_work_row_by_row(vocab: int) -> None:
    rows = 96
    logits = torch.randn(rows, vocab, device="cuda").bfloat16()
    at = torch.arange(rows, device="cuda")
    settings = (
        torch.rand(rows, device="cuda") + 0.3,
        torch.randint(1, vocab, (rows,), device="cuda"),
        torch.rand(rows, device="cuda", dtype=torch.float64),
        torch.rand(rows, device="cuda") / 100,
    )
    together = torch.zeros(rows, 1, dtype=torch.int64, device="cuda")
    token_cuts(logits, at, torch.ones_like(at), *settings, together, cut_heads(rows, "cuda"))
    for row in (0, 1, 50, 95):
        one, alone = slice(row, row + 1), torch.zeros(1, 1, dtype=torch.int64, device="cuda")
        mine = [each[one].contiguous() for each in settings]
        token_cuts(logits[one], at[:1], at[1:2], *mine, alone, cut_heads(1, "cuda"))
        assert torch.equal(alone, together[one])


def test_the_check_covers_more_rows_than_a_tile() -> None:
    """The rows compared lie on both sides of the end of a tile, behind other whole tiles too."""
    assert strict._PREFIX < 64 < strict._PREFIX + strict._TESTED
    assert strict._MANY_ROWS == 2048
