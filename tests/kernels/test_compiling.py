"""The interpreter accepts what the compiler does not: every kernel, compiled for the H200."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_for_hopper.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    "group",
    [
        "attention",
        "fused",
        "skinny",
        "draft",
        "sampling",
        "settings",
        "rounds",
        "ngrams",
    ],
)
def test_compiles_without_spills(group: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-W", "ignore", str(SCRIPT), group]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    frames = [int(size) for size in re.findall(r"'STACK': (\d+)", done.stdout)]
    assert frames
    assert max(frames) <= 64, done.stdout  # what registers do not hold lies there
