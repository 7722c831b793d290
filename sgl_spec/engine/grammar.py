"""Grammars through llguidance: from a request's text to an automaton over the model's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from tokenizers import Tokenizer

from sgl_spec.engine.ebnf import to_lark
from sgl_spec.engine.json_schema import SchemaError, as_read
from sgl_spec.request import Grammar
from sgl_spec.speculative.grammar import Automaton, Bools, Path, Words, bit

# Between two tokens of JSON: nothing, a space, or a line break with its indentation. Without a
# bound a model that has lost its way can write blanks until its budget is gone.
JSON_WHITESPACE = r"( |\n[ \t]{0,32})?"
MAX_REASON_CHARS = 200

Compile = Callable[[Grammar], Automaton]


class GrammarError(Exception):
    """A grammar that cannot be served. The message is what stands behind the field's name."""


@dataclass(frozen=True, slots=True)
class EndBits:
    """How llguidance says in a mask that the text may end.

    token: the id that it takes for an end, which is no text. width: words of its masks. hidden: ids
    that are never in a mask of ours: this one and those that end the model's texts. kept: what is
    left of those of our words that hold hidden ones, by the place of the word.
    """

    token: int
    width: int
    hidden: frozenset[int]
    kept: dict[int, np.int32]

    def hide(self, words: Words) -> None:
        """Take the hidden ids out of masks, [..., ceil(V / 32)]."""
        for place, kept in self.kept.items():
            words[..., place] &= kept

    def read(self, words: Words) -> Bools:
        """Of masks as llguidance writes them, [n, width]: whether their texts may end."""
        may_end: Bools = (words[:, self.token >> 5] >> (self.token & 31) & 1).astype(np.bool_)
        return may_end


class LLAutomaton:
    """`speculative.grammar.Automaton` over an `LLMatcher`.

    base: a matcher at its beginning, which is never moved; all automata of a grammar share it.
    """

    def __init__(self, base: LLMatcher, ends: EndBits) -> None:
        self._base = base
        self._matcher = base.deep_copy()
        self._ends = ends

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
        written = words if len(words) == self._ends.width else _wide(1, self._ends)[0]
        self._matcher.unsafe_compute_mask_ptr(_address(written), written.nbytes)
        if written is not words:
            words[:] = written[: len(words)]
        self._ends.hide(words)

    def step(self, token: int) -> bool:
        """Move by a token, if it may follow."""
        if token in self._ends.hidden:
            return False
        return self._matcher.try_consume_tokens([token]) == 1

    def restart(self) -> LLAutomaton:
        """A new automaton of the same grammar, at its beginning."""
        return LLAutomaton(self._base, self._ends)

    @staticmethod
    def fill_along(paths: Sequence[Path], words: Words) -> Bools:
        """See `Automaton.fill_along`. One call for all paths, which uses several cores and does not
        hold Python's lock."""
        ends = _automaton(paths[0])._ends
        written = words if words.shape[1] == ends.width else _wide(len(words), ends)
        drafts: list[tuple[LLMatcher, int, list[int]]] = []
        leaves: list[tuple[LLMatcher, int]] = []
        moved: list[tuple[LLMatcher, int]] = []
        for path in paths:
            matcher = _automaton(path)._matcher
            steps = matcher.try_consume_tokens(path.before) if path.before else 0
            if steps:
                moved.append((matcher, steps))
            if steps == len(path.before) and path.tokens:
                drafts.append((matcher, path.first, path.tokens))
            elif steps == len(path.before):
                leaves.append((matcher, path.first))
        where = _address(written), written.strides[0], len(written)
        if drafts:
            _executor().unsafe_compute_mask_ptr_with_draft_token(drafts, *where)
        if leaves:
            _executor().unsafe_compute_mask_ptr(leaves, *where)
        for matcher, steps in moved:
            if not matcher.is_error():
                matcher.rollback(steps)
        may_end = ends.read(written)
        if written is not words:
            words |= written[:, : words.shape[1]]
        ends.hide(words)
        return may_end


def _automaton(path: Path) -> LLAutomaton:
    found = path.constraint.automaton
    assert isinstance(found, LLAutomaton)
    return found


@cache
def _executor() -> LLExecutor:
    return LLExecutor()


def _wide(rows: int, ends: EndBits) -> Words:
    """Masks with a word more than ours, where the vocabulary leaves no id that is no text."""
    return np.zeros((rows, ends.width), dtype=np.int32)


def _address(words: Words) -> int:
    address: int = words.__array_interface__["data"][0]
    return address


def make_compiler(
    tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int], *, closed: bool = True
) -> Compile:
    """What compiles grammars for a model's tokens. It may be called from any thread. closed: how
    JSON schemas are read, see `json_schema.as_read`.

    A tokenizer that llguidance cannot read gives a compiler that refuses everything and says so.
    """
    tokenizer, end = _with_end(tokenizer, vocab_size)
    known = max(vocab_size, end + 1)
    try:
        table = LLTokenizer(tokenizer.to_str(), n_vocab=known, eos_token=[end])
    except ValueError as error:
        return refuse_all(f"is not supported with this model's tokenizer: {error}")
    hidden, kept = frozenset([end, *eos_ids]), dict[int, np.int32]()
    for token in hidden:
        if token < 32 * -(-vocab_size // 32):
            kept[token >> 5] = kept.get(token >> 5, np.int32(-1)) & ~bit(token)
    ends = EndBits(end, -(-known // 32), hidden, kept)

    def compile(grammar: Grammar) -> Automaton:
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(table, _source(grammar, closed), log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(f"cannot be compiled: {_reason(matcher.get_error())}")
        automaton = LLAutomaton(matcher, ends)
        _require_text(automaton, np.zeros(-(-vocab_size // 32), dtype=np.int32))
        return automaton

    return compile


def _with_end(tokenizer: Tokenizer, vocab_size: int) -> tuple[Tokenizer, int]:
    """A special token, which no text spells; one more if there is none."""
    for token, added in tokenizer.get_added_tokens_decoder().items():
        if added.special and token < vocab_size:
            return tokenizer, token
    wider = Tokenizer.from_str(tokenizer.to_str())
    wider.add_special_tokens(["<|end of text|>"])
    return wider, wider.get_vocab_size() - 1


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
