"""Whether a reply is what its grammar allows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
from fake_grammar import commit
from grammars import EBNF, REGEXES, SCHEMAS
from tokenizers import Tokenizer

from sgl_spec.engine.grammar import make_compiler
from sgl_spec.request import SamplingParams
from sgl_spec.speculative.grammar import Constraint, Place

# Sampling parameters of every grammar, by a name for messages.
ASKED: dict[str, dict[str, Any]] = {
    **{name: {"json_schema": schema} for name, schema in SCHEMAS.items()},
    **{f"regex {name}": {"regex": text} for name, text in REGEXES.items()},
    **{f"ebnf {name}": {"ebnf": text} for name, text in EBNF.items()},
}


def check_text(asked: dict[str, Any], text: str) -> None:
    """The whole text matches; for EBNF see `Follower`."""
    if "regex" in asked:
        assert re.fullmatch(asked["regex"], text, re.ASCII), text
    elif "json_schema" in asked:
        schema = asked["json_schema"]
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))


class Follower:
    """Steps ids through their grammar, one by one."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos: Sequence[int]) -> None:
        self._compile = make_compiler(tokenizer, vocab, eos)
        self._vocab, self._eos = vocab, eos

    def check(self, asked: dict[str, Any], reply: dict[str, Any]) -> None:
        """A reply that stopped is complete, and ends where the grammar does; one that was cut is
        the beginning of a text in the grammar."""
        ids, finish = list(reply["output_ids"]), reply["meta_info"]["finish_reason"]
        grammar = SamplingParams(**asked).grammar
        assert grammar is not None
        one = Constraint(self._compile(grammar), self._eos, self._vocab)
        ended = ids[-1] in self._eos
        for token in ids[:-1] if ended else ids:
            assert one.place is Place.OPEN, "the text goes on after its end"
            assert commit(one, token) is not Place.BROKEN, one.problem
        if finish["type"] == "stop":
            complete = one.words[self._eos[0] >> 5] >> (self._eos[0] & 31) & 1
            assert bool(complete) if ended else one.place is Place.ENDED
            check_text(asked, reply["text"])
        else:
            assert finish["type"] == "length"
            assert one.place is Place.OPEN
