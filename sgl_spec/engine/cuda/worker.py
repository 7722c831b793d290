"""The worker of a GPU server.

Common batches run as rounds that live on the device (`rounds`), launched before the tokens of the
round before were read. What needs the host in the middle of a round (a grammar, penalties,
log-probabilities, other acceptance rules) runs as on the CPU, one forward at a time; a batch goes
from one way to the other whenever its members change. Trees that the host makes (n-grams) are
uploaded between two rounds, and what the drafter learns from a round it learns while the next one
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgl_spec.engine.batch import (
    Batch,
    Computed,
    DecodeBatch,
    IntArray,
    Launched,
    PrefillBatch,
    StepOutput,
    host_tree_forward,
)
from sgl_spec.engine.cuda.costs import DeviceCosts, TreeShapes
from sgl_spec.engine.cuda.drafting import HostDrafting
from sgl_spec.engine.cuda.follow import DeviceFollow
from sgl_spec.engine.cuda.forwards import run_forwards
from sgl_spec.engine.cuda.graphs import Replayed, Rounds
from sgl_spec.engine.cuda.host_round import HostRound
from sgl_spec.engine.cuda.ngram import DeviceNgram, RoundSizes
from sgl_spec.engine.cuda.ngram_round import NgramRound
from sgl_spec.engine.cuda.prefill import Prefills
from sgl_spec.engine.cuda.rest import Resting, RestRound
from sgl_spec.engine.cuda.rounds import DraftParts, Parts, RoundKind, TreeRound
from sgl_spec.engine.cuda.running import Running, is_simple
from sgl_spec.engine.cuda.seam import SeamClock
from sgl_spec.engine.cuda.state import DeviceRows
from sgl_spec.engine.cuda.timing import Stopwatch, timed
from sgl_spec.engine.cuda.transfer import Fetched, send
from sgl_spec.engine.req import Req
from sgl_spec.engine.worker import Worker
from sgl_spec.layers.context import ForwardBatch
from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec.speculative.base import DraftBatch
from sgl_spec.speculative.model_drafter import ModelDrafter
from sgl_spec.speculative.rules import FollowRule
from sgl_spec.speculative.simulate import SimulatedRule
from sgl_spec.speculative.tree import TokenTree

BoolArray = npt.NDArray[np.bool_]


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
        self._device_rule = isinstance(inner, FollowRule) and self.topology is None
        self.follow = follow = DeviceFollow(most_nodes)
        if isinstance(self.rule, FollowRule):
            self.rule = self.follow
        self._simple: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self._sampled: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self._filtered: BoolArray = np.zeros(num_rows, dtype=np.bool_)
        self._placed: BoolArray = np.zeros(num_rows, dtype=np.bool_)  # the device knows the text
        self._length: IntArray = np.zeros(num_rows, dtype=np.int64)  # of the text, as collected
        self._tenancy: IntArray = np.zeros(num_rows, dtype=np.int64)
        self._under_way = 0  # batches launched and not collected
        self._rounds_under_way = 0
        self._later: list[Callable[[], object]] | None = None  # what makes rounds to be captured
        self._last: Stopwatch | None = None  # of the batch launched last, if it was a round
        self._seam = SeamClock() if self.device.type == "cuda" else None
        seams = run_forwards(self.follower, self.parts, rounds, most_nodes, self._seam)
        compiles = partial(follow.compile, self.model.config.vocab_size, self.device)
        self._seams: list[Callable[[], object]] = [compiles, *seams] if rounds.captures else []
        self._prefills = Prefills(self.parts, rounds, prefill_rows if self._device_rule else 0)
        self._resting: Resting | None = None
        if weighs and isinstance(self.drafter, ModelDrafter) and rounds.sizes:
            self._resting = Resting(self.drafter.economy)
        self.shapes = TreeShapes(rounds.sizes, most_nodes)
        self._trees: HostDrafting | None = None
        self._ngrams: DeviceNgram | None = None
        if self.drafter is not None and self.parts.draft is None:
            costs = DeviceCosts(self.shapes) if weighs and rounds.sizes else None
            self.costs = costs
            if isinstance(self.drafter, DeviceNgram):
                self._ngrams = self.drafter
                self._sizes = RoundSizes(self.shapes, self.drafter.scores, costs)
            else:
                self._trees = HostDrafting(self.drafter, costs)

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
        self._simple[row] = is_simple(req)
        self._sampled[row] = sampling.temperature > 0
        filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        self._filtered[row] = filtered and sampling.temperature > 0
        self.device_rows.set_params(row, sampling, sampling.max_nodes(self.most_nodes))
        if self._ngrams is not None:
            self._ngrams.expect(row, len(req.ids) + req.remaining)

    def begin(self, req: Req) -> None:
        """The request may be drafted for."""
        super().begin(req)
        if self._trees is not None:
            self._trees.begin()

    def drafter_stats(self) -> dict[str, float]:
        """Those of trees that the host makes included. seam_wait_ms: how long the device lately had
        no forward to run in a round that needs the host."""
        mine = {} if self._trees is None else self._trees.stats()
        seam = {} if self._seam is None else {"seam_wait_ms": self._seam.wait_ms}
        return super().drafter_stats() | mine | seam

    def close(self, row: int) -> None:
        """The row's request ended or was retracted; what still runs for it is dropped."""
        self._tenancy[row] += 1
        if self._trees is not None:
            self._trees.learn()
        super().close(row)

    # --- launch and collect -----------------------------------------------------------------------

    def runs_ahead(self, reqs: Sequence[Req]) -> bool:
        """Whether the device needs nothing of the host between this batch and its neighbours. Trees
        of the host follow tokens that it knows."""
        if not self._device_rule or not all(is_simple(req) for req in reqs):
            return False
        free = self._trees is None or self._trees.idle
        return free or not any(req.in_flight for req in reqs)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Enqueue a batch, or compute it where it needs the host."""
        if not self._device_rule or not self._simple[batch.rows].all():
            return self._on_host(batch)
        if self._seam is not None:
            self._seam.leave()
        self.table.sync()
        self.device_rows.sync()
        self._under_way += 1
        if isinstance(batch, PrefillBatch):
            return self._launch_prefill(batch)
        return self._launch_round(batch)

    def _on_host(self, batch: Batch) -> Launched:
        rows, self._last = batch.rows, None
        if self._seam is not None:
            self._seam.enter(rows, self._tenancy)
        launched = super().launch(batch)
        assert isinstance(launched, Computed)
        if self._seam is not None and isinstance(batch, DecodeBatch):
            self._seam.round_over()
        known = (
            batch.starts + batch.takes if isinstance(batch, PrefillBatch) else batch.committed + 1
        )
        new = np.array([len(tokens) for tokens in launched.output.tokens], dtype=np.int64)
        self._length[rows] = known + new
        self._placed[rows] = False
        return launched

    def _tree_rows(self, planned: TokenTree, batch: DecodeBatch) -> ForwardBatch:
        """Those of trees on the host are made there; a device would have to be read for it."""
        if planned.tokens.device.type != "cpu":
            return super()._tree_rows(planned, batch)
        return host_tree_forward(ArrayTree.of(planned), batch.rows, batch.committed, self.table)

    def _verify(self, forward: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """Without a clock: rounds cost what the captured ones do."""
        hidden, features = self.follower.run(forward)
        return self.model.logits(hidden), features

    def collect(self, launched: Launched) -> StepOutput:
        """Wait for a batch and hand out its tokens."""
        if not isinstance(launched, Running):
            return super().collect(launched)
        self.table.sync()  # slots planned by now: the next launch then need not send them
        self._under_way -= 1
        self._rounds_under_way -= launched.is_round
        tokens: list[list[int]] = [[] for _ in range(launched.size)]
        proposed = launched.proposed
        if launched.results is not None:
            given = launched.results.wait().numpy()
            for place, (count, *drawn) in zip(
                launched.final.tolist(), given[launched.final].tolist(), strict=True
            ):
                tokens[place] = drawn[:count]
            if self._trees is not None and launched.draft is not None:
                self._trees.tell(launched, self._length[launched.rows], given)
            self._keep(launched, given[launched.final])
            if launched.facts is not None:
                proposed = self._learn_chains(launched.facts, given)
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
        return StepOutput(tokens=tokens, proposed=proposed)

    def _learn_chains(self, found: Fetched, given: IntArray) -> list[int]:
        """Learn from n-grams that the device found. given: [B, 1 + N], counts and tokens. Returns
        how many drafts each request had verified."""
        assert self._ngrams is not None
        facts = found.wait().numpy().astype(np.int64)
        self._sizes.note(facts)
        if self._simulated is None:
            self._ngrams.learn(facts, given[:, 0].astype(np.int64) - 1)
        counts: list[int] = (facts[:, 2] - 1).tolist()
        return counts

    def _keep(self, launched: Running, given: IntArray) -> None:
        """Write down the tokens of rows that are still the same requests'. given: [B, 1 + N],
        counts and tokens."""
        rows = launched.rows
        same = self._tenancy[rows] == launched.tenancy
        if not same.all():
            rows, given = rows[same], given[same]
        counts, tokens = given[:, 0], given[:, 1:]
        column = np.arange(tokens.shape[1])
        new = column < counts[:, None]
        at = (rows * self.tokens.shape[1] + self._length[rows])[:, None] + column
        self.tokens.reshape(-1)[at[new]] = tokens[new]
        self._length[rows] += counts
        if isinstance(self.drafter, ModelDrafter):
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
        if self._trees is not None:
            self._trees.observe(taken)
            if self._under_way:
                self._trees.learn(look=True)

    def settle(self) -> None:
        """A batch was launched: behind it the drafter hears of the round before."""
        if self._trees is not None:
            self._trees.learn()
        super().settle()

    # --- prompts ----------------------------------------------------------------------------------

    def _launch_prefill(self, batch: PrefillBatch) -> Launched:
        (final,) = np.nonzero(batch.finals)
        rows, ends = batch.rows, batch.starts + batch.takes
        program = self._prefills.run(batch, self.tokens)
        self._last = None
        self._length[rows] = ends
        self._placed[rows[final]] = True
        if isinstance(self.drafter, ModelDrafter):
            self._mark_written(rows, ends + self.drafter.shift)
        return Running(
            rows=rows[final],
            tenancy=self._tenancy[rows[final]],
            final=final,
            size=len(rows),
            results=Fetched(program.out[: len(rows)]) if len(final) else None,
            proposed=[0] * len(rows),
        )

    # --- rounds -----------------------------------------------------------------------------------

    def _launch_round(self, batch: DecodeBatch) -> Launched:
        rows, size = batch.rows, len(batch.rows)
        self._place(rows[~self._placed[rows]])
        if self._ngrams is not None:
            self._ngrams.sync()
        draft = self._draft_batch(batch)
        tree, before = self._host_tree(draft, batch)
        drafts = self._drafts(batch)
        replayed = self._round_of(size, self._kind(rows), tree, drafts=drafts)
        program = replayed.program
        program.load(rows, tree)
        forced = program.lengths is not None
        if program.lengths is not None:
            assert self._simulated is not None
            send(self._simulated.lengths(size), program.lengths[:size])
        weighed = self._resting is not None or (self._trees is not None and self.costs is not None)
        watch = self._last = Stopwatch.started() if weighed else None
        replayed.run()
        self._rounds_under_way += 1
        if watch is not None:
            watch.stop()
        return Running(
            rows=rows,
            tenancy=self._tenancy[rows],
            final=np.arange(size),
            size=size,
            results=Fetched(program.out[:size]),
            proposed=self._proposed(batch, tree, drafts=drafts),
            draft=draft,
            tree=tree,
            forced=forced,
            drafted=drafts,
            watch=watch,
            before=before,
            is_round=True,
            facts=Fetched(program.facts[:size]) if isinstance(program, NgramRound) else None,
        )

    def _drafts(self, batch: DecodeBatch) -> bool:
        """Whether the draft model drafts in this round, or only follows."""
        if self.parts.draft is None or not (batch.max_nodes > 1).any():
            return False
        padded = self.rounds.padded(len(batch.rows))
        return self._resting is None or self._resting.drafts(padded)

    def _proposed(self, batch: DecodeBatch, tree: ArrayTree | None, *, drafts: bool) -> list[int]:
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

    def _draft_batch(self, batch: DecodeBatch) -> DraftBatch | None:
        """What a drafter on the host may look at, as far as the host knows; None without one."""
        if self._trees is None:
            return None
        rows, lengths = batch.rows, batch.committed + 1
        if self._trees.looks:
            return DraftBatch(rows, lengths, batch.max_nodes, self.tokens)
        sampling, plain_ms = self._sampling_rows(rows), self._plain_ms(batch)
        return DraftBatch(rows, lengths, batch.max_nodes, self.tokens, sampling, plain_ms)

    def _host_tree(
        self, draft: DraftBatch | None, batch: DecodeBatch
    ) -> tuple[ArrayTree | None, Stopwatch | None]:
        """The trees of a drafter on the host and the round whose tokens they follow; None where
        they are roots alone."""
        if self._trees is None or draft is None or self._rounds_under_way:
            return None, None
        tree = self._trees.plan(draft, batch.remaining)
        return (tree if tree.width > 1 else None), self._last

    def _kind(self, rows: IntArray) -> RoundKind:
        return RoundKind(
            sampled=bool(self._sampled[rows].any()),
            filtered=bool(self._filtered[rows].any()),
            forced=self._simulated is not None,
        )

    def _round_of(
        self, size: int, kind: RoundKind, tree: ArrayTree | None, *, drafts: bool
    ) -> Replayed:
        padded = self.rounds.padded(size)
        if self.parts.draft is not None:
            return self._model_round(padded, kind, drafts=drafts)
        if self._ngrams is not None:
            return self._ngram_round(*self._sizes.choose(size, padded), kind)
        if tree is None:
            return self._host_round(padded, padded, kind)
        return self._host_round(*self.shapes.fit(size, tree.drafts), kind)

    def _model_round(self, padded: int, kind: RoundKind, *, drafts: bool) -> Replayed:
        made = TreeRound if drafts else RestRound
        kind = kind if drafts else replace(kind, forced=False)
        key = ("tree" if drafts else "rest", padded, kind)
        return self.rounds.get(key, padded, lambda: made(self.parts, padded, kind))

    def _host_round(self, size: int, rows: int, kind: RoundKind) -> Replayed:
        """rows: equal to the size without trees."""
        nodes = 1 if rows == size else self.most_nodes
        return self.rounds.get(
            ("host", size, rows, kind),
            size,
            lambda: HostRound(self.parts, size, kind, rows, nodes),
        )

    def _ngram_round(self, size: int, rows: int, kind: RoundKind) -> Replayed:
        """rows: equal to the size where nothing is verified beside the roots."""
        mine = self._ngrams
        assert mine is not None

        def make() -> NgramRound:
            index, depths = mine.index, mine.depths
            return NgramRound(self.parts, size, kind, rows, mine.nodes, index, depths)

        return self.rounds.get(("ngram", size, rows, kind), size, make)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture what greedy batches need, the largest first, so that all share its memory, and
        time what is to be weighed."""
        kind = RoundKind(forced=self._simulated is not None)
        self._prefills.prepare()
        if self._trees is not None:
            shapes = [*self.shapes, *((size, size) for size in self.rounds.sizes)]
            self._trees.prepare(shapes, partial(self._host_round, kind=kind))
        if self._ngrams is not None:
            self._sizes.prepare(
                lambda size, rows: timed(self._ngram_round(size, rows, kind)), self.rounds.sizes
            )
            return
        for size in reversed(self.rounds.sizes):
            self._round_of(size, kind, None, drafts=self.parts.draft is not None)
            if self._resting is not None:
                self._resting.know(size, timed(self._model_round(size, kind, drafts=False)))

    @torch.inference_mode()
    def prepare_more(self) -> bool:
        """Capture one round that sampled batches need, or one forward of those that the host
        judges; nothing is under way. Whether there was one. Otherwise the first such batch of every
        size would wait for it."""
        if self._later is None:
            kinds = (RoundKind(sampled=True), RoundKind(sampled=True, filtered=True))
            wanted = kinds if self._simulated is None and self._device_rule else ()
            self._later = [make for kind in wanted for make in self._every_round(kind)]
            self._later += self._seams
        if not self._later:
            return False
        self._later.pop(0)()
        return True

    def _every_round(self, kind: RoundKind) -> list[Callable[[], Replayed]]:
        """What makes the rounds of a kind, the largest first."""
        sizes = self.rounds.sizes[::-1]
        if self.parts.draft is not None:
            drafts = (True, False) if self._resting is not None else (True,)
            model = self._model_round
            return [partial(model, size, kind, drafts=each) for size in sizes for each in drafts]
        trees = self._trees is not None or self._ngrams is not None
        shapes = [*(self.shapes if trees else ()), *((size, size) for size in sizes)]
        made = self._host_round if self._ngrams is None else self._ngram_round
        shapes.sort(key=lambda shape: shape[1], reverse=True)
        return [partial(made, size, rows, kind) for size, rows in shapes]
