"""The script for two GPUs, with two processes of a CPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from serving import ROOT


def test_the_bench_of_ranks(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Rows of one rank and of two, by level, and texts that are the same."""
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    longer = config | {"max_position_embeddings": 8192}  # some prompts are long in its tokens
    (model / "config.json").write_text(json.dumps(longer))
    small = {
        "PYTHON": sys.executable,
        "MODEL": str(model),
        "SHAPES": "as-is",
        "ALGORITHMS": "NGRAM",
        "LEVELS": "2:2",
        "PROMPTS": "4",
        "TOKENS": "8",
        "FLAGS": "--dtype float32 --max-total-tokens 8192 --max-running-requests 4",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["examples/tp_bench.sh", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | small,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    (compared,) = (line for line in done.stdout.splitlines() if "texts as in" in line)
    assert ": 4 of 4 texts as in " in compared
    rows = [json.loads(line) for line in (tmp_path / "serving.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    rounds = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert [row["batch"] for row in rounds] == [2, 2]
