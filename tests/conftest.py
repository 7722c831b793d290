"""Fixtures and limits that every test shares."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports torch or transformers; server processes inherit all three. The spin count
# is the package's own (see its `__init__`), which comes too late once torch is there.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ["HF_HUB_OFFLINE"] = "1"
if not any(Path("/dev").glob("nvidia[0-9]*")):
    # Kernels run in triton's interpreter. Triton reads this when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"

from hypothesis import settings
from results import Results
from serving import Launch, launcher
from tiny import make_tiny

TIMEOUT_S = {"unit": 120, "kernels": 300, "e2e": 600}
SLOW_TIMEOUT_S = 7200

# CI tries the same examples each time, so that what lands is not decided by chance.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("local", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    """See `results`."""
    parser.addoption("--results", type=Path, metavar="FILE", help="write what came of the tests")


def pytest_configure(config: pytest.Config) -> None:
    """Collect results where they are asked for."""
    path = config.getoption("--results")
    if path is not None and not hasattr(config, "workerinput"):  # xdist's workers tell their parent
        config.pluginmanager.register(Results(path))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test the time-out of its folder, and skip GPU tests where there is no GPU."""
    for item in items:
        if item.get_closest_marker("timeout") is None:
            limit = TIMEOUT_S.get(item.path.parent.name, SLOW_TIMEOUT_S)
            slow = item.get_closest_marker("slow") is not None
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S if slow else limit))
        if item.get_closest_marker("gpu") is not None and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default checkpoint of `tiny.make_tiny`."""
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The embedded model in Hugging Face layout, converted on the first use of this machine."""
    from sgl_spec.models.checkpoint import resolve_checkpoint

    return resolve_checkpoint("smollm2")


@pytest.fixture
def launch(tmp_path: Path, tiny_model_dir: Path) -> Iterator[Launch]:
    """`launch(*flags)` starts a real server (on the tiny model unless `model=` is given) and
    returns a `serving.Server`; after the test it must end cleanly."""
    with launcher(tmp_path, tiny_model_dir) as start:
        yield start


@pytest.fixture(scope="module")
def launch_shared(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path
) -> Iterator[Launch]:
    """`launch` for servers that the tests of one module share."""
    with launcher(tmp_path_factory.mktemp("servers"), tiny_model_dir) as start:
        yield start
