"""FlashInfer's paged attention (`--attention-backend flashinfer`).

A page is one slot. Its plan is made on the host for each forward, from lengths that are read back:
a seam, and nothing for a CUDA graph.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from sgl_spec.layers.context import AttnBatch
from sgl_spec.layers.device_attention import Attend, Heads

_WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation advises


class FlashInferAttention:
    """Token trees by a packed mask, chunks of a prefill by the causal rule."""

    def __init__(self, heads: Heads) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._heads = heads
        space = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=heads.device)
        # Only the FA2 kernels know masks; a wrapper keeps the kernels of its first plan.
        self._trees = BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend="fa2")
        self._chunks = BatchPrefillWithPagedKVCacheWrapper(space, "NHD")

    def reserve(self, max_batch: int, max_q_len: int, columns: int) -> None:
        """The work space is of one size."""

    def plan(self, batch: AttnBatch) -> Attend:
        """See `Attention.plan`. Waits for the device."""
        heads, causal = self._heads, batch.mask_words is None
        lens = kv_lens(batch)
        request, position = ragged(lens)
        wrapper = self._chunks if causal else self._trees
        wrapper.plan(
            batch.q_starts.int(),
            torch.cat((lens.new_zeros(1), lens.cumsum(0))).int(),
            batch.req_to_token[batch.rows[request], position],
            torch.ones_like(lens, dtype=torch.int32),
            num_qo_heads=heads.kv_heads * heads.heads_per_kv,
            num_kv_heads=heads.kv_heads,
            head_dim_qk=heads.head_dim,
            page_size=1,
            custom_mask=None if causal else tree_mask(batch, lens),
            causal=causal,
            sm_scale=heads.head_dim**-0.5,
            q_data_type=heads.dtype,
            kv_data_type=heads.dtype,
        )
        return partial(_run, wrapper)


def kv_lens(batch: AttnBatch) -> Tensor:
    """[B] int64, the columns that a request's rows may see."""
    lens = batch.prefix_lens + batch.q_starts.diff()
    return lens if batch.tree_lens is None else lens + batch.tree_lens


def ragged(lens: Tensor) -> tuple[Tensor, Tensor]:
    """(owner, index among its owner's) of lens[0] + lens[1] + ... things, in order."""
    owner = torch.arange(len(lens), device=lens.device).repeat_interleave(lens)
    first = lens.cumsum(0) - lens
    return owner, torch.arange(len(owner), device=lens.device) - first[owner]


def tree_mask(batch: AttnBatch, lens: Tensor) -> Tensor:
    """What each row of a token tree sees, [sum of rows x columns] bool, request by request."""
    assert batch.mask_words is not None
    request, _ = ragged(batch.q_starts.diff())
    row, column = ragged(lens[request])
    new = column - batch.prefix_lens[request[row]]  # negative: in the prefix
    seen = (batch.mask_words[row] >> new.clamp(0, 63)) & 1
    return (new < 0) | (seen != 0)


def _run(wrapper: Any, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    pages = k_cache.unsqueeze(1), v_cache.unsqueeze(1)  # [slots, 1, kv_heads, d]
    out: Tensor = wrapper.run(q.contiguous(), pages)
    return out.view(len(q), -1)
