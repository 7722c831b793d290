"""The worker of a GPU server: every batch is a round or a prompt chunk that lives on the device and
is launched before the tokens of the one before were read.

Which rounds there are, and who drafts in them, is the affair of `sources`. Of the host they need
the masks of grammars alone (`resume`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from sgl_spec.engine.batch import Batch, DecodeBatch, IntArray, Launched, PrefillBatch, StepOutput
from sgl_spec.engine.cuda.costs import DeviceCosts, TreeShapes
from sgl_spec.engine.cuda.drafting import HostTreeRounds
from sgl_spec.engine.cuda.graphs import Rounds
from sgl_spec.engine.cuda.model_rounds import ModelRounds, draft_parts
from sgl_spec.engine.cuda.ngram_round import NgramRounds
from sgl_spec.engine.cuda.prefill import Prefills
from sgl_spec.engine.cuda.round import (
    FINISH,
    KINDS,
    PROPOSE,
    VERIFY,
    Acceptance,
    Parts,
    Round,
    RoundKind,
    Space,
)
from sgl_spec.engine.cuda.row_logprobs import RowLogprobs
from sgl_spec.engine.cuda.running import RowKinds, Running, RunningPrompts, RunningRound
from sgl_spec.engine.cuda.shown import ShownRound
from sgl_spec.engine.cuda.sources import RoundSource
from sgl_spec.engine.cuda.state import DeviceRows
from sgl_spec.engine.cuda.timing import Mark, Stopwatch
from sgl_spec.engine.cuda.transfer import Fetched, send
from sgl_spec.engine.draft_trees import TreeReader
from sgl_spec.engine.kv_pool import SlotTable
from sgl_spec.engine.logprobs import LogprobReader
from sgl_spec.engine.req import Req
from sgl_spec.engine.row_sampling import RowSampling
from sgl_spec.layers.context import KVCache
from sgl_spec.models.decoder import Decoder
from sgl_spec.request import DraftRound, LogprobParams
from sgl_spec.speculative.base import DraftBatch, Drafter, follows_kv, settle
from sgl_spec.speculative.grammar import Constraint, Masked, Place, tree_masks
from sgl_spec.speculative.model_drafter import ModelDrafter
from sgl_spec.speculative.ngram import NgramDrafter
from sgl_spec.speculative.ngram_scores import scores as ngram_scores
from sgl_spec.speculative.simulate import SimulatedRule

logger = logging.getLogger(__name__)

_BLEND = 1 / 16  # weight of the newest masked round in what the device waits for masks


class DeviceWorker:
    """See the module, and `engine.runner.Runner`.

    rounds: the captured rounds; source: who drafts in them. most_nodes: of a tree, root included.
    weighs: whether drafts may be left out by what they cost. prefill_rows: most prompt tokens of
    one forward. simulated: gives accept lengths instead of the target's.
    """

    def __init__(
        self,
        model: Decoder,
        kv: KVCache,
        table: SlotTable,
        *,
        rounds: Rounds,
        most_nodes: int,
        drafter: Drafter | None = None,
        simulated: SimulatedRule | None = None,
        weighs: bool = False,
        prefill_rows: int = 0,
    ) -> None:
        self.model, self.table, self.rounds, self.drafter = model, table, rounds, drafter
        self.most_nodes = most_nodes
        num_rows, device = table.num_rows, table.device.device
        config = model.config
        self.tokens: npt.NDArray[np.int32] = np.zeros(table.host.shape, dtype=np.int32)
        self.device_rows = DeviceRows(num_rows, config.vocab_size, config.eos_token_ids, device)
        space = Space(config.vocab_size, device)
        draft = draft_parts(drafter)
        self.parts = Parts(model, kv, table.device, self.device_rows, space, draft)
        self.logprobs = LogprobReader(model)
        self.trees = TreeReader()
        self._shown_end: Mark | None = None  # of the batch launched last, if it was a shown round
        self._simulated = simulated
        self._kinds = RowKinds(num_rows, forced=simulated is not None)
        self._constraints: dict[int, Constraint] = {}  # of the rows that have one
        self._asked: dict[int, LogprobParams] = {}  # likewise, of output tokens
        self._drafting: set[int] = set()
        self._length: IntArray = np.zeros(num_rows, dtype=np.int64)  # of the text, as collected
        self._tenancy: IntArray = np.zeros(num_rows, dtype=np.int64)
        self._under_way = 0  # batches launched and not collected
        self._rounds_under_way = 0
        self._later: list[Callable[[], object]] | None = None  # what makes rounds to be captured
        self._last: Stopwatch | None = None  # of the batch launched last, if it was a round
        self._mask_wait_ms: float | None = None
        self._prefills = Prefills(self.parts, rounds, prefill_rows)
        self._sampling: RowSampling | None = None  # for a drafter on the host
        self.source = self._source(weighs)

    def _source(self, weighs: bool) -> RoundSource:
        drafter, parts, rounds = self.drafter, self.parts, self.rounds
        if drafter is None:
            return RoundSource(parts, rounds)
        if isinstance(drafter, ModelDrafter):
            return ModelRounds(parts, rounds, drafter, weighs=weighs)
        shapes = TreeShapes(rounds.sizes, self.most_nodes)
        costs = DeviceCosts(shapes) if weighs and rounds.sizes else None
        if isinstance(drafter, NgramDrafter):
            return NgramRounds(parts, rounds, shapes, costs, drafter)
        self._sampling = RowSampling(self.model, self.table.num_rows, counts=False)
        draft_of = self._draft_batch
        return HostTreeRounds(parts, rounds, shapes, costs, drafter, draft_of=draft_of)

    def _draft_batch(self, batch: DecodeBatch) -> DraftBatch:
        """What a drafter on the host may know of a batch."""
        assert self._sampling is not None
        rows, lengths = batch.rows, batch.committed + 1
        return DraftBatch(rows, lengths, batch.max_nodes, self.tokens, self._sampling.of(rows))

    # --- requests come and go ---------------------------------------------------------------------

    def open(self, req: Req) -> None:
        """Fill the row of an admitted request."""
        row, sampling = req.held.row, req.sampling
        self.tokens[row, : len(req.ids)] = req.ids
        if req.constraint is not None:
            self._constraints[row] = req.constraint
        if req.logprobs is not None:
            self._asked[row] = req.logprobs.params
        self.logprobs.open(req)
        self.trees.open(req)
        if self._sampling is not None:
            self._sampling.open(req)
        if follows_kv(self.drafter):
            self.drafter.open(row, req.held.committed_len)
        self._tenancy[row] += 1
        self._kinds.open(req)
        self.device_rows.open(req, sampling.max_nodes(self.most_nodes))
        self.source.open(row, len(req.ids) + req.remaining)

    def begin(self, req: Req) -> None:
        """The request's prompt is in the KV cache and its next token is drawn: it may be drafted
        for."""
        if self.drafter is not None:
            row, length = req.held.row, len(req.ids)
            self.drafter.begin(row, self.tokens[row, :length], req.drafted)
            req.drafted = length
            self._drafting.add(row)
        self.source.begin()

    def shareable(self, req: Req) -> int:
        """Leading tokens of a request whose KV, the target's and the drafter's, is there."""
        committed = req.held.committed_len
        if not follows_kv(self.drafter):
            return committed
        return min(committed, self.drafter.written_len(req.held.row))

    def close(self, row: int) -> None:
        """The row's request ended or was retracted; what still runs for it is dropped."""
        self._tenancy[row] += 1
        self.logprobs.close(row)
        self.trees.close(row)
        self._constraints.pop(row, None)
        self._asked.pop(row, None)
        if self.drafter is not None and row in self._drafting:
            self._drafting.discard(row)
            self.drafter.finish(row)

    def drafter_stats(self) -> dict[str, float]:
        """Figures of the drafter and its rounds. mask_wait_ms: how long the device lately had
        nothing to do in a round before a grammar's masks came."""
        own = {} if self.drafter is None else dict(self.drafter.stats())
        waits = {} if self._mask_wait_ms is None else {"mask_wait_ms": self._mask_wait_ms}
        return own | self.source.stats() | waits

    def flush(self) -> None:
        """Forget what the drafter has learned."""
        self.source.flush()
        if self.drafter is not None:
            self.drafter.flush()

    # --- launch and collect -----------------------------------------------------------------------

    def runs_ahead(self, reqs: Sequence[Req]) -> bool:
        """Whether the device needs nothing of the host between this batch and its neighbours."""
        return not self.source.waits() or not any(req.in_flight for req in reqs)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Enqueue a batch."""
        self.table.sync()
        self.device_rows.sync()
        self._under_way += 1
        if isinstance(batch, PrefillBatch):
            return self._launch_prefill(batch)
        return self._launch_round(batch)

    @torch.inference_mode()
    def resume(self, launched: Launched) -> Launched:
        """The batches before this one are committed: enqueue the rest of a round that waits for
        masks of grammars."""
        if not isinstance(launched, RunningRound) or launched.drafted is None:
            return launched
        masks = _program(launched).acceptance.masks
        assert masks is not None
        trees = launched.drafted.wait().numpy()
        nodes = trees.shape[1] // 2
        drafted = (trees[:, :nodes], trees[:, nodes:-1], trees[:, -1])
        found = tree_masks(*drafted, self._constraints_of(launched.rows))
        masks.send(found.words, found.row_of)
        masked = self._mark()
        launched.planned.replayed.run(FINISH)
        return self._finished(replace(launched, masked=masked))

    def _finished(self, launched: RunningRound) -> RunningRound:
        """All of a round is enqueued: fetch what it gives."""
        program, size = _program(launched), launched.size
        if launched.watch is not None:
            launched.watch.stop()
        facts, shown = launched.planned.facts, launched.shown
        self._shown_end = None
        if shown is not None:
            self._shown_end = self._mark()
            shown = shown.fetch(program, size, self._shown_end)
        return replace(
            launched,
            drafted=None,
            shown=shown,
            results=Fetched(program.out[:size]),
            facts=None if facts is None else Fetched(facts),
            logprobs=self._fetch_logprobs(program.acceptance, launched.rows, launched.final),
        )

    def _mark(self) -> Mark | None:
        return Mark() if self.parts.on_gpu else None

    def _constraints_of(self, rows: IntArray) -> list[Constraint | None]:
        """Those of rows whose text may go on; what others are given is dropped."""
        found = [self._constraints.get(row) for row in rows.tolist()]
        return [one if one is not None and one.place is Place.OPEN else None for one in found]

    def _fetch_logprobs(
        self, accepted: Acceptance, rows: IntArray, places: IntArray
    ) -> RowLogprobs | None:
        """Those of the rows that ask. places: where the rows stand in the batch."""
        asking = [i for i, row in enumerate(rows.tolist()) if row in self._asked]
        if not asking:
            return None
        assert accepted.found is not None
        params = [self._asked[int(rows[i])] for i in asking]
        return RowLogprobs.fetch(
            accepted.found, accepted.levels + 1, places[asking].tolist(), params
        )

    def collect(self, launched: Launched) -> StepOutput:
        """Wait for a batch and hand out its tokens."""
        assert isinstance(launched, Running)
        self.table.sync()  # slots planned by now: the next launch then need not send them
        self._under_way -= 1
        self._rounds_under_way -= isinstance(launched, RunningRound)
        tokens: list[list[int]] = [[] for _ in range(launched.size)]
        proposed, logprobs, trees = launched.proposed, None, None
        if launched.results is not None:
            given = launched.results.wait().numpy()
            for place, (count, *drawn) in zip(
                launched.final.tolist(), given[launched.final].tolist(), strict=True
            ):
                tokens[place] = drawn[:count]
            lengths = self._keep(launched, given[launched.final])
            if isinstance(launched, RunningRound):
                proposed = self.source.collected(launched, lengths, given)
                self._note(launched, given)
                trees = _shown(launched, given)
            if launched.logprobs is not None:
                logprobs = launched.logprobs.read(given[:, 0].tolist())
        prompts = None
        if isinstance(launched, RunningPrompts) and launched.hidden is not None:
            with torch.inference_mode():
                prompts = self.logprobs.of_prompts(launched.batch, self.tokens, launched.hidden)
        return StepOutput(tokens, proposed, logprobs, prompts, trees)

    def _note(self, launched: RunningRound, given: IntArray) -> None:
        if launched.forced and self._simulated is not None:
            self._simulated.note(torch.from_numpy(given[:, 0].astype(np.int64)))
        if launched.verified is not None and launched.masked is not None:
            ms, known = launched.verified.ms_until(launched.masked), self._mask_wait_ms
            self._mask_wait_ms = ms if known is None else known + _BLEND * (ms - known)

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
        self.source.observe(taken, behind=self._under_way > 0)

    def settle(self) -> None:
        """A batch was launched: what the drafter has put off may be done behind it."""
        settle(self.drafter)

    # --- prompts ----------------------------------------------------------------------------------

    def _launch_prefill(self, batch: PrefillBatch) -> Launched:
        (final,) = np.nonzero(batch.finals)
        rows, ends = batch.rows, batch.starts + batch.takes
        scored = bool((batch.unscored < ends).any())
        masks = self._next_masks(batch)
        program = self._prefills.run(batch, self.tokens, masks.words, masks.row_of, whole=scored)
        self._last = self._shown_end = None
        self._length[rows] = ends
        self.source.filled(rows, ends)
        return RunningPrompts(
            rows=rows[final],
            tenancy=self._tenancy[rows[final]],
            final=final,
            size=len(rows),
            results=Fetched(program.out[: len(rows)]) if len(final) else None,
            proposed=[0] * len(rows),
            logprobs=self._fetch_logprobs(program.acceptance, rows[final], final),
            batch=batch,
            hidden=program.hidden if scored else None,
        )

    def _next_masks(self, batch: PrefillBatch) -> Masked:
        """Of the tokens behind the prompts that end here."""
        known = self._constraints_of(batch.rows)
        ends = [one if end else None for one, end in zip(known, batch.finals, strict=True)]
        roots = np.zeros((len(known), 1), dtype=np.int64)
        return tree_masks(roots, roots - 1, roots[:, 0] + 1, ends)

    # --- rounds -----------------------------------------------------------------------------------

    def _launch_round(self, batch: DecodeBatch) -> Launched:
        rows, size = batch.rows, len(batch.rows)
        behind, before = self._rounds_under_way > 0, self._last
        asking = self.trees.asking(rows)
        kind = replace(self._kinds.of(rows), shown=bool(asking))
        planned = self.source.plan(batch, kind, behind=behind)
        replayed, watch = planned.replayed, None
        program = replayed.program
        assert isinstance(program, Round)
        program.load(rows, planned.tree)
        if program.lengths is not None:
            assert self._simulated is not None
            send(self._simulated.lengths(size), program.lengths[:size])
        if planned.timed:
            watch = Stopwatch.started()
        self._last = watch
        self._rounds_under_way += 1
        shown = ShownRound(asking, self._shown_end, self._mark()) if asking else None
        launched = RunningRound(
            rows=rows,
            tenancy=self._tenancy[rows],
            final=np.arange(size),
            size=size,
            results=None,
            proposed=self.source.proposed(batch, planned),
            planned=planned,
            forced=program.lengths is not None,
            watch=watch,
            before=before,
            shown=shown,
        )
        if not program.split:
            replayed.run()
            return self._finished(launched)
        return self._run_pieces(launched, masked=kind.masked)

    def _run_pieces(self, launched: RunningRound, *, masked: bool) -> Launched:
        """A round that is split. A masked one waits for `resume` before its last piece."""
        replayed, program, shown = launched.planned.replayed, _program(launched), launched.shown
        replayed.run(PROPOSE)
        proposed = self._mark() if shown is not None else None
        drafted = Fetched(program.drafted[: launched.size]) if masked else None
        replayed.run(VERIFY)
        verified = self._mark()
        if shown is not None:
            shown = replace(shown, proposed=proposed, verified=verified)
        launched = replace(launched, drafted=drafted, shown=shown)
        if masked:
            return replace(launched, verified=verified)
        replayed.run(FINISH)
        return self._finished(launched)

    # --- made beforehand --------------------------------------------------------------------------

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture what greedy batches need, the largest first, so that all share its memory, and
        time what is to be weighed."""
        self._prefills.prepare()
        self.source.prepare(RoundKind(forced=self._simulated is not None))

    @torch.inference_mode()
    def pause_tokens(self, ms: float) -> int | None:
        """Prompt tokens whose forward takes no longer; None for no bound."""
        return self._prefills.tokens_within(ms) if ms and self.parts.on_gpu else None

    @torch.inference_mode()
    def prepare_more(self) -> bool:
        """Nothing runs: capture one round that batches of other kinds need. Whether there was one.
        Otherwise the first such batch of every size would wait for it."""
        if self._later is None:
            wanted = KINDS[1:] if self._simulated is None and self.rounds.captures else ()
            self._later = [make for kind in wanted for make in self.source.every_round(kind)]
        if not self._later:
            return False
        try:
            self._later.pop(0)()
        except torch.OutOfMemoryError as error:  # they are made when they are needed, or not
            logger.warning("No memory to prepare more rounds: %s", error)
            self._later.clear()
        return True


def _shown(launched: RunningRound, given: IntArray) -> list[DraftRound | None] | None:
    """What requests ask to see of a round."""
    if launched.shown is None:
        return None
    planned, facts = launched.planned, launched.facts
    known = None if planned.tree is None else planned.tree.scores
    if facts is not None:
        known = ngram_scores(facts.wait()).numpy()
    option = None if planned.decision is None else planned.decision.option
    return launched.shown.read(given, option, known)


def _program(launched: RunningRound) -> Round:
    program = launched.planned.replayed.program
    assert isinstance(program, Round)
    return program
