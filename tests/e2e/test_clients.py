"""Clients that agents are built on work unmodified; `make clients` installs them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from serving import ROOT, Launch

PYTHON = Path(os.environ.get("CLIENTS_PYTHON", ROOT / ".venv-clients" / "bin" / "python"))


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="make clients installs the client programs")
def test_client_programs(launch: Launch) -> None:
    server = launch("--speculative-algorithm", "NGRAM", model="smollm2")
    done = subprocess.run(
        [PYTHON, "tests/client_programs.py", server.url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": os.environ["PATH"], "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["with_instructor", "with_langchain", "with_litellm"]
