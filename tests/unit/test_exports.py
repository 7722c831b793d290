"""The names that the package offers."""

from __future__ import annotations

import importlib
import os
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


@pytest.mark.parametrize(
    ("first", "given", "warned"), [("torch", None, 1), ("torch", "7", 0), ("sgl_spec", None, 0)]
)
def test_torch_before_the_package_is_warned_of(first: str, given: str | None, warned: int) -> None:
    """A stand-in under torch's name: only the order of the imports counts."""
    env = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    env |= {} if given is None else {"GOMP_SPINCOUNT": given}
    torch = "sys.modules['torch'] = sys"
    lines = [torch, "import sgl_spec"] if first == "torch" else ["import sgl_spec", torch]
    script = "; ".join(["import os, sys", *lines, "print(os.environ['GOMP_SPINCOUNT'])"])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=env
    )
    assert done.stdout.strip() == (given or "1000"), done.stderr
    assert done.stderr.count("Import sgl_spec first, or set the variable") == warned
