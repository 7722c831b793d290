# PYTHON_ARGCOMPLETE_OK
"""The command `sgl-spec`, also as `python -m sgl_spec`: serve, bench, train and others.

What a command needs is imported when it is asked for, so that help and completion are quick.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from sgl_spec import __version__

COMMANDS = {
    "serve": ("sgl_spec.server.launch:run", "serve a model; flags alone mean this too"),
    "bench": ("sgl_spec.bench.__main__:main", "measure speed and acceptance"),
    "experiment": ("sgl_spec.bench.__main__:experiment", "compare settings under loads"),
    "deploy": ("sgl_spec.deploy.__main__:main", "serve with many replicas on Ray Serve"),
    "trace": ("sgl_spec.server.trace:main", "show the rounds that --spec-trace has written"),
    "train": ("sgl_spec.training.__main__:main", "make training data, train and judge drafts"),
}
STOPPED = 130  # as a shell counts an end by Ctrl-C


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its code."""
    if "_ARGCOMPLETE" in os.environ:
        complete()
    try:
        sys.exit(run(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would end the end
        sys.exit(STOPPED)


def run(argv: Sequence[str]) -> int:
    """Run a command; the exit code."""
    word = argv[0] if argv else ""
    if word == "--version":
        sys.stdout.write(f"sgl-spec {__version__}\n")
        return 0
    if word in ("-h", "--help"):
        sys.stdout.write(_usage())
        return 0
    name, rest = ("serve", argv) if word.startswith("-") else (word, argv[1:])
    if name not in COMMANDS:
        from sgl_spec.options import near

        unknown = f"{name!r} is no command{near(name, COMMANDS)}.\n" if name else ""
        sys.stderr.write(unknown + _usage())
        return 2
    if name == "train":  # which says after a SIGTERM too what is kept
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    code: int = load(COMMANDS[name][0])(rest)
    return code


def load(entry: str) -> Callable[[Sequence[str]], int]:
    """Import "module:function". Ctrl-C meanwhile ends the process at once, with nothing to clean
    up: raised within somebody's import, it may come out as any other error."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:
        signal.signal(signal.SIGINT, lambda *_: os._exit(STOPPED))
    module, _, function = entry.partition(":")
    found: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), function)
    if usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return found


def complete() -> None:
    """Answer the shell that asks what may follow, and leave."""
    import argparse

    import argcomplete

    from sgl_spec.args import ServerArgs
    from sgl_spec.bench.__main__ import COMMANDS as BENCHES
    from sgl_spec.deploy.args import DeployArgs
    from sgl_spec.training.__main__ import COMMANDS as TRAININGS

    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    commands.add_parser("serve", parents=[ServerArgs.parser()], add_help=False)
    commands.add_parser("bench").add_argument("benchmark", choices=BENCHES)
    commands.add_parser("experiment").add_argument("plan")
    commands.add_parser("deploy", parents=[DeployArgs.parser()], add_help=False)
    commands.add_parser("trace").add_argument("file")
    commands.add_parser("train").add_argument("step", choices=TRAININGS)
    argcomplete.autocomplete(parser)


def _usage() -> str:
    lines = [f"  {name:12}{about}" for name, (_, about) in COMMANDS.items()]
    end = "Each has its --help. For completion in bash or zsh:"
    hint = '  eval "$(register-python-argcomplete sgl-spec)"'
    return "\n".join(["usage: sgl-spec COMMAND ...", *lines, end, hint, ""])


if __name__ == "__main__":
    main()
