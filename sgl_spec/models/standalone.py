"""A whole model as a draft: same tokenizer as the target, own weights and KV, fed unshifted."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from sgl_spec.layers.context import ForwardBatch, KVCache
from sgl_spec.models.decoder import Decoder


class StandaloneDraft:
    """A `DraftModel` that is a `Decoder`.

    The two vocabularies agree up to `num_tokens`, the number of tokens that the tokenizer has; rows
    beyond it, in either model, are padding. Padding is never drafted. A padding id that a client
    sends for the target, and that this model has no row for, is read as token 0: what it drafts
    then may be poor, the text is the target's anyway.
    """

    token_ids: Tensor | None = None
    capture: tuple[int, ...] = ()

    def __init__(self, name: str, model: Decoder, num_tokens: int, target_rows: int) -> None:
        """target_rows: of the target's embedding."""
        assert num_tokens <= model.config.vocab_size
        self.name = name
        self.model = model
        self.width = model.config.hidden_size
        self.logit_width = num_tokens
        self._lacks_rows = model.config.vocab_size < target_rows

    def fuse(self, features: Tensor) -> Tensor:
        """A whole model reads no features."""
        raise AssertionError(f"{self.name} captures nothing of the target")

    def forward(self, batch: ForwardBatch, features: Tensor | None, kv: KVCache) -> Tensor:
        """See `DraftModel.forward`: the final-normed hidden; features are None."""
        assert features is None
        return self.model.forward(self._within(batch) if self._lacks_rows else batch, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, logit_width] float32 of rows that `forward` returned."""
        return self.model.logits(hidden)[:, : self.logit_width]

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """`logits` in the model's dtype; rows lie apart where the model has padding."""
        return self.model.raw_logits(hidden)[:, : self.logit_width]

    def reserve(self, max_batch: int, max_q_len: int, positions: int = 0) -> None:
        """See `Decoder.reserve`."""
        self.model.reserve(max_batch, max_q_len, positions)

    def new_kv_cache(self, num_slots: int) -> KVCache:
        """Empty keys and values for `num_slots` tokens of every layer."""
        return self.model.new_kv_cache(num_slots)

    @property
    def weight_bytes(self) -> int:
        """Memory of the model's weights."""
        return self.model.weight_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one KV slot over all layers."""
        return self.model.kv_bytes_per_token

    def _within(self, batch: ForwardBatch) -> ForwardBatch:
        known = batch.tokens < self.model.config.vocab_size
        return dataclasses.replace(batch, tokens=torch.where(known, batch.tokens, 0))
