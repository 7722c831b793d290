"""`python -m sgl_spec.training COMMAND ...`: one module per command, imported when asked for."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence

from sgl_spec.bench.dispatch import Command, dispatch

_FROM_CHECKPOINT = "with --resume it goes on from its last checkpoint, if it got to one."
COMMANDS = {
    "data": Command(
        "let the target answer prompts: token shards for the other commands",
        "what was finished is kept, and the same command goes on.",
    ),
    "eagle3": Command("train an EAGLE3 head on token shards", _FROM_CHECKPOINT),
    "standalone": Command("distil a small Llama from the target on shards", _FROM_CHECKPOINT),
    "eval": Command("acceptance of a draft by kind of prompt and tree shape"),
}


def main(argv: Sequence[str]) -> int:
    """Run a command. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    return dispatch("sgl_spec.training", COMMANDS, argv)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stopped as by Ctrl-C
    sys.exit(main(sys.argv[1:]))
