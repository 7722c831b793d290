"""The form of a weight: the fastest by what was measured, the same at every start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sgl_spec import kept
from sgl_spec.layers import products
from sgl_spec.layers.products import (
    LAYOUTS,
    PACKED,
    PLAIN,
    ROWS,
    SMALL,
    Form,
    Layout,
    best_form,
    can_pack,
    form_of,
    hold,
    measure,
    padded_rows,
    product,
)

Times = dict[tuple[Layout, int], float]


def table(packed: list[float], plain: list[float], transposed: list[float]) -> Times:
    """Microseconds by layout and the rows of `ROWS`."""
    layouts: list[tuple[Layout, list[float]]] = [
        ("packed", packed),
        ("plain", plain),
        ("transposed", transposed),
    ]
    return {
        (layout, rows): us
        for layout, times in layouts
        for rows, us in zip(ROWS, times, strict=True)
    }


# Measured: gate and up, and q, k and v, of SmolLM2 on two cores of a Xeon.
GATE_UP = table([351, 358, 409, 473], [243, 304, 485, 608], [266, 321, 388, 537])
QKV = table([137, 139, 150, 173], [89, 103, 152, 167], [89, 112, 118, 168])
TIMES_HERE = table([75, 76, 75, 98], [150, 170, 220, 220], [130, 140, 130, 150])


@pytest.mark.parametrize(
    ("times", "twice", "form"),
    [
        (QKV, False, Form("transposed")),
        (GATE_UP, True, Form("packed", 2, "plain")),
        (GATE_UP, False, PACKED),
        (TIMES_HERE, True, PACKED),
    ],
)
def test_the_fastest_over_all_rows(times: Times, twice: bool, form: Form) -> None:
    assert best_form(times, twice=twice) == form


def test_another_form_must_be_worth_it() -> None:
    """A few per cent may be noise, and the packed one is the best with many rows."""
    times = table([100] * 4, [97] * 4, [98] * 4)
    assert best_form(times, twice=True) == PACKED


def test_every_product_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SAMPLE", 1 << 14)
    found = measure(24, 16, torch.float32)
    assert set(found) == {(layout, rows) for layout in LAYOUTS for rows in ROWS}
    assert all(seconds > 0 for times in found.values() for seconds in times)


@pytest.fixture
def weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.Tensor]:
    """One that is large enough to be measured, on a machine where nothing is known."""
    if not can_pack(torch.empty(2, 2)):
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield torch.empty(SMALL // 4 // 64, 64)
    products._measured_form.cache_clear()


def measured(
    monkeypatch: pytest.MonkeyPatch, passes: dict[tuple[Layout, int], list[float]]
) -> None:
    """A fresh process that would measure this."""
    products._measured_form.cache_clear()
    monkeypatch.setattr(products, "measure", lambda *_: passes)


def quiet(times: Times) -> dict[tuple[Layout, int], list[float]]:
    return {key: [us * 1.01, us, us * 2] for key, us in times.items()}


def test_a_form_is_kept(weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, quiet(GATE_UP))
    first = form_of(weight)
    assert first == Form("packed", 2, "plain")
    measured(monkeypatch, quiet(TIMES_HERE))
    assert form_of(weight) == first
    assert form_of(torch.empty(weight.shape[0], 128)) == PACKED, "another shape"
    products._measured_form.cache_clear()
    monkeypatch.setattr(products, "cpu_name", lambda: "another machine")
    assert form_of(weight) == PACKED


def test_a_busy_machine_decides_nothing(
    weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measured(monkeypatch, {key: [us] for key, us in GATE_UP.items()})
    assert form_of(weight) == PACKED
    measured(monkeypatch, {key: [us, us * 3, us * 4] for key, us in GATE_UP.items()})
    assert form_of(weight) == PACKED
    assert caplog.text.count("too busy") == 2
    measured(monkeypatch, quiet(GATE_UP))
    assert form_of(weight) != PACKED, "the next start measures again"


def test_what_is_small_or_not_onednn_s_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "measure", None)
    assert form_of(torch.empty(8, 8, dtype=torch.float16)) == PLAIN
    if can_pack(torch.empty(2, 2)):
        assert form_of(torch.empty(8, 8)) == PACKED


def test_the_first_measurement_to_end_is_believed_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def meanwhile() -> int:
        assert start(lambda: 1) == 1
        return 2

    def start(measure: object) -> int:
        return kept.measured_once("kind", "facts", measure, read=int, write=str)  # type: ignore[arg-type]

    assert start(meanwhile) == 1
    assert [path.suffix for path in (tmp_path / "sgl-spec" / "kind").iterdir()] == [".json"]


def test_few_numbers_of_rows_are_compiled() -> None:
    """And a row's bits are those that it has without the padding."""
    counts = {padded_rows(rows) for rows in range(1, 2049)}
    assert len(counts) <= 60
    assert all(rows <= padded_rows(rows) <= max(1.25 * rows, rows + 7) for rows in range(1, 4097))
    weight, x = torch.randn(96, 64), torch.randn(130, 64)
    held = hold(weight, "packed")
    for rows in (9, 65, 130):
        unpadded = torch.ops.mkldnn._linear_pointwise.default(x[:rows], held, None, "none", [], "")
        assert torch.equal(product("packed", x[:rows], held, None), unpadded)
