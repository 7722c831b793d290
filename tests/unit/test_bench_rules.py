"""`bench rules`: the table of the published example, closed forms first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_spec.bench.__main__ import main
from sgl_spec.bench.rules import P, cases, total_variation

DRAWS = 20_000


def test_the_closed_forms_are_the_published_numbers() -> None:
    table = {case.name: case.expected for case in cases()}
    expected = {
        "one-hot": (0.25, 0.0),
        "p/q": (0.70, 0.0),
        "target only": (0.75, 0.0),
        "p/q, chain": (0.70, 0.0),
        "threshold_acc 0.5": (1.0, 0.35),
        "threshold_single 0.5": (0.75, 0.0),
        "threshold_single 0.2": (1.0, 0.75),
    }
    for name, (accepted, distance) in expected.items():
        assert table[name].acceptance == pytest.approx(accepted), name
        assert total_variation(table[name].first, P) == pytest.approx(distance), name
    for name in ("p/q, tree", "block"):
        assert total_variation(table[name].first, P) == pytest.approx(0, abs=1e-12), name
    assert table["p/q, tree"].acceptance > 0.9
    assert table["block"].kept > table["p/q, chain"].kept == pytest.approx(0.7 + 0.49 + 0.343)


def test_a_short_run_measures_what_the_closed_forms_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four standard errors of each figure, seeds fixed."""
    file = tmp_path / "rules.json"
    assert main(["rules", "--draws", str(DRAWS), "--json", str(file)]) == 0
    printed, progress = capsys.readouterr()
    assert progress.count("Drawing: ") == len(cases())
    assert "Drawing" not in printed
    result = json.loads(file.read_text())
    assert (result["draws"], result["seed"]) == (DRAWS, 0)
    assert result["argv"][:4] == ["python", "-m", "sgl_spec.bench", "rules"]
    error = 4 / DRAWS**0.5
    for row in result["rows"]:
        assert row["rule"] in printed
        assert abs(row["acceptance"] - row["acceptance_expected"]) < error / 2, row
        assert abs(row["kept"] - row["kept_expected"]) < error * 1.5, row
        assert abs(row["total_variation"] - row["total_variation_expected"]) < error, row
        lossy = row["total_variation_expected"] > 0
        assert row["p_value"] < 1e-12 if lossy else row["p_value"] > 1e-4, row
        assert row["p_value_pair"] < 1e-12 if lossy else row["p_value_pair"] > 1e-4, row
        if lossy:
            ratio = row["chi_square"] / row["chi_square_expected"]
            assert ratio == pytest.approx(1, abs=0.05), row
