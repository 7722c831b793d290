"""One log format for both processes."""

from __future__ import annotations

import logging


def _not_a_poll(record: logging.LogRecord) -> bool:
    """Whether an access is worth a line: the polls of /health are not. The arguments are
    uvicorn's: client, method, path, HTTP version, status."""
    args = record.args
    return not (isinstance(args, tuple) and len(args) == 5 and _path(args[2]) == "/health")


def _path(target: object) -> str:
    return str(target).partition("?")[0]


def configure_logging(level: str, process: str) -> None:
    """Log to stderr from `level` on; `process` says which of the two processes speaks."""
    logging.basicConfig(
        level=level.upper(),
        format=f"[%(asctime)s {process}] %(levelname)s %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )
    logging.getLogger("uvicorn.access").addFilter(_not_a_poll)
    # What uvicorn says of its own start and end; `Server` has better words for both.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
