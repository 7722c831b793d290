"""The drafter protocol. A drafter proposes trees; the target's draw never depends on them, so a
drafter can make a request faster or slower but never change its text.

With --speculative-use-rejection-sampling the drafts are sampled instead, and judged against what
they were sampled from. A drafter that can do that says so with a class attribute `samples = True`,
finds the shape of its trees in `DrafterContext.topology`, and draws them with
`propose.SampledTrees`. The text then has the target's distribution, but its tokens depend on the
drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sgl_spec.speculative.sampling import SamplingRows
from sgl_spec.speculative.topology import Topology
from sgl_spec.speculative.tree import AcceptResult, TokenTree

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """What a drafter may look at for one round of B requests.

    rows: [B] request row, stable while the request runs and reused later.
    lengths: [B] tokens known so far, prompt and output; the last of them is the tree's root.
    max_nodes: [B] most nodes (root included) the request may verify this round, at least 1; a row
    with 1
        must get a root-only tree.
    tokens: [num_rows, width] int32; tokens[rows[i], :lengths[i]] is the request's text.
    sampling: the B requests' parameters, whose temperature and seed a drafter that samples needs;
        the engine always gives them.
    """

    rows: IntArray
    lengths: IntArray
    max_nodes: IntArray
    tokens: npt.NDArray[np.int32]
    sampling: SamplingRows | None = None

    def roots(self) -> IntArray:
        """[B] each request's last known token, the root of its tree."""
        return self.tokens[self.rows, self.lengths - 1].astype(np.int64)


class Drafter(Protocol):
    """Proposes a token tree per request and round. All calls come from the engine's thread.

    Life of a request row: `begin` once its prompt is in the KV cache, then `propose` and `observe`
    once a round, then `finish`. A retracted request gets `finish`, and `begin` again when it
    resumes.
    """

    def begin(self, row: int, tokens: npt.NDArray[np.int32], known: int) -> None:
        """A request starts (or resumes) in `row` with text `tokens`, of which the first `known`
        tokens were already given to this drafter before a retraction."""

    def propose(self, batch: DraftBatch) -> TokenTree:
        """Trees for this round; node 0 of request i is tokens[rows[i], lengths[i] - 1]."""

    def observe(self, batch: DraftBatch, tree: TokenTree, accepted: AcceptResult) -> None:
        """What the target made of `tree`, the tree that was verified: a part of the proposed one
        when the engine pruned it. `batch.tokens` already holds the accepted tokens after
        `lengths`."""

    def finish(self, row: int) -> None:
        """The row's request ended or was retracted."""

    def flush(self) -> None:
        """Forget everything learned from requests (called when none is running)."""

    def stats(self) -> dict[str, float]:
        """Figures for /server_info and /metrics."""


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter is built from.

    num_rows: request rows; width: tokens a row can hold; draft_tokens: most nodes of a tree, root
    included; vocab_size: the target's; options: the drafter's own flags by name; topology: where
    drafts are to be sampled, the shape of the trees, of which a request takes the first `max_nodes`
    nodes; None where the drafter chooses.
    """

    num_rows: int
    width: int
    draft_tokens: int
    vocab_size: int
    options: dict[str, object]
    topology: Topology | None = None


_REGISTRY: dict[str, Callable[[DrafterContext], Drafter]] = {}


def register_drafter(name: str, factory: Callable[[DrafterContext], Drafter]) -> None:
    """Make `--speculative-algorithm NAME` build its drafter with `factory`. Names are
    upper-cased."""
    _REGISTRY[name.upper()] = factory


def registered_drafters() -> list[str]:
    """Names that `build_drafter` knows, sorted."""
    return sorted(_REGISTRY)


def can_sample(drafter: Drafter) -> bool:
    """Whether a drafter draws its tokens from a distribution that it hands over."""
    return bool(getattr(drafter, "samples", False))


def build_drafter(name: str, context: DrafterContext) -> Drafter:
    """Build a registered drafter; an unknown name is a `KeyError` (flags are checked before)."""
    return _REGISTRY[name.upper()](context)
