"""A small random grammar that writes prompts, openings and requests.

`data/grammar.json` maps a symbol to its alternatives, one drawn evenly. In an alternative, {symbol}
is expanded in turn and {3..9} is a whole number of that range.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from importlib.resources import files

_SLOT = re.compile(r"\{(?:(?P<low>\d+)\.\.(?P<high>\d+)|(?P<symbol>[a-z_0-9]+))\}")
_DEPTH = 12


class Grammar:
    """Alternatives by symbol. An unknown symbol raises `KeyError` when it is met."""

    def __init__(self, alternatives: Mapping[str, list[str]]) -> None:
        self.alternatives = alternatives

    @classmethod
    def load(cls) -> Grammar:
        """The package's own."""
        source = files("sgl_spec.training") / "data" / "grammar.json"
        return cls(json.loads(source.read_text(encoding="utf-8")))

    def expand(
        self,
        symbol: str,
        rng: random.Random,
        bound: Mapping[str, str] | None = None,
        depth: int = 0,
    ) -> str:
        """One text of `symbol`. bound: symbols whose text is given, inserted as it is."""
        assert depth < _DEPTH, f"{symbol} expands without end"
        given = bound or {}
        if symbol in given:
            return given[symbol]

        def slot(match: re.Match[str]) -> str:
            if match["low"]:
                return str(rng.randint(int(match["low"]), int(match["high"])))
            return self.expand(match["symbol"], rng, given, depth + 1)

        return _SLOT.sub(slot, rng.choice(self.alternatives[symbol]))
