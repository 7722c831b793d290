"""The part of the engine that touches the model: it turns a batch into tokens.

All a round needs of a request lives in buffers indexed by request row (text, committed length,
sampling parameters, slots), so a batch is little more than a list of rows.

Batches, texts and what was accepted lie on the host; what meets logits, hidden states or KV lies on
the model's device. Trees are planned where their drafter made them and then brought there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.profiler import record_function

from sgl_spec.engine.asked import PLAIN, AskedDrafts
from sgl_spec.engine.batch import (
    Batch,
    Computed,
    DecodeBatch,
    IntArray,
    Launched,
    PrefillBatch,
    StepOutput,
    prefill_forward,
    tree_forward,
)
from sgl_spec.engine.control import Decision
from sgl_spec.engine.draft_trees import RoundClock, TreeReader
from sgl_spec.engine.following import Follower
from sgl_spec.engine.kv_pool import SlotTable
from sgl_spec.engine.logprobs import LogprobReader, PerRequest
from sgl_spec.engine.req import Req
from sgl_spec.engine.row_sampling import RowSampling
from sgl_spec.layers.context import ForwardBatch, KVCache
from sgl_spec.layers.transfer import on_device, wait_for
from sgl_spec.request import Logprobs
from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec.speculative.base import DraftBatch, Drafter, settle
from sgl_spec.speculative.grammar import Constraint, mask_tree, token_masks
from sgl_spec.speculative.ngram import NgramDrafter
from sgl_spec.speculative.propose import require_sampled
from sgl_spec.speculative.prune import MIN_GAIN, bounded, keep_nodes
from sgl_spec.speculative.rules import AcceptanceRule, FollowRule
from sgl_spec.speculative.sampling import TokenMasks
from sgl_spec.speculative.topology import Topology
from sgl_spec.speculative.tree import AcceptResult, TokenTree, narrow, root_only

if TYPE_CHECKING:
    from sgl_spec.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class _Round:
    """What a round leaves to be told to the drafter once the scheduler knows what was kept.

    tree: where its drafter made it. accepted, offsets: on the CPU; [B] the first verified row of
    each request. features: [T, C] of the verified rows. decision: that the drafter be asked or not,
    None where that is no question. begun: when the round did, in seconds.
    """

    draft: DraftBatch
    tree: TokenTree
    accepted: AcceptResult
    offsets: Tensor
    features: Tensor | None
    decision: Decision | None
    begun: float


class Worker:
    """Runs prefill chunks and speculation rounds for the scheduler.

    drafter None, or a batch without draft budget: trees are root-only and a round is plain
    decoding. asked: decides what is drafted; None verifies whatever is proposed. rule: how drafts
    are accepted; topology: the shape that sampled trees must have, where the rule asks for them.
    """

    def __init__(
        self,
        model: Decoder,
        kv: KVCache,
        table: SlotTable,
        *,
        drafter: Drafter | None = None,
        asked: AskedDrafts | None = None,
        rule: AcceptanceRule | None = None,
        topology: Topology | None = None,
    ) -> None:
        self.model = model
        self.device = model.device
        self.kv = kv
        self.table = table
        self.drafter = drafter
        self.follower = Follower(model, kv, drafter)
        self.asked = asked
        self.follow: AcceptanceRule = FollowRule()  # first tokens are drawn by it
        self.rule = rule or self.follow
        self.topology = topology
        self.tokens: npt.NDArray[np.int32] = np.zeros(table.host.shape, dtype=np.int32)
        self.logprobs = LogprobReader(model)
        self.trees, self._clock = TreeReader(), RoundClock()
        self.sampling = RowSampling(model, len(self.tokens))
        self._constraints: dict[int, Constraint] = {}  # of the rows that have one
        self._drafting: set[int] = set()
        self._round: _Round | None = None

    # --- requests come and go ---------------------------------------------------------------------

    def open(self, req: Req) -> None:
        """Fill the row of an admitted request."""
        row = req.held.row
        self.tokens[row, : len(req.ids)] = req.ids
        if req.constraint is not None:
            self._constraints[row] = req.constraint
        self.follower.open(row, req.held.committed_len)
        if isinstance(self.drafter, NgramDrafter):
            self.drafter.expect(row, len(req.ids) + req.remaining)
        self.logprobs.open(req)
        self.trees.open(req)
        self.sampling.open(req)

    def begin(self, req: Req) -> None:
        """The request's prompt is in the KV cache and its next token is drawn: it may be drafted
        for."""
        if self.drafter is None:
            return
        row, length = req.held.row, len(req.ids)
        self.drafter.begin(row, self.tokens[row, :length], req.drafted)
        req.drafted = length
        self._drafting.add(row)
        self.settle()

    def shareable(self, req: Req) -> int:
        """Leading tokens of a request whose KV, the target's and the drafter's, is there."""
        return self.follower.written(req.held.row, req.held.committed_len)

    def close(self, row: int) -> None:
        """The row's request ended or was retracted."""
        self.logprobs.close(row)
        self.trees.close(row)
        self._constraints.pop(row, None)
        if self.drafter is not None and row in self._drafting:
            self._drafting.discard(row)
            self.drafter.finish(row)

    def drafter_stats(self) -> dict[str, float]:
        """Figures of the drafter, for /server_info and /metrics."""
        control = {} if self.asked is None else self.asked.stats()
        return control if self.drafter is None else control | self.drafter.stats()

    def flush(self) -> None:
        """Forget what the drafter has learned."""
        if self.drafter is not None:
            self.drafter.flush()
        if self.asked is not None:
            self.asked.clear()

    def pause_tokens(self, ms: float) -> int | None:
        """Prompt tokens whose forward takes no longer; None for no bound. Here nothing is timed."""
        return None

    def prepare_more(self) -> bool:
        """Nothing runs: get something ready that a later batch would have to wait for. Whether
        there was something."""
        return False

    # --- one forward ------------------------------------------------------------------------------

    def runs_ahead(self, reqs: Sequence[Req]) -> bool:
        """Whether a batch of these requests may be launched before the one before it is collected,
        and the next one before it is. Here everything is computed in turn."""
        return False

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Run one batch."""
        self.table.sync()
        if isinstance(batch, PrefillBatch):
            return Computed(self._prefill(batch))
        return Computed(self._decode(batch))

    def resume(self, launched: Launched) -> Launched:
        """Nothing is left to do."""
        return launched

    def collect(self, launched: Launched) -> StepOutput:
        """What a launched batch gave its requests."""
        assert isinstance(launched, Computed)
        return launched.output

    @torch.inference_mode()
    def observe(self, taken: list[int]) -> None:
        """Tell the drafter how the last round ended. taken: tokens that each request kept, which a
        stop may have cut."""
        done, self._round = self._round, None
        assert done is not None
        if self.drafter is not None:
            self.table.sync()
            counts = torch.tensor(taken, dtype=torch.int64)
            kept = replace(done.accepted, counts=counts)
            begun = time.perf_counter()
            with record_function("extend"):
                self.follower.verified(done.draft, kept, done.offsets, done.features)
            self._clock.followed(begun)
            self.drafter.observe(done.draft, done.tree, kept)
            self.settle()
            self._note(done, kept, sum(taken))

    def _note(self, done: _Round, kept: AcceptResult, tokens: int) -> None:
        """Learn what drafting brought and took, all that the drafter did included."""
        if self.asked is None or done.decision is None:
            return
        self.asked.learn(ArrayTree.of(done.tree), kept, _sampled(done.draft))
        ms = self.model.ranks.agree((time.perf_counter() - done.begun) * 1e3)
        self.asked.note(done.decision, len(done.draft.rows), tokens, ms)

    def settle(self) -> None:
        """Let the drafter do what it has put off: nothing is gained by waiting here."""
        settle(self.drafter)

    def _prefill(self, batch: PrefillBatch) -> StepOutput:
        forward = prefill_forward(batch, self.tokens, self.table)
        whole = self.follower.reads_hidden or self.logprobs.asked(batch.rows)
        ends = forward.q_starts[1:] - 1
        hidden, features = self.follower.run(forward if whole else replace(forward, wanted=ends))
        tokens: list[list[int]] = [[] for _ in batch.rows]
        logprobs: list[Logprobs | None] = [None] * len(tokens)
        (finals,) = np.nonzero(batch.finals)
        if len(finals):
            rows, lengths = batch.rows[finals], (batch.starts + batch.takes)[finals]
            last = on_device(finals, self.device)
            read_rows = hidden[ends[last] if whole else last]
            drawn, read = self._draw_next(read_rows, rows, lengths)
            for i, row, end, token in zip(finals, rows, lengths, drawn.tolist(), strict=True):
                tokens[i] = [token]
                self.tokens[row, end] = token
            for i, one in zip(finals, read or (), strict=False):
                logprobs[i] = one
        self.follower.prefilled(forward, batch, self.tokens, features)
        self._clock.end()
        return StepOutput(
            tokens=tokens,
            proposed=[0] * len(tokens),
            logprobs=logprobs,
            prompt_logprobs=self.logprobs.of_prompts(batch, self.tokens, hidden),
        )

    def _draw_next(
        self, hidden: Tensor, rows: IntArray, lengths: IntArray
    ) -> tuple[Tensor, PerRequest]:
        """The token after each row's text of `lengths` tokens, and its log-probabilities: a
        root-only tree whose root is the text's last token, so that first tokens take the same path
        as all others."""
        roots = torch.from_numpy(self.tokens[rows, lengths - 1].astype(np.int64))
        logits = self.model.logits(hidden)
        offsets = torch.arange(len(rows))
        sampling = self.sampling.of(rows)
        tree = self._constrain(root_only(roots), rows).to(self.device)
        drawn = self.follow(
            tree,
            logits,
            on_device(offsets, self.device),
            sampling,
            on_device(lengths - 1, self.device),
            masks=token_masks(tree),
        )
        accepted = drawn.on_host()
        self.sampling.count(rows, accepted)
        logprobs = self.logprobs.of_emitted(rows, accepted, logits, offsets)
        return accepted.tokens[:, 0], logprobs

    def _decode(self, batch: DecodeBatch) -> StepOutput:
        """A round, with marks for a profiler; `observe` is its end."""
        begun, draft = self._clock.begin(), self._draft_batch(batch)
        with record_function("propose"):
            planned, decision = self._propose(draft, batch.remaining)
        self._clock.proposed()
        with record_function("verify"):
            # A device has its forward before all else, and what reads a tree on it before that.
            forward, masks = self._tree_rows(planned, batch), token_masks(planned)
            logits, features = self._verify(forward)
        self._clock.verified()
        offsets = forward.q_starts[:-1]
        with record_function("accept"):
            accepted = self._accept(planned, batch, logits, offsets, masks)
            offsets = offsets.cpu()
            logprobs = self.logprobs.of_emitted(batch.rows, accepted, logits, offsets)
        self._round = _Round(draft, planned, accepted, offsets, features, decision, begun)
        option, times = None if decision is None else decision.option, self._clock.end()
        trees = self.trees.of_round(batch.rows, planned, accepted, logits, offsets, times, option)
        return replace(self._output(draft, planned, accepted, logprobs), trees=trees)

    def _propose(self, draft: DraftBatch, remaining: IntArray) -> tuple[TokenTree, Decision | None]:
        decision = None
        if self.asked is not None and (draft.max_nodes > 1).any():
            decision = self.asked.decide(len(draft.rows))
        return self._plan_tree(draft, remaining, decision), decision

    def _accept(
        self,
        planned: TokenTree,
        batch: DecodeBatch,
        logits: Tensor,
        offsets: Tensor,
        masks: TokenMasks | None,
    ) -> AcceptResult:
        """Judge the trees, bring what is kept to the front, and count it."""
        rows, committed = (on_device(x, self.device) for x in (batch.rows, batch.committed))
        tree, sampling = planned.to(self.device), self.sampling.of(batch.rows)
        if masks is not None and tree.allowed is not None:
            masks = TokenMasks(tree.allowed.words, on_device(masks.row_of, self.device))
        starts = on_device(offsets, self.device)
        found = self.rule(tree, logits, starts, sampling, committed, masks=masks)
        self._keep_path(rows, committed, tree.width, found)
        accepted = found.on_host()
        self.sampling.count(batch.rows, accepted)
        return accepted

    def _draft_batch(self, batch: DecodeBatch) -> DraftBatch:
        """What a drafter may know of a batch."""
        rows, lengths, most = batch.rows, batch.committed + 1, batch.max_nodes
        deeper = None if self.asked is None else self.asked.deeper
        return DraftBatch(rows, lengths, most, self.tokens, self.sampling.of(rows), deeper)

    def _tree_rows(self, planned: TokenTree, batch: DecodeBatch) -> ForwardBatch:
        """The rows that verify these trees."""
        tree = planned.to(self.device)
        rows, committed = (on_device(x, self.device) for x in (batch.rows, batch.committed))
        return tree_forward(tree, rows, committed, self.table.device)

    def _plan_tree(
        self, draft: DraftBatch, remaining: IntArray, decision: Decision | None
    ) -> TokenTree:
        rests = decision is not None and decision.option == PLAIN
        if self.drafter is None or rests or not (draft.max_nodes > 1).any():
            return self._constrain(root_only(torch.from_numpy(draft.roots())), draft.rows)
        start = time.perf_counter()
        tree = self.drafter.propose(draft)
        if self.asked is not None:
            wait_for(self.device)
        drafting_s = time.perf_counter() - start
        if self.topology is not None:
            require_sampled(tree, self.topology)
        tree = self._constrain(bounded(tree, remaining, draft.max_nodes), draft.rows)
        if int(tree.num_nodes.max()) > 1 and self.asked is not None:
            # Forwards of a draft model are part of every round: the dearer, the more rows pay.
            fixed_ms = self.model.ranks.agree(drafting_s * 1e3)
            fixed_ms = 0.0 if self.follower.drafter is None else fixed_ms
            trial = decision is not None and decision.trial
            keep = self.asked.worthwhile(
                ArrayTree.of(tree), _sampled(draft), fixed_ms, MIN_GAIN, trial=trial
            )
            tree = keep_nodes(tree, on_device(keep, tree.tokens.device))
        return narrow(tree)

    def _constrain(self, tree: TokenTree, rows: IntArray) -> TokenTree:
        """The trees with the masks of the requests that have a grammar, and without the drafts
        that leave it unless the rule needs them."""
        if not self._constraints:
            return tree
        constraints = [self._constraints.get(row) for row in rows.tolist()]
        return mask_tree(tree, constraints, drop=not self.rule.samples)

    def _verify(self, forward: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """The target's logits of a tree batch, [T, V], and the features that the drafter wants; the
        time keeps the cost table true."""
        if self.asked is not None:
            wait_for(self.device)
        start = time.perf_counter()
        hidden, features = self.follower.run(forward)
        logits = self.model.logits(hidden)
        if self.asked is not None:
            wait_for(self.device)
            requests, ms = len(forward.rows), (time.perf_counter() - start) * 1e3
            ms = self.model.ranks.agree(ms)
            self.asked.costs.add(requests, len(forward.tokens) - requests, ms)
        return logits, features

    def _keep_path(
        self, rows: Tensor, committed: Tensor, width: int, accepted: AcceptResult
    ) -> None:
        """Bring the KV of the accepted path to the front of the tree's positions."""
        if width == 1:
            return
        if self.model.kernels == "triton":
            from sgl_spec_kernels.compact import move_path  # a CPU server needs no triton
        else:
            from sgl_spec_kernels.kv_move import move_path
        path, counts = accepted.path.contiguous(), accepted.counts
        move_path(self.kv.k, self.kv.v, self.table.device, rows, committed, path, counts)

    def _output(
        self, draft: DraftBatch, tree: TokenTree, accepted: AcceptResult, logprobs: PerRequest
    ) -> StepOutput:
        tokens = [
            row[:count]
            for row, count in zip(accepted.tokens.tolist(), accepted.counts.tolist(), strict=True)
        ]
        for row, length, new in zip(draft.rows, draft.lengths, tokens, strict=True):
            self.tokens[row, length : length + len(new)] = new
        proposed = (tree.num_nodes - 1).tolist()
        return StepOutput(tokens=tokens, proposed=proposed, logprobs=logprobs)


def _sampled(draft: DraftBatch) -> npt.NDArray[np.bool_]:
    """[B]: which of the requests have a temperature."""
    assert draft.sampling is not None
    return draft.sampling.temperature.numpy(force=True) > 0
