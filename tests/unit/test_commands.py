"""`sgl-spec`: its commands, what completes them, and what is told before anything is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sgl_spec
from sgl_spec import __main__ as command
from sgl_spec.args import ServerArgs
from sgl_spec.options import declared

SGL_SPEC = [sys.executable, "-m", "sgl_spec"]


def completions(line: str, directory: Path) -> list[str]:
    """What the shell would offer for a line, asked in the way of argcomplete's script."""
    out = directory / "completions"
    asked = {"_ARGCOMPLETE": "3", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    env = os.environ | asked | {"_ARGCOMPLETE_STDOUT_FILENAME": str(out)}
    subprocess.run(SGL_SPEC, env=env, timeout=60, check=False)
    return [word.strip() for word in out.read_text().split("\v") if word.strip()]


def test_commands_and_names_complete(tmp_path: Path) -> None:
    python = f"{sys.executable} -m sgl_spec "
    assert set(completions(python, tmp_path)) >= set(command.COMMANDS)
    assert "serving" in completions(f"{python}bench s", tmp_path)
    assert "eagle3" in completions(f"{python}train ", tmp_path)


def test_flags_and_values_complete(tmp_path: Path) -> None:
    serve = f"{sys.executable} -m sgl_spec serve "
    flags = completions(f"{serve}--", tmp_path)
    assert {flag for opt in declared(ServerArgs).values() for flag in opt.flags} <= set(flags)
    assert "--dp-size" not in flags
    assert completions(f"{serve}--load-format d", tmp_path) == ["dummy"]


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("", 2, "usage: sgl-spec COMMAND"),
        ("--help", 0, "usage: sgl-spec COMMAND"),
        ("--version", 0, f"sgl-spec {sgl_spec.__version__}"),
        ("serv --port 1", 2, "'serv' is no command (did you mean serve?)."),
        ("serve --help", 0, "--speculative-algorithm"),
        ("serve --port 0", 2, "--port must be an integer from 1 to 65535, got 0."),
        ("--port 0 --model-path m", 2, "--port must be an integer from 1 to 65535, got 0."),
        ("bench --help", 0, "serving"),
        ("experiment --help", 0, "PLAN.toml"),
        ("deploy --help", 0, "--max-replicas"),
        ("deploy --model-path m --replicas 0", 2, "--replicas must be an integer >= 1, got 0."),
        ("train --help", 0, "eagle3"),
    ],
)
def test_commands(line: str, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(line.split())
    shown = capsys.readouterr()
    assert (caught.value.code, said in (shown.err if code else shown.out)) == (code, True), shown


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--model-path ./no-such-dir", "--model-path ./no-such-dir: no such directory."),
        (f"--model-path {__file__}", f"--model-path {__file__} is a file; it must be a directory."),
        ("--model-path smollm2 --tokenizer-path /no/such", "--tokenizer-path /no/such: no such d"),
        (
            "--model-path smollm2 --speculative-algo EAGLE3 --speculative-draft-model ~/no/such",
            "--speculative-draft-model-path ~/no/such: no such directory.",
        ),
    ],
)
def test_a_path_that_does_not_exist_is_told_before_torch_loads(flags: str, said: str) -> None:
    """The CPU time of one process, which says more than the clock of a busy machine."""
    before = os.times()
    done = subprocess.run(
        [*SGL_SPEC, "serve", *flags.split()], capture_output=True, text=True, timeout=60
    )
    after = os.times()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1
    spent = after.children_user + after.children_system
    assert spent - before.children_user - before.children_system < 2
