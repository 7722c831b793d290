"""Prefix cache: a radix tree over token ids in whole pages; every cached token owns one KV slot.

The tree only keeps books. It allocates nothing: slots enter by `insert`, and leave by `evict` or
`reset`, whose results go back to the allocator.

A drafter whose KV at position i depends on token i + 1 needs shorter hits; that is the caller's
rule: it lowers `limit` in `match` and the length it inserts.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Tokens = Sequence[int] | npt.NDArray[np.integer]

_EMPTY: IntArray = np.empty(0, dtype=np.int64)


@dataclass(slots=True, eq=False)
class Node:
    """One edge of the tree and the subtree below it; to callers, a handle for a cached prefix.

    A handle keeps its meaning when its edge is split: the node stays the deeper half.
    tokens, slots: [pages * page_size] int64, owned copies. locks: holders of this node or of one
    below, so it never falls on the way to the root. last_use: tick of the last touch of this node
    or of one below. queued: whether the eviction heap has this node's entry; there is at most one.
    """

    tokens: IntArray
    slots: IntArray
    parent: Node | None
    serial: int
    last_use: int = 0
    locks: int = 0
    queued: bool = False
    children: dict[bytes, Node] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix. slots: [matched] int64. `node` stands for it; any later `evict`
    may drop it unless it is locked first."""

    slots: IntArray
    node: Node


@dataclass(frozen=True, slots=True)
class InsertResult:
    """What became of an insertion of n tokens.

    slots: [n] int64, the tree's slots for all n tokens; the caller's table row must name these from
    now on. duplicates: the caller's own slots that the tree did not take, since their tokens were
    cached before; they are still the caller's, to be freed.
    `node` stands for the n tokens; lock it (before unlocking an earlier one) to keep them.
    """

    node: Node
    slots: IntArray
    duplicates: IntArray


class PrefixCache:
    """See the module. Ownership: a slot passed to `insert` and not reported as a duplicate is the
    tree's until `evict` or `reset` returns it. Not thread-safe."""

    def __init__(self, page_size: int) -> None:
        assert page_size >= 1, page_size
        self.page_size = page_size
        self._start()

    def _start(self) -> None:
        self._clock = 0
        self._serial = 0
        self._root = Node(_EMPTY, _EMPTY, None, 0)
        # (last_use, serial, node) of leaves that were unlocked when queued. An entry may be out of
        # date: its time can only be too old, and a node that is locked or has children by now is
        # dropped when it surfaces and queued again when it turns evictable. So the heap never
        # outgrows the tree.
        self._heap: list[tuple[int, int, Node]] = []
        self._cached = 0
        self._locked = 0

    @property
    def cached_tokens(self) -> int:
        """Tokens (slots) the tree holds."""
        return self._cached

    @property
    def evictable_tokens(self) -> int:
        """Tokens that `evict` can free now: locks are monotone, so all unlocked ones."""
        return self._cached - self._locked

    def match(self, tokens: Tokens, limit: int) -> PrefixMatch:
        """Longest cached prefix of `tokens` in whole pages, at most `limit` tokens; a use."""
        node, found = self._root, [_EMPTY]
        for child, used in self._walk(self._whole_pages(tokens, limit)):
            node = self._split(child, used)
            found.append(node.slots)
        self._touch(node)
        return PrefixMatch(np.concatenate(found), node)

    def peek(self, tokens: Tokens, limit: int) -> int:
        """Length that `match` would find; changes nothing and is no use (for ordering a queue)."""
        return sum(used for _, used in self._walk(self._whole_pages(tokens, limit)))

    def insert(self, tokens: Tokens, slots: Tokens) -> InsertResult:
        """Cache `tokens` (whole pages, KV written) under `slots`; what is cached already keeps its
        slots. A use."""
        key = np.asarray(tokens, dtype=np.int64)
        own = np.asarray(slots, dtype=np.int64)
        assert len(key) == len(own), (len(key), len(own))
        assert len(key) % self.page_size == 0, (len(key), self.page_size)
        hit = self.match(key, len(key))
        node, already = hit.node, len(hit.slots)
        if already < len(key):
            node = self._add_leaf(node, key[already:], own[already:])
        duplicates = own[:already][own[:already] != hit.slots]
        return InsertResult(node, np.concatenate([hit.slots, own[already:]]), duplicates)

    def lock(self, node: Node) -> None:
        """Hold the prefix that `node` stands for: it cannot be evicted until as many `unlock`s."""
        for step in _to_root(node):
            if step.locks == 0:
                self._locked += len(step)
            step.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. The prefix was in use until now, so this is a use too."""
        for step in _to_root(node):
            assert step.locks > 0, "unlock of a prefix that is not locked"
            step.locks -= 1
            if step.locks == 0:
                self._locked -= len(step)
        self._touch(node)
        self._queue(node)

    def evict(self, num_tokens: int) -> IntArray:
        """Free at least `num_tokens`, rounded up to a page, or all that is evictable.

        Least recently used leaves go first, their tails first. Returns the freed slots; amortised
        O(log nodes) per leaf.
        """
        missing = -(-num_tokens // self.page_size) * self.page_size
        freed = [_EMPTY]
        while missing > 0 and self._heap:
            leaf = self._pop_evictable()
            if leaf is None:
                break
            freed.append(self._cut(leaf, missing))
            missing -= len(freed[-1])
        return np.concatenate(freed)

    def reset(self) -> IntArray:
        """Forget everything; nothing may be locked. Returns all slots."""
        assert self._root.locks == 0, f"{self._root.locks} locks are still held"
        slots = self.all_slots()
        self._start()
        return slots

    def all_slots(self) -> IntArray:
        """Every slot the tree holds, for integrity checks of the pool. O(cached tokens)."""
        return np.concatenate([node.slots for node in self._nodes()])

    def check(self) -> None:
        """Recount everything and assert that the books are right. O(cached tokens)."""
        nodes = list(self._nodes())
        for node in nodes:
            self._check_node(node)
        for node in nodes[1:]:
            self._check_edge(node)
        slots = np.concatenate([node.slots for node in nodes])
        assert len(np.unique(slots)) == len(slots), "a slot is cached twice"
        assert self._cached == len(slots), (self._cached, len(slots))
        locked = sum(len(node) for node in nodes if node.locks)
        assert self._locked == locked, (self._locked, locked)
        queued = [node.serial for _, _, node in self._heap]
        assert sorted(queued) == sorted(node.serial for node in nodes if node.queued), (
            "heap differs"
        )
        assert all(time <= node.last_use for time, _, node in self._heap), "heap runs ahead"

    def _check_node(self, node: Node) -> None:
        assert len(node.tokens) == len(node.slots), "tokens and slots differ in length"
        assert len(node) % self.page_size == 0, "an edge holds part of a page"
        pages = node.slots.reshape(-1, self.page_size)
        assert (pages == pages[:, :1] + np.arange(self.page_size)).all(), (
            "slots of a page are apart"
        )
        assert (pages[:, 0] % self.page_size == 0).all(), "slots straddle pages"
        assert node.last_use <= self._clock, "used in the future"
        assert node.locks >= sum(child.locks for child in node.children.values()), (
            "locks not monotone"
        )
        assert node.queued or node.locks or node.children or node is self._root, (
            "leaf not evictable"
        )

    def _check_edge(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "a second root"
        assert len(node) > 0, "an empty edge"
        assert parent.children.get(self._first_page(node.tokens)) is node, "filed under another key"
        assert parent.last_use >= node.last_use, "a child is younger than its parent"

    def _nodes(self) -> Iterator[Node]:
        """All nodes, the root first. A loop, because a long conversation is a deep chain."""
        stack = [self._root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _whole_pages(self, tokens: Tokens, limit: int) -> IntArray:
        length = min(len(tokens), max(limit, 0))
        return np.asarray(tokens[: length - length % self.page_size], dtype=np.int64)

    def _first_page(self, tokens: IntArray) -> bytes:
        return tokens[: self.page_size].tobytes()

    def _walk(self, tokens: IntArray) -> Iterator[tuple[Node, int]]:
        """Nodes on the path of `tokens`, each with how many of its leading tokens match (whole
        pages, at least one; fewer than all only at the end)."""
        node = self._root
        while len(tokens):
            child = node.children.get(self._first_page(tokens))
            if child is None:
                return
            used = self._common(child.tokens, tokens)
            whole = used == len(child)  # asked before the caller may split the child
            yield child, used
            if not whole:
                return
            node, tokens = child, tokens[used:]

    def _common(self, left: IntArray, right: IntArray) -> int:
        """Length of the common prefix in whole pages."""
        length = min(len(left), len(right))
        differs = left[:length] != right[:length]
        common = int(differs.argmax()) if differs.any() else length
        return common - common % self.page_size

    def _split(self, node: Node, length: int) -> Node:
        """Give the first `length` tokens of `node`'s edge a node of their own; return it."""
        if length == len(node):
            return node
        head = self._new_node(node.parent, node.tokens[:length], node.slots[:length])
        head.locks, head.last_use = node.locks, node.last_use
        node.tokens, node.slots = node.tokens[length:].copy(), node.slots[length:].copy()
        node.parent = head
        head.children[self._first_page(node.tokens)] = node
        return head

    def _new_node(self, parent: Node | None, tokens: IntArray, slots: IntArray) -> Node:
        """A node filed under `parent`, in the place of whatever had its first page there."""
        assert parent is not None, "the root has no edge"
        self._serial += 1
        node = Node(tokens.copy(), slots.copy(), parent, self._serial)
        parent.children[self._first_page(tokens)] = node
        return node

    def _add_leaf(self, parent: Node, tokens: IntArray, slots: IntArray) -> Node:
        # A new node even below a lone leaf: growing that leaf would widen what holders have locked.
        leaf = self._new_node(parent, tokens, slots)
        leaf.last_use = self._clock
        self._cached += len(leaf)
        self._queue(leaf)
        return leaf

    def _touch(self, node: Node) -> None:
        self._clock += 1
        for step in _to_root(node):
            step.last_use = self._clock

    def _evictable(self, node: Node) -> bool:
        return not node.children and node.locks == 0 and node is not self._root

    def _queue(self, node: Node) -> None:
        """Enter `node` in the eviction heap if it is evictable and not there yet."""
        if self._evictable(node) and not node.queued:
            node.queued = True
            heapq.heappush(self._heap, (node.last_use, node.serial, node))

    def _pop_evictable(self) -> Node | None:
        """Take the least recently used evictable leaf out of the heap."""
        while self._heap:
            time, _, node = heapq.heappop(self._heap)
            node.queued = False
            if self._evictable(node) and time == node.last_use:
                return node
            self._queue(node)
        return None

    def _cut(self, leaf: Node, most: int) -> IntArray:
        """Free at most `most` tokens (whole pages) from the end of an evictable leaf."""
        keep = max(len(leaf) - most, 0)
        freed = leaf.slots[keep:]
        self._cached -= len(freed)
        if keep:
            leaf.tokens, leaf.slots = leaf.tokens[:keep].copy(), leaf.slots[:keep].copy()
            self._queue(leaf)
        else:
            assert leaf.parent is not None
            del leaf.parent.children[self._first_page(leaf.tokens)]
            self._queue(leaf.parent)
        return freed


def _to_root(node: Node) -> Iterator[Node]:
    step: Node | None = node
    while step is not None:
        yield step
        step = step.parent
