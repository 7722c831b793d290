"""Grammars over trees: what may follow each node, and which drafts leave the grammar.

One depth-first walk per constrained request steps its automaton down every drafted path that the
grammar allows and rolls it back. It gives the masks of all nodes, so that a token is drawn from the
same mask whether it was reached by drafts or step by step, and it finds the drafts that the mask
rules out, which need not be verified. Requests without a grammar are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class Masked:
    """Masks of B trees of N nodes. words: [M, ceil(V / 32)] int32. row_of: [B, N] int64, the row
    of words that restricts a node, -1 where it is free. legal: [B, N] bool, False for drafts that
    leave their request's grammar."""

    words: Words
    row_of: npt.NDArray[np.int64]
    legal: npt.NDArray[np.bool_]


def tree_masks(
    tokens: npt.NDArray[np.int64],
    parents: npt.NDArray[np.int64],
    num_nodes: npt.NDArray[np.int64],
    constraints: Sequence[Constraint | None],
    pool: Executor | None = None,
) -> Masked:
    """The masks of all nodes of the requests that have a grammar.

    tokens, parents: [B, N], of which a tree's first num_nodes [B] count. constraints: one per tree,
    None for a request without a grammar; each stands at its tree's root and does so again
    afterwards. The nodes below an illegal one stay free: no walk reaches them. pool: threads for
    the walks, which spend their time in the grammar engine, outside Python's lock.
    """
    row_of = np.full(tokens.shape, -1, dtype=np.int64)
    legal = np.ones(tokens.shape, dtype=np.bool_)
    walks, width, used = [], 0, 0
    for i, one in enumerate(constraints):
        if one is not None:
            count, width = int(num_nodes[i]), len(one.words)
            walks.append((i, one, count, used))
            used += count
    words = np.empty((used, width), dtype=np.int32)

    def walk(i: int, one: Constraint, count: int, start: int) -> None:
        found = _Walk(one, tokens[i, :count].tolist(), parents[i, :count].tolist(), words, start)
        row_of[i, :count], legal[i, :count] = found.row_of, found.legal

    if pool is None or len(walks) < 2:
        for each in walks:
            walk(*each)
    else:
        list(pool.map(lambda each: walk(*each), walks))
    return Masked(words, row_of, legal)


def mask_tree(
    tree: TokenTree, constraints: Sequence[Constraint | None], *, drop: bool = True
) -> TokenTree:
    """The trees with `allowed` set, without the nodes that leave their request's grammar.

    constraints: see `tree_masks`. drop False keeps all nodes: where drafts are sampled, a node may
    not be taken out because of its token; it is rejected, since the target gives it probability 0.
    """
    if all(one is None for one in constraints):
        return tree
    device = tree.tokens.device
    found = tree_masks(
        tree.tokens.numpy(force=True),
        tree.parents.numpy(force=True),
        tree.num_nodes.numpy(force=True),
        constraints,
    )
    allowed = NodeMasks(on_device(found.words, device), on_device(found.row_of, device))
    tree = replace(tree, allowed=allowed)
    if not drop or bool(found.legal.all()):
        return tree
    return keep_nodes(tree, on_device(found.legal, device))


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
