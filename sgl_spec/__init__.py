"""sgl-spec: an LLM server whose subject is tree speculation."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any

# OpenMP threads spin at the end of every parallel region, and a forward has hundreds of regions. On
# a core that the spinning thread shares (with the API process, say), the other thread cannot run
# meanwhile, and a forward takes 20 times as long. Read when torch loads, so it is set before that.
if "torch" in sys.modules and "GOMP_SPINCOUNT" not in os.environ:
    logging.getLogger(__name__).warning(
        "torch was imported before sgl_spec, so its OpenMP threads have not read "
        "GOMP_SPINCOUNT=1000 and spin: on a busy machine a forward in this process may take "
        "twice as long. Import sgl_spec first, or set the variable before Python starts."
    )
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from sgl_spec.llm import LLM, Completion, Piece
    from sgl_spec.request import LogprobParams, SamplingParams
    from sgl_spec.speculative.base import register_drafter

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "LogprobParams", "Piece", "SamplingParams", "register_drafter"]

_HOME = {
    "LLM": "sgl_spec.llm",
    "Completion": "sgl_spec.llm",
    "LogprobParams": "sgl_spec.request",
    "Piece": "sgl_spec.llm",
    "SamplingParams": "sgl_spec.request",
    "register_drafter": "sgl_spec.speculative.base",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: the API process imports this package without
    torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
