"""One log format for both processes."""

from __future__ import annotations

import logging


def configure_logging(level: str, process: str) -> None:
    """Log to stderr from `level` on; `process` says which of the two processes speaks."""
    logging.basicConfig(
        level=level.upper(),
        format=f"[%(asctime)s {process}] %(levelname)s %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )
    # What uvicorn says of its own start and end; `Server` has better words for both.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
