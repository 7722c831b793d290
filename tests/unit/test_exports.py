"""The names that the package offers."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import sgl_spec


@pytest.mark.parametrize("name", sgl_spec.__all__)
def test_public_name_loads_and_is_documented(name: str) -> None:
    public = getattr(sgl_spec, name)
    assert public.__doc__, name
    assert public.__module__.startswith("sgl_spec."), name


def test_all_is_complete() -> None:
    assert len(set(sgl_spec.__all__)) == len(sgl_spec.__all__)
    namespace: dict[str, object] = {}
    exec("from sgl_spec import *", namespace)
    assert set(sgl_spec.__all__) <= namespace.keys()


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        sgl_spec.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    "package", ["bench", "engine", "layers", "models", "server", "speculative"]
)
def test_exports_of_a_room_exist(package: str) -> None:
    module = importlib.import_module(f"sgl_spec.{package}")
    for name in getattr(module, "__all__", []):
        assert hasattr(module, name), name


def test_importing_the_package_is_cheap() -> None:
    script = "import sgl_spec, sys; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "False", done.stderr
