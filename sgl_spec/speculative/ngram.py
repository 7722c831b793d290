"""NGRAM: drafts copied from what this server has read and written, over all requests.

Prompts and outputs go into one trie (`trie.py`); the trees continue the longest suffixes of each
text that the trie knows (`ngram_tree.py`), and every node carries a learned estimate of its
acceptance (`ngram_scores.py`), by which the engine drops the nodes that do not pay for themselves.
A request whose drafts keep being dropped is probed now and then, so that it can come back. When
nothing of a batch's proposals is verified the drafter rests for a few rounds, because looking up
and inserting cost a few percent of a small batch's round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sgl_spec.speculative.base import DraftBatch, Drafter, DrafterContext, register_drafter
from sgl_spec.speculative.ngram_candidates import Draft
from sgl_spec.speculative.ngram_memo import ProposalMemo
from sgl_spec.speculative.ngram_options import NgramOptions
from sgl_spec.speculative.ngram_queue import InsertQueue, Job, join
from sgl_spec.speculative.ngram_scores import AcceptanceModel
from sgl_spec.speculative.ngram_tree import Texts, TreeBuilder
from sgl_spec.speculative.tree import AcceptResult, TokenTree, root_only
from sgl_spec.speculative.trie import NgramTrie, Piece

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

ROUND_TOKENS = 132  # a round inserts outputs first, then queued prompts up to this many tokens
MIN_SLICE = 12  # but always so many of the queue
MAX_GAIN = 40  # tokens that one text may have gained in a round without being queued
MAX_REST = 3  # rounds without a proposal after proposals of which nothing was worth verifying
_PROBE_GAP = 32  # rounds without a verified draft until a request is probed; doubles if in vain
_MAX_PROBE_GAP = 512
_PROBE_SHARE = 16  # at most one request in so many (and at least one) is probed in a round


@dataclass(slots=True)
class _Totals:
    """Counts since the last flush: trees asked for, those with a draft, drafted nodes verified
    under an accepted parent, those accepted, probes."""

    proposed: int = 0
    matched: int = 0
    tried: int = 0
    accepted: int = 0
    probes: int = 0


@dataclass(slots=True)
class _PutOff:
    """What `settle` has to do. outcome: what became of the drafts of some rows. draft: the rows'
    next drafts, which take their place, and the batch that they were proposed for. gained: rows
    whose new tokens are to be inserted."""

    outcome: tuple[Ints, TokenTree, AcceptResult] | None = None
    draft: tuple[Ints, Draft] | None = None
    gained: Ints | None = None
    proposed: DraftBatch | None = None

    def is_later(self, batch: DraftBatch) -> bool:
        """Whether the drafts are of a round that comes after the one of `batch`: every request
        that goes on has then gained a token."""
        mine = self.proposed
        return mine is not None and not np.array_equal(mine.lengths, batch.lengths)


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
        self._memo = ProposalMemo(num_rows, options.num_draft_tokens)
        self._queue = InsertQueue(num_rows, options.max_trie_depth)
        self._given = np.zeros(num_rows, np.int64)  # tokens of the row's text queued or inserted
        self._tails = np.zeros(num_rows, np.int64)  # log position of the last of them
        self._suffixes = np.zeros((num_rows, options.max_trie_depth - 1), np.int64)
        self._suffixes_at = np.full(
            num_rows, -1, np.int64
        )  # the trie's clock when they were looked up
        self._tried_at = np.zeros(num_rows, np.int64)  # round of the last verified draft or probe
        self._gap = np.full(num_rows, _PROBE_GAP)
        self._round = 0
        self._in_vain = 0  # proposals in a row of which nothing was verified
        self._rest = 0  # rounds to go without a proposal
        self._asked = False  # for the trees of the round that is observed next
        self._owed = np.zeros(num_rows, np.int64)  # length of a text whose end is not yet given
        self._texts: Ints32 | None = None  # where the owed texts stand
        self._put_off = _PutOff()
        self._fresh_prompt = False  # one was queued while nothing else was
        self._totals = _Totals()

    # ---- the protocol

    def begin(self, row: int, tokens: Ints32, known: int) -> None:
        """See `Drafter`. Queues the tokens from `known` on; `settle` inserts a first slice, so that
        a short prompt can be copied from the first round on."""
        self._forget(row)
        self._in_vain = self._rest = 0
        self._given[row] = len(tokens)
        if known < len(tokens):
            self._fresh_prompt |= not self._queue.pending
            self._queue.add(row, tokens, known, 0)

    def propose(self, batch: DraftBatch) -> TokenTree:
        """See `Drafter`."""
        self._asked = True
        if self._rest:
            return root_only(torch.from_numpy(batch.roots()))
        rows, texts = batch.rows, self._texts_of(batch)
        draft = self._builder.build(texts)
        self._put_off.draft, self._put_off.proposed = (rows, draft), batch
        self._suffixes[rows] = draft.suffixes
        in_log = (texts.tails >= 0) & (texts.logged == texts.lengths)
        self._suffixes_at[rows[in_log]] = self.trie.log.clock
        self._note_probes(rows[texts.probes & (draft.num_nodes > 1)])
        self._totals.proposed += int((batch.max_nodes > 1).sum())
        self._totals.matched += int((draft.num_nodes > 1).sum())
        return _tree(draft)

    def look(self, batch: DraftBatch) -> TokenTree:
        """See `Looks`. Who looks asks for proposals only where there is something, so a rest
        ends."""
        self._in_vain = self._rest = 0
        return _tree(self._builder.build(self._texts_of(batch)))

    def _texts_of(self, batch: DraftBatch) -> Texts:
        """What the trees of a batch continue."""
        rows = batch.rows
        windows, known = self._windows(batch.tokens, rows, batch.lengths - 1, -1)
        given = self._given[rows]
        begun = ~self._queue.queued[rows] & (given > 0) & (given <= batch.lengths)
        return Texts(
            rows=rows,
            windows=windows,
            known=known,
            tails=np.where(begun, self._tails[rows], -1),
            tokens=batch.tokens,
            lengths=batch.lengths,
            logged=given,
            max_nodes=batch.max_nodes,
            probes=self._due_probes(batch),
        )

    def observe(self, batch: DraftBatch, tree: TokenTree, accepted: AcceptResult) -> None:
        """See `Drafter`. `settle` learns from the verified nodes and inserts the new tokens."""
        late = self._put_off.is_later(batch)
        if not late:
            self.settle()
        if tree.width > 1:
            self._put_off.outcome = batch.rows, tree, accepted
        if self._asked and not late:
            self._plan_rest(tree.width > 1)
            self._asked = False
        ends = batch.lengths + accepted.counts.numpy(force=True)
        self._owed[batch.rows], self._texts = ends, batch.tokens
        if self._queue.pending or not self._rest:
            self._put_off.gained = batch.rows
        self._round += 1

    def settle(self) -> None:
        """See `DefersWork`. Most of the drafter's time: proposals may be a round behind with what
        was accepted and with what stands in the trie."""
        todo, self._put_off = self._put_off, _PutOff()
        fresh, self._fresh_prompt = self._fresh_prompt, False
        if todo.outcome is not None:
            self._learn(*todo.outcome)
        if todo.draft is not None:
            self._memo.keep(*todo.draft)
        if todo.gained is not None and self._texts is not None:
            self._insert(todo.gained, self._texts)
        elif fresh:
            self._insert_slices(self._queue.slices(ROUND_TOKENS), None)

    def finish(self, row: int) -> None:
        """See `Drafter`. What is queued or owed of the row's text is still inserted."""
        if self._texts is not None:
            self._queue_rest(row, self._texts[row, : self._owed[row]])
        self._forget(row)

    def flush(self) -> None:
        """See `Drafter`."""
        self.trie.clear()
        self.model.clear()
        for row in range(self._given.size):
            self._forget(row)
        self._queue.clear()
        self._in_vain = self._rest = 0
        self._asked = False
        self._texts, self._put_off = None, _PutOff()
        self._fresh_prompt = False
        self._totals = _Totals()

    def stats(self) -> dict[str, float]:
        """Trie size and memory; tokens in the queue, and all that wait to be inserted; what became
        of the drafts since the last flush."""
        totals = self._totals
        return {
            "trie_nodes": self.trie.num_nodes,
            "trie_bytes": self.trie.num_bytes,
            "trie_evicted": self.trie.nodes.evicted,
            "queued_tokens": self._queue.pending,
            "pending_tokens": self._queue.pending + self._num_owed(),
            "dropped_tokens": self._queue.dropped,
            "match_rate": totals.matched / max(1, totals.proposed),
            "acceptance_rate": totals.accepted / max(1, totals.tried),
            "probes": totals.probes,
        }

    def _num_owed(self) -> int:
        return int(np.maximum(self._owed - self._given, 0).sum())

    def _plan_rest(self, verified: bool) -> None:
        """Count a rest down, or begin one: the longer, the more proposals in a row were in vain."""
        if verified:
            self._in_vain = self._rest = 0
        elif self._rest:
            self._rest -= 1
        else:
            self._in_vain += 1
            self._rest = min(self._in_vain, MAX_REST)

    # ---- rows

    def _forget(self, row: int) -> None:
        """The row belongs to no request, or to a new one."""
        self._queue.forget(row)
        self._memo.forget(row)
        self.model.start(row)
        self._given[row] = 0
        self._owed[row] = 0
        self._tails[row] = 0
        self._suffixes_at[row] = -1
        self._tried_at[row] = self._round
        self._gap[row] = _PROBE_GAP

    def _windows(
        self, texts: Ints32, rows: Ints, ends: Ints, shorter: int = 0
    ) -> tuple[Ints32, Ints]:
        """[m, depth + shorter] tokens that end at column `ends` of `rows`, newest first, and how
        many of them exist."""
        depth = self.options.max_trie_depth + shorter
        columns = np.maximum(ends[:, None] - np.arange(depth), 0)
        at = columns + (rows * texts.shape[1])[:, None]
        return texts.reshape(-1).take(at), np.minimum(ends + 1, depth)

    # ---- probes

    def _due_probes(self, batch: DraftBatch) -> Bools:
        """[B] requests to probe: those that have waited longest beyond their gap, a few at a
        time."""
        over = self._round - self._tried_at[batch.rows] - self._gap[batch.rows]
        over[batch.max_nodes < 2] = -1
        due: Bools = over >= 0
        limit = max(1, over.size // _PROBE_SHARE)
        if due.sum() > limit:
            chosen = np.argsort(-over, kind="stable")[:limit]
            due = np.zeros_like(due)
            due[chosen] = True
        return due

    def _note_probes(self, rows: Ints) -> None:
        self._tried_at[rows] = self._round
        self._gap[rows] = np.minimum(self._gap[rows] * 2, _MAX_PROBE_GAP)
        self._totals.probes += rows.size

    # ---- learning

    def _learn(self, rows: Ints, tree: TokenTree, accepted: AcceptResult) -> None:
        """Credit the verified nodes whose parent was accepted."""
        trials = self._memo.trials(rows, tree, accepted)
        self.model.learn(trials.rows, trials.buckets, trials.chances, trials.won)
        self._tried_at[trials.rows] = self._round
        self._gap[trials.rows[trials.won]] = _PROBE_GAP
        self._totals.tried += trials.won.size
        self._totals.accepted += int(trials.won.sum())

    # ---- insertion

    def _insert(self, rows: Ints, texts: Ints32) -> None:
        """Insert what is owed of texts, and a slice of the queue. A text of which a part is queued
        waits for that."""
        ends = self._owed[rows]
        gained = np.maximum(ends - self._given[rows], 0)
        for row in rows[(gained > MAX_GAIN) & ~self._queue.queued[rows]].tolist():
            self._queue_rest(row, texts[row, : self._owed[row]])
        live = np.flatnonzero(~self._queue.queued[rows] & (gained > 0))
        rows, gained = rows.take(live), gained.take(live)
        starts = np.cumsum(gained) - gained
        row = np.repeat(rows, gained)
        at = np.arange(row.size) + np.repeat(self._given.take(rows) - starts, gained)
        windows, known = self._windows(texts, row, at)
        slices = self._queue.slices(max(MIN_SLICE, ROUND_TOKENS - row.size))
        before = self._suffixes.take(rows, axis=0)
        before[self._suffixes_at.take(rows) != self.trie.log.clock] = -1
        piece = Piece(windows, known, starts, self._tails.take(rows), before)
        self._given[rows] = ends.take(live)
        if row.size:
            self._tails[rows] = self._insert_slices(slices, piece)
        elif slices:
            self._insert_slices(slices, None)

    def _insert_slices(self, slices: list[tuple[Job, Piece]], first: Piece | None) -> Ints:
        """Insert a piece and slices of the queue. Returns the log positions of the former's
        tails."""
        pieces = [*([] if first is None else [first]), *[part for _, part in slices]]
        tails = self.trie.insert(join(pieces))
        own = tails.size - len(slices)
        for (job, part), tail in zip(slices, tails[own:].tolist(), strict=True):
            if self._queue.advance(job, part.known.size, tail) and job.row >= 0:
                self._tails[job.row] = tail
        return tails[:own]

    def _queue_rest(self, row: int, text: Ints32) -> None:
        """Queue what the row's text has beyond the tokens that were given."""
        given = int(self._given[row])
        if given >= text.size:
            return
        if self._queue.queued[row]:
            self._queue.extend(row, text[given:])
        else:
            self._queue.add(row, text, given, int(self._tails[row]))
        self._given[row] = text.size


def _tree(draft: Draft) -> TokenTree:
    return TokenTree(
        tokens=torch.from_numpy(draft.tokens),
        parents=torch.from_numpy(draft.parents),
        num_nodes=torch.from_numpy(draft.num_nodes),
        scores=torch.from_numpy(draft.scores.astype(np.float32)),
    )


def build(context: DrafterContext) -> Drafter:
    """An `NgramDrafter` from the server's options (`num_draft_tokens`, `ngram_*`); others are not
    its."""
    given = context.options
    fields = ("max_trie_depth", "min_bfs_breadth", "max_bfs_breadth", "match_type", "capacity")
    values: dict[str, Any] = {
        field: given[f"ngram_{field}"] for field in fields if f"ngram_{field}" in given
    }
    options = NgramOptions(num_draft_tokens=context.draft_tokens, **values)
    return NgramDrafter(context.num_rows, options)


def register() -> None:
    """Make `--speculative-algorithm NGRAM` known."""
    register_drafter("NGRAM", build)


register()
