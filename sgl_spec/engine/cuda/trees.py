"""Trees that no device makes: roots alone, and those of a drafter on the host."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sgl_spec.engine.cuda.round import ChainTrees, IntArray, Parts, Requests, even_starts
from sgl_spec.engine.cuda.transfer import send
from sgl_spec.layers.context import ForwardBatch
from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec_kernels.sample import Walked
from sgl_spec_kernels.tree_rows import tree_rows


class Roots:
    """Plain decoding. The roots are the device's own, so a round may be launched before the host
    knows them. See `round.TreeSource`."""

    nodes, levels, scores = 1, 0, None

    def __init__(self, parts: Parts, requests: Requests) -> None:
        self.parts, self.requests = parts, requests
        self.total = len(requests.rows)
        self.starts = even_starts(self.total, 1, parts.table.device)
        self.offsets = self.starts[:-1]
        self.tree = ChainTrees.of_roots(requests.at.last)
        self.zeros, self.ones = torch.zeros_like(requests.rows), torch.ones_like(requests.rows)
        self.positions, self.slots = torch.zeros_like(self.zeros), torch.zeros_like(self.zeros)

    def load(self, rows: IntArray, tree: ArrayTree | None) -> None:
        """See `round.Program`."""
        assert tree is None, "there are no trees"
        self.requests.load(rows)

    def propose(self) -> None:
        """See `round.TreeSource`."""
        mine = self.requests
        tree_rows(
            self.offsets, self.zeros, self.zeros, mine.at.committed, mine.rows, self.parts.table,
            self.positions, self.slots,
        )  # fmt: skip

    def forward(self) -> ForwardBatch:
        """See `round.TreeSource`."""
        return ForwardBatch(
            tokens=self.requests.at.last,
            positions=self.positions,
            slots=self.slots,
            req_to_token=self.parts.table,
            rows=self.requests.rows,
            prefix_lens=self.requests.at.committed,
            q_starts=self.starts,
            mask_words=self.ones,
            max_q_len=1,
        )

    def learn(self, walked: Walked) -> None:
        """See `round.TreeSource`."""


class _Block:
    """Trees that the host fills in, as one block of words.

    requests, nodes, node_depths, row_words: [T], what each row of the forward is (node -1: filler).
    starts: [B + 1], each request's rows. rows, num_nodes: [B]. tokens, parents, depths, words:
    [B, N], the trees again, for the walk.
    """

    def __init__(self, batch: int, rows: int, nodes: int, device: torch.device) -> None:
        sizes = [rows] * 5 + [batch + 1, batch, batch] + [batch * nodes] * 4
        self.host = torch.zeros(sum(sizes), dtype=torch.int64)
        self.block = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        flat = torch.split(self.block, sizes)
        self.row_tokens, self.requests, self.nodes, self.node_depths, self.row_words = flat[:5]
        self.starts, self.rows, self.num_nodes = flat[5:8]
        trees = [part.view(batch, nodes) for part in flat[8:]]
        self.tokens, self.parents, self.depths, self.words = trees
        parts = [part.numpy() for part in torch.split(self.host, sizes)]
        self._flat, self._wide = parts[:8], [part.reshape(batch, nodes) for part in parts[8:]]

    def fill(self, rows: IntArray, filler: int, tree: ArrayTree) -> None:
        """Write all of it and send it."""
        self._write(rows, filler, tree)
        send(self.host, self.block)

    def _write(self, rows: IntArray, filler: int, tree: ArrayTree) -> None:
        row_tokens, requests, nodes, depths, words, starts, table_rows, counts = self._flat
        size, batch, most = len(rows), len(table_rows), len(nodes)
        counts[:size], counts[size:] = tree.num_nodes, 1
        table_rows[:size], table_rows[size:] = rows, filler
        np.cumsum(counts, out=starts[1:])
        total, drafted = int(starts[-1]), int(starts[size])
        assert total <= most, f"{total} rows, the round has {most}"
        columns = (tree.tokens, tree.parents, tree.depths, tree.words())
        for wide, column, value in zip(self._wide, columns, (0, -1, 0, 1), strict=True):
            wide[:size, : tree.width] = column
            wide[size:, 0] = value
        spots = np.flatnonzero(tree.used())
        request = spots // tree.width
        requests[:drafted], nodes[:drafted] = request, spots - request * tree.width
        for row, column in ((row_tokens, columns[0]), (depths, columns[2]), (words, columns[3])):
            row[:drafted] = column.take(spots)
        requests[drafted:total], requests[total:] = np.arange(size, batch), 0
        nodes[drafted:total], nodes[total:] = 0, -1
        row_tokens[drafted:], depths[drafted:], words[drafted:] = 0, 0, 1


class HostTrees:
    """Trees that the host made, `total` rows in all. See `round.TreeSource`.

    They are ragged: rows are shared by the requests of a batch, so many small trees and few large
    ones cost the same.
    """

    scores = None

    def __init__(self, parts: Parts, requests: Requests, total: int, nodes: int) -> None:
        device = parts.table.device
        self.parts, self.requests, self.total = parts, requests, total
        self.nodes, self.levels = nodes, nodes - 1
        self.tree = _Block(len(requests.rows), total, nodes, device)
        self.offsets: Tensor = self.tree.starts[:-1]
        requests.rows = self.tree.rows
        self.positions = torch.zeros(total, dtype=torch.int64, device=device)
        self.slots = torch.zeros_like(self.positions)

    def load(self, rows: IntArray, tree: ArrayTree | None) -> None:
        """See `round.Program`. None, of no requests, as a round is captured."""
        if tree is None:
            assert not len(rows)
            tree = ArrayTree.roots(rows)
        self.tree.fill(rows, self.parts.rows.filler, tree)

    def propose(self) -> None:
        """See `round.TreeSource`."""
        tree, mine = self.tree, self.requests
        tree_rows(
            tree.requests, tree.nodes, tree.node_depths, mine.at.committed, mine.rows,
            self.parts.table, self.positions, self.slots,
        )  # fmt: skip

    def forward(self) -> ForwardBatch:
        """See `round.TreeSource`."""
        return ForwardBatch(
            tokens=self.tree.row_tokens,
            positions=self.positions,
            slots=self.slots,
            req_to_token=self.parts.table,
            rows=self.requests.rows,
            prefix_lens=self.requests.at.committed,
            q_starts=self.tree.starts,
            mask_words=self.tree.row_words,
            max_q_len=self.nodes,
        )

    def learn(self, walked: Walked) -> None:
        """See `round.TreeSource`."""
