"""`python -m sgl_spec.bench COMMAND ...`: one module per benchmark, imported when asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sgl_spec.bench.dispatch import Command, dispatch

COMMANDS = {
    "experiment": Command(
        "a grid of settings and loads from a file: tables and plots",
        "what was measured is kept, and the same command goes on.",
    ),
    "published": Command("bring a document's tables up to date with results of experiments"),
    "accept": Command("acceptance on Spec-Bench by group, depth and tree shape, beside theory"),
    "serving": Command("load client: tokens per second, first token, latencies of a server"),
    "offline": Command("tokens per second of the engine by task, beside transformers"),
    "round": Command("a round beside its floor, and what takes its time"),
    "kernels": Command("every device kernel beside its floor and torch, on a GPU"),
    "ngram": Command("accept length and host time of the n-gram trie, over recorded texts"),
}


def main(argv: Sequence[str]) -> int:
    """Run a benchmark. Returns the exit code."""
    return dispatch("sgl_spec.bench", COMMANDS, argv)


def experiment(argv: Sequence[str]) -> int:
    """`sgl-spec experiment`."""
    return main(["experiment", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
