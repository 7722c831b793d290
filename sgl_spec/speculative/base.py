"""The drafter protocol. A drafter proposes trees; the target's draw never depends on them, so a
drafter can make a request faster or slower but never change its text.

With --speculative-use-rejection-sampling the drafts are sampled instead, and judged against what
they were sampled from. A drafter that can do that says so with a class attribute `samples = True`,
finds the shape of its trees in `DrafterContext.topology`, and draws them with
`propose.SampledTrees`. The text then has the target's distribution, but its tokens depend on the
drafts.

A drafter may also keep keys and values of its own in the target's slots, and read hidden states of
the target: see `KVDrafter`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sgl_spec.errors import ConfigError
from sgl_spec.layers.context import ForwardBatch
from sgl_spec.layers.transfer import on_device
from sgl_spec.models.decoder import Decoder
from sgl_spec.models.draft import DraftModel
from sgl_spec.speculative.sampling import SamplingRows
from sgl_spec.speculative.topology import Topology
from sgl_spec.speculative.tree import AcceptResult, TokenTree

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """What a drafter may look at for one round of B requests. It is not to be written to; drafters
    from outside are shown what they cannot write to, or copies.

    rows: [B] request row, stable while the request runs and reused later.
    lengths: [B] tokens known so far, prompt and output; the last of them is the tree's root.
    max_nodes: [B] most nodes (root included) the request may verify this round, at least 1; a row
    with 1
        must get a root-only tree.
    tokens: [num_rows, width] int32; tokens[rows[i], :lengths[i]] is the request's text.
    sampling: the B requests' parameters, whose temperature and seed a drafter that samples needs;
        the engine always gives them, on the device of the target's logits.
    deeper: for a drafter that grows its trees level by level: whether another level pays, from the
        chances [B] that the best nodes so far are accepted, and which of the B requests are
        sampled. None where whole trees are wanted at any price.
    """

    rows: IntArray
    lengths: IntArray
    max_nodes: IntArray
    tokens: npt.NDArray[np.int32]
    sampling: SamplingRows | None = None
    deeper: Callable[[Tensor, Tensor], bool] | None = None

    def roots(self) -> IntArray:
        """[B] each request's last known token, the root of its tree."""
        return self.tokens[self.rows, self.lengths - 1].astype(np.int64)

    def take(self, index: IntArray) -> DraftBatch:
        """The requests at `index` (int64, rising)."""
        sampling = self.sampling
        if sampling is not None:
            sampling = sampling.select(on_device(index, sampling.seed.device))
        rows, lengths, most = self.rows[index], self.lengths[index], self.max_nodes[index]
        return DraftBatch(rows, lengths, most, self.tokens, sampling, self.deeper)


class Drafter(Protocol):
    """Proposes a token tree per request and round. All calls come from the engine's thread. A tree
    may lie on the CPU or on the target's device.

    Life of a request row: `begin` once its prompt is in the KV cache, then `propose` and `observe`
    once a round, then `finish`. A retracted request gets `finish`, and `begin` again when it
    resumes. Nothing is proposed while drafts take more time than they bring; such rounds are
    observed all the same, with trees of one node.
    """

    def begin(self, row: int, tokens: npt.NDArray[np.int32], known: int) -> None:
        """A request starts (or resumes) in `row` with text `tokens`, of which the first `known`
        tokens were already given to this drafter before a retraction."""

    def propose(self, batch: DraftBatch) -> TokenTree:
        """Trees for this round; node 0 of request i is tokens[rows[i], lengths[i] - 1]."""

    def observe(self, batch: DraftBatch, tree: TokenTree, accepted: AcceptResult) -> None:
        """What the target made of `tree`, the tree that was verified: a part of the proposed one
        when the engine pruned it, on the same device. `accepted` lies on the CPU. `batch.tokens`
        already holds the accepted tokens after `lengths`."""

    def finish(self, row: int) -> None:
        """The row's request ended or was retracted."""

    def flush(self) -> None:
        """Forget everything learned from requests (called when none is running)."""

    def stats(self) -> dict[str, float]:
        """Figures for /server_info and /metrics."""


class DefersWork(Protocol):
    """A drafter with this method as well leaves the work to it that its next proposal can do
    without. It is called once after `begin` or `observe`: at once where nothing is gained by
    waiting, or when the next forward is under way, behind which its time is hidden; then one
    `propose` comes before it. A drafter must not rely on the call."""

    def settle(self) -> None:
        """Do what `begin` and `observe` have put off."""


class KVDrafter(Drafter, Protocol):
    """A drafter with a KV cache of its own, in the target's slots, that follows the target's.

    It says so with the class attribute `follows_kv = True`. Its cache has as many slots as the
    target's (`DrafterContext.num_slots`), and finds the slot of a position in the same table
    (`DrafterContext.req_to_token`), whose entries may change between two calls. The rules:

    - Positions below `written_len` hold its KV. It writes no others than those from `written_len`
      on, because the slots before may be shared with other requests; a position is written once.
      Prefixes are shared through the prefix cache only as far as the drafter has written them.
    - Behind the text, a round may write any position up to committed length + A, A being the
      larger of --speculative-num-draft-tokens and --speculative-num-steps times
      --speculative-eagle-topk. The target's verify does not touch the drafter's cache, and nothing
      in it moves when a path is accepted: what is kept of such rows is the drafter's affair.
    - A drafter that is not asked to `propose` still hears of every token. It may write its KV at
      any of its calls, so it can let rows wait until they are needed, but should bound what waits.

    Life of a row: `open`, `prefilled` for each chunk of the prompt, `begin`, then `propose` (where
    the request may be drafted for), `verified` and `observe` in every round, `finish`. A request
    that ends before its prompt is through gets no `begin` and no `finish`.

    Features and forwards lie on the target's device, all else that it is told on the CPU.

    capture: layers of the target whose hidden states it wants, as `Decoder.forward_features` counts
    them; () for none. reads_ahead: whether its KV at a position depends on the token of the next
    position as well. Then two texts share a position only if they agree about the next token too.
    """

    follows_kv: bool
    capture: tuple[int, ...]
    reads_ahead: bool

    def open(self, row: int, cached: int) -> None:
        """A request takes `row`; its first `cached` positions lie in slots from the prefix cache,
        with the target's KV and the drafter's."""

    def prefilled(self, forward: ForwardBatch, following: Tensor, features: Tensor | None) -> None:
        """The target has run T rows of prompts, `forward`, which continue where each row's KV
        ended.

        following: [T] int64, the token behind each row: for the last row of a prompt the one that
        was drawn, for the last row of a chunk that is not the prompt's last the prompt's next.
        features: [T, len(capture) * hidden] of the rows, None if nothing is captured.
        """

    def verified(self, batch: DraftBatch, counts: Tensor, features: Tensor | None) -> None:
        """The target has verified a round and the requests kept counts [B] tokens, which
        `batch.tokens` holds after `lengths`: positions lengths - 1 to lengths + counts - 2 now have
        the target's KV.

        features: [sum(counts), len(capture) * hidden] of these positions, request by request; None
        if nothing is captured.
        """

    def written_len(self, row: int) -> int:
        """Leading positions of the row that hold the drafter's KV."""


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter is built from.

    num_rows: request rows; width: tokens a row can hold; draft_tokens: most nodes of a tree, root
    included; vocab_size: the target's; options: the drafter's own flags by name; topology: where
    drafts are to be sampled, the shape of the trees, of which a request takes the first `max_nodes`
    nodes; None where the drafter chooses. For a `KVDrafter`: num_slots, slots of its KV cache;
    req_to_token: [num_rows or more, width] int32, the slot of each position of each row, on the
    target's device; target: the model that verifies; draft_model: what
    --speculative-draft-model-path names, loaded for EAGLE, EAGLE3 and STANDALONE, None for other
    names, which load their own.
    """

    num_rows: int
    width: int
    draft_tokens: int
    vocab_size: int
    options: dict[str, object]
    topology: Topology | None = None
    num_slots: int = 0
    req_to_token: Tensor | None = None
    target: Decoder | None = None
    draft_model: DraftModel | None = None


_REGISTRY: dict[str, Callable[[DrafterContext], Drafter]] = {}


def register_drafter(name: str, factory: Callable[[DrafterContext], Drafter]) -> None:
    """Make `--speculative-algorithm NAME` build its drafter with `factory`, a class or a function.
    Names are upper-cased. `ConfigError` for a class that lacks methods of the protocol."""
    if isinstance(factory, type):
        require_protocol(name.upper(), factory)
    _REGISTRY[name.upper()] = factory


def protocol_methods(drafter: object) -> list[str]:
    """What a drafter, or a class of drafters, must be able to answer."""
    protocols = (Drafter, KVDrafter) if getattr(drafter, "follows_kv", False) else (Drafter,)
    return [name for each in protocols for name in vars(each) if not name.startswith("_")]


def require_protocol(name: str, drafter: object) -> None:
    """Raise a `ConfigError` that names the methods which a drafter, or a class of drafters,
    lacks."""
    methods = protocol_methods(drafter)
    lacks = [method for method in methods if not callable(getattr(drafter, method, None))]
    if lacks:
        raise ConfigError(
            f"The drafter {name} lacks {', '.join(lacks)}; it must have the methods "
            f"{', '.join(methods)}."
        )


def registered_drafters() -> list[str]:
    """Names that `build_drafter` knows, sorted."""
    return sorted(_REGISTRY)


def settle(drafter: Drafter | None) -> None:
    """Let a drafter do what it has put off, if it is one that does that (`DefersWork`)."""
    do: Callable[[], None] | None = getattr(drafter, "settle", None)
    if do is not None:
        do()


def can_sample(drafter: Drafter) -> bool:
    """Whether a drafter draws its tokens from a distribution that it hands over."""
    return bool(getattr(drafter, "samples", False))


def follows_kv(drafter: Drafter | None) -> TypeGuard[KVDrafter]:
    """Whether a drafter keeps its own KV in the target's slots."""
    return bool(getattr(drafter, "follows_kv", False))


def build_drafter(name: str, context: DrafterContext) -> Drafter:
    """Build a registered drafter; an unknown name is a `KeyError` (flags are checked before)."""
    return _REGISTRY[name.upper()](context)
