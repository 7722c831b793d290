"""Which part of a model's weights a rank has; see `layers.parallel`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from torch import Tensor

from sgl_spec.errors import ConfigError
from sgl_spec.layers.parallel import Ranks
from sgl_spec.models.config import ModelConfig

_HEADS = re.compile(r"model\.layers\.\d+\.self_attn\.([qkv])_proj\.(weight|bias)")
_INNER = re.compile(r"model\.layers\.\d+\.mlp\.(gate|up)_proj\.(weight|bias)")
_SUMMED = re.compile(r"model\.layers\.\d+\.(self_attn\.o|mlp\.down)_proj\.weight")
_LM_HEAD = "lm_head.weight"


def check_size(config: ModelConfig, size: int) -> None:
    """`ConfigError` unless `size` ranks can share the model."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if size > kv_heads and (size % kv_heads or heads % size):
        raise _refusal(size, f"{heads} query and {kv_heads} key-value heads")
    if config.intermediate_size % size:
        raise _refusal(size, f"an intermediate size of {config.intermediate_size}")
    if config.vocab_size % size:
        raise _refusal(size, f"a vocabulary of {config.vocab_size}")


def _refusal(size: int, what: str) -> ConfigError:
    return ConfigError(
        f"--tp-size {size} does not divide the model, which has {what}.", param="tp_size"
    )


@dataclass(frozen=True, slots=True)
class Span:
    """A run of something that is divided."""

    start: int
    count: int

    def times(self, each: int) -> Span:
        """The same in units of which there are `each` in one."""
        return Span(self.start * each, self.count * each)


class Shard:
    """The part of one rank.

    KV heads are dealt out as evenly as they go, each with the query heads that read it; where there
    are fewer than ranks, a KV head lies on several, each with its own of the query heads. config:
    of the layers as this rank has them.
    """

    def __init__(self, config: ModelConfig, ranks: Ranks) -> None:
        check_size(config, ranks.size)
        rank, size = ranks.rank, ranks.size
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        first = rank * kv_heads // size
        kv = Span(first, max(1, (rank + 1) * kv_heads // size - first))
        query = kv.times(heads // kv_heads)
        if size > kv_heads:
            query = Span(rank, 1).times(heads // size)
        self._inner = Span(rank, 1).times(config.intermediate_size // size)
        self._words = Span(rank, 1).times(config.vocab_size // size)
        self._query, self._kv = query.times(dim), kv.times(dim)
        self.config = replace(
            config,
            num_heads=query.count,
            num_kv_heads=kv.count,
            intermediate_size=self._inner.count,
        )

    def cut(self, name: str, weight: Tensor) -> Tensor:
        """This rank's part of a stored weight, a view."""
        if found := _HEADS.fullmatch(name):
            return _narrow(weight, 0, self._query if found[1] == "q" else self._kv)
        if _INNER.fullmatch(name):
            return _narrow(weight, 0, self._inner)
        if found := _SUMMED.fullmatch(name):
            return _narrow(weight, 1, self._inner if found[1] == "mlp.down" else self._query)
        return self.words(weight) if name == _LM_HEAD else weight

    def words(self, head: Tensor) -> Tensor:
        """The rows of the LM head that are this rank's, a view."""
        return _narrow(head, 0, self._words)


def _narrow(weight: Tensor, dim: int, span: Span) -> Tensor:
    return weight.narrow(dim, span.start, span.count)
