"""What a model and a traffic need, by arithmetic: bytes on each GPU, bytes between them, replicas.
`docs/scale.md` shows it; a test computes that page again."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Gpu:
    """An H200. memory: bytes; read: bytes/s from memory, as measured; link: bytes/s to the other
    GPUs of the host, as its maker says; sum_s: the least that one all-reduce takes, assumed."""

    memory: float = 141e9
    read: float = 4.15e12
    link: float = 450e9
    sum_s: float = 10e-6


@dataclass(frozen=True)
class Model:
    """A decoder in `bytes` per number."""

    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    parameters: float
    bytes: int = 2


LLAMA_70B = Model(80, 8192, 8, 128, vocabulary=128_256, parameters=70.6e9)


@dataclass(frozen=True)
class Shard:
    """A model on `gpus` GPUs, of whose memory `share` may be used."""

    model: Model
    gpus: int
    gpu: Gpu = Gpu()
    share: float = 0.88

    @property
    def weights(self) -> float:
        """Bytes of weights on each GPU. The embedding is on all of them."""
        return (self._read + self._embedding) * self.model.bytes

    @property
    def _embedding(self) -> int:
        return self.model.vocabulary * self.model.hidden

    @property
    def _read(self) -> float:
        return (self.model.parameters - self._embedding) / self.gpus

    @property
    def kv_token(self) -> int:
        """Bytes of one token's KV on each GPU; a head is on one GPU at least."""
        heads = ceil(self.model.kv_heads / self.gpus)
        return 2 * self.model.layers * heads * self.model.head_dim * self.model.bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens that find room."""
        return int((self.gpu.memory * self.share - self.weights) // self.kv_token)

    @property
    def sums(self) -> int:
        """All-reduces of one forward: behind o_proj and down_proj of each layer."""
        return 0 if self.gpus == 1 else 2 * self.model.layers

    def sum_bytes(self, rows: int) -> int:
        """Bytes that one all-reduce adds up."""
        return rows * self.model.hidden * self.model.bytes

    def sums_s(self, rows: int) -> float:
        """Seconds of a forward's all-reduces: a GPU sends each byte 2 (n - 1) / n times."""
        sent = self.sum_bytes(rows) * 2 * (self.gpus - 1) / self.gpus
        return self.sums * max(self.gpu.sum_s, sent / self.gpu.link)

    def read_s(self, kv: int = 0) -> float:
        """Seconds that reading a forward's weights, and the KV of `kv` tokens, takes."""
        return (self._read * self.model.bytes + kv * self.kv_token) / self.gpu.read


def replicas(requests_per_s: float, answered: float, tokens_per_s: float) -> int:
    """Replicas for a traffic, at the tokens per second that one was measured to write."""
    return ceil(requests_per_s * answered / tokens_per_s)


def open_requests(requests_per_s: float, seconds: float) -> float:
    """Requests under way at any time (Little's law)."""
    return requests_per_s * seconds
