"""What `bench.kernels` times of a forward: each kernel on the shapes of an 8B Llama with SmolLM2's
vocabulary and of its EAGLE3 head, beside the bytes that it must move and what torch does in its
place. `tree_cases` has the kernels of drafting and sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_spec_kernels import gated_gemm, tree_attn
from sgl_spec_kernels.rms_norm import rms_norm
from sgl_spec_kernels.rope_kv import rope_kv
from sgl_spec_kernels.silu_mul import silu_mul
from sgl_spec_kernels.skinny_gemm import GemmShape, GemmWork, gemm_work, skinny_gemm, wins

Call = Callable[[], object]
DEVICE = "cuda"
HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, DRAFT_VOCAB = 4096, 32, 8, 128, 14336, 49152, 32000
LINEARS = {
    "qkv": (6144, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
    "head": (VOCAB, HIDDEN),
    "draft qkv": (6144, 2 * HIDDEN),
    "draft fuse": (HIDDEN, 3 * HIDDEN),
    "draft head": (DRAFT_VOCAB, HIDDEN),
}
# requests, rows of each, cached tokens of each
TREES = [
    (1, 1, 600),
    (1, 8, 600),
    (8, 8, 600),
    (48, 1, 600),
    (48, 8, 600),
    (48, 8, 2000),
    (1, 8, 16000),
]
# requests, rows of each, cached tokens by turns
_UNEQUAL = (100, 100, 100, 700, 800)
MIXED = [(batch, rows, _UNEQUAL) for batch, rows in ((24, 1), (48, 1), (48, 4), (48, 8))]
NORMED = (1, 8, 48, 64, 96, 192, 384)  # rows
_BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table.

    bytes: each input read once, each output written once. prepare: a fresh set of inputs and the
    call on it; several sets together exceed the L2 cache. baseline: the same for torch, if it has
    an equivalent. flops: of the matrix products, where they may take longer than the bytes.
    """

    name: str
    bytes: int
    prepare: Callable[[], Call]
    baseline: Callable[[], Call] | None = None
    flops: float = 0.0


def model_cases() -> Iterator[Case]:
    """Everything between the embedding and the logits."""
    for name, (outputs, inputs) in LINEARS.items():
        for rows in (1, 2, 4, 8, 16, 32, 64):
            yield linear(name, rows, outputs, inputs)
    for shape in TREES:
        yield attention(*shape)
    for batch, q_len, lengths in MIXED:
        yield attention_mixed(batch, q_len, lengths)
    for tokens in (512, 2048, 8192):
        yield chunk(tokens)
    for rows in NORMED:
        yield norm(rows)
    for rows in (1, 8, 48, 384):
        yield rope(rows)
        yield gate(rows)
    for rows in (32, 48, 64, 96, 128, 192, 256):
        yield gated(rows)
    for batch, q_len in ((1, 1), (1, 8), (8, 1), (8, 8), (48, 1), (48, 4)):
        yield layer(batch, q_len, 600)


def rand(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Normal values, in the dtype of the model if none is given."""
    return torch.randn(*shape, device=DEVICE).to(dtype or _BF16)


def _attn_call(q: Tensor, q_len: int, lengths: Sequence[int], *, causal: bool) -> Call:
    """Attention of q [B * q_len, HEADS, DIM], behind so many tokens of each request, over a cache
    of its own whose slots are scattered."""
    batch, columns, group = len(lengths), max(lengths) + q_len, HEADS // KV_HEADS
    kv = rand(2, batch * columns, KV_HEADS, DIM)
    words = ((2 << torch.arange(q_len, device=DEVICE)) - 1).repeat(batch)
    plan = tree_attn.plan_tree_attn(
        torch.randperm(batch * columns, device=DEVICE).view(batch, -1).int(),
        torch.arange(batch, device=DEVICE),
        torch.tensor(lengths, device=DEVICE),
        torch.arange(batch + 1, device=DEVICE) * q_len,
        None if causal else words,
        heads_per_kv=group,
        kv_heads=KV_HEADS,
        max_q_len=q_len,
        work=tree_attn.attn_work(batch, KV_HEADS, q_len, group, DIM, DEVICE),
    )
    return lambda: tree_attn.tree_attn(q, kv[0], kv[1], plan, DIM**-0.5)


def _attn_bytes(q_len: int, lengths: Sequence[int]) -> int:
    columns = sum(length + q_len for length in lengths)
    return 4 * DIM * (columns * KV_HEADS + len(lengths) * q_len * HEADS)


def attention(batch: int, q_len: int, length: int) -> Case:
    """Rows of `batch` requests over `length` cached tokens."""
    columns = length + q_len

    def prepare() -> Call:
        q = rand(batch * q_len, HEADS, DIM)
        return _attn_call(q, q_len, [length] * batch, causal=False)

    def baseline() -> Call:
        """Contiguous keys and a dense mask: less than a server has to do."""
        k, v = rand(2, batch, KV_HEADS, columns, DIM)
        q = rand(batch, HEADS, q_len, DIM)
        mask = torch.ones(q_len, columns, dtype=torch.bool, device=DEVICE).tril(length)
        return lambda: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    name = f"attention {batch} x {q_len}, {length} cached"
    return Case(name, _attn_bytes(q_len, [length] * batch), prepare, baseline)


def attention_mixed(batch: int, q_len: int, lengths: Sequence[int]) -> Case:
    """Rows of `batch` requests over cached tokens of these lengths, by turns."""
    each = [lengths[i % len(lengths)] for i in range(batch)]

    def prepare() -> Call:
        return _attn_call(rand(batch * q_len, HEADS, DIM), q_len, each, causal=False)

    name = f"attention {batch} x {q_len}, {min(lengths)} to {max(lengths)} cached"
    return Case(name, _attn_bytes(q_len, each), prepare)


def chunk(tokens: int) -> Case:
    """Causal attention of the first chunk of a prompt."""

    def prepare() -> Call:
        return _attn_call(rand(tokens, HEADS, DIM), tokens, [0], causal=True)

    def baseline() -> Call:
        k, v = rand(2, 1, KV_HEADS, tokens, DIM)
        q = rand(1, HEADS, tokens, DIM)
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    flops = 2.0 * tokens * (tokens + 1) * HEADS * DIM
    return Case(f"prompt of {tokens}", _attn_bytes(tokens, [0]), prepare, baseline, flops)


def linear(name: str, rows: int, outputs: int, inputs: int, shape: GemmShape | None = None) -> Case:
    """A dense layer on few rows; o and down add to the residual stream."""
    added = name in ("o", "down")

    def prepare() -> Call:
        weight, x = rand(outputs, inputs), rand(rows, inputs)
        stream = rand(rows, outputs) if added else None
        out = stream if stream is not None else torch.empty_like(rand(rows, outputs))
        work = gemm_work([(outputs, inputs)], rows, DEVICE)
        return lambda: skinny_gemm(x, weight, work, None, stream, out, shape)

    def baseline() -> Call:
        weight, x, stream = rand(outputs, inputs), rand(rows, inputs), rand(rows, outputs)
        if added:
            return lambda: torch.addmm(stream, x, weight.T)
        return lambda: F.linear(x, weight)

    moved = 2 * (outputs * inputs + rows * (inputs + outputs * (2 if added else 1)))
    return Case(f"{name} x {rows} rows", moved, prepare, baseline)


def norm(rows: int) -> Case:
    """RMSNorm with the residual."""

    def prepare() -> Call:
        x, stream, weight = rand(rows, HIDDEN), rand(rows, HIDDEN), rand(HIDDEN)
        out = torch.empty_like(x)
        return lambda: rms_norm(x, weight, 1e-5, stream, out)

    def baseline() -> Call:
        x, stream, weight = rand(rows, HIDDEN), rand(rows, HIDDEN), rand(HIDDEN)
        return lambda: F.rms_norm(stream.add_(x), weight.shape, weight, 1e-5)

    return Case(f"norm + residual x {rows}", 2 * HIDDEN * (4 * rows + 1), prepare, baseline)


def rope(rows: int) -> Case:
    """Rotary and KV write."""

    def prepare() -> Call:
        qkv, cache = rand(rows, (HEADS + 2 * KV_HEADS) * DIM), rand(2, 4096, KV_HEADS, DIM)
        angles = torch.rand(8192, DIM // 2, device=DEVICE) * 6
        cos, sin = angles.cos(), angles.sin()
        slots = torch.randperm(4096, device=DEVICE)[:rows]
        return lambda: rope_kv(qkv, cache[0], cache[1], cos, sin, slots, slots)

    moved = rows * (2 * 2 * (HEADS + 2 * KV_HEADS) * DIM + 4 * DIM)
    return Case(f"rotary + KV write x {rows}", moved, prepare)


def gate(rows: int) -> Case:
    """SiLU x mul."""

    def prepare() -> Call:
        x = rand(rows, 2 * INNER)
        return lambda: silu_mul(x)

    def baseline() -> Call:
        x = rand(rows, 2 * INNER)
        return lambda: F.silu(x[:, :INNER]).mul_(x[:, INNER:])

    return Case(f"silu x mul x {rows}", 2 * 3 * rows * INNER, prepare, baseline)


def gated(rows: int, shape: gated_gemm.GatedShape | None = None) -> Case:
    """The gate and up product with its activation; torch's product and our activation."""
    outputs, inputs = LINEARS["gate_up"]
    shape = shape or gated_gemm.wins(rows, outputs, inputs)

    def prepare() -> Call:
        assert shape is not None, f"nothing is tuned for {rows} rows"
        weight, x = rand(outputs, inputs), rand(rows, inputs)
        return lambda: gated_gemm.gated_gemm(x, weight, shape)

    def baseline() -> Call:
        weight, x = rand(outputs, inputs), rand(rows, inputs)
        return lambda: silu_mul(F.linear(x, weight))

    moved = 2 * (outputs * inputs + rows * (inputs + outputs // 2))
    return Case(f"gated product x {rows}", moved, prepare, baseline, 2.0 * rows * outputs * inputs)


def product(x: Tensor, weight: Tensor, work: GemmWork, added: Tensor | None = None) -> Tensor:
    """x W^T, added to a stream in place if there is one, by whatever is faster."""
    shape = wins(x.shape[0], *weight.shape)
    if shape is None:
        return torch_product(x, weight, work, added)
    y: Tensor = skinny_gemm(x, weight, work, None, added, added, shape)
    return y


def torch_product(x: Tensor, weight: Tensor, work: GemmWork, added: Tensor | None = None) -> Tensor:
    """The same by torch."""
    return F.linear(x, weight) if added is None else added.addmm_(x, weight.T)


def inner_product(x: Tensor, weight: Tensor, work: GemmWork) -> Tensor:
    """silu(gate) * up, by whatever is faster."""
    shape = gated_gemm.wins(x.shape[0], *weight.shape)
    y: Tensor
    if shape is None:
        y = silu_mul(product(x, weight, work))
    else:
        y = gated_gemm.gated_gemm(x, weight, shape)
    return y


def layer(batch: int, q_len: int, length: int) -> Case:
    """A whole layer, eight or nine kernels; torch's: with its own products in place of ours."""
    rows, width = batch * q_len, (HEADS + 2 * KV_HEADS) * DIM
    shapes = [LINEARS[name] for name in ("qkv", "o", "gate_up", "down")]

    def make(linear: Callable[..., Tensor], inner: Callable[..., Tensor]) -> Call:
        qkv_w, o_w, gate_w, down_w = (rand(*shape) * 0.02 for shape in shapes)
        x, stream, norm_w = rand(rows, HIDDEN), rand(rows, HIDDEN), rand(HIDDEN)
        work = gemm_work(shapes, rows, DEVICE)
        angles = torch.rand(8192, DIM // 2, device=DEVICE) * 6
        cos, sin, cache = angles.cos(), angles.sin(), rand(2, 4096, KV_HEADS, DIM)
        slots = torch.randperm(4096, device=DEVICE)[:rows]
        q = torch.empty(rows, HEADS, DIM, dtype=_BF16, device=DEVICE)
        attend = _attn_call(q, q_len, [length] * batch, causal=False)

        def call() -> None:
            qkv = linear(rms_norm(x, norm_w, 1e-5, stream), qkv_w, work)
            rope_kv(qkv.view(rows, width), cache[0], cache[1], cos, sin, slots, slots)
            mixed = attend()
            assert isinstance(mixed, Tensor)
            linear(mixed, o_w, work, stream)
            linear(inner(rms_norm(stream, norm_w, 1e-5), gate_w, work), down_w, work, stream)

        return call

    weights = sum(outputs * inputs for outputs, inputs in shapes)
    moved = 2 * weights + _attn_bytes(q_len, [length] * batch)
    name = f"layer {batch} x {q_len}, {length} cached"
    flops = 2.0 * rows * weights
    return Case(
        name,
        moved,
        lambda: make(product, inner_product),
        lambda: make(torch_product, lambda *of: silu_mul(torch_product(*of))),
        flops,
    )
