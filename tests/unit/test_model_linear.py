"""The linear layer computes what the plain one does, however its weight is held."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import sgl_spec.layers.linear as linear_module
from sgl_spec.layers.linear import Linear
from sgl_spec.layers.products import PACKED, PLAIN, Form, can_pack

FORMS = (
    PLAIN,
    PACKED,
    Form("transposed"),
    Form("packed", 2, "plain"),
    Form("packed", 4, "transposed"),
)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 33, 130])
@pytest.mark.parametrize("with_bias", [True, False])
def test_equals_the_product(
    monkeypatch: pytest.MonkeyPatch, rows: int, with_bias: bool, form: Form
) -> None:
    """Sizes off any block edge; the residual of `add_to` is left as it was."""
    if form.layout == "packed" and not can_pack(torch.empty(2, 2)):
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(linear_module, "form_of", lambda weight: form)
    torch.manual_seed(rows)
    weight, x, residual = torch.randn(77, 45), torch.randn(rows, 45), torch.randn(rows, 77)
    bias = torch.randn(77) if with_bias else None
    layer = Linear(weight, bias)
    assert layer.size == (77, 45)
    assert torch.equal(layer.plain_weight(), weight)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert torch.equal(layer(x), layer(x)), "the same bits each time"
    before = residual.clone()
    torch.testing.assert_close(layer(x).double(), expected, atol=2e-5, rtol=0)
    added = layer.add_to(residual, x)
    torch.testing.assert_close(added.double(), expected + residual.double(), atol=2e-5, rtol=0)
    assert torch.equal(residual, before)
    layer.add_into(residual, x)
    torch.testing.assert_close(residual.double(), added.double(), atol=2e-5, rtol=0)


def test_each_copy_is_counted() -> None:
    weight = torch.randn(6, 4)
    layer = Linear(weight, torch.zeros(6))
    layer.form, layer.few_weight = Form(layer.form.layout, 2), weight
    assert len(layer.tensors()) == 3


def test_only_what_onednn_multiplies_natively_is_packed() -> None:
    assert not can_pack(torch.empty(2, 2, dtype=torch.float16))
    assert not can_pack(torch.empty(2, 2, device="meta"))
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert can_pack(torch.empty(2, 2, dtype=torch.bfloat16)) == native
