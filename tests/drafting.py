"""How tests choose a drafter, by keyword for `LLM` or by flag for a server."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

PLUGINS = str(Path(__file__).with_name("plugin_drafters.py"))
DRAFTERS = ["none", "NGRAM", "STANDALONE", "SELF", "JUNK"]


def drafter_options(name: str, model: Path) -> dict[str, Any]:
    """Options that select a drafter; SELF and STANDALONE draft with `model`."""
    options: dict[str, Any] = {"speculative_algorithm": name}
    if name in ("SELF", "JUNK"):
        options["speculative_drafter_module"] = PLUGINS
    if name in ("SELF", "STANDALONE"):
        options["speculative_draft_model_path"] = str(model)
    return options


def drafter_flags(name: str, model: Path) -> list[str]:
    """The same on the command line."""
    options = drafter_options(name, model).items()
    flags = [(f"--{key.replace('_', '-')}", value) for key, value in options]
    return list(itertools.chain.from_iterable(flags))
