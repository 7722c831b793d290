"""The first code of the engine process: tie its life to the API process, then call the entry point.

Run by `processes.Engine` as `python -m sgl_spec.server.child PARENT_PID`, with a `Boot` as JSON on
stdin. It imports nothing of the engine by name, so that the API side stays free of it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import signal
import sys
from typing import Any

import msgspec

from sgl_spec.args import ResolvedArgs
from sgl_spec.server.logs import configure_logging

PR_SET_PDEATHSIG = 1
# Writes the stacks of all threads to stderr, also while C code holds the interpreter.
STACKS_SIGNAL = signal.SIGUSR1


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine process needs to start.

    entry: "module:function", called with (args, to_engine, from_engine); returns the exit code.
    args: the fields of `ResolvedArgs`. to_engine, from_engine: ZMQ addresses, to which the engine
    connects a PULL and a PUSH socket.
    """

    entry: str
    args: dict[str, Any]
    to_engine: str
    from_engine: str


def die_with_parent(parent: int) -> None:
    """On Linux, have the kernel kill this process when the API process ends in whatever way."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        raise SystemExit("The API process ended before its engine started.")


def main() -> None:
    """Read the `Boot` and run the engine until it ends."""
    die_with_parent(int(sys.argv[1]))
    faulthandler.register(STACKS_SIGNAL)
    boot = msgspec.json.decode(sys.stdin.buffer.read(), type=Boot)
    args = ResolvedArgs(**boot.args)
    configure_logging(args.log_level, "engine")
    module, _, function = boot.entry.partition(":")
    entry = getattr(importlib.import_module(module), function)
    sys.exit(entry(args, boot.to_engine, boot.from_engine))


if __name__ == "__main__":
    main()
