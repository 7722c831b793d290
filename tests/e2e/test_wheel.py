"""The wheel holds what the tree holds, and serves without the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import READY_TIMEOUT_S, ROOT, Server, free_port, start_command

PACKAGES = {"sgl_spec": "sgl_spec", "kernels/sgl_spec_kernels": "sgl_spec_kernels"}


def tree_files(*below: str) -> list[str]:
    """The files that git tracks, and those that it would track if they were added."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", *below]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy so that nothing an earlier build left behind gets in."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in tree_files(*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name)
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(out), str(tree))
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def home(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel in it. Torch and the others are those that run the tests;
    a path file does not run theirs, so the checkout they may point to stays unknown."""
    home = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    pip("--python", str(home / "bin" / "python"), "install", str(wheel))
    (packages,) = home.glob("lib/*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home


# What may lead to this checkout, where something by the name of the wheel lies already.
ALONE = {"PYTHONPATH": ""}


def pip(*words: str) -> None:
    """Run pip without an index."""
    command = [sys.executable, "-m", "pip", *words, "--no-index", "--no-deps", "--quiet"]
    done = subprocess.run(command, env=os.environ | ALONE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_holds_every_file_of_the_packages(wheel: Path) -> None:
    wanted = {
        package + name.removeprefix(folder)
        for folder, package in PACKAGES.items()
        for name in tree_files(folder)
    }
    held = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert "sgl_spec/engine/__init__.py" in wanted
    assert sorted(held) == sorted(wanted)


@pytest.fixture
def served(home: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    port = free_port()
    flags = ["--model-path", "smollm2", "--port", str(port)]
    algorithm = ["--speculative-algorithm", request.param, "--skip-server-warmup"]
    command = [str(home / "bin" / "sgl-spec"), *flags, *algorithm]
    server = start_command(tmp_path, command, port, cwd=tmp_path, **ALONE)
    yield server
    server.kill()


@pytest.mark.parametrize("served", ["none", "NGRAM", "EAGLE3", "STANDALONE"], indirect=True)
def test_serves(served: Server) -> None:
    served.wait_until_ready(READY_TIMEOUT_S)
    params = {"temperature": 0, "max_new_tokens": 12}
    body = {"text": "The capital of France is", "sampling_params": params}
    reply = served.client.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    assert "Paris" in reply.json()["text"]
    served.stop()


def test_is_not_the_checkout(home: Path, tmp_path: Path) -> None:
    """What the servers above import."""
    script = "import sgl_spec as s, sgl_spec_kernels as k; print(s.__file__, k.__file__)"
    done = subprocess.run(
        [home / "bin" / "python", "-c", script],
        cwd=tmp_path,
        env=os.environ | ALONE,
        capture_output=True,
        text=True,
        check=True,
    )
    files = [Path(line) for line in done.stdout.split()]
    assert len(files) == 2
    assert all(path.is_relative_to(home) for path in files), files
