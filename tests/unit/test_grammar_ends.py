"""How grammars end: which of them can, and what a minimum length and stop ids do to that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_grammar_engine import TOKENIZER, VOCAB, spell
from tiny import IM_END

from sgl_spec import LLM
from sgl_spec.engine.grammar import Compile, GrammarError, make_compiler
from sgl_spec.request import Grammar


@pytest.fixture(scope="module")
def compile() -> Compile:
    return make_compiler(TOKENIZER, VOCAB, [IM_END])


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


SELF, ITEM = {"$ref": "#"}, {"$ref": "#/$defs/a~1b"}
TREE = {"type": "object", "properties": {"kids": {"type": "array", "items": SELF, "minItems": 1}}}
ENDLESS: list[tuple[str, Any]] = [
    ("json_schema", {"type": "object", "properties": {"a": SELF}, "required": ["a"]}),
    ("json_schema", {"type": "array", "items": SELF, "minItems": 1}),
    ("json_schema", {"type": "array", "prefixItems": [{}, SELF], "minItems": 2}),
    ("json_schema", {"type": "object", "required": ["x"], "additionalProperties": SELF}),
    ("json_schema", {"anyOf": [{"type": "array", "items": SELF, "minItems": 1}]}),
    ("json_schema", {**TREE, "required": ["kids"]}),
    (
        "json_schema",
        {
            "$defs": {"a/b": {"type": "object", "properties": {"n": ITEM}, "required": ["n"]}},
            "type": "array",
            "items": ITEM,
            "minItems": 3,
        },
    ),
    ("ebnf", 'root ::= "a" root'),
    ("ebnf", 'root ::= "a" x+\nx ::= "b" root | ("c" | "d") x{2,}'),
]
ENDING: list[tuple[str, Any]] = [
    ("json_schema", TREE),
    ("json_schema", {"type": ["array", "null"], "items": SELF, "minItems": 1}),
    ("json_schema", {"type": "array", "items": SELF}),
    ("json_schema", {"type": "array", "prefixItems": [{}, SELF], "minItems": 1}),
    ("json_schema", {"properties": {"a": SELF}, "required": ["a"]}),
    ("json_schema", {"type": "object", "properties": {"a": SELF}, "required": ["b"]}),
    (
        "json_schema",
        {
            "type": "object",
            "properties": {"a": {"anyOf": [SELF, {"type": "null"}]}},
            "required": ["a"],
        },
    ),
    ("ebnf", 'root ::= "a" root | "b"'),
    ("ebnf", 'root ::= "a" root?'),
    ("ebnf", 'root ::= "a" (root "," | "c"){0,4}'),
    ("ebnf", 'root ::= "a" x*\nx ::= "b" x'),
]


def as_text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content)


@pytest.mark.parametrize(("kind", "content"), ENDLESS)
def test_what_no_finite_text_satisfies_is_refused(
    compile: Compile, kind: Any, content: Any
) -> None:
    with pytest.raises(GrammarError, match="cannot be compiled: no finite text satisfies it"):
        compile(Grammar(kind, as_text(content), kind))


@pytest.mark.parametrize(("kind", "content"), ENDING)
def test_what_can_end_is_not_taken_for_endless(compile: Compile, kind: Any, content: Any) -> None:
    compile(Grammar(kind, as_text(content), kind))
