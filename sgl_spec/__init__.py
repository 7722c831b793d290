"""sgl-spec: an LLM server whose subject is tree speculation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_spec.llm import LLM, Completion
    from sgl_spec.request import SamplingParams
    from sgl_spec.speculative.base import register_drafter

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "SamplingParams", "register_drafter"]

_HOME = {
    "LLM": "sgl_spec.llm",
    "Completion": "sgl_spec.llm",
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
