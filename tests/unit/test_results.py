"""The row that `--results` writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest

def test_good(): pass

@pytest.mark.skip(reason="not here")
def test_left_out(): pass

def test_bad(): assert 1 == 2, "numbers differ"

@pytest.fixture
def broken(): raise KeyError("no set-up")

def test_without_set_up(broken): pass
"""


def test_outcomes_and_conditions(tmp_path: Path) -> None:
    file, out = tmp_path / "test_some.py", tmp_path / "row.json"
    file.write_text(TESTS)
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    flags = ["-q", "-p", "no:cacheprovider", "--results", str(out), str(file)]
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "kernels"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *flags],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths, "SGL_SPEC_COMMIT": "abc"},
        capture_output=True,
        text=True,
    )
    row = json.loads(out.read_text())
    assert done.returncode == row["exit_code"] == 1, done.stdout
    counts = {name: row[name] for name in ("passed", "failed", "error", "skipped")}
    assert counts == dict.fromkeys(counts, 1)
    said = {one["test"].split("::")[1]: one.get("said", "") for one in row["tests"]}
    assert "numbers differ" in said["test_bad"]
    assert "no set-up" in said["test_without_set_up"]
    assert said["test_good"] == ""
    assert row["commit"] == "abc"
    assert row["argv"][:4] == ["python", "-m", "pytest", "-q"]
    assert row["versions"]["torch"]
