"""What was proposed for each request row, to learn from what came of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgl_spec.speculative.ngram_candidates import Draft, pick
from sgl_spec.speculative.tree import AcceptResult, TokenTree

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Trials:
    """Proposed nodes that were verified and whose parent was accepted, flat: request row, bucket
    and chance they had been given, and whether they were accepted."""

    rows: Ints
    buckets: Ints
    chances: Floats
    won: Bools


class ProposalMemo:
    """The last tree proposed for each row."""

    def __init__(self, num_rows: int, nodes: int) -> None:
        shape = (num_rows, nodes)
        self._tokens = np.zeros(shape, np.int64)
        self._parents = np.full(shape, -1, np.int64)  # -1 from num_nodes on
        self._buckets = np.zeros(shape, np.int64)
        self._chances = np.zeros(shape)

    def forget(self, row: int) -> None:
        """Nothing is proposed for the row."""
        self._parents[row] = -1

    def keep(self, rows: Ints, draft: Draft) -> None:
        """Remember a batch of proposals."""
        width = draft.tokens.shape[1]
        used = np.arange(width) < draft.num_nodes[:, None]
        self._parents[rows] = -1
        self._parents[rows, :width] = np.where(used, draft.parents, -1)
        self._tokens[rows, :width] = draft.tokens
        self._buckets[rows, :width] = draft.buckets
        self._chances[rows, :width] = draft.chances

    def trials(self, rows: Ints, tree: TokenTree, accepted: AcceptResult) -> Trials:
        """Match a verified tree, whatever its node order, with what was proposed for its rows."""
        tokens, parents = tree.tokens.numpy(force=True), tree.parents.numpy(force=True)
        counts = np.maximum(accepted.counts.numpy(force=True), 1)
        steps = int(counts.max(initial=1))
        path = accepted.path.numpy(force=True)[:, :steps]
        on_path = np.arange(steps) < counts[:, None]
        path = path * on_path
        batch, width = tokens.shape
        above = self._parents[rows]
        text = self._tokens[rows]
        own = _own_path(above, text, pick(tokens, path), on_path)
        twin = np.full((batch, width), -2)  # our node for each accepted one; -1: not ours
        flat = path + np.arange(batch)[:, None] * width
        twin.reshape(-1)[flat[on_path]] = own[on_path]
        parent_twin = pick(twin, np.clip(parents, 0, width - 1))
        drafted = np.arange(width) < tree.num_nodes.numpy(force=True)[:, None]
        drafted &= parent_twin >= 0
        drafted[:, 0] = False
        at = np.flatnonzero(drafted)
        of = at // width
        same = above.take(of, axis=0) == parent_twin.reshape(-1).take(at)[:, None]
        same &= text.take(of, axis=0) == tokens.reshape(-1).take(at)[:, None]
        hits = np.flatnonzero(same)
        found, node = hits // same.shape[1], hits % same.shape[1]
        row = rows.take(of.take(found))
        spot = row * same.shape[1] + node
        return Trials(
            rows=row,
            buckets=self._buckets.reshape(-1).take(spot),
            chances=self._chances.reshape(-1).take(spot),
            won=twin.reshape(-1).take(at.take(found)) > -2,
        )


def _own_path(above: Ints, text: Ints, tokens: Ints, on_path: Bools) -> Ints:
    """[B, steps] our node for each accepted node (tokens [B, steps]), -1 where it is not ours.

    above, text: [B, N] parents and tokens of our nodes.
    """
    own = np.full(tokens.shape, -1)
    own[:, 0] = 0
    for step in range(1, tokens.shape[1]):
        before = own[:, step - 1 : step]
        same = (above == before) & (text == tokens[:, step : step + 1]) & (before >= 0)
        hit = same.any(axis=1) & on_path[:, step]
        own[:, step] = np.where(hit, np.argmax(same, axis=1), -1)
    return own
