"""Forwards of batches that the host judges, each one CUDA graph.

Where a round has a seam, the host needs the target's logits before it can go on, so the round
itself cannot be a graph. Its forwards can: they are filled up to a few shapes, and a batch costs a
few launches instead of ten per layer. Rows that fill a forward up hold token 0 at position 0 and
store nothing; requests that fill it up have no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from sgl_spec.engine.cuda.costs import ROWS, TreeShapes
from sgl_spec.engine.cuda.graphs import Replayed, Rounds
from sgl_spec.engine.cuda.growth import SMALL_BATCH, TreeGrower
from sgl_spec.engine.cuda.rounds import DraftParts, IntArray, Parts
from sgl_spec.engine.cuda.seam import SeamClock
from sgl_spec.engine.cuda.transfer import send
from sgl_spec.engine.following import Follower
from sgl_spec.engine.memory import CAPTURED_ROWS, SEAM_DRAFT_GRAPHS, SEAM_GRAPHS
from sgl_spec.engine.policy import PREFILL_REQUESTS_CUDA
from sgl_spec.layers.context import ForwardBatch
from sgl_spec.layers.transfer import batch_on_device
from sgl_spec.layers.wanted import only
from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec.speculative.model_drafter import ModelDrafter
from sgl_spec.speculative.tree import MAX_TREE_NODES

SMALL_PROMPT = 256  # rows of the graphs that are made before they are needed

Compute = Callable[[ForwardBatch, Tensor | None], Sequence[Tensor]]
"""(batch, features of its rows if the model reads any) to tensors of [T, width] each."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a forward is filled up to. longest: bound on the rows of a request. words: whether rows
    have mask words, else they are causal chunks. tree: whether columns of a tree come before."""

    rows: int
    requests: int
    longest: int
    words: bool
    tree: bool

    def holds(self, other: Shape) -> bool:
        """Whether what fits the other fits this one."""
        same = (self.words, self.tree) == (other.words, other.tree)
        sizes = (self.rows, self.requests, self.longest)
        theirs = (other.rows, other.requests, other.longest)
        return same and all(mine >= least for mine, least in zip(sizes, theirs, strict=True))


@dataclass(frozen=True, slots=True)
class Role:
    """One of the models. name: for its graphs. compute: its forward. bounds: most rows of a request
    that comes with mask words, rising. widths, dtype: of what it gives. shapes: as many are
    captured. reads: width of the features that it reads, if any."""

    name: str
    compute: Compute
    bounds: tuple[int, ...]
    widths: tuple[int, ...]
    dtype: torch.dtype
    shapes: int
    reads: int | None = None


class _Inputs:
    """The integers that a forward of one shape reads, in one block of words.

    fields: tokens, positions, slots, mask words if there are any: [rows]; table rows, prefix
    lengths, tree lengths if there are any: [requests]; starts: [requests + 1].
    """

    def __init__(self, shape: Shape, filler: int, device: torch.device | str) -> None:
        sizes = [shape.rows] * (3 + shape.words) + [shape.requests] * (2 + shape.tree)
        sizes.append(shape.requests + 1)
        self.block = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self.fields = torch.split(self.block, sizes)
        self.fields[2].fill_(-1)
        if shape.words:
            self.fields[3].fill_(1)
        self.fields[3 + shape.words].fill_(filler)
        self._blank = self.block.clone()

    def clear(self) -> None:
        """Rows and requests that fill up, nothing else."""
        self.block.copy_(self._blank)

    def fill(self, batch: ForwardBatch) -> None:
        """Copy those of a batch that fits; it lies where these do."""
        given = [batch.tokens, batch.positions, batch.slots, batch.mask_words]
        given += [batch.rows, batch.prefix_lens, batch.tree_lens, batch.q_starts]
        values = [value for value in given if value is not None]
        self.clear()
        self.fields[-1][len(batch.rows) :].fill_(len(batch.tokens))
        mine = [field[: len(value)] for field, value in zip(self.fields, values, strict=True)]
        torch._foreach_copy_(mine, values)


class PaddedForward:
    """A forward of one shape, its inputs and outputs in buffers of its own. See `rounds.Round`.

    rows: [requests] table rows. out: what it gave, the first of `outs` [T, width].
    """

    lengths: Tensor | None = None

    def __init__(
        self,
        parts: Parts,
        compute: Compute,
        shape: Shape,
        outs: Sequence[Tensor],
        reads: Tensor | None,
    ) -> None:
        """outs, reads: what it gives and the features it reads, with at least as many rows."""
        self._compute = compute
        self.outs = [out[: shape.rows] for out in outs]
        self.out = self.outs[0]
        self._features = None if reads is None else reads[: shape.rows]
        self._inputs = _Inputs(shape, parts.rows.filler, parts.table.device)
        self._host = _Inputs(shape, parts.rows.filler, "cpu")
        fields = self._inputs.fields
        self.rows = fields[3 + shape.words]
        self.batch = ForwardBatch(
            tokens=fields[0],
            positions=fields[1],
            slots=fields[2],
            req_to_token=parts.table,
            rows=self.rows,
            prefix_lens=fields[4 + shape.words],
            q_starts=fields[-1],
            mask_words=fields[3] if shape.words else None,
            tree_lens=fields[-2] if shape.tree else None,
            max_q_len=shape.longest,
        )

    def load(self, rows: IntArray, tree: ArrayTree | None) -> None:
        """Nothing but what fills it up, as a forward is captured; see `fill`."""
        assert not len(rows)
        assert tree is None
        self._inputs.clear()

    def fill(self, batch: ForwardBatch, features: Tensor | None) -> None:
        """Copy the inputs of a batch that fits, from the device or from the host."""
        assert batch.req_to_token is self.batch.req_to_token
        if batch.tokens.device == self._inputs.block.device:
            self._inputs.fill(batch)
        else:
            self._host.fill(batch)
            send(self._host.block, self._inputs.block)
        if self._features is not None:
            assert features is not None
            self._features[: len(features)].copy_(features)

    def __call__(self) -> None:
        found = self._compute(self.batch, self._features)
        for out, value in zip(self.outs, found, strict=True):
            out.copy_(value)


class Forwards:
    """One model's forwards, by the graph of the smallest shape that holds them, or kernel by kernel
    if there is none. rounds: where graphs are kept, and for which batch sizes. clock: times them.
    """

    def __init__(self, parts: Parts, role: Role, rounds: Rounds, clock: SeamClock | None) -> None:
        self.role, self.rounds, self.clock = role, rounds, clock
        self.shapes: set[Shape] = set()  # that were made
        self._parts = parts
        self._outs: list[Tensor] = []  # graphs run one after the other and share what they
        self._reads: Tensor | None = None  # give and read; made with the first of them

    def run(self, batch: ForwardBatch, features: Tensor | None = None) -> list[Tensor]:
        """What the model gives of the batch's rows, [T, width] each; the caller's to keep. Its
        graphs compute all rows, so a batch is taken as if all were wanted."""
        batch = replace(batch, wanted=None)
        shape = self._shape(batch)
        replayed = None if shape is None else self._made(shape)
        with nullcontext() if self.clock is None else self.clock.forward():
            if replayed is None:
                there = batch_on_device(batch, self._parts.table.device)
                return list(self.role.compute(there, features))
            padded = replayed.program
            assert isinstance(padded, PaddedForward)
            padded.fill(batch, features)
            replayed.run()
            return [out[: len(batch.tokens)].clone() for out in padded.outs]

    def _shape(self, batch: ForwardBatch) -> Shape | None:
        """What a batch is filled up to; None: it runs as it is."""
        wanted = _wanted(batch, self.role.bounds, self.rounds.sizes)
        if wanted is None or wanted in self.shapes or len(self.shapes) < self.role.shapes:
            return wanted
        holding = (shape for shape in self.shapes if shape.holds(wanted))
        return min(holding, key=lambda shape: (shape.rows, shape.requests), default=None)

    def _made(self, shape: Shape) -> Replayed:
        key = (self.role.name, shape)
        if key not in self.rounds and self.clock is not None:
            self.clock.restart()  # a capture takes longer than what is to be timed
        self.shapes.add(shape)
        return self.rounds.get(key, lambda: self._make(shape))

    def _make(self, shape: Shape) -> PaddedForward:
        role = self.role
        if not self._outs:
            self._outs = [self._rows(width) for width in role.widths]
            self._reads = None if role.reads is None else self._rows(role.reads)
        return PaddedForward(self._parts, role.compute, shape, self._outs, self._reads)

    def _rows(self, width: int) -> Tensor:
        device = self._parts.table.device
        return torch.zeros(CAPTURED_ROWS, width, dtype=self.role.dtype, device=device)

    def later(self) -> list[Callable[[], object]]:
        """What makes the graphs that small batches need, in moments without work."""
        shapes = _small_shapes(self.role.bounds, self.rounds.sizes)
        return [partial(self._prepare, shape) for shape in shapes]

    def _prepare(self, shape: Shape) -> None:
        if shape in self.shapes or len(self.shapes) < self.role.shapes:
            self._made(shape)


def _small_shapes(bounds: tuple[int, ...], sizes: tuple[int, ...]) -> list[Shape]:
    """Of few requests and short prompts."""
    return [
        Shape(rows, size, bound, words=True, tree=False)
        for bound in bounds
        for size in _tree_shapes(sizes, bound).sizes
        for rows in _tree_shapes(sizes, bound).rows(size)
        if size <= SMALL_BATCH
    ] + [
        Shape(rows, PREFILL_REQUESTS_CUDA, rows, words=False, tree=False)
        for rows in ROWS
        if sizes and rows <= SMALL_PROMPT
    ]


def _wanted(batch: ForwardBatch, bounds: tuple[int, ...], sizes: tuple[int, ...]) -> Shape | None:
    """The shape for a batch, None where it is too large. sizes: of batches that are captured."""
    total, requests, longest = len(batch.tokens), len(batch.rows), batch.max_q_len
    if not sizes or longest is None or total > CAPTURED_ROWS:
        return None
    if batch.mask_words is None:
        rows = next(count for count in ROWS if count >= total)
        fits = requests <= PREFILL_REQUESTS_CUDA
        return Shape(rows, PREFILL_REQUESTS_CUDA, rows, False, False) if fits else None
    bound = next((bound for bound in bounds if bound >= longest), None)
    if bound is None or requests > sizes[-1]:
        return None
    shapes = _tree_shapes(sizes, bound)
    size = next(size for size in shapes.sizes if size >= requests)
    rows = next(rows for rows in shapes.rows(size) if rows >= total)
    tree = batch.tree_lens is not None
    return Shape(rows, size, bound, True, tree) if rows <= CAPTURED_ROWS else None


@cache
def _tree_shapes(sizes: tuple[int, ...], most_nodes: int) -> TreeShapes:
    return TreeShapes(sizes, most_nodes)


def target_role(parts: Parts, capture: tuple[int, ...], most_nodes: int) -> Role:
    """The target's, with the features of the layers `capture`."""
    model, width = parts.model, parts.model.config.hidden_size

    def compute(batch: ForwardBatch, features: Tensor | None) -> Sequence[Tensor]:
        if capture:
            return model.forward_features(batch, parts.kv, capture)
        return (model.forward(batch, parts.kv),)

    return Role(
        name="target forward",
        compute=compute,
        bounds=(1, most_nodes) if most_nodes > 1 else (1,),
        widths=(width, len(capture) * width) if capture else (width,),
        dtype=model.dtype,
        shapes=SEAM_GRAPHS,
    )


def draft_role(draft: DraftParts) -> Role:
    """The draft model's: levels of trees, and what a round has accepted."""

    def compute(batch: ForwardBatch, features: Tensor | None) -> Sequence[Tensor]:
        return (draft.model.forward(batch, features, draft.kv),)

    width = draft.model.width
    return Role(
        name="draft forward",
        compute=compute,
        bounds=tuple(sorted({min(most, MAX_TREE_NODES) for most in (draft.topk, draft.steps + 1)})),
        widths=(width,),
        dtype=draft.kv.k.dtype,
        shapes=SEAM_DRAFT_GRAPHS,
        reads=width if draft.model.capture else None,
    )


def run_forwards(
    follower: Follower, parts: Parts, rounds: Rounds, most_nodes: int, clock: SeamClock | None
) -> list[Callable[[], object]]:
    """Let a follower's target, and the draft model if there is one, run this way. Returns what
    makes the graphs that are likely to be needed."""
    target = Forwards(parts, target_role(parts, follower.capture, most_nodes), rounds, clock)

    def run_target(batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        hidden, *features = target.run(batch)
        return only(hidden, batch.wanted), features[0] if features else None

    follower.run = run_target
    if parts.draft is not None and isinstance(follower.drafter, ModelDrafter):
        draft = Forwards(parts, draft_role(parts.draft), rounds, clock)
        follower.drafter.forward = lambda batch, features: only(
            draft.run(batch, features)[0], batch.wanted
        )
        grower = TreeGrower(parts, rounds, clock)
        follower.drafter.grow = grower.grow
        return [*target.later(), *draft.later(), *grower.later()]
    return target.later()
