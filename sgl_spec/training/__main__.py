"""`python -m sgl_spec.training COMMAND ...`: one module per command, imported when asked for."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence

from sgl_spec.errors import SglSpecError

COMMANDS = {
    "data": "let the target answer prompts: token shards for the other commands",
    "eagle3": "train an EAGLE3 head on token shards",
    "standalone": "distil a small Llama from the target on token shards",
    "eval": "accept length of a draft by task and tree shape, without serving",
}


def main(argv: Sequence[str]) -> int:
    """Run `sgl_spec.training.COMMAND.main(rest)`. Returns the exit code."""
    if not argv or argv[0] not in COMMANDS:
        asked_for_help = bool(argv) and argv[0] in ("-h", "--help")
        print(_usage(), file=sys.stdout if asked_for_help else sys.stderr)
        return 0 if asked_for_help else 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        importlib.import_module(f"sgl_spec.training.{argv[0]}").main(argv[1:])
    except SglSpecError as error:
        print(f"{argv[0]}: {error}", file=sys.stderr)
        return 2
    return 0


def _usage() -> str:
    lines = [f"  {name:12}{text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: python -m sgl_spec.training COMMAND ...", *lines])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
