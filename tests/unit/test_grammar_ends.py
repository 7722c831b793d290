"""How a minimum length and stop ids meet the end of a grammar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_grammar_engine import VOCAB, spell

from sgl_spec import LLM


@pytest.mark.parametrize("algorithm", ["none", "NGRAM"])
def test_a_minimum_length_against_stop_ids_that_leave_nothing_else(
    tiny_model_dir: Path, algorithm: str
) -> None:
    llm = LLM(str(tiny_model_dir), speculative_algorithm=algorithm)
    letter, every = spell("y")[0], list(range(VOCAB))
    cases: dict[str, tuple[dict[str, Any], list[int], tuple[str, int | str | None]]] = {
        "the first token is the minimum": (
            {"regex": "yes", "min_new_tokens": 1, "stop_token_ids": [letter]},
            spell("y"),
            ("stop", letter),
        ),
        "only later tokens may end": (
            {"regex": "yesyesyes", "min_new_tokens": 3, "stop_token_ids": [letter]},
            spell("yesy"),
            ("stop", letter),
        ),
        "all tokens end": (
            {"regex": "yes", "min_new_tokens": 2, "stop_token_ids": every},
            spell("ye"),
            ("stop", spell("e")[0]),
        ),
        "the grammar ends first": (
            {"regex": "yes", "min_new_tokens": 9, "stop_token_ids": every},
            spell("yes"),
            ("stop", None),
        ),
    }
    for name, (params, ids, end) in cases.items():
        for temperature in (0.0, 1.0):
            one = llm.generate("a", {**params, "temperature": temperature, "max_new_tokens": 20})[0]
            assert (one.output_ids, one.finish.kind, one.finish.matched) == (ids, *end), name
    free = {"min_new_tokens": 10, "max_new_tokens": 20, "stop_token_ids": every, "temperature": 0.0}
    ended = llm.generate(["a b a b a b a b"] * 2, free)
    plain = {"max_new_tokens": 10, "ignore_eos": True, "temperature": 0.0, "speculation": False}
    for one in ended:
        assert one.output_ids == llm.generate("a b a b a b a b", plain)[0].output_ids
        assert (one.finish.kind, one.finish.matched) == ("stop", one.output_ids[-1])
