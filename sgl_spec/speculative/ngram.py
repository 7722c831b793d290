"""NGRAM: drafts copied from what this server has read and written, over all requests.

Prompts and outputs go into one trie (`sgl_spec_kernels.ngram_ref`), which lies where the target
does and yields a tree of what followed the longest suffixes of each text. Every node carries a
learned chance (`ngram_scores`), by which the engine drops the nodes that do not pay for themselves.

This is the host's side: where the texts stand in the trie's log. Rounds that live on a device do
the rest there (`engine.cuda.ngram_round`); for others this is an ordinary drafter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgl_spec.errors import ConfigError
from sgl_spec.layers.transfer import on_device
from sgl_spec.speculative.base import DraftBatch, Drafter, DrafterContext, register_drafter
from sgl_spec.speculative.ngram_scores import NgramScores, scores
from sgl_spec.speculative.tree import AcceptResult, TokenTree
from sgl_spec_kernels import ngram_ref
from sgl_spec_kernels.ngram_ref import (
    FIRST,
    GRAMS,
    MOST_MATCHED,
    NgramDrafts,
    ngram_drafts,
    token_index,
)

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]

_REFRESH = 16  # judged rounds after which chances are computed again
_MOST_PLACES = 1 << 26  # that a log has for growing texts, four bytes each


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """num_draft_tokens: nodes of a tree, root included. max_trie_depth: longest n-gram, the token
    that is drafted included. min_bfs_breadth, max_bfs_breadth: of how many places the tree is made
    where the match is the longest and where it is the shortest, linear between. match_type: of
    equal matches the latest (BFS) or the commonest (PROB) continuation comes first. capacity: most
    n-grams, rounded up to a power of two."""

    num_draft_tokens: int = 12
    max_trie_depth: int = 18
    min_bfs_breadth: int = 1
    max_bfs_breadth: int = 10
    match_type: str = "BFS"
    capacity: int = 10_000_000

    def __post_init__(self) -> None:
        if not 2 <= self.num_draft_tokens <= 64:
            raise ConfigError(f"NGRAM draft tokens must be 2 to 64, got {self.num_draft_tokens}")
        if not 2 <= self.max_trie_depth <= 64:
            raise ConfigError(f"NGRAM trie depth must be 2 to 64, got {self.max_trie_depth}")
        if not 1 <= self.min_bfs_breadth <= self.max_bfs_breadth:
            raise ConfigError(
                "NGRAM needs 1 <= min BFS breadth <= max BFS breadth, got "
                f"{self.min_bfs_breadth} and {self.max_bfs_breadth}"
            )
        if self.match_type not in ("BFS", "PROB"):
            raise ConfigError(f"NGRAM match type must be BFS or PROB, got {self.match_type!r}")
        if not 1024 <= self.capacity < 1 << 30:
            raise ConfigError(f"NGRAM capacity must be 1024 to 2^30 - 1, got {self.capacity}")

    @property
    def longest(self) -> int:
        """Tokens of the longest match that is told from shorter ones."""
        longest: int = min(self.max_trie_depth - 1, MOST_MATCHED)
        return longest

    def breadth(self) -> Tensor:
        """[MOST_MATCHED + 1] int32, see `TokenIndex`."""
        slope = (self.max_bfs_breadth - self.min_bfs_breadth) / max(self.longest - 1, 1)
        left = (self.longest - torch.arange(MOST_MATCHED + 1)).clamp(min=0)
        breadth: Tensor = (left * slope).int() + self.min_bfs_breadth
        return breadth


@dataclass(frozen=True, slots=True)
class IndexSize:
    """tokens: that the log has places for. grams: n-grams that the table has entries for. width:
    most tokens of a text."""

    tokens: int
    grams: int
    width: int

    @classmethod
    def of(cls, capacity: int, width: int, rows: int) -> IndexSize:
        """capacity: n-grams to be kept. rows: texts that grow at the
        same time: each has places for all that it may come to, and one more is about to begin;
        beyond _MOST_PLACES they take each other's."""
        kept = max(capacity // GRAMS, 2 * width)
        growing = min((rows + 1) * (width + 1), _MOST_PLACES)
        return cls(max(kept, growing) + FIRST, GRAMS * kept, width)

    @property
    def nbytes(self) -> int:
        """Memory of such an index, at most."""
        return 4 * self.tokens + 2 * 4 * self.grams


@dataclass(slots=True)
class _Totals:
    """Counts since the last flush: texts of rounds, those with a draft, drafts verified, those
    accepted, tokens entered."""

    asked: int = 0
    matched: int = 0
    verified: int = 0
    accepted: int = 0
    entered: int = 0


class NgramDrafter:
    """The drafter; see the module. num_rows: request rows. kernels: whether the operations are
    Triton's, on a device.

    index: what rounds on the device read and extend. All texts share it. Where tenants must not see
    each other's, a salt of theirs goes into every sum of `ngram_ref._records`, as the text's own
    place goes into some.
    """

    def __init__(
        self,
        num_rows: int,
        options: NgramOptions,
        size: IndexSize,
        device: torch.device | None = None,
        *,
        kernels: bool = False,
    ) -> None:
        self.options, self.nodes = options, options.num_draft_tokens
        self.device = device or torch.device("cpu")
        self._ops = _operations(kernels=kernels)
        self.index = token_index(
            size.tokens,
            size.grams,
            num_rows + 1,
            self.nodes,
            self.device,
            longest=options.longest,
            by_count=options.match_type == "PROB",
        )
        self.index.breadth.copy_(options.breadth())
        self._places = size.tokens
        self.scores = NgramScores(self.index)
        self._starts = np.full(num_rows + 1, FIRST, dtype=np.int64)
        self._most = np.full(num_rows, size.width)  # tokens that a row's text may come to
        self._head = FIRST
        self._growing: dict[int, tuple[int, int]] = {}  # begin and end of the spans of such texts
        self._writes: list[tuple[int, Ints32]] = []  # where texts begin, and their tokens
        self._judged = 0  # rounds since chances were computed
        self._proposed: tuple[DraftBatch, NgramDrafts] | None = None
        self._totals = _Totals()

    # --- the texts --------------------------------------------------------------------------------

    def expect(self, row: int, most: int) -> None:
        """The text in a row that is about to begin may come to so many tokens."""
        self._most[row] = most

    def begin(self, row: int, tokens: Ints32, known: int) -> None:
        """See `Drafter`. The text gets a place of its own, also where it was known before."""
        most = max(int(self._most[row]), len(tokens))
        start = self._reserve(most + 2 * self.nodes)  # rounds may run ahead of its end
        self._starts[row], self._growing[row] = start, (start, self._head)
        self._writes.append((start, tokens.copy()))
        self._totals.entered += len(tokens)

    def _reserve(self, size: int) -> int:
        """A span of the log, and a place that stays empty behind it; the oldest texts go, those
        that grow last of all."""
        start = self._room(size + 1)
        self._head = start + size + 1
        self.index.log[start : self._head].zero_()
        return start

    def _room(self, size: int) -> int:
        """The next place with so many behind it that no growing text has; where there is none, the
        next one all the same."""
        spans, last = sorted(self._growing.values()), self._places - size
        first: int = self._head if self._head <= last else FIRST
        for start in (first, FIRST):
            free: int = start
            for begin, end in spans:
                if begin < free + size and free < end:
                    free = end
            if free <= last:
                return free
        return first

    def sync(self) -> None:
        """Bring the index up to date with what the host knows, in the order of the stream."""
        if self._writes:
            writes, self._writes = self._writes, []
            self.index.starts.copy_(on_device(self._starts, self.device))
            sizes = [len(tokens) for _, tokens in writes]
            starts = np.repeat([start for start, _ in writes], sizes)
            places = np.concatenate([np.arange(at, at + len(tokens)) for at, tokens in writes])
            tokens = np.concatenate([tokens for _, tokens in writes]) + 1
            at = on_device(places, self.device)
            self.index.log.index_copy_(0, at, on_device(tokens, self.device))
            self._ops.enter(self.index, at, on_device(starts, self.device))
        if self._judged >= _REFRESH:
            self._judged = 0
            self.scores.refresh()

    def finish(self, row: int) -> None:
        """See `Drafter`: the text stays until its place is needed."""
        self._growing.pop(row, None)

    def flush(self) -> None:
        """See `Drafter`."""
        self.index.clear()
        self.scores.refresh()
        self._head, self._judged = FIRST, 0
        self._writes.clear()
        self._proposed = None
        self._totals = _Totals()

    # --- rounds that the host leads ---------------------------------------------------------------

    def propose(self, batch: DraftBatch) -> TokenTree:
        """See `Drafter`."""
        self.sync()
        trees = ngram_drafts(len(batch.rows), self.nodes, self.device)
        columns = (batch.rows, batch.lengths - 1, batch.roots(), batch.max_nodes)
        rows, committed, roots, most = (on_device(column, self.device) for column in columns)
        self._ops.propose(self.index, rows, committed, roots, most, trees)
        self._proposed = batch, trees
        return TokenTree(trees.tokens, trees.parents, trees.num_nodes, scores(trees.facts))

    def observe(self, batch: DraftBatch, tree: TokenTree, accepted: AcceptResult) -> None:
        """See `Drafter`."""
        given = (batch.rows, batch.lengths - 1, accepted.tokens.contiguous(), accepted.counts)
        rows, committed, tokens, counts = (on_device(each, self.device) for each in given)
        places, starts = (committed.new_empty(tokens.numel()) for _ in range(2))
        self._ops.keep(self.index, rows, committed, tokens, counts, places, starts)
        self._ops.enter(self.index, places, starts)
        proposed, self._proposed = self._proposed, None
        found = 0
        if proposed is not None and np.array_equal(proposed[0].lengths, batch.lengths):
            self._ops.judge(self.index, proposed[1], rows, tokens, counts)
            found = int((proposed[1].drafted > 1).sum())
        drafts = int(tree.num_nodes.sum()) - tree.batch
        self.note(drafts, int(accepted.counts.sum()), tree.batch, found)

    def note(self, verified: int, emitted: int, requests: int, found: int) -> None:
        """A round is over: drafts that it verified, tokens that it emitted, its requests, and for
        how many of them something was found."""
        self._judged += 1
        totals = self._totals
        totals.asked += requests
        totals.matched += found
        totals.verified += verified
        totals.accepted += emitted - requests
        totals.entered += emitted

    def stats(self) -> dict[str, float]:
        """Tokens and memory of the index; what became of the drafts since the last flush."""
        totals = self._totals
        return {
            "index_tokens": min(totals.entered, self._places - FIRST),
            "index_bytes": self.index.nbytes,
            "match_rate": totals.matched / max(1, totals.asked),
            "acceptance_rate": totals.accepted / max(1, totals.verified),
        }


def _operations(*, kernels: bool) -> Any:
    """The module of the index's operations; a CPU server needs no triton."""
    if not kernels:
        return ngram_ref
    from sgl_spec_kernels import ngram

    return ngram


def options_of(given: Mapping[str, object], draft_tokens: int) -> NgramOptions:
    """From the server's options (`ngram_*`); others are not its."""
    fields = ("max_trie_depth", "min_bfs_breadth", "max_bfs_breadth", "match_type", "capacity")
    values: dict[str, Any] = {
        field: given[f"ngram_{field}"] for field in fields if f"ngram_{field}" in given
    }
    return NgramOptions(num_draft_tokens=draft_tokens, **values)


def build(context: DrafterContext) -> Drafter:
    """An `NgramDrafter` on the host."""
    options = options_of(context.options, context.draft_tokens)
    size = IndexSize.of(options.capacity, context.width, context.num_rows)
    return NgramDrafter(context.num_rows, options, size)


def register() -> None:
    """Make `--speculative-algorithm NGRAM` known."""
    register_drafter("NGRAM", build)


register()
