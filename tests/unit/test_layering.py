"""Who may import whom. Every import counts, also one inside a function or for types only."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ARGS = {"args", "options", "sglang_compat", "validate"}  # one declaration per option
BELOW_ENGINE = {"kernels", "layers", "models", "speculative"}
# A room: the rooms it may import, besides itself; all but the kernels may also import `errors`.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "kept": set(),
    **dict.fromkeys(ARGS, ARGS),
    "request": set(),
    "messages": {"args", "request"},
    "text": set(),
    "interrupts": set(),
    "streams": {"request", "messages"},
    "kernels": set(),
    "layers": {"kernels", "kept"},
    "models": {"kernels", "layers", "kept"},
    "speculative": {"kernels", "layers", "models", "request"},
    "engine": {*BELOW_ENGINE, *ARGS, "kept", "request", "messages", "text"},
    "llm": {*BELOW_ENGINE, *ARGS, "engine", "request", "messages", "text", "interrupts", "streams"},
    "server": {*ARGS, "request", "messages", "text"},
    # Names that the package offers; each is loaded when it is first used.
    "sgl_spec": {"llm", "request", "speculative"},
}
# May import any room; none imports them.
OUTSIDE = {"bench", "training", "deploy", "launch", "__main__"}

# Each line keeps a promise: pickle runs code from the wire, multiprocessing pickles by itself.
FORBIDDEN = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "multiprocessing"}
FORBIDDEN_CALLS = {"send_pyobj", "recv_pyobj", "allow_pickle"}
HEAVY = {"torch", "transformers", "triton", "safetensors", "gguf"}
KERNELS_MAY_USE = {"torch", "triton", "numpy", "sgl_spec_kernels"}
ONLY_STANDARD = {"errors"}


def room_of(module: str) -> str | None:
    """The room of one of our modules, None for anybody else's."""
    parts = module.split(".")
    if parts[0] == "sgl_spec_kernels":
        return "kernels"
    if parts[0] == "launch_server":
        return "launch"
    if parts[0] != "sgl_spec":
        return None
    return parts[1] if len(parts) > 1 else "sgl_spec"


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules that a source imports. A name taken from `sgl_spec` itself counts as a room if it is
    one, else (but for `__version__`) as the package's public names."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names if alias.name != "sgl_spec")
            case ast.ImportFrom(module="sgl_spec"):
                yield from (target for alias in node.names for target in from_package(alias.name))
            case ast.ImportFrom():
                assert node.level == 0, "relative imports are not used here"
                yield str(node.module)
            case ast.Attribute(value=ast.Name(id="sgl_spec"), attr=name):
                yield from from_package(name)


def from_package(name: str) -> list[str]:
    """What `sgl_spec.NAME` stands for."""
    if name == "__version__":
        return []
    return [f"sgl_spec.{name}" if name in MAY_IMPORT or name in OUTSIDE else "sgl_spec"]


def violations(module: str, source: str) -> list[str]:
    """What in the source of `module` breaks a rule."""
    room, tree = room_of(module), ast.parse(source)
    assert room in MAY_IMPORT or room in OUTSIDE, f"{module} is in no known room"
    allowed = MAY_IMPORT.get(room, set()) | ({room} if room == "kernels" else {room, "errors"})
    found = []
    for target in imported(tree):
        top, to = target.split(".")[0], room_of(target)
        if to is not None and room not in OUTSIDE and to not in allowed:
            found.append(f"{room} must not import {target}")
        if top in FORBIDDEN:
            found.append(f"{target} is not used anywhere")
        if room == "server" and top in HEAVY:
            found.append(f"the API process must stay free of {target}")
        foreign = to is None and top not in sys.stdlib_module_names
        if (room == "kernels" and foreign and top not in KERNELS_MAY_USE) or (
            room in ONLY_STANDARD and foreign
        ):
            found.append(f"{room} must not depend on {target}")
    return found + pickled(tree)


def pickled(tree: ast.AST) -> list[str]:
    """Calls that read or write pickles without importing the module."""
    found = []
    harmless = {
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and any(ast.unparse(keyword) == "weights_only=True" for keyword in node.keywords)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in harmless:
            torch_load = node.attr == "load" and ast.unparse(node.value) == "torch"
            if node.attr in FORBIDDEN_CALLS or torch_load:
                found.append(f"{ast.unparse(node)} is pickle")
        elif isinstance(node, ast.keyword) and node.arg in FORBIDDEN_CALLS:
            found.append(f"{node.arg} is pickle")
    return found


def sources() -> dict[str, Path]:
    """Our modules by name."""
    found = {"launch_server": ROOT / "launch_server.py"}
    for base in (ROOT, ROOT / "kernels"):
        for package in ("sgl_spec", "sgl_spec_kernels"):
            for path in (base / package).rglob("*.py"):
                parts = path.relative_to(base).with_suffix("").parts
                found[".".join(parts).removesuffix(".__init__")] = path
    return found


@pytest.mark.parametrize("module", sorted(sources()))
def test_rooms(module: str) -> None:
    assert violations(module, sources()[module].read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sgl_spec.layers.attention", "from sgl_spec.models.decoder import Decoder"),
        ("sgl_spec.speculative.eagle", "def f():\n    import sgl_spec.engine.worker"),
        ("sgl_spec.server.app", "from sgl_spec.engine.engine import Engine"),
        ("sgl_spec.server.app", "from sgl_spec import engine"),
        ("sgl_spec.server.app", "from sgl_spec import LLM"),
        ("sgl_spec.server.app", "import sgl_spec\nx = sgl_spec.LLM"),
        ("sgl_spec.server.app", "import torch.nn"),
        ("sgl_spec.server.app", "if TYPE_CHECKING:\n    from torch import Tensor"),
        ("sgl_spec.engine.worker", "from sgl_spec.server.frontend import Frontend"),
        ("sgl_spec.engine.worker", "from sgl_spec.bench import timing"),
        ("sgl_spec.engine.worker", "import multiprocessing.connection"),
        ("sgl_spec.engine.worker", "x = torch.load(path)"),
        ("sgl_spec.engine.worker", "x = torch.load(path, weights_only=flag)"),
        ("sgl_spec.engine.worker", "socket.send_pyobj(x)"),
        ("sgl_spec.engine.worker", "np.load(path, allow_pickle=True)"),
        ("sgl_spec.messages", "import pickle"),
        ("sgl_spec.request", "from sgl_spec.args import ServerArgs"),
        ("sgl_spec.errors", "import msgspec"),
        ("sgl_spec.llm", "from sgl_spec.server.launch import run"),
        ("sgl_spec_kernels.kv_move", "from sgl_spec.errors import ConfigError"),
        ("sgl_spec_kernels.kv_move", "import msgspec"),
    ],
)
def test_each_rule_has_teeth(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


def test_tensors_saved_by_torch_may_be_read() -> None:
    source = "x = torch.load(path, map_location='cpu', weights_only=True)"
    assert violations("sgl_spec.models.torch_file", source) == []


def test_a_new_room_must_be_declared() -> None:
    with pytest.raises(AssertionError, match="no known room"):
        violations("sgl_spec.utils", "")


def test_kernels_folder_is_no_package() -> None:
    """A root folder that imports as `kernels` would shadow the PyPI package which transformers
    looks for."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_api_process_loads_nothing_heavy() -> None:
    """What the walk cannot see: an import by way of somebody else's package."""
    modules = [name for name in sources() if room_of(name) == "server"]
    script = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
print(*sorted({HEAVY!r} & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
