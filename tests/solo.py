"""What a request gives when it runs alone, without speculation and without a prefix cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from talk import Prompt

from sgl_spec import LLM, Completion


class Solo:
    """Answers of the plain engine to one request at a time; each is computed once."""

    def __init__(self, directory: Path, **flags: Any) -> None:
        sizes = {"max_total_tokens": 4096, "max_running_requests": 1}
        self.llm = LLM(str(directory), disable_radix_cache=True, **(sizes | flags))
        self._known: dict[str, Completion] = {}

    def run(self, prompt: Prompt, **sampling: Any) -> Completion:
        """The whole answer."""
        key = json.dumps([prompt, sampling], sort_keys=True)
        if key not in self._known:
            (self._known[key],) = self.llm.generate([prompt], [sampling])
        return self._known[key]

    def ids(self, prompt: Prompt, **sampling: Any) -> list[int]:
        """Its ids."""
        return self.run(prompt, **sampling).output_ids
