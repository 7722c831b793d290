"""EAGLE, EAGLE3 and STANDALONE: trees from a draft model with a KV cache in the target's slots.

The cache follows the target's. After each chunk of a prompt the same rows are run by the draft
model; the tokens a round accepted wait until the request is drafted for again, and go in together
before its tree grows. The last of these rows predicts the root's children, so a tree of `steps`
levels takes steps - 1 further forwards.

The two kinds of draft models differ in what a row is (see `models.draft.DraftModel`). A head's row
at position p reads the token at p + 1, a whole model's the token at p. So for a text of n tokens,
whose last one is the tree's root, a head has n - 1 rows to write and a whole model n; the root's
children follow from the last row either way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgl_spec.layers.context import ForwardBatch
from sgl_spec.layers.transfer import on_device
from sgl_spec.models.draft import DraftModel
from sgl_spec.speculative.base import DraftBatch, Drafter, DrafterContext, register_drafter
from sgl_spec.speculative.draft_rows import DraftTrees, span
from sgl_spec.speculative.grow import GrownTrees
from sgl_spec.speculative.propose import SampledTrees
from sgl_spec.speculative.topology import Topology
from sgl_spec.speculative.tree import AcceptResult, DraftProbs, TokenTree, root_only

ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE")
WAITING_ROWS = 64  # accepted tokens that a request may leave unwritten
# Of a forward that writes them. A request across a multiple of it is the first of the next forward,
# which has those of its rows more that lie before.
EXTENDED_ROWS = 1024


@dataclass(frozen=True, slots=True)
class TreeShape:
    """steps: levels below the root. topk: children per node and nodes per level that grow on.
    draft_tokens: most nodes of a tree, root included. shared_noise: whether sampled requests are
    drafted with the target's own noise."""

    steps: int
    topk: int
    draft_tokens: int
    shared_noise: bool = True


@dataclass(slots=True)
class _Totals:
    """Counts since the last flush: forwards and rows that wrote text, forwards and rows of tree
    nodes, and catch-ups of requests that were not drafted for."""

    extends: int = 0
    extended_rows: int = 0
    tree_forwards: int = 0
    tree_rows: int = 0
    catch_ups: int = 0


class ModelDrafter:
    """The drafter; see the module. A `KVDrafter`.

    written: [num_rows], leading positions that hold the draft's KV. known: [num_rows], positions
    whose inputs are known; between the two lie the rows that wait. last: [num_rows, H], what the
    model returned for the row's last written position. The counts lie on the CPU, what the model
    gives and the trees on `device`, the target's.
    """

    samples = True
    follows_kv = True

    def __init__(
        self,
        model: DraftModel,
        shape: TreeShape,
        req_to_token: Tensor,
        num_slots: int,
        topology: Topology | None = None,
    ) -> None:
        self.model = model
        self.shape = shape
        self.topology = topology
        self.capture = model.capture
        self.shift = 1 if model.capture else 0
        self.reads_ahead = self.shift == 1
        self.req_to_token = req_to_token
        self.kv = model.new_kv_cache(num_slots)
        num_rows = len(req_to_token)
        self.device = device = req_to_token.device
        self.written = torch.zeros(num_rows, dtype=torch.int64)
        self.known = torch.zeros(num_rows, dtype=torch.int64)
        self.last = torch.zeros(num_rows, model.width, dtype=self.kv.k.dtype, device=device)
        self._waiting = None
        if model.capture:
            # One round adds at most steps + 1 rows to those that may wait.
            most = WAITING_ROWS + shape.steps + 1
            self._waiting = self.last.new_zeros(num_rows, most, model.width)
        self._totals = _Totals()

    # ---- the text

    def open(self, row: int, cached: int) -> None:
        """See `KVDrafter`."""
        self.written[row] = self.known[row] = cached

    def begin(self, row: int, tokens: npt.NDArray[np.int32], known: int) -> None:
        """See `Drafter`. Nothing to do: `prefilled` has seen the prompt."""

    def prefilled(self, forward: ForwardBatch, following: Tensor, features: Tensor | None) -> None:
        """See `KVDrafter`. Runs the same rows."""
        rows, starts = forward.rows.cpu(), forward.prefix_lens.cpu()
        assert torch.equal(self.written[rows], starts), "a hole in the KV"
        self.written[rows] = self.known[rows] = starts + forward.q_starts.diff().cpu()
        if self.shift:
            forward = replace(forward, tokens=on_device(following, self.device))
        fused = None if features is None else self.model.fuse(features)
        forward = replace(forward, wanted=forward.q_starts[1:] - 1)
        self.last[forward.rows] = self._forward(forward, fused)

    def verified(self, batch: DraftBatch, counts: Tensor, features: Tensor | None) -> None:
        """See `KVDrafter`. The rows wait; requests with too many of them catch up."""
        rows = torch.from_numpy(batch.rows)
        self._learn(rows, torch.from_numpy(batch.lengths) + counts, features)
        late = rows[self.known[rows] - self.written[rows] >= WAITING_ROWS]
        if len(late):
            self._totals.catch_ups += len(late)
            self._extend(late, torch.from_numpy(batch.tokens))

    def _learn(self, rows: Tensor, lengths: Tensor, features: Tensor | None) -> None:
        """The texts of `rows` now have `lengths` tokens. features: of the positions that became
        known."""
        known = lengths - self.shift
        if self._waiting is not None:
            assert features is not None
            new = span(rows, self.known[rows], known - self.known[rows])
            place = new.positions - self.written[rows][new.request]
            at = on_device(torch.stack((rows[new.request], place)), self.device)
            self._waiting[at[0], at[1]] = self.model.fuse(features)
        self.known[rows] = known

    def _extend(self, rows: Tensor, tokens: Tensor) -> None:
        """Write what waits of these rows. tokens: [num_rows, width], the texts."""
        waiting = self.known[rows] - self.written[rows]
        rows, waiting = rows[waiting > 0], waiting[waiting > 0]
        part = (waiting.cumsum(0) - 1) // EXTENDED_ROWS
        counts = torch.unique_consecutive(part, return_counts=True)[1].tolist()
        for some in torch.split(rows, counts):
            self._extend_together(some, tokens)

    def _extend_together(self, rows: Tensor, tokens: Tensor) -> None:
        """As `_extend`, in one forward; something waits of every row."""
        todo = span(rows, self.written[rows], self.known[rows] - self.written[rows])
        at = todo.rows[todo.request]
        forward = todo.forward(tokens[at, todo.positions + self.shift].long(), self.req_to_token)
        features = None
        if self._waiting is not None:
            waits = on_device(torch.stack((at, todo.within())), self.device)
            features = self._waiting[waits[0], waits[1]]
        hidden = self._forward(forward, features)
        self.last[forward.rows] = hidden[on_device(todo.ends, self.device)]
        self.written[todo.rows] += todo.counts
        self._totals.extends += 1
        self._totals.extended_rows += len(at)

    def written_len(self, row: int) -> int:
        """See `KVDrafter`."""
        return int(self.written[row])

    def observe(self, batch: DraftBatch, tree: TokenTree, accepted: AcceptResult) -> None:
        """See `Drafter`. Nothing to do: `verified` has seen the text."""

    def finish(self, row: int) -> None:
        """See `Drafter`. The row's state is replaced when another request opens it."""

    def flush(self) -> None:
        """See `Drafter`."""
        self._totals = _Totals()

    def stats(self) -> dict[str, float]:
        """Forwards and rows of the draft model since the last flush."""
        totals = self._totals
        return {
            "extend_forwards": totals.extends,
            "extend_rows": totals.extended_rows,
            "tree_forwards": totals.tree_forwards,
            "tree_rows": totals.tree_rows,
            "catch_ups": totals.catch_ups,
        }

    # ---- trees

    def propose(self, batch: DraftBatch) -> TokenTree:
        """See `Drafter`. Only requests with more than one node cost draft forwards."""
        (wanted,) = np.nonzero(batch.max_nodes > 1)
        if not len(wanted):
            return root_only(torch.from_numpy(batch.roots()))
        drafting = batch if len(wanted) == len(batch.rows) else batch.take(wanted)
        rows = torch.from_numpy(drafting.rows)
        self._know_roots(rows, torch.from_numpy(drafting.lengths))
        self._extend(rows, torch.from_numpy(batch.tokens))
        trees = self._grow(drafting) if self.topology is None else self._draw(drafting)
        return trees if drafting is batch else _spread(trees, batch, wanted)

    def _know_roots(self, rows: Tensor, lengths: Tensor) -> None:
        """A whole model has the root itself to write; a head wrote all it can with the features."""
        known = lengths - self.shift
        assert self.shift == 0 or torch.equal(self.known[rows], known), "features are missing"
        self.known[rows] = known

    def _columns(self, rows: Tensor) -> tuple[DraftTrees, Tensor]:
        """Where the trees of these rows lie, and what the model said of their roots."""
        at, prefix = on_device(torch.stack((rows, self.written[rows])), self.device)
        return DraftTrees(self.req_to_token, at, prefix), self.last[at]

    def _run(
        self, columns: DraftTrees, request: Tensor, nodes: tuple[Tensor, Tensor, int], above: Tensor
    ) -> Tensor:
        """[M, H] of tree nodes. nodes: their tokens, words and depth. above: [M, H], what was
        returned for their parents."""
        forward = columns.forward(request, *nodes)
        self._totals.tree_forwards += 1
        self._totals.tree_rows += len(request)
        return self._forward(forward, above if self.shift else None)

    def _forward(self, batch: ForwardBatch, features: Tensor | None) -> Tensor:
        return self.model.forward(batch, features, self.kv)

    def _grow(self, batch: DraftBatch) -> TokenTree:
        """The best trees that a few steps find."""
        shape, size = self.shape, len(batch.rows)
        # A tree of n nodes is at most n - 1 deep.
        steps = min(shape.steps, int(batch.max_nodes.max()) - 1)
        trees = GrownTrees(
            on_device(batch.roots(), self.device),
            on_device(batch.lengths, self.device),
            batch.sampling,
            steps=steps,
            topk=shape.topk,
            draft_tokens=shape.draft_tokens,
            shared_noise=shape.shared_noise,
        )
        columns, hidden = self._columns(torch.from_numpy(batch.rows))
        sampled = _sampled(batch)
        trees.expand(self.model.logits(hidden), self.model.token_ids)
        request = torch.arange(size, device=self.device).repeat_interleave(shape.topk)
        for _ in range(steps - 1):
            if batch.deeper is not None and not batch.deeper(trees.chances(), sampled):
                break
            edge = trees.frontier()
            above = hidden.view(size, -1, hidden.shape[1])
            above = above[request, edge.parents.flatten()]
            nodes = (edge.tokens.flatten(), edge.words.flatten(), edge.depth)
            hidden = self._run(columns, request, nodes, above)
            trees.expand(self.model.logits(hidden), self.model.token_ids)
        most = on_device(batch.max_nodes, self.device)
        return trees.finish(most)

    def _draw(self, batch: DraftBatch) -> TokenTree:
        """Trees of the prescribed shape with tokens drawn from the draft's own distribution."""
        assert self.topology is not None
        parents = torch.tensor(self.topology.parents, device=self.device)
        trees = SampledTrees(batch, self.topology, self.model.token_ids)
        columns, roots = self._columns(torch.from_numpy(batch.rows))
        words = torch.zeros_like(trees.tokens)
        hidden = self.last.new_zeros(*trees.tokens.shape, self.last.shape[1])
        hidden[:, 0] = roots
        for level in trees.levels():
            request, node = level.request, level.node
            if level.depth:
                above = (request, parents[node])
                words[request, node] = words[above] | 1 << columns.columns(request)
                nodes = (trees.tokens[request, node], words[request, node], level.depth)
                hidden[request, node] = self._run(columns, request, nodes, hidden[above])
            trees.grow(level, self.model.logits(hidden[request, node]))
        return trees.finish()


def _sampled(batch: DraftBatch) -> Tensor:
    """[B] bool: which texts are sampled, where the parameters lie."""
    if batch.sampling is None:
        return torch.zeros(len(batch.rows), dtype=torch.bool)
    return batch.sampling.temperature > 0


def _spread(trees: TokenTree, batch: DraftBatch, where: npt.NDArray[np.int64]) -> TokenTree:
    """The trees of the requests at `where`, and roots alone for the rest of the batch."""
    size, device = len(batch.rows), trees.tokens.device
    index = on_device(where, device)

    def wide(values: Tensor, fill: float) -> Tensor:
        return values.new_full((size, *values.shape[1:]), fill).index_copy_(0, index, values)

    tokens = wide(trees.tokens, 0)
    tokens[:, 0] = on_device(batch.roots(), device)
    scores, draft = trees.scores, trees.draft
    return TokenTree(
        tokens=tokens,
        parents=wide(trees.parents, -1),
        num_nodes=wide(trees.num_nodes, 1),
        scores=None if scores is None else wide(scores, 1.0),
        draft=draft and DraftProbs(draft.probs, wide(draft.row_of, -1), draft.ids),
    )


def build(context: DrafterContext) -> Drafter:
    """A `ModelDrafter` around the context's draft model, with the shape that the flags give."""
    assert context.draft_model is not None
    assert context.req_to_token is not None
    options = context.options
    shape = TreeShape(
        steps=int(str(options["num_steps"])),
        topk=int(str(options["eagle_topk"])),
        draft_tokens=context.draft_tokens,
        shared_noise=options["draft_sampling"] == "shared-noise",
    )
    return ModelDrafter(
        context.draft_model, shape, context.req_to_token, context.num_slots, context.topology
    )


def register() -> None:
    """Make these names of `--speculative-algorithm` known."""
    for name in ALGORITHMS:
        register_drafter(name, build)


register()
