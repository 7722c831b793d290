"""Grammars through llguidance: from a request's text to an automaton over the model's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from tokenizers import Tokenizer

from sgl_spec.engine.ebnf import to_lark
from sgl_spec.engine.json_schema import SchemaError, as_read
from sgl_spec.request import Grammar
from sgl_spec.speculative.grammar import Automaton, Bools, Path, Words, bit, has_token

# Between two tokens of JSON: nothing, a space, or a line break with its indentation. Without a
# bound a model that has lost its way can write blanks until its budget is gone.
JSON_WHITESPACE = r"( |\n[ \t]{0,32})?"
MAX_REASON_CHARS = 200

Compile = Callable[[Grammar], Automaton]


class GrammarError(Exception):
    """A grammar that cannot be served. The message is what stands behind the field's name."""


class LLAutomaton:
    """`speculative.grammar.Automaton` over an `LLMatcher`.

    base: a matcher at its beginning, which is never moved; all automata of a grammar share it.
    shown: the mask of all tokens but those that llguidance takes for ends.
    """

    def __init__(self, base: LLMatcher, shown: Words) -> None:
        self._base = base
        self._matcher = base.deep_copy()
        self._shown = shown

    @property
    def may_end(self) -> bool:
        """Whether the text so far is complete."""
        return self._matcher.is_accepting()

    @property
    def error(self) -> str | None:
        """Why the automaton is broken, if it is."""
        return _reason(self._matcher.get_error()) if self._matcher.is_error() else None

    def fill(self, words: Words) -> None:
        """Write the mask of the tokens that continue the text."""
        address = words.__array_interface__["data"][0]
        self._matcher.unsafe_compute_mask_ptr(address, words.nbytes)
        words &= self._shown

    def step(self, token: int) -> bool:
        """Move by a token; False breaks the automaton."""
        return self._matcher.consume_token(token)

    def restart(self) -> LLAutomaton:
        """A new automaton of the same grammar, at its beginning."""
        return LLAutomaton(self._base, self._shown)

    @staticmethod
    def fill_along(paths: Sequence[Path], words: Words) -> Bools:
        """See `Automaton.fill_along`. Token by token: the engine's own call for drafted paths does
        not say where the text may end, and an end id in a mask may be text that goes on."""
        may_end = np.zeros(len(words), dtype=np.bool_)
        for path in paths:
            automaton, moved = _automaton(path), 0
            for row, token in enumerate((*path.tokens, None), path.first):
                automaton.fill(words[row])
                may_end[row] = automaton.may_end
                if token is None or not has_token(words[row], token) or not automaton.step(token):
                    break
                moved += 1
            if automaton.error is None:
                automaton._matcher.rollback(moved)
        return may_end


def _automaton(path: Path) -> LLAutomaton:
    found = path.constraint.automaton
    assert isinstance(found, LLAutomaton)
    return found


def make_compiler(
    tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int], *, closed: bool = True
) -> Compile:
    """What compiles grammars for a model's tokens. It may be called from any thread. closed: how
    JSON schemas are read, see `json_schema.as_read`.

    A tokenizer that llguidance cannot read gives a compiler that refuses everything and says so.
    """
    try:
        table = LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=list(eos_ids) or None)
    except ValueError as error:
        return refuse_all(f"is not supported with this model's tokenizer: {error}")
    shown = np.full(-(-vocab_size // 32), -1, dtype=np.int32)
    for token in table.eos_tokens:
        shown[token >> 5] &= ~bit(token)

    def compile(grammar: Grammar) -> Automaton:
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(table, _source(grammar, closed), log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(f"cannot be compiled: {_reason(matcher.get_error())}")
        automaton = LLAutomaton(matcher, shown)
        _require_text(automaton, np.empty_like(shown))
        return automaton

    return compile


def refuse_all(reason: str) -> Compile:
    """A compiler for servers that have none."""

    def compile(grammar: Grammar) -> Automaton:
        raise GrammarError(reason)

    return compile


def _source(grammar: Grammar, closed: bool) -> str:
    """The grammar in llguidance's own form."""
    try:
        if grammar.kind == "regex":
            # \d, \w and \s are ASCII, as in JSON schemas and in SGLang.
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(grammar.text, 'dws')}/")
        if grammar.kind == "ebnf":
            return LLMatcher.grammar_from_lark(to_lark(grammar.text))
        return LLMatcher.grammar_from_json_schema(
            as_read(grammar.text, closed=closed), overrides={"whitespace_pattern": JSON_WHITESPACE}
        )
    except (ValueError, SchemaError) as error:
        raise GrammarError(f"cannot be compiled: {_reason(str(error))}") from error


def _require_text(automaton: LLAutomaton, words: Words) -> None:
    automaton.fill(words)
    if automaton.error is not None:
        raise GrammarError(f"cannot be compiled: {automaton.error}")
    if not words.any():
        raise GrammarError("cannot be compiled: it allows no text")


def _reason(message: str) -> str:
    """The one line of an llguidance message that says what is wrong."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines or lines[0].startswith("panic"):
        return "the grammar engine failed on it"
    if lines[0] in ("NoExtension", "NoExtensionBias"):
        return "it allows no text"
    chosen = next((line[7:] for line in lines if line.startswith("error: ")), lines[0])
    return chosen if len(chosen) <= MAX_REASON_CHARS else chosen[: MAX_REASON_CHARS - 3] + "..."
