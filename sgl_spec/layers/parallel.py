"""One model over several ranks, and the two collectives that its layers need.

    q, k, v, gate, up    by outputs: each rank has its own heads and its part of the inner columns
    o, down              by inputs: each rank's product is a summand, `Ranks.sum` adds them up
    LM head              by vocabulary: `Ranks.gather` lays the parts side by side

Everything between is computed by every rank from the same numbers, so drafts, draws and walks are
equal on all of them and are never sent. The embedding is whole on every rank: to look rows up in
parts would cost a collective in each forward, and in each step of a draft model that shares it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sgl_spec.layers.linear import Linear

# Its name since torch 2.13, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Ranks(Protocol):
    """Those that share a model. All of them call the same methods in the same order.

    rank: this one's place, 0 leads. size: how many there are.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """x added up over the ranks, the same bits on each; x may be overwritten."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """[rows, columns of all ranks]: their x [rows, columns] side by side, in their order."""
        ...

    def agree(self, value: Any) -> Any:
        """Rank 0's value, plain data. What is measured or waited for differs between ranks; what
        is decided by it must not."""
        ...

    def least(self, count: int) -> int:
        """The smallest of the ranks' counts."""
        ...


class Alone:
    """The one rank of a model that is not shared; see `Ranks`."""

    rank, size = 0, 1

    def sum(self, x: Tensor) -> Tensor:
        """x itself."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """x itself."""
        return x

    def agree(self, value: Any) -> Any:
        """The value itself."""
        return value

    def least(self, count: int) -> int:
        """The count itself."""
        return count


ALONE = Alone()


class TorchRanks:
    """Ranks of torch.distributed's default process group; see `Ranks`.

    agreed: hands on rank 0's value. ordered: sums are taken in the order of the ranks, whatever the
    library would do with a tensor of that size: a row's bits then do not depend on the rows beside
    it. host: a group whose collectives the CPU runs.
    """

    def __init__(
        self, agreed: Callable[[Any], Any], host: dist.ProcessGroup, *, ordered: bool
    ) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.host = host
        self._agreed, self._ordered = agreed, ordered

    def sum(self, x: Tensor) -> Tensor:
        """See `Ranks`."""
        if self._ordered:
            return ordered_sum(self._parts(x))
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """See `Ranks`."""
        return self._parts(x).transpose(0, 1).reshape(x.shape[0], -1)

    def agree(self, value: Any) -> Any:
        """See `Ranks`."""
        return self._agreed(value)

    def least(self, count: int) -> int:
        """See `Ranks`."""
        found = torch.tensor([count])
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.host)
        return int(found)

    def differing(self, digest: int) -> list[int]:
        """The ranks whose digest is not rank 0's."""
        found = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(found, torch.tensor([digest]), group=self.host)
        return [rank for rank, one in enumerate(found) if int(one) != int(found[0])]

    def _parts(self, x: Tensor) -> Tensor:
        """[ranks, rows, columns]."""
        parts = x.new_empty(self.size, *x.shape)
        _all_gather(parts.view(-1, *x.shape[1:]), x.contiguous())
        return parts


def ordered_sum(parts: Tensor) -> Tensor:
    """The sum over the first dimension from the first to the last, in float32."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


class SummedLinear(Linear):
    """A dense layer whose inputs are divided: the ranks' products are added up, then the bias."""

    __slots__ = ("_ranks", "_whole_bias")

    def __init__(self, weight: Tensor, bias: Tensor | None, ranks: Ranks) -> None:
        """weight: [out, in of this rank]. bias: [out], whole on every rank, or None."""
        super().__init__(weight)
        self._whole_bias, self._ranks = bias, ranks

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        total = self._ranks.sum(super().__call__(x))
        return total if self._whole_bias is None else total.add_(self._whole_bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Linear`."""
        return self(x).add_(residual)

    def add_into(self, stream: Tensor, x: Tensor) -> None:
        """See `Linear`."""
        stream.add_(self(x))

    def tensors(self) -> list[Tensor]:
        """See `Linear`."""
        stored = super().tensors()
        return stored if self._whole_bias is None else [*stored, self._whole_bias]


class GatheredLinear(Linear):
    """A dense layer whose outputs are divided, and gathered: every rank has all of them."""

    __slots__ = ("_ranks",)

    def __init__(self, weight: Tensor, ranks: Ranks) -> None:
        """weight: [out of this rank, in]."""
        super().__init__(weight)
        self._ranks = ranks

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return self._ranks.gather(super().__call__(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See `Linear`."""
        return self(x).add_(residual)

    def add_into(self, stream: Tensor, x: Tensor) -> None:
        """See `Linear`."""
        stream.add_(self(x))

    def plain_weight(self) -> Tensor:
        """See `Linear`: of all ranks, a copy."""
        return self._ranks.gather(super().plain_weight().t().contiguous()).t()
