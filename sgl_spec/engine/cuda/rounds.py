"""Speculation rounds that run on the device from end to end.

A round reads where its requests stand from the row state, drafts, verifies, draws, keeps the
accepted path, and moves the row state on. Nothing in it depends on a value that the host would have
to read, and all its buffers stay where they are, so a round can be captured once as a CUDA graph
and replayed, and the next one launched before this one's tokens were read.

    PlainRound   no drafts: plain decoding (`plain_round`)
    TreeRound    drafts of a model, on the device (`tree_round`)
    NgramRound   n-grams that the device finds (`ngram_round`)
    HostRound    trees that the host made (`host_round`)
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgl_spec.engine.cuda.state import DeviceRows
from sgl_spec.engine.cuda.transfer import send
from sgl_spec.layers.context import ForwardBatch, KVCache
from sgl_spec.models.decoder import Decoder
from sgl_spec.models.draft import DraftModel
from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec_kernels.compact import move_path
from sgl_spec_kernels.filters import CutHeads, cut_heads, token_cuts
from sgl_spec_kernels.round_state import (
    RowState,
    begin_round,
    end_round,
)
from sgl_spec_kernels.sample import Trees, Walked, draw_all, draw_walk, walked
from sgl_spec_kernels.simulate import force_path

IntArray = npt.NDArray[np.int64]

DRAW_ALL_NODES = 64  # more nodes are drawn level by level, where the walks stand


@dataclass(frozen=True, slots=True)
class DraftParts:
    """The draft model on the device. hidden: [rows + 1, H], what it returned for the last written
    position of each row. shared_noise: whether sampled requests are drafted with the target's own
    noise. steps, topk, nodes: shape of the trees."""

    model: DraftModel
    kv: KVCache
    hidden: Tensor
    steps: int
    topk: int
    nodes: int
    shared_noise: bool


class SharedHeads:
    """The filters' work space of all rounds: they run one after the other, and none reads what it
    did not write. It grows; rounds that were made before keep the smaller ones."""

    def __init__(self) -> None:
        self._heads: CutHeads | None = None

    def of(self, rows: int, device: torch.device) -> CutHeads:
        """For so many rows of logits, or more."""
        if self._heads is None or len(self._heads.sizes) < rows:
            self._heads = cut_heads(rows, device)
        return self._heads


@dataclass(frozen=True, slots=True)
class Parts:
    """What all rounds of a server share. table: req_to_token on the device."""

    model: Decoder
    kv: KVCache
    table: Tensor
    rows: DeviceRows
    draft: DraftParts | None = None
    heads: SharedHeads = field(default_factory=SharedHeads)


@dataclass(frozen=True, slots=True)
class RoundKind:
    """What the requests of a batch ask for. sampled: some have a temperature. filtered: some of
    these have top_k, top_p or min_p. forced: accept lengths are given."""

    sampled: bool = False
    filtered: bool = False
    forced: bool = False


class Round(Protocol):
    """One round of `batch` requests. rows: [batch] int64, their table rows, to be filled before it
    runs. out: [batch, 1 + nodes] int32, how many tokens each gave, and which."""

    rows: Tensor
    out: Tensor
    lengths: Tensor | None

    def load(self, rows: IntArray, tree: ArrayTree | None) -> None: ...
    def __call__(self) -> None: ...


class Requests:
    """Where the requests of a round stand: copies of their rows of the state.

    rows: [B] int64, table rows. text: [B] int64, lengths of their texts, roots included.
    """

    def __init__(self, parts: Parts, batch: int, kind: RoundKind) -> None:
        device, state = parts.table.device, parts.rows.state
        self.state, self.kind = state, kind
        self.rows = torch.full((batch,), parts.rows.filler, dtype=torch.int64, device=device)
        copies = {f.name: getattr(state, f.name).new_zeros(batch) for f in fields(RowState)}
        self.at = RowState(**copies)
        self.text = torch.zeros_like(self.rows)
        self._filler = parts.rows.filler
        self._loaded = np.full(batch, self._filler, dtype=np.int64)

    def load(self, rows: IntArray) -> None:
        """Give it its requests; those behind them fill the batch up."""
        padded = np.full(len(self._loaded), self._filler, dtype=np.int64)
        padded[: len(rows)] = rows
        if not np.array_equal(padded, self._loaded):
            self._loaded = padded
            send(padded, self.rows)

    def begin(self, *, texts: bool = False) -> None:
        """texts: whether `text` is needed."""
        begin_round(self.state, self.rows, self.at)
        if texts:
            torch.add(self.at.committed, 1, out=self.text)

    def cuts(self, logits: Tensor, offsets: Tensor, counts: Tensor, into: Cuts | None) -> None:
        """What filters keep of the rows of `logits`."""
        if into is not None:
            at = self.at
            token_cuts(
                logits, offsets, counts, at.temperature, at.top_k, at.top_p, at.min_p,
                into.cuts, into.heads,
            )  # fmt: skip

    @property
    def drawn_at(self) -> Tensor | None:
        """Temperatures, None where all are 0."""
        return self.at.temperature if self.kind.sampled else None


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where a round keeps what filters leave of its logits; see `filters.token_cuts`."""

    cuts: Tensor
    heads: CutHeads

    @classmethod
    def maybe(cls, parts: Parts, kind: RoundKind, batch: int, nodes: int) -> Cuts | None:
        if not kind.filtered:
            return None
        device = parts.table.device
        cuts = torch.zeros(batch, nodes, dtype=torch.int64, device=device)
        return cls(cuts, parts.heads.of(batch * nodes, device))


class Acceptance:
    """Draw, follow, keep the path, move the state on."""

    def __init__(self, parts: Parts, requests: Requests, nodes: int, levels: int) -> None:
        batch, device = len(requests.rows), parts.table.device
        self.parts, self.requests = parts, requests
        self.nodes, self.levels = nodes, levels
        self.walked: Walked = walked(batch, nodes, parts.model.config.vocab_size, device)
        self.cuts = Cuts.maybe(parts, requests.kind, batch, nodes)
        self.lengths = None
        if requests.kind.forced:
            self.lengths = torch.ones(batch, dtype=torch.int64, device=device)
        self.out = torch.zeros(batch, 1 + nodes, dtype=torch.int32, device=device)

    def accept(self, tree: WalkedTree, logits: Tensor, offsets: Tensor) -> None:
        """offsets: [B] int64, the first row of logits of each request."""
        mine, out = self.requests, self.walked
        mine.cuts(logits, offsets, tree.num_nodes, self.cuts)
        cuts, heads = (None, None) if self.cuts is None else (self.cuts.cuts, self.cuts.heads)
        trees = Trees(
            tree.tokens, tree.parents, tree.depths, tree.num_nodes, logits, offsets,
            mine.at.committed, mine.at.seed, mine.drawn_at, cuts, heads,
        )  # fmt: skip
        if self.lengths is not None or tree.tokens.numel() <= DRAW_ALL_NODES:
            draw_all(trees, out)
        else:
            draw_walk(trees, out, self.levels + 1)
        if self.lengths is not None:
            force_path(trees, tree.words, self.lengths, out)
        if self.nodes > 1:
            kv, table = self.parts.kv, self.parts.table
            move_path(kv.k, kv.v, table, mine.rows, mine.at.committed, out.path, out.counts)

    def finish(self) -> None:
        """Move the row state on."""
        state, filler = self.requests.state, self.parts.rows.filler
        end_round(state.committed, state.last, self.requests.rows, self.walked, self.out, filler)


class WalkedTree(Protocol):
    """Trees on the device: [B, N] int64, num_nodes [B] int64."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def parents(self) -> Tensor: ...
    @property
    def depths(self) -> Tensor: ...
    @property
    def num_nodes(self) -> Tensor: ...
    @property
    def words(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class ChainTrees:
    """Chains, and roots alone, as trees; see `WalkedTree`."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    num_nodes: Tensor
    words: Tensor

    @classmethod
    def of(cls, tokens: Tensor, num_nodes: Tensor) -> ChainTrees:
        """tokens: [B, N], num_nodes: [B], both int64 and kept as they are."""
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        flat = (steps - 1, steps, (2 << steps) - 1)
        parents, depths, words = (each.expand(tokens.shape).contiguous() for each in flat)
        return cls(tokens, parents, depths, num_nodes, words)

    @classmethod
    def of_roots(cls, roots: Tensor) -> ChainTrees:
        """Trees of one node. roots: [B] int64."""
        return cls.of(roots[:, None], torch.ones_like(roots))


def even_starts(batch: int, rows: int, device: torch.device) -> Tensor:
    return torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int64, device=device)


def verify(
    model: Decoder, batch: ForwardBatch, kv: KVCache, capture: tuple[int, ...]
) -> tuple[Tensor, Tensor | None]:
    """The target's logits [T, V] in its own dtype, and the features that are wanted."""
    if capture:
        hidden, features = model.forward_features(batch, kv, capture)
        return model.raw_logits(hidden), features
    return model.raw_logits(model.forward(batch, kv)), None
