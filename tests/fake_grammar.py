"""A grammar over `fakes.SumModel`'s tokens without a grammar engine, and plain decoding in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from fakes import EOS, VOCAB, SumModel

from sgl_spec.request import Grammar, SamplingParams
from sgl_spec.speculative.grammar import Automaton, Constraint, Path, Place, Words, bit
from sgl_spec.speculative.sampling import TokenMasks, build_rows, draw


class Counting:
    """About a third of the tokens may follow, depending on all before; a text has `least` to `most`
    tokens. A token of `breaks` breaks the automaton, as one does that costs too much."""

    def __init__(self, least: int, most: int, breaks: frozenset[int] = frozenset()) -> None:
        self.least, self.most, self.breaks = least, most, breaks
        self.tokens: list[int] = []
        self.error: str | None = None
        self.restarts = 0

    @property
    def may_end(self) -> bool:
        return len(self.tokens) >= self.least

    def allows(self, token: int) -> bool:
        key = sum((i + 3) * t for i, t in enumerate(self.tokens)) + 5 * token
        return token != EOS and len(self.tokens) < self.most and key * 2654435761 % 97 < 33

    def fill(self, words: Words) -> None:
        assert self.error is None
        words[:] = 0
        for token in range(VOCAB):
            if self.allows(token):
                words[token >> 5] |= bit(token)

    def step(self, token: int) -> bool:
        if not self.allows(token):
            return False
        if token in self.breaks:
            self.error = "too complex"
            return False
        self.tokens.append(token)
        return True

    def restart(self) -> Counting:
        again = Counting(self.least, self.most, self.breaks)
        again.restarts = self.restarts + 1
        return again

    @staticmethod
    def fill_along(paths: Sequence[Path], words: Words) -> np.ndarray:
        may_end = np.zeros(len(words), dtype=np.bool_)
        for path in paths:
            automaton = path.constraint.automaton
            before = list(automaton.tokens)
            if not all(automaton.step(token) for token in path.before):
                automaton.tokens[:] = before
                continue
            for row, token in enumerate([*path.tokens, None], path.first):
                automaton.fill(words[row])
                may_end[row] = automaton.may_end
                if token is None or not automaton.allows(token) or not automaton.step(token):
                    break
            automaton.tokens[:] = before  # which a broken one has no use for
        return may_end


def compile_counting(grammar: Grammar) -> Automaton:
    """A regex "least,most[,token that breaks]..."."""
    least, most, *breaks = map(int, grammar.text.split(","))
    return Counting(least, most, frozenset(breaks))


def plain(
    model: SumModel, prompt: Sequence[int], params: SamplingParams
) -> tuple[list[int], str, int | None]:
    """Step-by-step decoding: ids, kind of finish, and what matched."""
    assert params.grammar is not None
    stop = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    least = params.min_new_tokens
    constraint = Constraint(compile_counting(params.grammar), stop, VOCAB, least)
    rows = build_rows([params], [len(prompt)], [EOS])
    output: list[int] = []
    while len(output) < params.max_new_tokens:
        ids = [*prompt, *output]
        masks = TokenMasks(torch.from_numpy(constraint.words[None].copy()), torch.tensor([0]))
        logits = model.next_logits(ids)
        output.append(int(draw(logits, rows, torch.tensor([len(ids)]), masks=masks)))
        assert constraint.allows(output[-1])
        if output[-1] in stop and len(output) >= least:
            return output, "stop", output[-1]
        place = commit(constraint, output[-1])
        if place is not Place.OPEN:
            return output, {Place.ENDED: "stop", Place.BROKEN: "abort"}[place], None
    return output, "length", None


def commit(constraint: Constraint, token: int) -> Place:
    """Take one token; where the text stands then."""
    constraint.take([token])
    return constraint.place


def mask_of(automaton: Counting, end_ids: Sequence[int]) -> list[int]:
    """The tokens that may be drawn, from the definition."""
    allowed = [t for t in range(VOCAB) if automaton.allows(t)]
    return sorted({*allowed, *(end_ids if automaton.may_end and allowed else ())})


def listed(words: Words, vocab: int = VOCAB) -> list[int]:
    """The tokens of a mask."""
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little")
    found: list[int] = np.flatnonzero(bits[:vocab]).tolist()
    return found
