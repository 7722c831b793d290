"""The one shape of a forward pass: rows of tokens, the KV they may see, and where they write."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of every layer, addressed by slot.

    k, v: [num_layers, num_slots, num_kv_heads, head_dim].
    """

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttnBatch:
    """What attention reads of a forward; see `ForwardBatch`."""

    req_to_token: Tensor
    rows: Tensor
    prefix_lens: Tensor
    q_starts: Tensor
    mask_words: Tensor | None
    tree_lens: Tensor | None = None
    max_q_len: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch(AttnBatch):
    """One forward over ragged rows: B requests, T rows in all, request i owning rows
    q_starts[i] .. q_starts[i+1].

    Row r of request i holds `tokens[r]` at rotary position `positions[r]`; its KV is written at
    slot `slots[r]`, which is logical position prefix_lens[i] + (r - q_starts[i]) of the request's
    table row. A row sees the whole prefix (logical positions < prefix_lens[i]) and, of its own
    request's new rows,
    - `mask_words` None: itself and the rows before it (a prefill chunk, causal);
    - else row j (counted from q_starts[i]) iff bit j of its word is set (a token tree; at most 64
      rows per request). A root-only tree (one row, word 1) is ordinary decoding.

    A tree may also be written in several forwards, a few rows at a time: request i then has
    tree_lens[i] columns of it in the cache already, this forward's rows are written behind them, at
    logical positions prefix_lens[i] + tree_lens[i] + ..., and bit c of a word names column c of the
    whole tree, logical position prefix_lens[i] + c (at most 64 columns per request).

    On the device path (see `layers.backend`) batches may be filled up to the size of a CUDA graph:
    a slot of -1 stores nothing, and rows that no request owns (behind q_starts[-1]; tokens and
    positions 0, slots -1) are allowed. What such rows give means nothing. `max_q_len` is a bound on
    the rows of a request that the host knows: with it such a forward reads nothing back from the
    device; where it is None the bound is read from q_starts.

    Where one row of each request is all that is read of a forward, `wanted` names it: the last
    layer then leaves the others out once their keys and values are stored, and what the model
    returns has one row for each request. Features of layers are of all rows still. The rows of a
    request up to the wanted one must be a chain.

    tokens, positions, slots: [T] int64. mask_words: [T] int64 or None.
    req_to_token: [rows, width] int32, the slot of each logical position of each request row.
    rows: [B] int64, table row of each request. prefix_lens: [B] int64. q_starts: [B + 1] int64.
    tree_lens: [B] int64, with mask_words only; None is all 0. wanted: [B] int64, counted in T, any
    row where a request has none; None: all rows are read.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    wanted: Tensor | None = None
