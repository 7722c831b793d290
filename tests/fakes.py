"""A model without weights for engine tests, and drafters at both ends of acceptance.

`SumModel` stores one number per KV slot, a mix of token and position, and a row's logits are a hash
of the sum over everything the row sees. So a slot that is lost, shared wrongly, overwritten, moved
to the wrong place, or seen by the wrong row changes the text, and `SumModel.next_logits` says what
the text should be.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sgl_spec.engine.kv_pool import Holding
from sgl_spec.engine.req import Req, make_req
from sgl_spec.layers.context import ForwardBatch, KVCache
from sgl_spec.layers.parallel import ALONE
from sgl_spec.layers.wanted import only
from sgl_spec.request import SamplingParams, TokenizedRequest
from sgl_spec.speculative.base import DraftBatch
from sgl_spec.speculative.penalties import TokenCounts
from sgl_spec.speculative.sampling import build_rows, draw
from sgl_spec.speculative.tree import AcceptResult, TokenTree

VOCAB = 64
EOS = 0
_MASK = (1 << 31) - 1


def mix(tokens: Tensor, positions: Tensor) -> Tensor:
    """One number per (token, position)."""
    x = (tokens + 1) * 2654435761 + (positions + 7) * 40503
    x = (x ^ (x >> 15)) * 2246822519 & _MASK
    return (x ^ (x >> 13)) & _MASK


def holding_req(
    row: int, prompt: Sequence[int], output: Sequence[int], sampling: SamplingParams
) -> Req:
    """A request that holds a row, with some output."""
    asked = TokenizedRequest(rid=str(row), input_ids=list(prompt), sampling=sampling)
    req = make_req(asked, (EOS,), None)
    req.ids += output
    req.holding = Holding(row)
    return req


@dataclass
class _Config:
    eos_token_ids: tuple[int, ...] = (EOS,)
    vocab_size: int = VOCAB
    num_layers: int = 1


class SumModel:
    """`Decoder`'s interface over a one-number KV cache. entropy: scale of the logits' spread."""

    ranks = ALONE
    clock = staticmethod(lambda: time.perf_counter())

    def __init__(self, spread: float = 6.0) -> None:
        self.config = _Config()
        self.device = torch.device("cpu")
        self.kernels = "torch"
        self.spread = spread
        self.forwards = 0

    def new_kv_cache(self, num_slots: int) -> KVCache:
        return KVCache(*(torch.full((1, num_slots, 1, 1), -1, dtype=torch.int64) for _ in range(2)))

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        self.forwards += 1
        k = kv.k[0, :, 0, 0]
        k[batch.slots] = mix(batch.tokens, batch.positions)
        kv.v[0, batch.slots, 0, 0] = k[batch.slots]
        assert batch.slots.unique().numel() == batch.slots.numel(), "two rows write one slot"
        sums = [self._request_sums(batch, kv, i) for i in range(len(batch.rows))]
        return only(torch.cat(sums)[:, None], batch.wanted)

    def _request_sums(self, batch: ForwardBatch, kv: KVCache, i: int) -> Tensor:
        start, end = int(batch.q_starts[i]), int(batch.q_starts[i + 1])
        prefix, new = int(batch.prefix_lens[i]), end - start
        slots = batch.req_to_token[batch.rows[i], : prefix + new].long()
        seen = kv.k[0, slots, 0, 0]
        assert (seen >= 0).all(), "a slot that was never written is read"
        assert torch.equal(seen, kv.v[0, slots, 0, 0])
        assert torch.equal(slots[prefix:], batch.slots[start:end])
        if batch.mask_words is None:
            mask = torch.ones(new, new, dtype=torch.int64).tril()
        else:
            mask = (batch.mask_words[start:end, None] >> torch.arange(new)[None, :]) & 1
        return seen[:prefix].sum() + mask @ seen[prefix:]

    def logits(self, hidden: Tensor) -> Tensor:
        token = torch.arange(VOCAB)
        x = (hidden & _MASK) * 48271 + token[None, :] * 69621
        x = (x ^ (x >> 11)) * 1103515245 & _MASK
        x = ((x ^ (x >> 7)) & 0xFFFF).float() / 0xFFFF
        return x * self.spread

    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """[1, V]: the logits after `ids`, computed from scratch."""
        tokens = torch.tensor(list(ids))
        return self.logits(mix(tokens, torch.arange(len(tokens))).sum().view(1, 1))

    def reference(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """Plain step-by-step decoding, one token at a time; stops as the engine should."""
        counts = TokenCounts(1, VOCAB)
        counts.start(0, prompt, [])
        rows = build_rows([params], [len(prompt)], [EOS], counts=counts)
        stop = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
        ids = list(prompt)
        while len(ids) - len(prompt) < params.max_new_tokens:
            drawn = draw(self.next_logits(ids), rows, torch.tensor([len(ids)]))
            counts.add(torch.tensor([0]), drawn)
            token = int(drawn)
            ids.append(token)
            if token in stop and len(ids) - len(prompt) >= params.min_new_tokens:
                break
        return ids[len(prompt) :]


class RandomDrafter:
    """Random trees of random size: nearly nothing is accepted, every shape occurs."""

    def __init__(self, nodes: int, seed: int = 0) -> None:
        self.nodes = nodes
        self.rng = np.random.default_rng(seed)
        self.rows: set[int] = set()

    def begin(self, row: int, tokens: np.ndarray, known: int) -> None:
        assert row not in self.rows
        assert known <= len(tokens)
        self.rows.add(row)

    def finish(self, row: int) -> None:
        self.rows.remove(row)

    def propose(self, batch: DraftBatch) -> TokenTree:
        shape = (len(batch.rows), self.nodes)
        tokens, parents = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
        counts = np.ones(len(batch.rows), np.int64)
        for i, (row, length) in enumerate(zip(batch.rows, batch.lengths, strict=True)):
            tokens[i, 0] = batch.tokens[row, length - 1]
            self._grow(
                i,
                tokens,
                parents,
                counts,
                int(batch.max_nodes[i]),
                list(map(int, batch.tokens[row, :length])),
            )
        return TokenTree(*(torch.from_numpy(a) for a in (tokens, parents, counts)))

    def _grow(
        self,
        i: int,
        tokens: np.ndarray,
        parents: np.ndarray,
        counts: np.ndarray,
        most: int,
        ids: list[int],
    ) -> None:
        taken: set[tuple[int, int]] = set()
        for _ in range(self.rng.integers(0, min(most, self.nodes))):
            parent, token = int(self.rng.integers(counts[i])), int(self.rng.integers(VOCAB))
            if (parent, token) not in taken:
                taken.add((parent, token))
                tokens[i, counts[i]], parents[i, counts[i]] = token, parent
                counts[i] += 1

    def observe(self, batch: DraftBatch, tree: TokenTree, accepted: AcceptResult) -> None:
        for i, (row, length) in enumerate(zip(batch.rows, batch.lengths, strict=True)):
            count = int(accepted.counts[i])
            new = batch.tokens[row, length : length + count]
            assert list(new) == accepted.tokens[i, :count].tolist()

    def flush(self) -> None:
        assert not self.rows

    def stats(self) -> dict[str, float]:
        return {}


class OracleDrafter(RandomDrafter):
    """The target's own greedy continuation as a chain with junk siblings: with greedy requests
    every chain node is accepted."""

    def __init__(self, nodes: int, model: SumModel) -> None:
        super().__init__(nodes)
        self.model = model

    def _grow(
        self,
        i: int,
        tokens: np.ndarray,
        parents: np.ndarray,
        counts: np.ndarray,
        most: int,
        ids: list[int],
    ) -> None:
        parent = 0
        while counts[i] < min(most, self.nodes):
            true = int(self.model.next_logits(ids).argmax())
            both = [(true + 1) % VOCAB, true] if counts[i] + 2 <= most else [true]
            for token in both:
                tokens[i, counts[i]], parents[i, counts[i]] = token, parent
                counts[i] += 1
            parent = int(counts[i]) - 1
            ids.append(true)
