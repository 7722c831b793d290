"""Paged attention under an ancestor mask, in plain torch: the twin of the Triton kernel.

For row t of request i, head h and its KV head h // group:

    out[t, h] = sum_p softmax_p(scale * q[t, h] . k[slot(i, p)]) v[slot(i, p)]

over the logical positions p that the row sees: all p < prefix_lens[i], and p = prefix_lens[i] + j
for the tree columns j of its own request that its mask word names (bit j), or j <= its own index
when there are no words (a causal prefill chunk). slot(i, p) = req_to_token[rows[i], p]. The new
rows are the last columns; tree_lens[i] columns before them were written by earlier forwards.

How it is computed: requests of similar length and row count form a padded group; the heads that
share a KV head are folded into the rows of one matrix product, so keys and values are never
repeated. What does not depend on the layer (slots to gather, masks) is planned once per forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

_GROUP_SLOTS = 4096  # a group's gathered keys should stay in the L2 cache
_PAD_SLOTS = 128  # padding a request by this much costs less than one more call
_CHUNK_ROWS = 384  # folded rows (tokens x heads per KV head) of one causal block


@dataclass(frozen=True, slots=True)
class AttnGroup:
    """`batch` requests padded to `q_len` rows and to one KV length.

    start: first of its batch * q_len rows in the plan's row order. slots: [batch * kv_len], what
    each column reads, or a slice when that is one run of a lone request. mask: [batch, 1, q_len *
    heads_per_kv, kv_len] added to the scores, None when every row sees every column.
    """

    start: int
    batch: int
    q_len: int
    slots: Tensor | slice
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttnPlan:
    """What all layers of one forward share.

    gather: [padded rows], the row of q that each planned row is, None for the identity. scatter:
    [T], the planned row of each row of q, None likewise.
    """

    groups: list[AttnGroup]
    gather: Tensor | None
    scatter: Tensor | None


@dataclass(frozen=True, slots=True)
class _Request:
    table_row: int
    prefix: int
    start: int
    q_len: int
    tree: int

    @property
    def columns(self) -> int:
        return self.tree + self.q_len

    @property
    def kv_len(self) -> int:
        return self.prefix + self.columns


def plan_tree_attn(
    req_to_token: Tensor,
    rows: Tensor,
    prefix_lens: Tensor,
    q_starts: Tensor,
    mask_words: Tensor | None,
    tree_lens: Tensor | None = None,
    *,
    heads_per_kv: int,
    dtype: torch.dtype,
) -> AttnPlan:
    """Plan the attention of one forward.

    req_to_token: [rows, width] int32. rows, prefix_lens: [B] int64. q_starts: [B + 1] int64.
    mask_words: [T] int64 or None (causal chunks). tree_lens: [B] int64 or None (all 0), tree
    columns that are there already; needs words. heads_per_kv: query heads per KV head. dtype: of q.
    """
    assert tree_lens is None or mask_words is not None, "a causal chunk has no tree before it"
    starts = q_starts.tolist()
    trees = [0] * (len(starts) - 1) if tree_lens is None else tree_lens.tolist()
    requests = [
        _Request(row, prefix, start, stop - start, tree)
        for row, prefix, tree, (start, stop) in zip(
            rows.tolist(), prefix_lens.tolist(), trees, pairwise(starts), strict=True
        )
    ]
    builder = _PlanBuilder(req_to_token, mask_words, heads_per_kv, dtype)
    if mask_words is None:
        builder.add_chunks([request for request in requests if request.q_len > 1])
        requests = [request for request in requests if request.q_len == 1]
    for members in _similar(requests):
        builder.add_trees(members)
    return builder.finish(starts[-1])


def tree_attn(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttnPlan, scale: float) -> Tensor:
    """Attention of one layer, [T, num_heads * head_dim].

    q: [T, num_heads, head_dim]. k_cache, v_cache: [num_slots, num_kv_heads, head_dim], contiguous,
    with the new rows already written.
    """
    kv_heads, head_dim = k_cache.shape[1:]
    keys, values = k_cache.view(len(k_cache), -1), v_cache.view(len(v_cache), -1)
    planned = q if plan.gather is None else q.index_select(0, plan.gather)
    outputs = []
    for group in plan.groups:
        b, n = group.batch, group.q_len
        # [b, n, kv_heads, heads_per_kv, d] -> [b, kv_heads, n * heads_per_kv, d]
        folded = planned[group.start : group.start + b * n].view(b, n, kv_heads, -1, head_dim)
        folded = folded.transpose(1, 2).reshape(b, kv_heads, -1, head_dim)
        k = _read(keys, group.slots).view(b, -1, kv_heads, head_dim).transpose(1, 2)
        v = _read(values, group.slots).view(b, -1, kv_heads, head_dim).transpose(1, 2)
        out = _attend(folded, k, v, group.mask, scale)
        out = out.view(b, kv_heads, n, -1, head_dim).transpose(1, 2)
        outputs.append(out.reshape(b * n, -1))
    result = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return result if plan.scatter is None else result.index_select(0, plan.scatter)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q: [b, heads, rows, d]; k, v: [b, heads, columns, d]; mask: added to the scores."""
    if q.device.type == "cpu":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    # On a GPU torch may choose a kernel that faults on masks whose rows are not aligned.
    scores = (q @ k.transpose(-1, -2)).float() * scale
    scores = scores if mask is None else scores + mask
    return scores.softmax(-1).to(v.dtype) @ v


def _read(cache: Tensor, slots: Tensor | slice) -> Tensor:
    return cache[slots] if isinstance(slots, slice) else cache.index_select(0, slots)


def _as_run(slots: Tensor) -> Tensor | slice:
    """One run of neighbouring slots as a slice, which reads the cache where it lies."""
    first, last = int(slots[0]), int(slots[-1])
    if last - first != len(slots) - 1:
        return slots
    run = torch.arange(first, last + 1, dtype=slots.dtype, device=slots.device)
    return slice(first, last + 1) if torch.equal(slots, run) else slots


def _similar(requests: list[_Request]) -> Iterator[list[_Request]]:
    """Groups whose padding costs less than calling once more.

    Row counts are compared by powers of two; a single group keeps the requests' own order, so
    that a uniform batch needs no permutation.
    """
    order = sorted(requests, key=lambda r: (r.q_len.bit_length(), r.kv_len), reverse=True)
    members: list[_Request] = []
    for request in order:
        if members and not _fits(members, request):
            yield sorted(members, key=lambda r: r.start)
            members = []
        members.append(request)
    if members:
        yield sorted(members, key=lambda r: r.start)


def _fits(members: list[_Request], request: _Request) -> bool:
    longest = members[0]
    padding = longest.kv_len - request.kv_len
    return (
        longest.q_len.bit_length() == request.q_len.bit_length()
        and padding <= max(_PAD_SLOTS, longest.kv_len // 8)
        and (len(members) + 1) * longest.kv_len <= _GROUP_SLOTS
    )


class _PlanBuilder:
    """Collects groups and the order of their rows."""

    def __init__(
        self, req_to_token: Tensor, mask_words: Tensor | None, heads_per_kv: int, dtype: torch.dtype
    ) -> None:
        self.req_to_token = req_to_token
        self.mask_words = mask_words
        self.heads_per_kv = heads_per_kv
        self.dtype = dtype
        self.device = req_to_token.device
        self.groups: list[AttnGroup] = []
        self.row_order: list[int] = []

    def add_chunks(self, requests: list[_Request]) -> None:
        """Causal chunks, in blocks of rows that stop at their own last column.

        A causal mask aligned at its bottom right corner is the same for every block, so one mask of
        the longest block serves all of them as a view.
        """
        if not requests:
            return
        size = max(_CHUNK_ROWS // self.heads_per_kv, 1)
        tallest = min(size, max(request.q_len for request in requests))
        corner = self._causal_corner(tallest, max(request.kv_len for request in requests))
        for request in requests:
            slots = self.req_to_token[request.table_row, : request.kv_len]
            run = _as_run(slots)
            for first in range(0, request.q_len, size):
                n = min(size, request.q_len - first)
                kv_len = request.prefix + first + n
                columns = slots[:kv_len] if run is slots else slice(run.start, run.start + kv_len)
                mask = corner[None, None, -n * self.heads_per_kv :, -kv_len:]
                self._add(
                    1,
                    n,
                    columns,
                    mask,
                    range(request.start + first, request.start + first + n),
                )

    def add_trees(self, requests: list[_Request]) -> None:
        """Requests whose rows see the prefix and what their mask word names."""
        q_len = max(request.q_len for request in requests)
        kv_len = max(request.kv_len for request in requests)
        table = self.req_to_token[self._ints([r.table_row for r in requests]), :kv_len]
        if all(request.kv_len == kv_len for request in requests):
            slots = table
        else:
            column = torch.arange(kv_len, device=self.device)
            lengths = self._ints([request.kv_len for request in requests])
            # Columns past a request's end read its first slot: any finite value will do.
            slots = torch.where(column < lengths[:, None], table, table[:, :1])
        order = [r.start + min(j, r.q_len - 1) for r in requests for j in range(q_len)]
        mask = self._tree_mask(requests, q_len, kv_len, order)
        columns = _as_run(slots[0]) if len(requests) == 1 else slots.reshape(-1)
        self._add(len(requests), q_len, columns, mask, order)

    def finish(self, num_rows: int) -> AttnPlan:
        """The plan of a forward of `num_rows` rows."""
        if self.row_order == list(range(num_rows)):
            return AttnPlan(self.groups, None, None)
        scatter = [0] * num_rows
        # A padding row repeats the request's last row and comes after it, so walk backwards.
        for planned in range(len(self.row_order) - 1, -1, -1):
            scatter[self.row_order[planned]] = planned
        return AttnPlan(self.groups, self._ints(self.row_order), self._ints(scatter))

    def _add(
        self,
        batch: int,
        q_len: int,
        slots: Tensor | slice,
        mask: Tensor | None,
        order: list[int] | range,
    ) -> None:
        self.groups.append(AttnGroup(len(self.row_order), batch, q_len, slots, mask))
        self.row_order.extend(order)

    def _causal_corner(self, num_rows: int, num_columns: int) -> Tensor:
        """[num_rows * heads_per_kv, num_columns]: token r sees all but num_rows - 1 - r columns."""
        row = torch.arange(num_rows, device=self.device).repeat_interleave(self.heads_per_kv)
        column = torch.arange(num_columns, device=self.device) - (num_columns - num_rows)
        return self._additive(column[None, :] <= row[:, None])

    def _tree_mask(
        self, requests: list[_Request], q_len: int, kv_len: int, order: list[int]
    ) -> Tensor | None:
        ragged = any(request.kv_len < kv_len for request in requests)
        if q_len == 1 and not ragged and not any(request.tree for request in requests):
            return None
        prefix = self._ints([request.prefix for request in requests])[:, None]
        column = torch.arange(kv_len, device=self.device)
        if self.mask_words is None:
            words = torch.ones(len(requests), q_len, dtype=torch.int64, device=self.device)
        else:
            words = self.mask_words[self._ints(order)].view(len(requests), q_len)
        new = column - prefix  # [b, kv_len]: column of the request's tree, negative: prefix
        own = (words[:, :, None] >> new.clamp(0, 63)[:, None, :]) & 1
        lengths = self._ints([request.columns for request in requests])[:, None]
        visible = torch.where((new < 0)[:, None, :], True, (own != 0) & (new < lengths)[:, None, :])
        if q_len == 1 and bool(visible.all()):  # the newest node of a chain
            return None
        return self._additive(visible.repeat_interleave(self.heads_per_kv, 1))[:, None]

    def _additive(self, visible: Tensor) -> Tensor:
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~visible, -torch.inf)

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
