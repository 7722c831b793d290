"""`--results FILE`: what a run of tests came to, as one JSON row with its conditions.

`make gpu` writes docs/results/gpu-tests.json with it: no machine of ours that runs tests by itself
has a GPU, so the last result on one is kept beside the code.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest


class Results:
    """Collects how tests ended; writes it when the session does."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = time.perf_counter()
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        one = self._tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        one["seconds"] = round(one["seconds"] + report.duration, 3)
        if report.outcome != "passed":
            one["outcome"] = "error" if report.failed and report.when != "call" else report.outcome
            one["said"] = str(report.longrepr)[-2000:]

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        from sgl_spec.bench.report import provenance

        argv = ["python", "-m", "pytest", *sys.argv[1:]]
        outcomes = Counter(one["outcome"] for one in self._tests.values())
        row = provenance(argv) | {
            "exit_code": int(exitstatus),
            "seconds": round(time.perf_counter() - self._start, 1),
            **{name: outcomes[name] for name in ("passed", "failed", "error", "skipped")},
            "tests": [{"test": name, **one} for name, one in self._tests.items()],
        }
        self._path.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
