"""Accept a root path of a length given beforehand, after every node was drawn: for measuring what
rounds cost at an accept length. The text is not the target's.

`sgl_spec.speculative.simulate` is the twin: a tree that is not that deep gives its deepest path, of
several the one whose last node comes first; the token behind it is the one drawn there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sgl_spec_kernels.chain import chain, chained
from sgl_spec_kernels.sample import Trees, Walked


@triton.jit
def _force_path(
    lengths,
    num_nodes,
    depths,
    words,
    tokens,
    drawn,
    out_tokens,
    out_path,
    out_counts,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    chain(CHAINED)
    request = tl.program_id(0)
    lane = tl.arange(0, LANES)
    count = tl.load(num_nodes + request).to(tl.int32)
    at = request * WIDTH + lane
    depth = tl.load(depths + at, mask=lane < count, other=-1).to(tl.int32)
    wanted = tl.load(lengths + request).to(tl.int32) - 1
    wanted = tl.minimum(wanted, tl.max(depth, 0))
    node = tl.min(tl.where(depth == wanted, lane, LANES), 0)
    word = tl.load(words + request * WIDTH + node)
    on_path = ((word >> lane.to(tl.int64)) & 1) != 0
    token = tl.load(tokens + at, mask=on_path, other=0)
    to = request * WIDTH + depth
    tl.store(out_path + to, lane.to(tl.int64), mask=on_path)
    tl.store(out_tokens + to - 1, token, mask=on_path & (lane > 0))
    tl.store(out_tokens + request * WIDTH + wanted, tl.load(drawn + request * WIDTH + node))
    tl.store(out_counts + request, (wanted + 1).to(tl.int64))


def force_path(trees: Trees, words: Tensor, lengths: Tensor, out: Walked) -> None:
    """Replace out.tokens, path and counts of `sample.draw_all`.

    words: [B, N] int64, the nodes' ancestors. lengths: [B] int64, tokens to give out, at least 1.
    """
    batch, nodes = trees.tokens.shape
    assert words.is_contiguous(), "words must be contiguous"
    assert words.shape == (batch, nodes)
    _force_path[(batch,)](
        lengths,
        trees.num_nodes,
        trees.depths,
        words,
        trees.tokens,
        out.drawn,
        out.tokens,
        out.path,
        out.counts,
        WIDTH=nodes,
        LANES=max(triton.next_power_of_2(nodes), 2),
        num_warps=1,
        **chained(trees.tokens.device),
    )
