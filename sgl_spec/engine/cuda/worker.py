"""The worker of a GPU server.

Common batches run as rounds that live on the device (`rounds`), launched before the tokens of the
round before were read. What needs the host in the middle of a round (a grammar, penalties,
log-probabilities, other acceptance rules) runs as on the CPU, one forward at a time; a batch goes
from one way to the other whenever its members change. Which rounds there are, and who drafts in
them, is the affair of `sources`.
"""

from __future__ import annotations

import logging
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
from sgl_spec.engine.cuda.drafting import HostTreeRounds
from sgl_spec.engine.cuda.follow import DeviceFollow
from sgl_spec.engine.cuda.forwards import run_forwards
from sgl_spec.engine.cuda.graphs import Rounds
from sgl_spec.engine.cuda.model_rounds import ModelRounds, draft_parts
from sgl_spec.engine.cuda.ngram import DeviceNgram
from sgl_spec.engine.cuda.ngram_round import NgramRounds
from sgl_spec.engine.cuda.prefill import Prefills
from sgl_spec.engine.cuda.rounds import Parts, RoundKind
from sgl_spec.engine.cuda.running import RowKinds, Running, RunningRound, is_simple
from sgl_spec.engine.cuda.seam import SeamClock
from sgl_spec.engine.cuda.seam_trees import SeamTrees
from sgl_spec.engine.cuda.sources import RoundSource
from sgl_spec.engine.cuda.state import DeviceRows
from sgl_spec.engine.cuda.timing import Mark, Stopwatch
from sgl_spec.engine.cuda.transfer import Fetched, send
from sgl_spec.engine.req import Req
from sgl_spec.engine.worker import Worker
from sgl_spec.layers.context import ForwardBatch
from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec.speculative.model_drafter import ModelDrafter
from sgl_spec.speculative.rules import FollowRule
from sgl_spec.speculative.simulate import SimulatedRule
from sgl_spec.speculative.tree import TokenTree

logger = logging.getLogger(__name__)


class DeviceWorker(Worker):
    """See the module. rounds: the captured rounds; source: who drafts in them. most_nodes: of a
    tree, root included. weighs: whether drafts may be left out by what they cost. prefill_rows:
    most prompt tokens of one forward. seam_trees: holds drafts of batches that the host judges to
    what they bring, if drafts are weighed.
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
        draft = draft_parts(self.drafter)
        self.parts = Parts(self.model, self.kv, self.table.device, self.device_rows, draft)
        self._simulated = self.rule if isinstance(self.rule, SimulatedRule) else None
        inner = self.rule if self._simulated is None else self._simulated.rule
        self._device_rule = isinstance(inner, FollowRule) and self.topology is None
        self.follow = follow = DeviceFollow(most_nodes, self.parts.heads)
        if isinstance(self.rule, FollowRule):
            self.rule = self.follow
        self._kinds = RowKinds(num_rows, forced=self._simulated is not None)
        self._placed: npt.NDArray[np.bool_] = np.zeros(
            num_rows, dtype=np.bool_
        )  # the device knows the text
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
        self.source = self._source(weighs)
        by_time = weighs and self.device.type == "cuda"  # an interpreter's times say nothing
        self.seam_trees = SeamTrees(lambda: len(rounds), Mark) if by_time else None

    def _source(self, weighs: bool) -> RoundSource:
        drafter, parts, rounds = self.drafter, self.parts, self.rounds
        if drafter is None:
            return RoundSource(parts, rounds)
        if isinstance(drafter, ModelDrafter):
            return ModelRounds(parts, rounds, drafter, self.tokens, weighs=weighs)
        shapes = TreeShapes(rounds.sizes, self.most_nodes)
        costs = DeviceCosts(shapes) if weighs and rounds.sizes else None
        if isinstance(drafter, DeviceNgram):
            return NgramRounds(parts, rounds, shapes, costs, drafter)
        texts, draft_of = self.tokens, self._draft_batch
        return HostTreeRounds(parts, rounds, shapes, costs, drafter, texts=texts, draft_of=draft_of)

    # --- requests come and go ---------------------------------------------------------------------

    def open(self, req: Req) -> None:
        """Fill the row of an admitted request."""
        super().open(req)
        row, sampling = req.held.row, req.sampling
        self._tenancy[row] += 1
        self._placed[row] = False
        self._kinds.open(row, req)
        self.device_rows.set_params(row, sampling, sampling.max_nodes(self.most_nodes))
        self.source.open(row, len(req.ids) + req.remaining)

    def begin(self, req: Req) -> None:
        """The request may be drafted for."""
        super().begin(req)
        self.source.begin()

    def drafter_stats(self) -> dict[str, float]:
        """Those of its rounds included. seam_wait_ms: how long the device lately had no forward to
        run in a round that needs the host. See also `SeamTrees.stats`."""
        seam = {} if self._seam is None else {"seam_wait_ms": self._seam.wait_ms}
        trees = {} if self.seam_trees is None else self.seam_trees.stats()
        return super().drafter_stats() | self.source.stats() | seam | trees

    def flush(self) -> None:
        """Forget what the drafter has learned, and what its drafts have brought."""
        super().flush()
        if self.seam_trees is not None:
            self.seam_trees.clear()

    def close(self, row: int) -> None:
        """The row's request ended or was retracted; what still runs for it is dropped."""
        self._tenancy[row] += 1
        self.source.close()
        super().close(row)

    # --- launch and collect -----------------------------------------------------------------------

    def runs_ahead(self, reqs: Sequence[Req]) -> bool:
        """Whether the device needs nothing of the host between this batch and its neighbours."""
        if not self._device_rule or not all(is_simple(req) for req in reqs):
            return False
        return not self.source.waits() or not any(req.in_flight for req in reqs)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Enqueue a batch, or compute it where it needs the host."""
        if not self._device_rule or not self._kinds.simple(batch.rows):
            return self._on_host(batch)
        if self._seam is not None:
            self._seam.leave()
        self.table.sync()
        self.device_rows.sync()
        self._under_way += 1
        launched: Launched
        if isinstance(batch, PrefillBatch):
            launched = self._launch_prefill(batch)
        else:
            launched = self._launch_round(batch)
        if self.seam_trees is not None:
            self.seam_trees.passed()
        return launched

    def _afforded(self, batch: DecodeBatch) -> DecodeBatch:
        """A round that needs the host, without drafts where they do not pay."""
        if self.seam_trees is None:
            return batch
        most = batch.max_nodes
        if self.seam_trees.begin(len(most), wanted=bool((most > 1).any())):
            return batch
        return replace(batch, max_nodes=np.ones_like(most))

    def _on_host(self, batch: Batch) -> Launched:
        rows, self._last = batch.rows, None
        if self._seam is not None:
            self._seam.enter(rows, self._tenancy)
        if isinstance(batch, DecodeBatch):
            batch = self._afforded(batch)
        launched = super().launch(batch)
        assert isinstance(launched, Computed)
        if self._seam is not None and isinstance(batch, DecodeBatch):
            self._seam.round_over()
        if self.seam_trees is not None and isinstance(batch, PrefillBatch):
            self.seam_trees.passed()
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
        self._rounds_under_way -= isinstance(launched, RunningRound)
        tokens: list[list[int]] = [[] for _ in range(launched.size)]
        proposed = launched.proposed
        if launched.results is not None:
            given = launched.results.wait().numpy()
            for place, (count, *drawn) in zip(
                launched.final.tolist(), given[launched.final].tolist(), strict=True
            ):
                tokens[place] = drawn[:count]
            lengths = self._keep(launched, given[launched.final])
            if isinstance(launched, RunningRound):
                proposed = self.source.collected(launched, lengths, given)
                if launched.forced and self._simulated is not None:
                    self._simulated.note(torch.from_numpy(given[:, 0].astype(np.int64)))
        return StepOutput(tokens=tokens, proposed=proposed)

    def _keep(self, launched: Running, given: IntArray) -> IntArray:
        """Write down the tokens of rows that are still the same requests'. given: [B, 1 + N],
        counts and tokens. Returns the lengths of all texts before them."""
        rows, starts = launched.rows, self._length[launched.rows]
        lengths, same = starts, self._tenancy[rows] == launched.tenancy
        if not same.all():
            rows, lengths, given = rows[same], lengths[same], given[same]
        counts, tokens = given[:, 0], given[:, 1:]
        column = np.arange(tokens.shape[1])
        new = column < counts[:, None]
        at = (rows * self.tokens.shape[1] + lengths)[:, None] + column
        self.tokens.reshape(-1)[at[new]] = tokens[new]
        self._length[rows] = ends = lengths + counts
        self.source.kept(rows, ends)
        return starts

    @torch.inference_mode()
    def observe(self, taken: list[int]) -> None:
        """Tell who drafted how the round ended."""
        if self._round is not None:
            super().observe(taken)
            if self.seam_trees is not None:
                self.seam_trees.end(sum(taken) / len(taken))
            return
        self.source.observe(taken, behind=self._under_way > 0)

    def settle(self) -> None:
        """A batch was launched: what the drafter has put off may be done behind it."""
        self.source.settle()
        super().settle()

    # --- prompts ----------------------------------------------------------------------------------

    def _launch_prefill(self, batch: PrefillBatch) -> Launched:
        (final,) = np.nonzero(batch.finals)
        rows, ends = batch.rows, batch.starts + batch.takes
        program = self._prefills.run(batch, self.tokens)
        self._last = None
        self._length[rows] = ends
        self._placed[rows[final]] = True
        self.source.filled(rows, ends)
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
        behind, before = self._rounds_under_way > 0, self._last
        planned = self.source.plan(batch, self._kinds.of(rows), behind=behind)
        program = planned.replayed.program
        program.load(rows, planned.tree)
        if program.lengths is not None:
            assert self._simulated is not None
            send(self._simulated.lengths(size), program.lengths[:size])
        watch = self._last = Stopwatch.started() if planned.timed else None
        planned.replayed.run()
        self._rounds_under_way += 1
        if watch is not None:
            watch.stop()
        return RunningRound(
            rows=rows,
            tenancy=self._tenancy[rows],
            final=np.arange(size),
            size=size,
            results=Fetched(program.out[:size]),
            proposed=self.source.proposed(batch, planned),
            planned=planned,
            forced=program.lengths is not None,
            watch=watch,
            before=before,
            facts=None if planned.facts is None else Fetched(planned.facts),
        )

    def _place(self, rows: IntArray) -> None:
        """Tell the device where texts stand that the host has moved on."""
        if not len(rows):
            return
        lengths = self._length[rows]
        last = torch.from_numpy(self.tokens[rows, lengths - 1].astype(np.int64))
        self.device_rows.place(rows, torch.from_numpy(lengths - 1), last)
        self.source.placed(rows, lengths)
        self._placed[rows] = True

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture what greedy batches need, the largest first, so that all share its memory, and
        time what is to be weighed."""
        self._prefills.prepare()
        self.source.prepare(RoundKind(forced=self._simulated is not None))

    @torch.inference_mode()
    def prepare_more(self) -> bool:
        """Capture one round that sampled batches need, or one forward of those that the host
        judges; nothing is under way. Whether there was one. Otherwise the first such batch of every
        size would wait for it."""
        if self._later is None:
            kinds = (RoundKind(sampled=True), RoundKind(sampled=True, filtered=True))
            wanted = kinds if self._simulated is None and self._device_rule else ()
            self._later = [make for kind in wanted for make in self.source.every_round(kind)]
            self._later += self._seams
        if not self._later:
            return False
        try:
            self._later.pop(0)()
        except torch.OutOfMemoryError as error:  # they are made when they are needed, or not
            logger.warning("No memory to prepare more rounds: %s", error)
            self._later.clear()
        return True
