"""How a package of commands is run: `bench` and `training`, a module for each command."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_spec.errors import SglSpecError
from sgl_spec.options import near

STOPPED = 130  # as a shell counts an end by Ctrl-C


@dataclass(frozen=True, slots=True)
class Command:
    """about: for the list of commands. stopped: what is left after a stop."""

    about: str
    stopped: str = "nothing was written."


def dispatch(package: str, commands: Mapping[str, Command], argv: Sequence[str]) -> int:
    """Import and run `package.COMMAND.main(rest)`. Returns the exit code: 2 for what cannot work,
    `STOPPED` after Ctrl-C."""
    name = argv[0] if argv else ""
    if name in ("-h", "--help"):
        print(_usage(package, commands))
        return 0
    if name not in commands:
        unknown = f"{name} is no command of {package}{near(name, commands)}.\n" if name else ""
        print(unknown + _usage(package, commands), file=sys.stderr)
        return 2
    try:
        importlib.import_module(f"{package}.{name}").main(argv[1:])
    except SglSpecError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: stopped; {commands[name].stopped}", file=sys.stderr)
        return STOPPED
    return 0


def _usage(package: str, commands: Mapping[str, Command]) -> str:
    lines = [f"  {name:12}{command.about}" for name, command in commands.items()]
    return "\n".join([f"usage: {_typed(package)} COMMAND ...", *lines])


def _typed(package: str) -> str:
    """The command as it was typed: `sgl-spec bench`, or the module."""
    words = {"sgl_spec.bench": "bench", "sgl_spec.training": "train"}
    if Path(sys.argv[0]).name == "sgl-spec":
        return f"sgl-spec {words[package]}"
    return f"python -m {package}"
