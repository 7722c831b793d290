"""NGRAM on a GPU: the host's side of the index that lies there, and how large rounds should be.

Prompts, and what the host accepted by itself, are sent to the index before the next batch; what
rounds on the device accept they enter themselves. Where a batch runs one forward at a time (a
grammar, penalties, ...) this is an ordinary drafter that asks the same index.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sgl_spec.engine.cuda.costs import DeviceCosts, TreeShapes
from sgl_spec.engine.cuda.transfer import send
from sgl_spec.layers.transfer import on_device
from sgl_spec.speculative.base import DraftBatch
from sgl_spec.speculative.chain_scores import ChainScores
from sgl_spec.speculative.tree import AcceptResult, TokenTree
from sgl_spec_kernels.ngram_chains import MOST_MATCHED, chains, propose
from sgl_spec_kernels.ngram_index import ORDERS, learn, token_index
from sgl_spec_kernels.ngram_rows import CUTOFFS

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]

_REFRESH = 16  # learned rounds after which the device gets new scores
_BLEND = 0.25  # weight of the newest round in what drafts are expected to give
_MOST_PLACES = 1 << 26  # that a log has for growing texts, four bytes each


@dataclass(frozen=True, slots=True)
class IndexSize:
    """tokens: that the log has places for. grams: n-grams that the table has entries for."""

    tokens: int
    grams: int

    @classmethod
    def of(cls, capacity: int, width: int, rows: int) -> IndexSize:
        """capacity: n-grams to be kept. width: most tokens of a text. rows: texts that grow at the
        same time: each has places for all that it may come to, and one more is about to begin;
        beyond _MOST_PLACES they take each other's."""
        kept = max(capacity // len(ORDERS), 2 * width)
        growing = min((rows + 1) * (width + 1) + 1, _MOST_PLACES)
        return cls(max(kept, growing), len(ORDERS) * kept)

    @property
    def nbytes(self) -> int:
        """Memory of such an index, at most."""
        return 4 * self.tokens + 2 * 4 * self.grams


@dataclass(slots=True)
class _Totals:
    """Counts since the last flush: chains asked for, those that were found, drafts verified, those
    accepted, tokens entered."""

    asked: int = 0
    matched: int = 0
    tried: int = 0
    accepted: int = 0
    entered: int = 0


class DeviceNgram:
    """A `Drafter` whose index lies on the device. rows: request rows; nodes: of a chain, root
    included.

    index, depths: what rounds on the device read.
    """

    def __init__(self, rows: int, nodes: int, size: IndexSize, device: torch.device) -> None:
        self.nodes, self.device = nodes, device
        self.index = token_index(size.tokens, rows + 1, device, size.grams)
        self.scores = ChainScores(nodes, MOST_MATCHED, CUTOFFS)
        self.depths = on_device(self.scores.depths(), device).clone()
        self._starts = np.ones(rows + 1, dtype=np.int64)
        self._most = np.zeros(rows, dtype=np.int64)  # tokens that a row's text may come to
        self._matched = np.zeros(rows, dtype=np.int64)  # of the proposals not yet observed
        self._head = 1
        self._growing: dict[int, tuple[int, int]] = {}  # begin and end of the spans of such texts
        self._writes: list[tuple[int, int, Ints32]] = []  # place, tokens before it, tokens
        self._moved = False  # some start
        self._learned = 0  # rounds since the device got the scores
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
        self._moved = True
        self._write(row, 0, tokens)

    def _reserve(self, size: int) -> int:
        """A span of the log, and a place that stays empty behind it; the oldest texts go, those
        that grow last of all."""
        start = self._room(size + 1)
        self._head = start + size + 1
        self.index.log[start : self._head].fill_(-1)
        return start

    def _room(self, size: int) -> int:
        """The next place with so many behind it that no growing text has; where there is none, the
        next one all the same."""
        spans, last = sorted(self._growing.values()), len(self.index.log) - size
        first = self._head if self._head <= last else 1
        for start in (first, 1):
            free = start
            for begin, end in spans:
                if begin < free + size and free < end:
                    free = end
            if free <= last:
                return free
        return first

    def _write(self, row: int, position: int, tokens: Ints32) -> None:
        self._writes.append((int(self._starts[row]) + position, position, tokens.copy()))
        self._totals.entered += len(tokens)

    def sync(self) -> None:
        """Send what is new, in the order of the stream."""
        if self._moved:
            self._moved = False
            send(self._starts, self.index.starts)
        if self._writes:
            writes, self._writes = self._writes, []
            spans = [(place, known, len(tokens)) for place, known, tokens in writes]
            places = np.concatenate([np.arange(at, at + n) for at, _, n in spans])
            known = np.concatenate([np.arange(before, before + n) for _, before, n in spans])
            tokens = np.concatenate([tokens for *_, tokens in writes])
            at = on_device(places, self.device)
            self.index.log.index_copy_(0, at, on_device(tokens, self.device))
            learn(self.index, at, on_device(known, self.device))
        if self._learned >= _REFRESH:
            self._learned = 0
            send(self.scores.depths(), self.depths)

    def finish(self, row: int) -> None:
        """See `Drafter`: the text stays until its place is needed."""
        self._growing.pop(row, None)

    def flush(self) -> None:
        """See `Drafter`."""
        self.index.clear()
        self.scores.clear()
        send(self.scores.depths(), self.depths)
        self._head, self._learned = 1, 0
        self._writes.clear()
        self._totals = _Totals()

    # --- rounds on the device ---------------------------------------------------------------------

    def learn(self, facts: Ints, accepted: Ints) -> None:
        """What became of a round's chains. facts: [B, 3] as in `ngram_chains.Chains`. accepted: [B]
        drafts."""
        matched, available, verified = facts.T
        self._note(matched, verified - 1, accepted)
        self._totals.matched += int((available > 0).sum())
        self._totals.entered += int(accepted.sum()) + len(accepted)

    def _note(self, matched: Ints, drafted: Ints, accepted: Ints) -> None:
        self.scores.learn(matched, drafted, accepted)
        self._learned += 1
        totals = self._totals
        totals.asked += len(matched)
        totals.tried += int(np.minimum(accepted + 1, drafted).sum())
        totals.accepted += int(np.minimum(accepted, drafted).sum())

    # --- rounds that the host leads ---------------------------------------------------------------

    def propose(self, batch: DraftBatch) -> TokenTree:
        """See `Drafter`."""
        self.sync()
        out = chains(len(batch.rows), self.nodes, self.device)
        columns = (batch.rows, batch.lengths - 1, batch.roots(), batch.max_nodes)
        rows, committed, roots, most = (on_device(column, self.device) for column in columns)
        propose(self.index, rows, committed, roots, most, out)
        matched, drafted, _ = out.facts.cpu().numpy().astype(np.int64).T
        self._matched[batch.rows] = matched
        self._totals.matched += int((drafted > 0).sum())
        scores = np.ones((len(matched), self.nodes), dtype=np.float32)
        scores[:, 1:] = self.scores.scores()[matched]
        parents = torch.arange(-1, self.nodes - 1).expand(len(matched), -1)
        return TokenTree(
            tokens=out.tokens.cpu(),
            parents=parents.contiguous(),
            num_nodes=torch.from_numpy(drafted + 1),
            scores=torch.from_numpy(scores),
        )

    def observe(self, batch: DraftBatch, tree: TokenTree, accepted: AcceptResult) -> None:
        """See `Drafter`."""
        counts = accepted.counts.numpy(force=True)
        drafted = tree.num_nodes.numpy(force=True) - 1
        self._note(self._matched[batch.rows], drafted, counts - 1)
        self._matched[batch.rows] = 0
        for row, length, count in zip(
            batch.rows.tolist(), batch.lengths.tolist(), counts.tolist(), strict=True
        ):
            self._write(row, length, batch.tokens[row, length : length + count])

    def stats(self) -> dict[str, float]:
        """Tokens and memory of the index; what became of the drafts since the last flush."""
        totals = self._totals
        return {
            "index_tokens": min(totals.entered, len(self.index.log) - 1),
            "index_bytes": self.index.nbytes,
            "match_rate": totals.matched / max(1, totals.asked),
            "acceptance_rate": totals.accepted / max(1, totals.tried),
        }


class RoundSizes:
    """How many rows rounds verify: as many as give the most tokens a second, by what the drafts of
    the rounds before promised. costs: None verifies every draft."""

    def __init__(self, shapes: TreeShapes, scores: ChainScores, costs: DeviceCosts | None) -> None:
        self.shapes, self.scores, self.costs = shapes, scores, costs
        self._gains: dict[int, npt.NDArray[np.float64]] = {}

    def choose(self, batch: int, padded: int) -> tuple[int, int]:
        """Batch size and rows of the round for so many requests. padded: the size of a round
        without drafts."""
        size = next((size for size in self.shapes.sizes if size >= batch), None)
        if size is None:
            return padded, padded * self.shapes.most_nodes
        rows = self.shapes.rows(size)
        if self.costs is None:
            return size, rows[-1]
        if size not in self._gains:
            self._gains[size] = self._first(size)
        expected = batch * (1 + self._gains[size])
        rates = expected / np.array([self.costs.ms(size, count) for count in rows])
        best = int(rates.argmax())
        if batch / self.costs.ms(padded, padded) > rates[best]:
            return padded, padded
        return size, rows[best]

    def _first(self, size: int) -> npt.NDArray[np.float64]:
        """Before anything is known: all texts have found something."""
        some = np.full(size, 2)
        return self._gains_of(size, some, np.full(size, self.shapes.most_nodes - 1))

    def _gains_of(self, size: int, matched: Ints, available: Ints) -> npt.NDArray[np.float64]:
        """[counts of rows] tokens that drafts are expected to give a request."""
        budgets = (np.array(self.shapes.rows(size)) - size) * len(matched) // size
        return self.scores.gains(matched, available, budgets) / max(1, len(matched))

    def note(self, facts: Ints) -> None:
        """What the chains of a round were like. facts: [B, 3] as in `ngram_chains.Chains`."""
        size = next((size for size in self.shapes.sizes if size >= len(facts)), None)
        if size is None or self.costs is None:
            return
        gains = self._gains_of(size, facts[:, 0], facts[:, 1])
        before = self._gains.get(size)
        self._gains[size] = gains if before is None else before + _BLEND * (gains - before)
