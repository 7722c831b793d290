"""NGRAM: drafts copied from what this server has read and written, over all requests.

Prompts and outputs go into one trie (`trie.py`); the trees continue the longest suffixes of each
text that the trie knows (`ngram_tree.py`), and every node carries a learned estimate of its
acceptance (`ngram_scores.py`), by which the engine drops the nodes that do not pay for themselves.
A request whose drafts keep being dropped is probed now and then, so that it can come back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sgl_spec.errors import ConfigError
from sgl_spec.speculative.base import DraftBatch, Drafter, DrafterContext, register_drafter
from sgl_spec.speculative.ngram_candidates import Draft
from sgl_spec.speculative.ngram_scores import AcceptanceModel
from sgl_spec.speculative.ngram_tree import Texts, TreeBuilder
from sgl_spec.speculative.tree import AcceptResult, TokenTree
from sgl_spec.speculative.trie import NgramTrie, Piece

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

ROUND_TOKENS = 160  # a round inserts outputs first, then queued prompts up to this many tokens
MIN_SLICE = 40  # but always so many of the queue
MAX_PENDING = 1 << 20  # queued tokens; beyond, the oldest part of the queue is dropped
_PROBE_GAP = 32  # rounds without a verified draft until a request is probed; doubles if in vain
_MAX_PROBE_GAP = 512
_PROBE_SHARE = 16  # at most one request in so many (and at least one) is probed in a round


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """num_draft_tokens: nodes of a tree, root included. max_trie_depth: longest n-gram.
    min_bfs_breadth, max_bfs_breadth: children followed from the longest and the shortest n-gram,
    linear between. match_type: BFS (children by recency, nodes breadth first) or PROB (children by
    frequency, nodes by probability). capacity: most trie nodes."""

    num_draft_tokens: int = 12
    max_trie_depth: int = 18
    min_bfs_breadth: int = 1
    max_bfs_breadth: int = 10
    match_type: str = "BFS"
    capacity: int = 10_000_000

    def __post_init__(self) -> None:
        if not 2 <= self.num_draft_tokens <= 64:
            raise ConfigError(f"NGRAM draft tokens must be 2 to 64, got {self.num_draft_tokens}")
        if not 1 <= self.min_bfs_breadth <= self.max_bfs_breadth:
            raise ConfigError(
                "NGRAM needs 1 <= min BFS breadth <= max BFS breadth, got "
                f"{self.min_bfs_breadth} and {self.max_bfs_breadth}"
            )
        if self.match_type not in ("BFS", "PROB"):
            raise ConfigError(f"NGRAM match type must be BFS or PROB, got {self.match_type!r}")

    def breadth(self) -> Ints:
        """[max_trie_depth] most children followed from an n-gram of i tokens."""
        depth = self.max_trie_depth - 1
        slope = (self.max_bfs_breadth - self.min_bfs_breadth) / depth
        left = depth - np.arange(self.max_trie_depth)
        breadth: Ints = (left * slope + self.min_bfs_breadth).astype(np.int64)
        return breadth


@dataclass(slots=True)
class _Job:
    """Text that waits to be inserted: tokens[done:]. row: the request it belongs to, -1 once that is
    gone. tail: log position of tokens[done - 1], 0 if it is not in the log."""

    row: int
    tokens: Ints32
    done: int
    tail: int = 0


class NgramDrafter:
    """The drafter; see the module. All state per request sits in arrays by row."""

    def __init__(self, num_rows: int, options: NgramOptions, *, seed: int | None = None) -> None:
        """num_rows: request rows. seed: fixes the trie's hash, for tests."""
        self.options = options
        by_prob = options.match_type == "PROB"
        self.trie = NgramTrie(
            options.max_trie_depth, options.capacity, rank_by_count=by_prob, seed=seed
        )
        self.model = AcceptanceModel(num_rows)
        self._builder = TreeBuilder(
            self.trie,
            self.model,
            options.num_draft_tokens,
            options.breadth(),
            by_chance=by_prob,
        )
        shape = (num_rows, options.num_draft_tokens)
        self._tokens = np.zeros(shape, np.int64)  # the last tree proposed for each row
        self._parents = np.full(shape, -1, np.int64)
        self._buckets = np.zeros(shape, np.int64)
        self._chances = np.zeros(shape)
        self._given = np.zeros(num_rows, np.int64)  # tokens of the row's text queued or inserted
        self._tails = np.zeros(num_rows, np.int64)  # log position of the last of them
        self._queued = np.zeros(num_rows, np.bool_)  # the row has a job
        self._tried_at = np.zeros(num_rows, np.int64)  # round of the last verified draft or probe
        self._gap = np.full(num_rows, _PROBE_GAP)
        self._clear()

    def _clear(self) -> None:
        self._jobs: deque[_Job] = deque()
        self._pending = 0
        self._round = 0
        self._totals = dict.fromkeys(
            ("proposed", "matched", "tried", "accepted", "probes", "dropped_tokens"), 0
        )

    # ---- the protocol

    def begin(self, row: int, tokens: Ints32, known: int) -> None:
        """See `Drafter`. Queues the tokens from `known` on."""
        self._forget(row)
        self._given[row] = len(tokens)
        if known < len(tokens):
            context = max(0, known - self.options.max_trie_depth)
            self._queue(_Job(row, np.array(tokens[context:], np.int32), known - context))

    def propose(self, batch: DraftBatch) -> TokenTree:
        """See `Drafter`."""
        rows = batch.rows
        probes = self._due_probes(batch)
        windows, known = self._windows(batch, rows, batch.lengths - 1, -1)
        live = ~self._queued[rows] & (self._given[rows] == batch.lengths)
        texts = Texts(
            rows=rows,
            windows=windows,
            known=known,
            tails=np.where(live, self._tails[rows], -1),
            max_nodes=batch.max_nodes,
            probes=probes,
        )
        draft = self._builder.build(texts)
        self._remember(rows, draft)
        self._totals["proposed"] += rows.size
        self._totals["matched"] += int((draft.num_nodes > 1).sum())
        return TokenTree(
            tokens=torch.from_numpy(draft.tokens),
            parents=torch.from_numpy(draft.parents),
            num_nodes=torch.from_numpy(draft.num_nodes),
            scores=torch.from_numpy(draft.scores.astype(np.float32)),
        )

    def observe(self, batch: DraftBatch, tree: TokenTree, accepted: AcceptResult) -> None:
        """See `Drafter`. Learns from the verified nodes and inserts the new tokens."""
        self._round += 1
        counts = accepted.counts.numpy(force=True)
        if tree.width > 1:
            self._learn(batch.rows, tree, accepted, counts)
        self._insert(batch, batch.lengths + counts)

    def finish(self, row: int) -> None:
        """See `Drafter`. What is queued of the row's text is still inserted."""
        self._forget(row)

    def flush(self) -> None:
        """See `Drafter`."""
        self.trie.clear()
        self.model.clear()
        for row in range(self._given.size):
            self._forget(row)
        self._clear()

    def stats(self) -> dict[str, float]:
        """Trie size and memory, queue, and what became of the drafts since the last flush."""
        totals = self._totals
        return {
            "trie_nodes": self.trie.num_nodes,
            "trie_bytes": self.trie.num_bytes,
            "trie_evicted": self.trie.nodes.evicted,
            "pending_tokens": self._pending,
            "dropped_tokens": totals["dropped_tokens"],
            "match_rate": totals["matched"] / max(1, totals["proposed"]),
            "acceptance_rate": totals["accepted"] / max(1, totals["tried"]),
            "probes": totals["probes"],
        }

    # ---- rows

    def _forget(self, row: int) -> None:
        """The row belongs to no request, or to a new one."""
        for job in self._jobs if self._queued[row] else ():
            if job.row == row:
                job.row = -1
        self._queued[row] = False
        self._given[row] = 0
        self._tails[row] = 0
        self._parents[row] = -1
        self._tried_at[row] = self._round
        self._gap[row] = _PROBE_GAP
        self.model.start(row)

    def _remember(self, rows: Ints, draft: Draft) -> None:
        width = draft.tokens.shape[1]
        self._parents[rows] = -1
        self._tokens[rows, :width] = draft.tokens
        self._parents[rows, :width] = draft.parents
        self._buckets[rows, :width] = draft.buckets
        self._chances[rows, :width] = draft.chances
        unused = np.arange(width) >= draft.num_nodes[:, None]
        at = np.flatnonzero(unused)
        self._parents[rows[at // width], at % width] = -1

    def _windows(
        self, batch: DraftBatch, rows: Ints, ends: Ints, shorter: int = 0
    ) -> tuple[Ints32, Ints]:
        """[m, depth + shorter] tokens that end at column `ends` of `rows`, newest first, and how many
        of them exist."""
        depth = self.options.max_trie_depth + shorter
        columns = np.maximum(ends[:, None] - np.arange(depth), 0)
        at = columns + (rows * batch.tokens.shape[1])[:, None]
        return batch.tokens.reshape(-1).take(at), np.minimum(ends + 1, depth)

    # ---- probes

    def _due_probes(self, batch: DraftBatch) -> Bools:
        """[B] requests to probe: those that have waited longest beyond their gap, a few at a time."""
        over = self._round - self._tried_at[batch.rows] - self._gap[batch.rows]
        over[batch.max_nodes < 2] = -1
        due: Bools = over >= 0
        limit = max(1, over.size // _PROBE_SHARE)
        if due.sum() > limit:
            chosen = np.argsort(-over, kind="stable")[:limit]
            due = np.zeros_like(due)
            due[chosen] = True
        probed = batch.rows[due]
        self._tried_at[probed] = self._round
        self._gap[probed] = np.minimum(self._gap[probed] * 2, _MAX_PROBE_GAP)
        self._totals["probes"] += probed.size
        return due

    # ---- learning

    def _learn(self, rows: Ints, tree: TokenTree, accepted: AcceptResult, counts: Ints) -> None:
        """Credit the verified nodes whose parent was accepted."""
        tokens, parents = tree.tokens.numpy(force=True), tree.parents.numpy(force=True)
        path = accepted.path.numpy(force=True)
        batch, width = tokens.shape
        steps = max(1, int(counts.max(initial=1)))
        on_path = np.arange(steps) < np.maximum(counts, 1)[:, None]
        own = self._own_path(rows, tokens, path[:, :steps], on_path)
        mine = np.full((batch, width), -2)  # for accepted nodes, the node of ours; -1: not ours
        text = np.nonzero(on_path)[0]
        mine[text, path[:, :steps][on_path]] = own[on_path]
        drafted = np.arange(width) < tree.num_nodes.numpy(force=True)[:, None]
        drafted[:, 0] = False
        above = np.take_along_axis(mine, np.maximum(parents, 0), axis=1)
        text, node = np.nonzero(drafted & (above >= 0))
        row = rows[text]
        same = self._parents[row] == above[text, node][:, None]
        same &= self._tokens[row] == tokens[text, node][:, None]
        found = np.flatnonzero(same.any(axis=1))
        row, twin = row[found], np.argmax(same[found], axis=1)
        won = mine[text[found], node[found]] > -2
        self.model.learn(row, self._buckets[row, twin], self._chances[row, twin], won)
        self._tried_at[row] = self._round
        self._gap[row[won]] = _PROBE_GAP
        self._totals["tried"] += won.size
        self._totals["accepted"] += int(won.sum())

    def _own_path(self, rows: Ints, tokens: Ints, path: Ints, on_path: Bools) -> Ints:
        """[B, steps] the node of our proposal for each accepted node, -1 where it was not ours."""
        own = np.full(path.shape, -1)
        own[:, 0] = 0
        for step in range(1, path.shape[1]):
            token = np.take_along_axis(tokens, np.where(on_path, path, 0)[:, step : step + 1], 1)
            same = (self._parents[rows] == own[:, step - 1 : step]) & (self._tokens[rows] == token)
            hit = same.any(axis=1) & on_path[:, step] & (own[:, step - 1] >= 0)
            own[:, step] = np.where(hit, np.argmax(same, axis=1), -1)
        return own

    # ---- insertion

    def _queue(self, job: _Job) -> None:
        self._jobs.append(job)
        self._queued[job.row] = True
        self._pending += job.tokens.size - job.done
        while self._pending > MAX_PENDING:
            self._drop(self._jobs[0])

    def _drop(self, job: _Job) -> None:
        """Give up on the rest of a job."""
        left = job.tokens.size - job.done
        self._totals["dropped_tokens"] += left
        self._end_job(job, 0, left)

    def _end_job(self, job: _Job, tail: int, taken: int) -> None:
        self._jobs.remove(job)
        self._pending -= taken
        if job.row >= 0:
            self._queued[job.row] = False
            self._tails[job.row] = tail

    def _insert(self, batch: DraftBatch, ends: Ints) -> None:
        """Insert what texts gained up to length `ends`, and a slice of the queue."""
        rows = batch.rows
        gained = np.maximum(ends - self._given[rows], 0)
        held = self._queued[rows] | (gained > MIN_SLICE)
        for i in np.flatnonzero(held & (gained > 0)):
            self._extend_job(batch, int(rows[i]), int(ends[i]))
        live = np.flatnonzero(~held & (gained > 0))
        rows, gained = rows[live], gained[live]
        starts = np.cumsum(gained) - gained
        row = np.repeat(rows, gained)
        at = np.arange(row.size) - np.repeat(starts, gained) + self._given[row]
        windows, known = self._windows(batch, row, at)
        slices = self._slices(max(MIN_SLICE, ROUND_TOKENS - row.size))
        piece = _join(Piece(windows, known, starts, self._tails[rows]), [s for _, s in slices])
        if piece.known.size:
            tails = self.trie.insert(piece)
            self._tails[rows] = tails[: rows.size]
            for (job, part), tail in zip(slices, tails[rows.size :].tolist(), strict=True):
                self._advance(job, part.known.size, tail)
        self._given[batch.rows] = np.maximum(self._given[batch.rows], ends)

    def _extend_job(self, batch: DraftBatch, row: int, end: int) -> None:
        """Queue a row's new tokens: behind what is queued of it, or because they are many."""
        given = int(self._given[row])
        if self._queued[row]:
            job = next(job for job in self._jobs if job.row == row)
            job.tokens = np.concatenate([job.tokens, batch.tokens[row, given:end]])
            self._pending += end - given
        else:
            begin = max(0, given - self.options.max_trie_depth)
            tail = int(self._tails[row])
            tokens = batch.tokens[row, begin:end].copy()
            self._queue(_Job(row, tokens, given - begin, tail))

    def _slices(self, room: int) -> list[tuple[_Job, Piece]]:
        """Parts of the queued jobs, `room` tokens in all, taken by turns."""
        slices: list[tuple[_Job, Piece]] = []
        for job in list(self._jobs):
            if room <= 0:
                break
            size = min(room, job.tokens.size - job.done)
            slices.append((job, _slice(job, size, self.options.max_trie_depth)))
            room -= size
        self._jobs.rotate(-len(slices))
        return slices

    def _advance(self, job: _Job, size: int, tail: int) -> None:
        job.done += size
        job.tail = tail
        if job.done == job.tokens.size:
            self._end_job(job, tail, size)
        else:
            self._pending -= size


def _slice(job: _Job, size: int, depth: int) -> Piece:
    ends = np.arange(job.done, job.done + size)
    windows = job.tokens.take(np.maximum(ends[:, None] - np.arange(depth), 0))
    known = np.minimum(ends + 1, depth)
    return Piece(windows, known, np.zeros(1, np.int64), np.array([job.tail]))


def _join(first: Piece, others: list[Piece]) -> Piece:
    """Pieces one after the other."""
    pieces = [first, *others]
    sizes = np.cumsum([0, *[p.known.size for p in pieces]])
    return Piece(
        windows=np.concatenate([p.windows for p in pieces]),
        known=np.concatenate([p.known for p in pieces]),
        starts=np.concatenate([p.starts + s for p, s in zip(pieces, sizes, strict=False)]),
        tails=np.concatenate([p.tails for p in pieces]),
    )


def build(context: DrafterContext) -> Drafter:
    """An `NgramDrafter` from the server's options (`num_draft_tokens`, `ngram_*`); others are not its."""
    names = {
        "max_trie_depth": "ngram_max_trie_depth",
        "min_bfs_breadth": "ngram_min_bfs_breadth",
        "max_bfs_breadth": "ngram_max_bfs_breadth",
        "match_type": "ngram_match_type",
        "capacity": "ngram_capacity",
    }
    values = {
        ours: context.options[name] for ours, name in names.items() if name in context.options
    }
    options = NgramOptions(num_draft_tokens=context.draft_tokens, **values)  # type: ignore[arg-type]
    return NgramDrafter(context.num_rows, options)


def register() -> None:
    """Make `--speculative-algorithm NGRAM` known."""
    register_drafter("NGRAM", build)


register()
