"""Grammars over trees: what may follow each node, and which drafts leave the grammar.

Automata are moved along every path of drafts that the grammar allows, and back. That gives the
masks of all nodes, so that a token is drawn from the same mask whether it was reached by drafts or
step by step, and it finds the drafts that the masks rule out, which need not be verified. Requests
without a grammar are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


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

    def restart(self) -> Automaton:
        """A new automaton of the same grammar, at its beginning."""

    @staticmethod
    def fill_along(paths: Sequence[Path], words: Words) -> Bools:
        """Write the masks along paths, no two of one automaton, and leave the automata where they
        stand, if none breaks.

        Row `first` of a path is the mask of where its automaton stands; each next row is the one
        behind the next token, up to the first token that cannot follow. Rows behind that stay as
        they are. Returns, for each row of words written, whether the text may end there.
        """


@dataclass(frozen=True, slots=True)
class Path:
    """Tokens to move a constraint's automaton by, and the first row of the masks; see
    `Automaton.fill_along`."""

    constraint: Constraint
    first: int
    tokens: list[int]


class Place(Enum):
    """Where a text stands. open: it may go on. ended: it is complete and nothing can follow.
    broken: no token continues it, or the automaton failed."""

    OPEN = "open"
    ENDED = "ended"
    BROKEN = "broken"


class Constraint:
    """A request's grammar and how far its committed output has come in it.

    end_ids: tokens that end the request; from the minimum length on they may be drawn where the
    text may end; one that is drawn earlier, since the grammar leaves nothing else, is a token like
    any other. depth: tokens of the output. words: the mask of the next token, [ceil(V / 32)] int32;
    end_bits: that of end_ids. problem: why the place is BROKEN.
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
        self.automaton = automaton
        self._committed: list[int] = []
        self.depth = 0
        self.end_bits = np.zeros_like(self.words)
        for token in self.end_ids:
            self.end_bits[token >> 5] |= bit(token)
        self.place = self._look(self.words)

    def allows(self, token: int) -> bool:
        """Whether the next output token may be this one."""
        return has_token(self.words, token)

    def commit(self, token: int) -> Place:
        """Take an output token (not one that ends the request); where the text stands now."""
        allowed = self.allows(token)
        self._committed.append(token)
        self.depth += 1
        if allowed and self.automaton.step(token):
            self.place = self._look(self.words)
        else:
            self.place = Place.BROKEN
            self.problem = self.automaton.error or f"token {token} is not allowed here"
        return self.place

    def mend(self) -> None:
        """Build an automaton that broke on a drafted path anew from the text."""
        if self.automaton.error is not None:
            self.automaton = self.automaton.restart()
            for token in self._committed:
                if not self.automaton.step(token):
                    return  # what worked once fails now: the next commit says so

    def _look(self, words: Words) -> Place:
        self.automaton.fill(words)
        self.problem = self.automaton.error or ""
        if self.problem:
            return Place.BROKEN
        may_end = self.automaton.may_end
        if not words.any():
            self.problem = "" if may_end else "no token of the vocabulary continues the text"
            return Place.ENDED if may_end else Place.BROKEN
        if may_end and self.depth >= self.min_new_tokens:
            words |= self.end_bits
        return Place.OPEN


@dataclass(frozen=True, slots=True)
class Masked:
    """Masks of B trees of N nodes. words: [M, ceil(V / 32)] int32. row_of: [B, N] int64, the row
    of words that restricts a node, -1 where it is free. legal: [B, N] bool, False for drafts that
    leave their request's grammar."""

    words: Words
    row_of: Ints
    legal: Bools


def tree_masks(
    tokens: Ints, parents: Ints, num_nodes: Ints, constraints: Sequence[Constraint | None]
) -> Masked:
    """The masks of all nodes of the requests that have a grammar.

    tokens, parents: [B, N], of which a tree's first num_nodes [B] count. constraints: one per tree,
    None for a request without a grammar; each stands at its tree's root and does so again
    afterwards. Nodes behind the end of a text and below an illegal one are free: no walk that
    counts reaches them.
    """
    row_of = np.full(tokens.shape, -1, dtype=np.int64)
    depths = np.zeros(tokens.shape, dtype=np.int64)
    turns: list[list[Path]] = []
    rows, mine = 0, {i: one for i, one in enumerate(constraints) if one is not None}
    for i, one in mine.items():
        if num_nodes[i] == 1:
            row_of[i, 0], rows = rows, rows + 1
            continue
        ids = tokens[i].tolist()
        for turn, path in enumerate(_root_paths(parents[i, : num_nodes[i]].tolist())):
            for depth, node in enumerate(path):
                if row_of[i, node] < 0:
                    row_of[i, node], depths[i, node] = rows + depth, depth
            if turn == len(turns):
                turns.append([])
            turns[turn].append(Path(one, rows, [ids[node] for node in path[1:]]))
            rows += len(path)
    legal = np.ones(tokens.shape, dtype=np.bool_)
    if not mine:
        return Masked(np.zeros((0, 0), dtype=np.int32), row_of, legal)
    first = next(iter(mine.values()))
    words = np.zeros((rows, len(first.words)), dtype=np.int32)
    may_end = np.zeros(rows, dtype=np.bool_)
    for i, one in mine.items():
        words[row_of[i, 0]] = one.words  # as it was left when the text was committed
    for paths in turns:
        may_end |= first.automaton.fill_along(paths, words)
        for one in mine.values():
            one.mend()
    _judge(tokens, parents, depths, mine, Masked(words, row_of, legal), may_end)
    used = row_of >= 0  # paths that share their beginning have it twice
    words, row_of[used] = words[row_of[used]], np.arange(used.sum())
    return Masked(words, row_of, legal)


def _root_paths(parents: list[int]) -> list[list[int]]:
    """The nodes from the root to each leaf of a tree."""
    inner, paths = set(parents), []
    for leaf in range(len(parents)):
        if leaf not in inner:
            path = [leaf]
            while path[-1]:
                path.append(parents[path[-1]])
            paths.append(path[::-1])
    return paths


def _judge(
    tokens: Ints,
    parents: Ints,
    depths: Ints,
    constraints: Mapping[int, Constraint],
    found: Masked,
    may_end: Bools,
) -> None:
    """Let texts end where they may, and find the illegal drafts, level by level: a draft's parent
    must allow it, and something must follow it unless it ends the text."""
    words, row_of, legal = found.words, found.row_of, found.legal
    goes_on = np.bitwise_or.reduce(words, axis=1) != 0
    ends = np.zeros(tokens.shape, dtype=np.bool_)  # nodes that end the request
    for i, one in constraints.items():
        used = row_of[i] >= 0
        late = one.depth + depths[i] >= one.min_new_tokens
        last = row_of[i, used & late]
        words[last[may_end[last] & goes_on[last]]] |= one.end_bits
        drafts = np.nonzero(used & late & (depths[i] > 0))[0]  # other entries may hold anything
        ends[i, drafts] = _has(one.end_bits[None], 0, tokens[i, drafts])
    for depth in range(1, int(depths.max(initial=0)) + 1):
        request, node = np.nonzero((depths == depth) & (row_of >= 0))
        row, above = row_of[request, node], row_of[request, parents[request, node]]
        allowed = (above >= 0) & _has(words, above, tokens[request, node])
        ended = ends[request, node]
        legal[request, node] = allowed & (ended | goes_on[row] | may_end[row])
        row_of[request, node] = np.where(allowed & ~ended & goes_on[row], row, -1)


def _has(words: Words, row: Ints | int, tokens: Ints) -> Bools:
    """Whether masks allow tokens, both [n]."""
    has: Bools = (words[row, tokens >> 5] >> (tokens & 31) & 1).astype(np.bool_)
    return has


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


def has_token(words: Words, token: int) -> bool:
    """Whether a mask allows a token."""
    return bool(int(words[token >> 5]) >> (token & 31) & 1)


def bit(token: int) -> np.int32:
    """A token's bit in its word, token // 32."""
    return np.uint32(1 << (token & 31)).astype(np.int32)
