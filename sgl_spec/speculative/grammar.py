"""Grammars over trees: what may follow each node, and which drafts leave the grammar.

Automata are moved along every path of drafts that the grammar allows, and back. That gives the
masks of all nodes, so that a token is drawn from the same mask whether it was reached by drafts or
step by step, and it finds the drafts that the masks rule out, which need not be verified. Requests
without a grammar are not looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
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
_NEVER = np.iinfo(np.int64).max


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
        """Move by a token that may follow. False: it may not, and the automaton stands where it
        did, or is broken."""

    def restart(self) -> Automaton:
        """A new automaton of the same grammar, at its beginning."""

    @staticmethod
    def fill_along(paths: Sequence[Path], words: Words) -> Bools:
        """Write the masks along paths, no two of one automaton, and leave the automata where they
        stand, if none breaks.

        Row `first` of a path is the mask behind the tokens `before`, each next row the one behind
        the next token, up to the first token that cannot follow. Rows behind that stay as they
        are, and so do all if one of `before` cannot. Returns, for each row of words written,
        whether the text may end there.
        """


@dataclass(frozen=True, slots=True)
class Path:
    """Tokens to move a constraint's automaton by, and the first row of the masks; see
    `Automaton.fill_along`."""

    constraint: Constraint
    before: list[int]
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
        self._may_end = False
        self.depth = 0
        self.end_bits = np.zeros_like(self.words)
        for token in self.end_ids:
            self.end_bits[token >> 5] |= bit(token)
        self.place = self._look()

    def allows(self, token: int) -> bool:
        """Whether the next output token may be this one."""
        return has_token(self.words, token)

    def take(self, tokens: Sequence[int]) -> int:
        """Take output tokens in order, up to one that ends the request, to where the text ends, or
        to one that is not allowed, which leaves the place BROKEN. Returns how many were allowed.

        The mask is made once, behind the last: a token that follows says that the one before it
        could be followed.
        """
        for count, token in enumerate(tokens):
            if token in self.end_ids and self._ends(moved=count > 0):
                self.place = Place.ENDED
                return count + 1
            if not self.automaton.step(token):
                self._refuse(token, moved=count > 0)
                return count
            self._committed.append(token)
            self.depth += 1
        self.place = self._look()
        return len(tokens)

    def _ends(self, *, moved: bool) -> bool:
        """Whether an end id that was drawn ends the request here. moved: the mask is older."""
        if moved:
            self.place = self._look()
        return self.place is Place.OPEN and self._may_end and self.depth >= self.min_new_tokens

    def _refuse(self, token: int, *, moved: bool) -> None:
        """A token cannot follow. Perhaps the text ended before it."""
        error = self.automaton.error
        if error is None and moved:
            self.place = self._look()
            if self.place is not Place.OPEN:
                return
        self.place = Place.BROKEN
        self.problem = error or f"token {token} is not allowed here"

    def mend(self) -> None:
        """Build an automaton that broke on a drafted path anew from the text."""
        if self.automaton.error is not None:
            self.automaton = self.automaton.restart()
            for token in self._committed:
                if not self.automaton.step(token):
                    return  # what worked once fails now: the next token says so

    def _look(self) -> Place:
        words = self.words
        self.automaton.fill(words)
        self.problem = self.automaton.error or ""
        if self.problem:
            return Place.BROKEN
        self._may_end = self.automaton.may_end
        if not np.count_nonzero(words):
            self.problem = "" if self._may_end else "no token of the vocabulary continues the text"
            return Place.ENDED if self._may_end else Place.BROKEN
        if self._may_end and self.depth >= self.min_new_tokens:
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
    mine = {i: one for i, one in enumerate(constraints) if one is not None}
    row_of = np.full(tokens.shape, -1, dtype=np.int64)
    legal = np.ones(tokens.shape, dtype=np.bool_)
    if not mine:
        return Masked(np.zeros((0, 0), dtype=np.int32), row_of, legal)
    depths = np.zeros(tokens.shape, dtype=np.int64)
    turns = _plan(tokens, parents, num_nodes, mine, row_of, depths)
    first = next(iter(mine.values()))
    words = np.zeros((int(row_of.max()) + 1, len(first.words)), dtype=np.int32)
    may_end = np.zeros(len(words), dtype=np.bool_)
    for paths in turns:
        may_end |= first.automaton.fill_along(paths, words)
        for path in paths:
            path.constraint.mend()
    for i, one in mine.items():
        if num_nodes[i] == 1:
            words[row_of[i, 0]] = one.words  # as it was left when the text was committed
    found = Masked(words, row_of, legal)
    _judge(tokens, parents, depths, mine, found, may_end)
    return found


def _plan(
    tokens: Ints,
    parents: Ints,
    num_nodes: Ints,
    constraints: Mapping[int, Constraint],
    row_of: Ints,
    depths: Ints,
) -> list[list[Path]]:
    """Give every node its row and depth. Returns the paths that fill the rows, in turns that do not
    hold a constraint twice; roots alone need none."""
    turns: list[list[Path]] = []
    nodes: list[int] = []  # by row, of the flattened trees
    levels: list[int] = []
    for i, one in constraints.items():
        count = int(num_nodes[i])
        ids, above = tokens[i, :count].tolist(), tuple(parents[i, :count].tolist())
        for turn, (path, known) in enumerate(_branches(above)):
            if count > 1:
                if turn == len(turns):
                    turns.append([])
                along = [ids[node] for node in path[1:]]
                turns[turn].append(Path(one, along[:known], len(nodes), along[known:]))
            first = i * tokens.shape[1]
            nodes += [first + node for node in path[known:]]
            levels += range(known, len(path))
    row_of.reshape(-1)[nodes] = np.arange(len(nodes))
    depths.reshape(-1)[nodes] = levels
    return turns


@lru_cache(maxsize=4096)
def _branches(parents: tuple[int, ...]) -> list[tuple[list[int], int]]:
    """The nodes from the root to each leaf of a tree, and how many of them an earlier path had."""
    inner, seen, branches = set(parents), set[int](), list[tuple[list[int], int]]()
    for leaf in range(len(parents)):
        if leaf not in inner:
            path = [leaf]
            while path[-1]:
                path.append(parents[path[-1]])
            branches.append((path[::-1], len(seen.intersection(path))))
            seen.update(path)
    return branches


def _judge(
    tokens: Ints,
    parents: Ints,
    depths: Ints,
    constraints: Mapping[int, Constraint],
    found: Masked,
    may_end: Bools,
) -> None:
    """Let texts end where they may, and find the illegal drafts: a draft's parent must allow it,
    and something must follow it unless it ends the text."""
    words, row_of, legal = found.words, found.row_of, found.legal
    goes_on = np.bitwise_or.reduce(words, axis=1) != 0
    ends = _let_end(tokens, depths, constraints, found, may_end & goes_on)
    drafts = depths > 0  # other entries may hold anything
    above, every = np.where(drafts, parents, 0), np.arange(len(tokens))
    row = row_of[drafts]
    allowed = _has(words, row_of[np.nonzero(drafts)[0], above[drafts]], tokens[drafts])
    legal[drafts] = allowed & (ends[drafts] | goes_on[row] | may_end[row])
    followed = row_of >= 0
    followed[drafts] = allowed & ~ends[drafts] & goes_on[row]
    for node in range(1, tokens.shape[1]):
        reached = followed[every, above[:, node]] | ~drafts[:, node]
        legal[:, node] &= reached
        followed[:, node] &= reached
    row_of[~followed] = -1


def _let_end(
    tokens: Ints,
    depths: Ints,
    constraints: Mapping[int, Constraint],
    found: Masked,
    may_end: Bools,
) -> Bools:
    """Allow end ids where a text may end. Returns the drafts that end their request."""
    groups = defaultdict[frozenset[int], list[int]](list)
    for i, one in constraints.items():
        groups[one.end_ids].append(i)
    ends = np.zeros(tokens.shape, dtype=np.bool_)
    for group in groups.values():
        bits = constraints[group[0]].end_bits
        columns, least = np.flatnonzero(bits), np.full(len(tokens), _NEVER)
        least[group] = [constraints[i].min_new_tokens - constraints[i].depth for i in group]
        late = (found.row_of >= 0) & (depths >= least[:, None])
        rows = found.row_of[late]
        found.words[rows[may_end[rows], None], columns] |= bits[columns]
        drafts = late & (depths > 0)
        ends[drafts] = _has(bits[None], 0, tokens[drafts])
    return ends


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
