"""`python -m sgl_spec.training COMMAND ...`: one module per command, imported when asked for."""

from __future__ import annotations

import importlib
import logging
import signal
import sys
from collections.abc import Sequence

from sgl_spec.errors import SglSpecError

COMMANDS = {
    "data": "let the target answer prompts: token shards for the other commands",
    "eagle3": "train an EAGLE3 head on token shards",
    "standalone": "distil a small Llama from the target on token shards",
    "eval": "accept length of a draft by task and tree shape, without serving",
}

_FROM_CHECKPOINT = "with --resume it goes on from its last checkpoint, if it got to one."
_AFTER_A_STOP = {
    "data": "what was finished is kept, and the same command goes on.",
    "eagle3": _FROM_CHECKPOINT,
    "standalone": _FROM_CHECKPOINT,
    "eval": "nothing was written.",
}


def main(argv: Sequence[str]) -> int:
    """Run `sgl_spec.training.COMMAND.main(rest)`. Returns the exit code: 2 for what cannot work,
    130 when it was stopped (Ctrl-C, or SIGTERM to the process)."""
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
    except KeyboardInterrupt:
        print(f"{argv[0]}: stopped; {_AFTER_A_STOP[argv[0]]}", file=sys.stderr)
        return 130
    return 0


def _usage() -> str:
    lines = [f"  {name:12}{text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: python -m sgl_spec.training COMMAND ...", *lines])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
