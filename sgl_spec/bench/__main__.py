"""`python -m sgl_spec.bench COMMAND ...`: one module per benchmark, imported when asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from sgl_spec.errors import SglSpecError
from sgl_spec.options import near

COMMANDS = {
    "experiment": "a grid of settings and loads from a file: tables and plots",
    "accept": "accept length of a drafter on Spec-Bench, by group and tree shape",
    "published": "bring a document's tables up to date with results of experiments",
    "kernels": "every device kernel beside its floor and torch, on a GPU",
    "ngram": "accept length and host time of the n-gram trie, over recorded texts",
    "offline": "tokens per second of the engine by task, beside transformers",
    "serving": "load client: tokens per second, first token, inter-token latencies of a server",
    "round": "a round beside its floor, and what takes its time",
}


def main(argv: Sequence[str]) -> int:
    """Run `sgl_spec.bench.COMMAND.main(rest)`. Returns the exit code."""
    if argv and argv[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if not argv or argv[0] not in COMMANDS:
        unknown = f"{argv[0]} is no benchmark{near(argv[0], COMMANDS)}.\n" if argv else ""
        print(unknown + _usage(), file=sys.stderr)
        return 2
    try:
        importlib.import_module(f"sgl_spec.bench.{argv[0]}").main(argv[1:])
    except SglSpecError as error:
        print(f"{argv[0]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{argv[0]}: stopped.", file=sys.stderr)
        return 130
    return 0


def experiment(argv: Sequence[str]) -> int:
    """`sgl-spec experiment`."""
    return main(["experiment", *argv])


def _usage() -> str:
    lines = [f"  {name:12}{text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: python -m sgl_spec.bench COMMAND ...", *lines])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
