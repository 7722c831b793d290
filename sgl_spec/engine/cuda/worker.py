"""The worker of a GPU server.

Common batches run as rounds that live on the device (`rounds`), launched before the tokens of the
round before were read. What needs the host in the middle of a round (a grammar, penalties,
log-probabilities, other acceptance rules) runs as on the CPU, one forward at a time; a batch goes
from one way to the other whenever its members change. Trees that the host makes (n-grams) are
uploaded between two rounds, and what the drafter learns from a round it learns while the next one
runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sgl_spec.engine.batch import (
    Batch,
    Computed,
    DecodeBatch,
    IntArray,
    Launched,
    PrefillBatch,
    StepOutput,
)
from sgl_spec.engine.cuda.costs import DeviceCosts, drafted_rows
from sgl_spec.engine.cuda.graphs import Replayed, Rounds
from sgl_spec.engine.cuda.prefill import REQUESTS, PrefillRound, row_counts
from sgl_spec.engine.cuda.rest import Resting, RestRound
from sgl_spec.engine.cuda.rounds import DraftParts, HostRound, Parts, RoundKind, TreeRound
from sgl_spec.engine.cuda.state import DeviceRows
from sgl_spec.engine.cuda.timing import Stopwatch, timed
from sgl_spec.engine.cuda.transfer import Fetched, send
from sgl_spec.engine.req import Req
from sgl_spec.engine.worker import Worker
from sgl_spec.speculative.base import DraftBatch
from sgl_spec.speculative.model_drafter import ModelDrafter
from sgl_spec.speculative.rules import FollowRule
from sgl_spec.speculative.simulate import SimulatedRule
from sgl_spec.speculative.tree import TokenTree, accepted_of

BoolArray = npt.NDArray[np.bool_]

MOST_PREFILL_ROWS = 2048  # of a captured forward; larger ones keep the card busy anyway


@dataclass(frozen=True, slots=True)
class _Running(Launched):
    """Work on the device. rows: [B] those it gives tokens to; tenancy: [B] whose they were. final:
    [B] where in the batch they stand, of `size`. trees: what the host made, with its batch. forced:
    whether accept lengths were given. drafted: whether a model drafted. watch: the time of it."""

    rows: IntArray
    tenancy: IntArray
    final: IntArray
    size: int
    results: Fetched | None
    proposed: list[int]
    trees: tuple[DraftBatch, TokenTree] | None = None
    forced: bool = False
    drafted: bool = False
    watch: Stopwatch | None = None


@dataclass(frozen=True, slots=True)
class _Told:
    """A round of host-made trees whose tokens are known: what its drafter is to be told."""

    draft: DraftBatch
    tree: TokenTree
    tokens: list[list[int]]


class DeviceWorker(Worker):
    """See the module. rounds: the captured rounds. most_nodes: of a tree, root included. weighs:
    whether trees that the host makes may be cut by what they cost. prefill_rows: most prompt tokens
    of one forward.
    """

    defers = True

    def __init__(
        self,
        *args: Any,
        rounds: Rounds,
        most_nodes: int,
        weighs: bool = False,
        prefill_rows: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.rounds = rounds
        self.most_nodes = most_nodes
        num_rows = self.table.num_rows
        self.device_rows = DeviceRows(num_rows, self.table.device.device)
        self.parts = Parts(
            self.model, self.kv, self.table.device, self.device_rows, self._draft_parts()
        )
        self._simulated = self.rule if isinstance(self.rule, SimulatedRule) else None
        inner = self.rule if self._simulated is None else self._simulated.rule
        models_only = self.drafter is None or self.parts.draft is not None
        self._device_rule = isinstance(inner, FollowRule) and self.topology is None
        self._ahead = self._device_rule and models_only
        self._simple: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self._sampled: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self._filtered: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self._placed: BoolArray = np.zeros(num_rows, dtype=np.bool_)  # the device knows the text
        self._length: IntArray = np.zeros(num_rows, dtype=np.int64)  # of the text, as collected
        self._tenancy: IntArray = np.zeros(num_rows, dtype=np.int64)
        self._told: _Told | None = None
        most = min(prefill_rows, MOST_PREFILL_ROWS)
        self._prefill_rows = row_counts(most) if rounds.captures else ()
        self._resting: Resting | None = None
        if weighs and isinstance(self.drafter, ModelDrafter) and rounds.sizes:
            self._resting = Resting(self.drafter.economy)
        if weighs and not models_only and rounds.sizes:
            self.costs = DeviceCosts(self._priced_round, rounds.padded, most_nodes)

    def _draft_parts(self) -> DraftParts | None:
        drafter = self.drafter
        if not isinstance(drafter, ModelDrafter):
            return None
        shape = drafter.shape
        return DraftParts(
            model=drafter.model,
            kv=drafter.kv,
            hidden=drafter.last,
            steps=shape.steps,
            topk=shape.topk,
            nodes=shape.draft_tokens,
            shared_noise=shape.shared_noise,
        )

    # --- requests come and go ---------------------------------------------------------------------

    def open(self, req: Req) -> None:
        """Fill the row of an admitted request."""
        super().open(req)
        row, sampling = req.held.row, req.sampling
        self._tenancy[row] += 1
        self._placed[row] = False
        self._simple[row] = _is_simple(req)
        self._sampled[row] = sampling.temperature > 0
        filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        self._filtered[row] = filtered and sampling.temperature > 0
        self.device_rows.set_params(row, sampling, sampling.max_nodes(self.most_nodes))

    def close(self, row: int) -> None:
        """The row's request ended or was retracted; what still runs for it is dropped."""
        self._tenancy[row] += 1
        super().close(row)

    # --- launch and collect -----------------------------------------------------------------------

    def runs_ahead(self, reqs: Sequence[Req]) -> bool:
        """Whether the device needs nothing of the host between this batch and its neighbours."""
        return self._ahead and all(_is_simple(req) for req in reqs)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Enqueue a batch, or compute it where it needs the host."""
        if not self._device_rule or not self._simple[batch.rows].all():
            return self._on_host(batch)
        self.table.sync()
        self.device_rows.sync()
        if isinstance(batch, PrefillBatch):
            return self._launch_prefill(batch)
        return self._launch_round(batch)

    def _on_host(self, batch: Batch) -> Launched:
        launched = super().launch(batch)
        assert isinstance(launched, Computed)
        rows = batch.rows
        known = (
            batch.starts + batch.takes if isinstance(batch, PrefillBatch) else batch.committed + 1
        )
        new = np.array([len(tokens) for tokens in launched.output.tokens], dtype=np.int64)
        self._length[rows] = known + new
        self._placed[rows] = False
        return launched

    def collect(self, launched: Launched) -> StepOutput:
        """Wait for a batch and hand out its tokens."""
        if not isinstance(launched, _Running):
            return super().collect(launched)
        tokens: list[list[int]] = [[] for _ in range(launched.size)]
        if launched.results is not None:
            packed = launched.results.wait().tolist()
            for place in launched.final:
                count, *given = packed[place]
                tokens[place] = given[:count]
            self._keep(launched, tokens)
        if launched.trees is not None:
            self._told = _Told(*launched.trees, tokens)
        if self._resting is not None and launched.watch is not None:
            self._resting.note(
                self.rounds.padded(launched.size),
                launched.size,
                sum(map(len, tokens)),
                launched.watch.ms(),
                drafted=launched.drafted,
            )
        if launched.forced and self._simulated is not None:
            self._simulated.note(torch.tensor([len(given) for given in tokens]))
        return StepOutput(tokens=tokens, proposed=launched.proposed)

    def _keep(self, launched: _Running, tokens: list[list[int]]) -> None:
        """Write down the tokens of rows that are still the same requests'."""
        same = self._tenancy[launched.rows] == launched.tenancy
        for row, place in zip(launched.rows[same], launched.final[same], strict=True):
            length, given = self._length[row], tokens[place]
            self.tokens[row, length : length + len(given)] = given
            self._length[row] += len(given)
        if isinstance(self.drafter, ModelDrafter):
            rows = launched.rows[same]
            self._mark_written(rows, self._length[rows])

    def _mark_written(self, rows: IntArray, lengths: IntArray) -> None:
        """The draft's KV follows texts of these lengths."""
        assert isinstance(self.drafter, ModelDrafter)
        at, ends = torch.from_numpy(rows), torch.from_numpy(lengths - self.drafter.shift)
        self.drafter.written[at] = self.drafter.known[at] = ends

    @torch.inference_mode()
    def observe(self, taken: list[int]) -> None:
        """Tell a drafter whose trees the host made how the round ended."""
        if self._round is not None:
            super().observe(taken)
            return
        told, self._told = self._told, None
        if told is None or self.drafter is None:
            return
        kept = accepted_of(told.tree, told.tokens, taken)
        self.drafter.observe(told.draft, told.tree, kept)

    # --- prompts ----------------------------------------------------------------------------------

    def _launch_prefill(self, batch: PrefillBatch) -> Launched:
        (final,) = np.nonzero(batch.finals)
        rows, ends = batch.rows, batch.starts + batch.takes
        program = self._run_prefill(batch)
        self._length[rows] = ends
        self._placed[rows[final]] = True
        if isinstance(self.drafter, ModelDrafter):
            self._mark_written(rows, ends + self.drafter.shift)
        return _Running(
            rows=rows[final],
            tenancy=self._tenancy[rows[final]],
            final=final,
            size=len(rows),
            results=Fetched(program.out[: len(rows)]) if len(final) else None,
            proposed=[0] * len(rows),
        )

    def _run_prefill(self, batch: PrefillBatch) -> PrefillRound:
        """By the graph of the next larger forward, or launch by launch if there is none."""
        total, requests = int(batch.takes.sum()), len(batch.rows)
        size = next((count for count in self._prefill_rows if count >= total), None)
        if size is None or requests > REQUESTS:
            program = PrefillRound(self.parts, total, requests)
            program.fill(batch, self.tokens)
            program()
            return program
        replayed = self._prefill_round(size)
        captured = replayed.program
        assert isinstance(captured, PrefillRound)
        captured.fill(batch, self.tokens)
        replayed.run()
        return captured

    def _prefill_round(self, size: int) -> Replayed:
        return self.rounds.captured(
            ("prefill", size), lambda: PrefillRound(self.parts, size, REQUESTS)
        )

    # --- rounds -----------------------------------------------------------------------------------

    def _launch_round(self, batch: DecodeBatch) -> Launched:
        rows, size = batch.rows, len(batch.rows)
        self._place(rows[~self._placed[rows]])
        trees = self._host_trees(batch)
        tree = None if trees is None else trees[1]
        drafts = self._drafts(batch)
        replayed = self._round_of(size, self._kind(rows), tree, drafts=drafts)
        program = replayed.program
        program.load(rows, tree)
        forced = program.lengths is not None
        if program.lengths is not None:
            assert self._simulated is not None
            send(self._simulated.lengths(size), program.lengths[:size])
        watch = None if self._resting is None else Stopwatch.started()
        replayed.run()
        if watch is not None:
            watch.stop()
        return _Running(
            rows=rows,
            tenancy=self._tenancy[rows],
            final=np.arange(size),
            size=size,
            results=Fetched(program.out[:size]),
            proposed=self._proposed(batch, tree, drafts=drafts),
            trees=trees,
            forced=forced,
            drafted=drafts,
            watch=watch,
        )

    def _drafts(self, batch: DecodeBatch) -> bool:
        """Whether the draft model drafts in this round, or only follows."""
        if self.parts.draft is None or not (batch.max_nodes > 1).any():
            return False
        padded = self.rounds.padded(len(batch.rows))
        return self._resting is None or self._resting.drafts(padded)

    def _proposed(self, batch: DecodeBatch, tree: TokenTree | None, *, drafts: bool) -> list[int]:
        """Draft tokens verified: of trees that the device grows, as many as they may have."""
        if tree is not None:
            counts: list[int] = (tree.num_nodes - 1).tolist()
            return counts
        if self.parts.draft is None or not drafts:
            return [0] * len(batch.rows)
        most = np.minimum(batch.max_nodes, self.parts.draft.nodes) - 1
        return [int(n) for n in most]

    def _place(self, rows: IntArray) -> None:
        """Tell the device where texts stand that the host has moved on."""
        if not len(rows):
            return
        lengths = self._length[rows]
        last = torch.from_numpy(self.tokens[rows, lengths - 1].astype(np.int64))
        self.device_rows.place(rows, torch.from_numpy(lengths - 1), last)
        if isinstance(self.drafter, ModelDrafter):
            self.drafter.catch_up(torch.from_numpy(rows), torch.from_numpy(lengths), self.tokens)
        self._placed[rows] = True

    def _host_trees(self, batch: DecodeBatch) -> tuple[DraftBatch, TokenTree] | None:
        """What a drafter on the host proposes; None without one."""
        if self.drafter is None or self.parts.draft is not None:
            return None
        sampling = self._sampling_rows(batch.rows)
        lengths = batch.committed + 1
        draft = DraftBatch(
            batch.rows, lengths, batch.max_nodes, self.tokens, sampling, self._plain_ms(batch)
        )
        return draft, self._plan_tree(draft, batch.remaining).to(torch.device("cpu"))

    def _kind(self, rows: IntArray) -> RoundKind:
        return RoundKind(
            sampled=bool(self._sampled[rows].any()),
            filtered=bool(self._filtered[rows].any()),
            forced=self._simulated is not None,
        )

    def _round_of(
        self, size: int, kind: RoundKind, tree: TokenTree | None, *, drafts: bool
    ) -> Replayed:
        padded, draft = self.rounds.padded(size), self.parts.draft
        if draft is not None:
            return self._model_round(padded, kind, drafts=drafts)
        nodes, total = 1, padded
        if tree is not None and tree.width > 1:
            drafted = int(tree.num_nodes.sum()) - size
            if padded in self.rounds.sizes:  # few shapes, so that few rounds are captured
                sizes = drafted_rows(padded, self.most_nodes)
                drafted = next(count for count in sizes if count >= drafted)
            nodes, total = self.most_nodes, padded + drafted
        return self._host_round(padded, kind, total, nodes)

    def _model_round(self, padded: int, kind: RoundKind, *, drafts: bool) -> Replayed:
        made = TreeRound if drafts else RestRound
        kind = kind if drafts else replace(kind, forced=False)
        key = ("tree" if drafts else "rest", padded, kind)
        return self.rounds.get(key, padded, lambda: made(self.parts, padded, kind))

    def _host_round(self, padded: int, kind: RoundKind, total: int, nodes: int) -> Replayed:
        return self.rounds.get(
            ("host", padded, total, nodes, kind),
            padded,
            lambda: HostRound(self.parts, padded, kind, total, nodes),
        )

    def _priced_round(self, padded: int, drafts: int) -> Replayed:
        """A round of host-made trees that is to be timed."""
        nodes = self.most_nodes if drafts else 1
        return self._host_round(padded, RoundKind(), padded + drafts, nodes)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture what greedy batches need, the largest first, so that all share its memory."""
        kind = RoundKind(forced=self._simulated is not None)
        for rows in reversed(self._prefill_rows if self._device_rule else ()):
            self._prefill_round(rows)
        for size in reversed(self.rounds.sizes):
            self._round_of(size, kind, None, drafts=self.parts.draft is not None)
            if self._resting is not None:
                self._resting.know(size, timed(self._model_round(size, kind, drafts=False)))


def _is_simple(req: Req) -> bool:
    """Whether a round of this request needs nothing of the host."""
    sampling = req.sampling
    return not (
        req.constraint is not None
        or sampling.grammar is not None
        or req.logprobs is not None
        or sampling.penalised
        or sampling.logit_bias
        or sampling.min_new_tokens
    )
