"""What a draft model is to the rest of the server: three heads and one whole model behind it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from sgl_spec.layers.context import ForwardBatch, KVCache


class DraftModel(Protocol):
    """A model that drafts, with its own KV cache over the target's slots.

    Two kinds of rows, told apart by `capture`:
    - a head (EAGLE, EAGLE3; `capture` not empty) is fed shifted. The row at position p holds the
      token of position p + 1 and the feature of position p, its KV lies in the slot of position p,
      and it predicts the token of position p + 2. The feature is `fuse` of what the target's
      layers gave at p, or, for a row of a draft tree, what `forward` returned for its parent row.
    - a whole model (STANDALONE; `capture` empty) is fed as any decoder: the row at position p holds
      the token of position p and predicts that of p + 1.

    Use under `torch.inference_mode()`.
    """

    @property
    def name(self) -> str:
        """For logs and errors: the layout and where the weights came from."""
        ...

    @property
    def width(self) -> int:
        """H: width of the features that `forward` takes and of the rows that it returns."""
        ...

    @property
    def logit_width(self) -> int:
        """W: columns of `logits`."""
        ...

    @property
    def token_ids(self) -> Tensor | None:
        """[W] int64, the target's token of each column; None: column c is token c."""
        ...

    @property
    def capture(self) -> tuple[int, ...]:
        """Layers of the target whose inputs the head reads, in the order in which it wants them
        concatenated (see `Decoder.forward_features`); () for a whole model."""
        ...

    def fuse(self, features: Tensor) -> Tensor:
        """[T, H], the features of committed rows. features: [T, len(capture) * target hidden], as
        `Decoder.forward_features` returns them. Not to be called where `capture` is ()."""
        ...

    def forward(self, batch: ForwardBatch, features: Tensor | None, kv: KVCache) -> Tensor:
        """Write the KV of every row at `batch.slots`; [R, H] of the rows that are read, the hidden
        row from which `logits` predicts and which is the feature of the row's children in a draft
        tree.

        features: [T, H], in the dtype of the head; None for a whole model.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, W] float32. hidden: [R, H], rows that `forward` returned."""
        ...

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """`logits` in the model's dtype, for kernels that widen them as they read; each row is
        contiguous, rows may lie apart."""
        ...

    def reserve(self, max_batch: int, max_q_len: int, positions: int = 0) -> None:
        """Make work space beforehand, as `Decoder.reserve` does."""
        ...

    def new_kv_cache(self, num_slots: int) -> KVCache:
        """Empty keys and values for `num_slots` tokens of every draft layer."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Memory of the draft's own weights; what it shares with the target is not counted."""
        ...

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one KV slot over all draft layers."""
        ...
