"""Grammars over trees: what may follow each node, and which drafts leave the grammar.

One depth-first walk per constrained request steps its automaton down every drafted path that the
grammar allows and rolls it back. It gives the masks of all nodes, so that a token is drawn from the
same mask whether it was reached by drafts or step by step, and it finds the drafts that the mask
rules out, which need not be verified. Requests without a grammar are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sgl_spec.layers.transfer import on_device
from sgl_spec.speculative.prune import keep_nodes
from sgl_spec.speculative.sampling import TokenMasks
from sgl_spec.speculative.tree import NodeMasks, TokenTree

Words = npt.NDArray[np.int32]


class Automaton(Protocol):
    """A place in a grammar, moved token by token.

    A step that the mask allows can still fail, when it would cost more than the grammar engine
    spends on one. Then `error` says why, and only `restart` is of use.
    """

    @property
    def may_end(self) -> bool:
        """Whether the text so far is complete."""

    @property
    def error(self) -> str | None:
        """Why the automaton is broken, if it is."""

    def fill(self, words: Words) -> None:
        """Write the mask of the tokens that continue the text; ids that end it are not among
        them."""

    def step(self, token: int) -> bool:
        """Move by a token; False breaks the automaton."""

    def rollback(self, count: int) -> None:
        """Undo the last `count` steps."""

    def restart(self) -> Automaton:
        """A new automaton of the same grammar, at its beginning."""


class Place(Enum):
    """Where a text stands. open: it may go on. ended: it is complete and nothing can follow.
    broken: no token continues it, or the automaton failed."""

    OPEN = "open"
    ENDED = "ended"
    BROKEN = "broken"


class Constraint:
    """A request's grammar and how far its committed output has come in it.

    end_ids: tokens that end the request; from the minimum length on they may be drawn where the
    text may end. min_new_tokens: the minimum length, see `ends`. words: the mask of the next token,
    [ceil(V / 32)] int32. problem: why the place is BROKEN.
    """

    def __init__(
        self,
        automaton: Automaton,
        end_ids: Iterable[int],
        vocab_size: int,
        min_new_tokens: int = 0,
    ) -> None:
        self.words: Words = np.zeros(-(-vocab_size // 32), dtype=np.int32)
        self.end_ids = frozenset(end_ids)
        self.min_new_tokens = min_new_tokens
        self.problem = ""
        self._automaton = automaton
        self._committed: list[int] = []
        self._depth = 0  # tokens up to where the automaton stands, drafted ones included
        self._end_bits = np.zeros_like(self.words)
        for token in self.end_ids:
            self._end_bits[token >> 5] |= bit(token)
        self.place = self._look(self.words)

    def allows(self, token: int) -> bool:
        """Whether the next output token may be this one."""
        return has_token(self.words, token)

    def ends(self, token: int) -> bool:
        """Whether this token, drawn where the automaton stands, ends the request. An end id that
        is drawn earlier, since the grammar leaves nothing else, is a token like any other."""
        return token in self.end_ids and self._depth + 1 >= self.min_new_tokens

    def commit(self, token: int) -> Place:
        """Take an output token (not one that ends the request); where the text stands now."""
        allowed = self.allows(token)
        self._committed.append(token)
        self._depth += 1
        if allowed and self._automaton.step(token):
            self.place = self._look(self.words)
        else:
            self.place = Place.BROKEN
            self.problem = self._automaton.error or f"token {token} is not allowed here"
        return self.place

    def visit(self, token: int, words: Words) -> Place:
        """Step down to a drafted token that is allowed here, and write the mask of what follows it.

        ENDED and BROKEN leave `words` meaningless.
        """
        self._depth += 1
        if self._automaton.step(token):
            return self._look(words)
        return Place.BROKEN

    def leave(self, path: Sequence[int]) -> None:
        """Go back up to the drafted path that led to the node left. A broken automaton is built
        anew from the text."""
        self._depth -= 1
        if self._automaton.error is None:
            self._automaton.rollback(1)
            return
        self._automaton = self._automaton.restart()
        for token in (*self._committed, *path):
            if not self._automaton.step(token):
                return  # what worked once fails now: the next step down or commit says so

    def _look(self, words: Words) -> Place:
        self._automaton.fill(words)
        self.problem = self._automaton.error or ""
        if self.problem:
            return Place.BROKEN
        may_end = self._automaton.may_end
        if not words.any():
            self.problem = "" if may_end else "no token of the vocabulary continues the text"
            return Place.ENDED if may_end else Place.BROKEN
        if may_end and self._depth >= self.min_new_tokens:
            words |= self._end_bits
        return Place.OPEN


def mask_tree(
    tree: TokenTree, constraints: Sequence[Constraint | None], *, drop: bool = True
) -> TokenTree:
    """The trees with `allowed` set, without the nodes that leave their request's grammar.

    constraints: one per tree, None for a request without a grammar; each stands at its tree's root
    and does so again afterwards. drop False keeps all nodes: where drafts are sampled, a node may
    not be taken out because of its token; it is rejected, since the target gives it probability 0.
    The rows of such nodes stay free, and no walk reaches them.
    """
    if all(one is None for one in constraints):
        return tree
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    counts = tree.num_nodes.tolist()
    rows = sum(n for n, one in zip(counts, constraints, strict=True) if one is not None)
    width = next(len(one.words) for one in constraints if one is not None)
    words = np.empty((rows, width), dtype=np.int32)
    row_of = np.full((tree.batch, tree.width), -1, dtype=np.int64)
    keep = np.ones((tree.batch, tree.width), dtype=np.bool_)
    used = 0
    for i, one in enumerate(constraints):
        if one is not None:
            walk = _Walk(one, tokens[i][: counts[i]], parents[i][: counts[i]], words, used)
            keep[i, : counts[i]] = walk.legal
            row_of[i, : counts[i]] = walk.row_of
            used = walk.end
    device = tree.tokens.device
    allowed = NodeMasks(on_device(words, device), on_device(row_of, device))
    tree = replace(tree, allowed=allowed)
    if not drop or bool(keep.all()):
        return tree
    return keep_nodes(tree, on_device(keep, device))


def token_masks(tree: TokenTree) -> TokenMasks | None:
    """`allowed` by the rows of the trees' forward: the nodes in use, tree by tree."""
    if tree.allowed is None:
        return None
    return TokenMasks(tree.allowed.words, tree.allowed.row_of[tree.used()])


class _Walk:
    """One request's walk. words[start .. end - 1] are its masks, row_of[node] where a node's is."""

    def __init__(
        self,
        constraint: Constraint,
        tokens: Sequence[int],
        parents: Sequence[int],
        words: Words,
        start: int,
    ) -> None:
        self.legal = [node == 0 for node in range(len(tokens))]
        self.row_of = [-1] * len(tokens)
        self.end = start + 1
        self._constraint = constraint
        self._tokens = tokens
        self._kids: list[list[int]] = [[] for _ in tokens]
        for node, parent in enumerate(parents[1:], 1):
            self._kids[parent].append(node)
        self._words = words
        self._path: list[int] = []
        self.row_of[0] = start
        words[start] = constraint.words
        self._below(0)

    def _below(self, node: int) -> None:
        """Visit the children of a node, at which the automaton stands."""
        mask = self._words[self.row_of[node]]
        for kid in self._kids[node]:
            token = self._tokens[kid]
            if not has_token(mask, token):
                continue
            if self._constraint.ends(token):
                self.legal[kid] = True  # nothing follows
            else:
                self._enter(kid, token)

    def _enter(self, kid: int, token: int) -> None:
        place = self._constraint.visit(token, self._words[self.end])
        self.legal[kid] = place is not Place.BROKEN
        if place is Place.OPEN:
            self.row_of[kid] = self.end
            self.end += 1
            self._path.append(token)
            self._below(kid)
            self._path.pop()
        self._constraint.leave(self._path)


def has_token(words: Words, token: int) -> bool:
    """Whether a mask allows a token."""
    return bool(int(words[token >> 5]) >> (token & 31) & 1)


def bit(token: int) -> np.int32:
    """A token's bit in its word, token // 32."""
    return np.uint32(1 << (token & 31)).astype(np.int32)
