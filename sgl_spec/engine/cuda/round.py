"""Speculation rounds that run on the device from end to end.

A round reads where its requests stand from the row state, lets its source propose trees, verifies
them, draws, keeps the accepted path, lets a draft model follow, and moves the row state on. Nothing
in it depends on a value that the host would have to read, and all its buffers stay where they are,
so a round can be captured once as a CUDA graph and replayed, and the next one launched before this
one's tokens were read.

Where the trees come from is a source:

    Roots         nobody: plain decoding (`trees`)
    GrownTrees    a draft model, on the device (`model_trees`)
    NgramTrees    n-grams that the device finds (`ngram_round`)
    HostTrees     the host (`trees`)

A grammar is the one thing that the host must add within a round: the masks of the drafted tokens. A
round of such requests is three graphs, `Round.pieces`. The host walks the grammars while the
verify forward, the second of them, runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
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
from sgl_spec.request import MAX_LOGPROB_IDS, MAX_TOP_LOGPROBS
from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec_kernels.compact import move_path
from sgl_spec_kernels.filters import CutHeads, cut_heads, token_cuts
from sgl_spec_kernels.logprobs import Asked, Found, emitted_logprobs, found_space
from sgl_spec_kernels.round_state import (
    RowState,
    begin_round,
    end_round,
    extend_buffers,
    extend_rows,
    gather_features,
)
from sgl_spec_kernels.sample import Trees, Walked, draw_all, draw_walk, walked
from sgl_spec_kernels.settings import (
    Adjusted,
    Masks,
    adjust_logits,
    adjusted_space,
    count_tokens,
)
from sgl_spec_kernels.simulate import force_path

IntArray = npt.NDArray[np.int64]

TIMED_REQUESTS = 8  # a shown round of no more is split, so that its parts can be timed
DRAW_ALL_NODES = 64  # more nodes are drawn level by level, where the walks stand
_PRODUCT_ROWS = 64  # up to here a product takes as long as for one row: the weights are read once


@dataclass(frozen=True, slots=True)
class DraftParts:
    """The draft model on the device. hidden: [rows + 1, H], what it returned for the last written
    position of each row."""

    model: DraftModel
    kv: KVCache
    hidden: Tensor


class Space:
    """Work space that all rounds share: they run one after the other, and none reads what it did
    not write. Each part grows; rounds that were made before keep the smaller one."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.vocab, self.device = vocab, device
        self._heads: CutHeads | None = None
        self._adjusted: Adjusted | None = None
        self._masks: Tensor | None = None
        self._found: Found | None = None

    def heads(self, rows: int) -> CutHeads:
        """The filters', for so many rows of logits."""
        if self._heads is None or len(self._heads.sizes) < rows:
            self._heads = cut_heads(rows, self.device)
        return self._heads

    def adjusted(self, rows: int) -> Adjusted:
        """Logits with the requests' settings."""
        if self._adjusted is None or len(self._adjusted.logits) < rows:
            self._adjusted = adjusted_space(rows, self.vocab, self.device)
        return self._adjusted

    def masks(self, rows: int) -> Tensor:
        """Masks of grammars."""
        if self._masks is None or len(self._masks) < rows:
            words = -(-self.vocab // 32)
            self._masks = torch.zeros(rows, words, dtype=torch.int32, device=self.device)
        return self._masks

    def found(self, rows: int) -> Found:
        """Log-probabilities of so many emitted tokens."""
        if self._found is None or len(self._found.values) < rows:
            most = min(MAX_TOP_LOGPROBS, self.vocab), MAX_LOGPROB_IDS
            self._found = found_space(rows, self.vocab, *most, self.device)
        return self._found


@dataclass(frozen=True, slots=True)
class Parts:
    """What all rounds of a server share. table: req_to_token on the device."""

    model: Decoder
    kv: KVCache
    table: Tensor
    rows: DeviceRows
    space: Space
    draft: DraftParts | None = None

    def agree(self, ms: float) -> float:
        """What rank 0 measured."""
        agreed: float = self.model.ranks.agree(ms)
        return agreed

    @property
    def on_gpu(self) -> bool:
        """Whether times mean anything: the interpreter runs the same on a CPU."""
        return self.table.device.type == "cuda"


@dataclass(frozen=True, slots=True)
class RoundKind:
    """What a round can do for its requests; one that can do more serves those that need less.

    sampled: some have a temperature. filtered: some of these have top_k, top_p or min_p. settings:
    some have penalties, biases, a minimum length or ask for log-probabilities. masked: some have a
    grammar. forced: accept lengths are given. shown: some ask to see their trees.
    """

    sampled: bool = False
    filtered: bool = False
    settings: bool = False
    masked: bool = False
    forced: bool = False
    shown: bool = False

    @property
    def unseen(self) -> RoundKind:
        """The kind of the same requests if nobody asked to see trees; it costs and brings the
        same."""
        return replace(self, shown=False)


KINDS = (
    RoundKind(),
    RoundKind(sampled=True),
    RoundKind(sampled=True, filtered=True),
    RoundKind(sampled=True, filtered=True, settings=True),
    RoundKind(sampled=True, filtered=True, settings=True, masked=True),
)
"""Few, so that the first batch of a kind seldom has to wait for a capture."""


def kind_for(*, sampled: bool, filtered: bool, settings: bool, masked: bool) -> RoundKind:
    """The least of `KINDS` that can do all this."""
    return KINDS[4 if masked else 3 if settings else 2 if filtered else int(sampled)]


PROPOSE, VERIFY, FINISH = range(3)
"""The pieces of a round."""


class Program(Protocol):
    """What can be captured: its inputs and outputs lie in buffers of its own.

    pieces: run one after the other. split: whether they are captured one by one, because the host
    comes between; else as a whole.
    """

    @property
    def pieces(self) -> tuple[Callable[[], None], ...]: ...

    @property
    def split(self) -> bool: ...

    def load(self, rows: IntArray, tree: ArrayTree | None) -> None:
        """Give it its requests; those behind them fill the batch up. tree: for `HostTrees`."""


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
        return cls(cuts, parts.space.heads(batch * nodes))


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


class NodeMasks:
    """The masks of a round's nodes; see `settings.Masks`. They are free until some are sent."""

    def __init__(self, space: Space, batch: int, nodes: int) -> None:
        self._host = np.full((batch, nodes), -1, dtype=np.int64)
        row_of = torch.full((batch, nodes), -1, dtype=torch.int64, device=space.device)
        self.masks = Masks(space.masks(batch * nodes), row_of)

    def send(self, words: npt.NDArray[np.int32], row_of: IntArray) -> None:
        """words: [M, ceil(V / 32)]. row_of: [b, n], what lies behind is free."""
        if len(words):
            send(words, self.masks.words[: len(words)])
        was_free = bool((self._host < 0).all())
        self._host.fill(-1)
        self._host[: row_of.shape[0], : row_of.shape[1]] = row_of
        if len(words) or not was_free:
            send(self._host, self.masks.row_of)


class Shown:
    """The model's own log-probabilities of a round's nodes and of the tokens it emits.

    values: [B, 2 N]: at j that of node j's token behind its parent's text (of node 0 it means
    nothing), at N + j that of the j-th emitted token.
    """

    def __init__(self, parts: Parts, batch: int, nodes: int) -> None:
        device, vocab = parts.table.device, parts.model.config.vocab_size
        table_rows = parts.rows.filler + 1
        nothing = torch.zeros(table_rows, dtype=torch.int64, device=device)
        ids = torch.zeros(table_rows, 1, dtype=torch.int32, device=device)
        self._asked = Asked(nothing, nothing, ids)
        self._found = found_space(batch * 2 * nodes, vocab, 1, 1, device)
        self._steps = torch.arange(nodes, device=device)
        self._all = torch.full((batch,), 2 * nodes, dtype=torch.int64, device=device)
        self.values = self._found.values.view(batch, 2 * nodes)

    def read(
        self, tree: WalkedTree, logits: Tensor, offsets: Tensor, requests: Requests, out: Walked
    ) -> None:
        """logits: as the model gave them. out: what was walked."""
        node, emitted = (self._steps < n[:, None] for n in (tree.num_nodes, out.counts))
        above = torch.where(node, tree.parents, 0).clamp(min=0)
        pairs = replace(
            out,
            path=torch.cat([above, torch.where(emitted, out.path, 0)], dim=1),
            tokens=torch.cat(
                [torch.where(node, tree.tokens, 0), torch.where(emitted, out.tokens, 0)], dim=1
            ),
            counts=self._all,
        )
        width = pairs.tokens.shape[1]
        emitted_logprobs(logits, offsets, requests.rows, self._asked, pairs, self._found, width)


class Acceptance:
    """Draw, follow, keep the path, move the state on. levels: of the trees below the root."""

    def __init__(
        self, parts: Parts, requests: Requests, nodes: int, levels: int, rows: int
    ) -> None:
        """rows: of logits."""
        batch, device, kind = len(requests.rows), parts.table.device, requests.kind
        self.parts, self.requests = parts, requests
        self.nodes, self.levels = nodes, levels
        self.walked: Walked = walked(batch, nodes, parts.model.config.vocab_size, device)
        self.cuts = Cuts.maybe(parts, kind, batch, nodes)
        self.masks = NodeMasks(parts.space, batch, nodes) if kind.masked else None
        self.adjusted: Adjusted | None = None
        self.found: Found | None = None
        if kind.settings:
            self.adjusted = parts.space.adjusted(max(rows, batch * nodes))
            self.found = parts.space.found(batch * (levels + 1))
        self.lengths = None
        if kind.forced:
            self.lengths = torch.ones(batch, dtype=torch.int64, device=device)
        self.out = torch.zeros(batch, 1 + nodes, dtype=torch.int32, device=device)

    def accept(self, tree: WalkedTree, logits: Tensor, offsets: Tensor) -> None:
        """offsets: [B] int64, the first row of logits of each request."""
        mine, out = self.requests, self.walked
        final = self._adjust(tree, logits, offsets)
        mine.cuts(final, offsets, tree.num_nodes, self.cuts)
        cuts, heads = (None, None) if self.cuts is None else (self.cuts.cuts, self.cuts.heads)
        trees = Trees(
            tree.tokens, tree.parents, tree.depths, tree.num_nodes, final, offsets,
            mine.at.committed, mine.at.seed, mine.drawn_at, cuts, heads,
        )  # fmt: skip
        if self.lengths is not None or tree.tokens.numel() <= DRAW_ALL_NODES:
            draw_all(trees, out)
        else:
            draw_walk(trees, out, self.levels + 1)
        if self.lengths is not None:
            force_path(trees, tree.words, self.lengths, out)
        if self.found is not None:
            asked, levels = self.parts.rows.asked, self.levels + 1
            emitted_logprobs(logits, offsets, mine.rows, asked, out, self.found, levels)
        if self.nodes > 1:
            kv, table = self.parts.kv, self.parts.table
            move_path(kv.k, kv.v, table, mine.rows, mine.at.committed, out.path, out.counts)

    def _adjust(self, tree: WalkedTree, logits: Tensor, offsets: Tensor) -> Tensor:
        """The logits that tokens are drawn from."""
        if self.adjusted is None:
            return logits
        mine, masks = self.requests, None if self.masks is None else self.masks.masks
        adjust_logits(
            logits, self.adjusted, self.parts.rows.settings, mine.rows, offsets,
            mine.at.committed, tree.num_nodes, tree.tokens, tree.depths, tree.words, masks,
        )  # fmt: skip
        final: Tensor = self.adjusted.logits
        return final

    def finish(self) -> None:
        """Move the row state on."""
        mine, rows = self.requests, self.parts.rows
        end_round(
            mine.state.committed, mine.state.last, mine.rows, self.walked, self.out, rows.filler
        )
        if self.adjusted is not None:
            count_tokens(rows.settings, mine.rows, self.walked, rows.filler)


def draft_prefix(draft: DraftParts, requests: Requests) -> Tensor:
    """[B] positions that hold the draft's KV when a round begins: those of the target's, and with a
    whole model the root's too. A view."""
    return requests.at.committed if draft.model.capture else requests.text


class Extension:
    """Brings the draft's KV up to the accepted text, with one forward of up to `levels` + 1 rows a
    request, of which the last is where the next tree grows from."""

    def __init__(self, parts: Parts, draft: DraftParts, requests: Requests, levels: int) -> None:
        batch, device = len(requests.rows), parts.table.device
        self.parts, self.draft, self.requests = parts, draft, requests
        self.most = levels + 1
        self.buffers = extend_buffers(batch, levels, device)
        self.prefix = draft_prefix(draft, requests)
        self.starts = even_starts(batch, self.most, device)

    def extend(self, accepted: Walked, features: Tensor | None) -> None:
        """features: [T, C] of the verified rows."""
        mine, model, rows = self.requests, self.draft.model, self.buffers
        extend_rows(
            rows,
            accepted,
            "head" if model.capture else "whole",
            committed=mine.at.committed,
            roots=mine.at.last,
            rows=mine.rows,
            req_to_token=self.parts.table,
        )
        fused = None
        if features is not None:
            fused = model.fuse(gather_features(features, rows.features))
        batch = ForwardBatch(
            tokens=rows.tokens,
            positions=rows.positions,
            slots=rows.slots,
            req_to_token=self.parts.table,
            rows=mine.rows,
            prefix_lens=self.prefix,
            q_starts=self.starts,
            mask_words=rows.words,
            max_q_len=self.most,
            wanted=rows.last if len(rows.tokens) > _PRODUCT_ROWS else None,
        )
        hidden = model.forward(batch, fused, self.draft.kv)
        if batch.wanted is None:
            hidden = gather_features(hidden, rows.last)
        self.draft.hidden.index_copy_(0, mine.rows, hidden)


class TreeSource(Protocol):
    """Where a round's trees come from.

    tree: the trees, once they are proposed. nodes: most of a tree, levels: most below its root.
    total: rows of the verify forward. offsets: [B] int64, the first of each request. scores:
    [B, N] float32, chances of the nodes; None where the host knows them.
    """

    nodes: int
    levels: int
    total: int

    @property
    def tree(self) -> WalkedTree: ...

    @property
    def offsets(self) -> Tensor: ...
    @property
    def scores(self) -> Tensor | None: ...

    def load(self, rows: IntArray, tree: ArrayTree | None) -> None:
        """See `Program`."""

    def propose(self) -> None:
        """Make the trees, and the rows that verify them."""

    def forward(self) -> ForwardBatch:
        """Those rows."""

    def learn(self, walked: Walked) -> None:
        """The round is over."""


class Round:
    """One round of `batch` requests. See `Program`.

    rows: [batch] int64, their table rows. out: [batch, 1 + nodes] int32, how many tokens each gave,
    and which. lengths: where accept lengths are given. drafted: of a masked or shown round, [batch,
    2 * nodes + 1] int64: tokens, parents, and how many nodes there are.
    """

    def __init__(
        self,
        parts: Parts,
        batch: int,
        kind: RoundKind,
        source: Callable[[Parts, Requests], TreeSource],
    ) -> None:
        self.parts, self.kind = parts, kind
        self.requests = Requests(parts, batch, kind)
        self.source = source(parts, self.requests)
        self.rows = self.requests.rows
        nodes, levels = self.source.nodes, self.source.levels
        self.acceptance = Acceptance(parts, self.requests, nodes, levels, self.source.total)
        self.out, self.lengths = self.acceptance.out, self.acceptance.lengths
        draft = parts.draft
        self.capture = () if draft is None else draft.model.capture
        self.extension = None if draft is None else Extension(parts, draft, self.requests, levels)
        self.drafted = torch.zeros(batch, 2 * nodes + 1, dtype=torch.int64, device=self.rows.device)
        self.shown = Shown(parts, batch, nodes) if kind.shown else None
        self._logits: Tensor | None = None
        self._features: Tensor | None = None

    def load(self, rows: IntArray, tree: ArrayTree | None) -> None:
        """See `Program`."""
        self.source.load(rows, tree)

    @property
    def pieces(self) -> tuple[Callable[[], None], ...]:
        """See `Program`."""
        return self.propose, self.verify, self.finish

    @property
    def split(self) -> bool:
        """See `Program`: masks come between the last two, from trees that the first has made. The
        parts of a shown round are timed."""
        return self.kind.masked or (self.kind.shown and len(self.rows) <= TIMED_REQUESTS)

    def propose(self) -> None:
        """Begin, and make the trees."""
        self.requests.begin(texts=self.extension is not None)
        self.source.propose()
        if self.kind.masked or self.kind.shown:
            tree = self.source.tree
            parts = (tree.tokens, tree.parents, tree.num_nodes[:, None])
            torch.cat(parts, dim=1, out=self.drafted)

    def verify(self) -> None:
        """The target's logits of all nodes."""
        model, kv, batch = self.parts.model, self.parts.kv, self.source.forward()
        if self.capture:
            hidden, self._features = model.forward_features(batch, kv, self.capture)
        else:
            hidden = model.forward(batch, kv)
        self._logits = model.raw_logits(hidden)

    def finish(self) -> None:
        """Accept, let the draft model follow, and move the state on."""
        assert self._logits is not None
        self.acceptance.accept(self.source.tree, self._logits, self.source.offsets)
        if self.shown is not None:
            self.shown.read(
                self.source.tree, self._logits, self.source.offsets, self.requests,
                self.acceptance.walked,
            )  # fmt: skip
        if self.extension is not None:
            self.extension.extend(self.acceptance.walked, self._features)
        self.acceptance.finish()
        self.source.learn(self.acceptance.walked)
        if not self.split:  # a graph of its own would lose its inputs
            self._logits = self._features = None


def even_starts(batch: int, rows: int, device: torch.device) -> Tensor:
    return torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int64, device=device)
