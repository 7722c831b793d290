"""Simulated acceptance, to measure what rounds cost at a given accept length. The text is not the
target's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sgl_spec.layers.transfer import on_device
from sgl_spec.speculative.rules import AcceptanceRule
from sgl_spec.speculative.sampling import SamplingRows, TokenMasks, draw
from sgl_spec.speculative.tree import AcceptResult, TokenTree


class SimulatedRule:
    """Judges every tree by a real rule, for its time, and then accepts a root path of a length that
    was settled before: floor or ceiling of `mean`, chosen so that the rounds keep to the mean.

    mean: tokens of a round, the one drawn behind the drafts included. A tree that is not that deep
    gives its deepest path. Of several paths the one whose last node comes first in the tree is
    taken. The token behind it is drawn from the target.
    """

    samples = False

    def __init__(self, rule: AcceptanceRule, mean: float) -> None:
        assert not rule.samples
        self.rule = rule
        self.mean = mean
        self.name = f"{rule.name}, simulated accept length {mean:g}"
        self._owed = 0.0  # tokens that the rounds so far lack
        self._turn = 0

    def __call__(
        self,
        tree: TokenTree,
        logits: Tensor,
        row_offsets: Tensor,
        rows: SamplingRows,
        committed_lens: Tensor,
        *,
        masks: TokenMasks | None = None,
    ) -> AcceptResult:
        """See `verify.sample_and_follow`."""
        self.rule(tree, logits, row_offsets, rows, committed_lens, masks=masks)
        depths = torch.where(tree.used(), tree.depths(), -1)
        lengths = on_device(self.lengths(tree.batch), depths.device)
        depth = torch.minimum(lengths - 1, depths.amax(1))
        self.note(depth + 1)
        node = (depths == depth[:, None]).to(torch.int8).argmax(1)
        path = _root_path(tree.parents, node, depth)
        tokens = tree.tokens.gather(1, path.roll(-1, 1))
        for level in sorted(set(depth.tolist())):
            (who,) = torch.nonzero(depth == level, as_tuple=True)
            tokens[who, level] = draw(
                logits,
                rows.select(who),
                committed_lens[who] + level + 1,
                row_offsets[who] + node[who],
                path=tokens[who, :level],
                masks=masks,
            )
        return AcceptResult(tokens=tokens, path=path, counts=depth + 1)

    def lengths(self, batch: int) -> Tensor:
        """[batch] tokens that the next round gives out, as far as its trees are that deep; the
        longer rounds go to another request each time."""
        low, high = math.floor(self.mean), math.ceil(self.mean)
        longer = round(self.mean * batch + self._owed) - low * batch if high > low else 0
        longer = min(max(longer, 0), batch)
        place = (torch.arange(batch) - self._turn) % batch
        self._turn += longer
        return torch.where(place < longer, high, low)

    def note(self, given: Tensor) -> None:
        """A round gave these tokens [batch]. What trees were too shallow for, the next rounds make
        up for, as far as one can."""
        batch = len(given)
        owed = self._owed + self.mean * batch - float(given.sum())
        self._owed = min(max(owed, -batch), batch)


def _root_path(parents: Tensor, node: Tensor, depth: Tensor) -> Tensor:
    """[B, N]: column d is the node at depth d on the way to `node` [B], which lies at `depth`; what
    stands behind it is 0."""
    path = torch.zeros_like(parents)
    request = torch.arange(len(node), device=node.device)
    for _ in range(int(depth.max()) + 1):
        path[request, depth] = node
        parent = parents[request, node].clamp(min=0)
        node, depth = parent, (depth - 1).clamp(min=0)
    path[:, 0] = 0
    return path
