"""What `bench.kernels` times: each kernel on the shapes of an 8B Llama, beside the bytes that it
must move and what torch does in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_spec_kernels import compact, draft_topk, filters, reject, sample, tree_attn, tree_build
from sgl_spec_kernels.rms_norm import rms_norm
from sgl_spec_kernels.rope_kv import rope_kv
from sgl_spec_kernels.silu_mul import silu_mul
from sgl_spec_kernels.skinny_gemm import GemmShape, gemm_work, skinny_gemm

Call = Callable[[], object]
DEVICE = "cuda"
HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, DRAFT_VOCAB = 4096, 32, 8, 128, 14336, 128256, 32000
LINEARS = {
    "qkv": (6144, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}
_BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table.

    bytes: each input read once, each output written once. prepare: a fresh set of inputs and the
    call on it; several sets together exceed the L2 cache. baseline: the same for torch, if it has
    an equivalent.
    """

    name: str
    bytes: int
    prepare: Callable[[], Call]
    baseline: Callable[[], Call] | None = None


def all_cases() -> Iterator[Case]:
    """Every kernel."""
    for batch, q_len, length in (
        (1, 1, 500),
        (1, 8, 500),
        (8, 8, 1000),
        (48, 1, 500),
        (48, 8, 500),
    ):
        yield attention(batch, q_len, length)
    yield attention(1, 8, 16000)
    for name, (outputs, inputs) in LINEARS.items():
        for rows in (1, 8, 16):
            yield linear(name, rows, outputs, inputs)
    for rows in (8, 384):
        yield norm(rows)
        yield rope(rows)
        yield gate(rows)
    for batch in (1, 48):
        yield topk(batch)
        yield trees(batch)
        yield compaction(batch)
        for filtered in (False, True):
            yield walk(batch, filtered=filtered)
        yield levels(batch)
        yield rejection(batch)


def _rand(*shape: int, dtype: torch.dtype = _BF16) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def attention(batch: int, q_len: int, length: int) -> Case:
    """Rows of `batch` requests over `length` cached tokens, slots scattered."""
    columns = length + q_len
    kv_bytes = 2 * batch * columns * KV_HEADS * DIM * 2
    group = HEADS // KV_HEADS

    def prepare() -> Call:
        kv = _rand(2, batch * columns, KV_HEADS, DIM)
        table = torch.randperm(batch * columns, device=DEVICE).view(batch, -1).int()
        plan = tree_attn.plan_tree_attn(
            table,
            torch.arange(batch, device=DEVICE),
            torch.full((batch,), length, device=DEVICE),
            torch.arange(batch + 1, device=DEVICE) * q_len,
            ((2 << torch.arange(q_len, device=DEVICE)) - 1).repeat(batch),
            heads_per_kv=group,
            kv_heads=KV_HEADS,
            max_q_len=q_len,
            work=tree_attn.attn_work(batch, KV_HEADS, q_len, group, DIM, DEVICE),
        )
        q = _rand(batch * q_len, HEADS, DIM)
        return lambda: tree_attn.tree_attn(q, kv[0], kv[1], plan, DIM**-0.5)

    def baseline() -> Call:
        """Contiguous keys and a dense mask: less than a server has to do."""
        k, v = _rand(2, batch, KV_HEADS, columns, DIM)
        q = _rand(batch, HEADS, q_len, DIM)
        mask = torch.ones(q_len, columns, dtype=torch.bool, device=DEVICE).tril(length)
        return lambda: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    moved = kv_bytes + 2 * batch * q_len * HEADS * DIM * 2
    return Case(f"attention {batch} x {q_len}, {length} cached", moved, prepare, baseline)


def linear(name: str, rows: int, outputs: int, inputs: int, shape: GemmShape | None = None) -> Case:
    """A dense layer on few rows; o and down add to the residual stream."""
    added = name in ("o", "down")

    def prepare() -> Call:
        weight, x = _rand(outputs, inputs), _rand(rows, inputs)
        stream = _rand(rows, outputs) if added else None
        out = stream if stream is not None else torch.empty_like(_rand(rows, outputs))
        work = gemm_work([(outputs, inputs)], rows, DEVICE)
        return lambda: skinny_gemm(x, weight, work, None, stream, out, shape)

    def baseline() -> Call:
        weight, x, stream = _rand(outputs, inputs), _rand(rows, inputs), _rand(rows, outputs)
        if added:
            return lambda: torch.addmm(stream, x, weight.T)
        return lambda: F.linear(x, weight)

    moved = 2 * (outputs * inputs + rows * (inputs + outputs * (2 if added else 1)))
    return Case(f"{name} x {rows} rows", moved, prepare, baseline)


def norm(rows: int) -> Case:
    """RMSNorm with the residual."""

    def prepare() -> Call:
        x, stream, weight = _rand(rows, HIDDEN), _rand(rows, HIDDEN), _rand(HIDDEN)
        out = torch.empty_like(x)
        return lambda: rms_norm(x, weight, 1e-5, stream, out)

    def baseline() -> Call:
        x, stream, weight = _rand(rows, HIDDEN), _rand(rows, HIDDEN), _rand(HIDDEN)
        return lambda: F.rms_norm(stream.add_(x), weight.shape, weight, 1e-5)

    return Case(f"norm + residual x {rows}", 2 * HIDDEN * (4 * rows + 1), prepare, baseline)


def rope(rows: int) -> Case:
    """Rotary and KV write."""

    def prepare() -> Call:
        qkv, cache = _rand(rows, (HEADS + 2 * KV_HEADS) * DIM), _rand(2, 4096, KV_HEADS, DIM)
        angles = torch.rand(8192, DIM // 2, device=DEVICE) * 6
        cos, sin = angles.cos(), angles.sin()
        slots = torch.randperm(4096, device=DEVICE)[:rows]
        return lambda: rope_kv(qkv, cache[0], cache[1], cos, sin, slots, slots)

    moved = rows * (2 * 2 * (HEADS + 2 * KV_HEADS) * DIM + 4 * DIM)
    return Case(f"rotary + KV write x {rows}", moved, prepare)


def gate(rows: int) -> Case:
    """SiLU x mul."""

    def prepare() -> Call:
        x = _rand(rows, 2 * INNER)
        return lambda: silu_mul(x)

    def baseline() -> Call:
        x = _rand(rows, 2 * INNER)
        return lambda: F.silu(x[:, :INNER]).mul_(x[:, INNER:])

    return Case(f"silu x mul x {rows}", 2 * 3 * rows * INNER, prepare, baseline)


def topk(batch: int) -> Case:
    """Draft top 4 of 4 rows a request, with the target's noise."""
    rows = 4 * batch

    def prepare() -> Call:
        logits = _rand(rows, DRAFT_VOCAB)
        values = torch.empty(rows, 4, device=DEVICE)
        tokens = torch.empty(rows, 4, dtype=torch.int64, device=DEVICE)
        work = draft_topk.topk_work(rows, DRAFT_VOCAB, 4, DEVICE)
        numbers, warm = torch.arange(batch, device=DEVICE), torch.ones(batch, device=DEVICE)
        ids = torch.randperm(VOCAB, device=DEVICE)[:DRAFT_VOCAB]
        return lambda: draft_topk.draft_topk(
            logits,
            values,
            tokens,
            work,
            error=0.7,
            depth=1,
            lengths=numbers,
            seed=numbers,
            temperature=warm,
            ids=ids,
        )

    def baseline() -> Call:
        logits = _rand(rows, DRAFT_VOCAB)
        return lambda: logits.float().log_softmax(-1).topk(4)

    moved = 2 * rows * DRAFT_VOCAB + 8 * DRAFT_VOCAB
    return Case(f"draft top 4 x {rows}", moved, prepare, baseline)


def trees(batch: int) -> Case:
    """A step of growth and the building of (5, 4, 8) trees: two kernels."""

    def prepare() -> Call:
        state = tree_build.grow_state(batch, 5, 4, DEVICE)
        tree = tree_build.device_tree(batch, 8, DEVICE)
        state.cand_scores.uniform_(-9, -1)
        log_probs = -torch.rand(4 * batch, 4, device=DEVICE)
        tokens = torch.randint(VOCAB, (4 * batch, 4), device=DEVICE)
        rows = torch.arange(batch, device=DEVICE)
        table = torch.randint(4096, (batch, 64), dtype=torch.int32, device=DEVICE)

        def call() -> None:
            where = {"rows": rows, "req_to_token": table}
            tree_build.grow_tree(
                state, log_probs, tokens, 2, prefix_lens=rows * 0, last=False, **where
            )
            tree_build.build_tree(tree, state, rows, 5, committed_lens=rows * 0, **where)

        return call

    return Case(f"grow + build tree x {batch}", batch * (68 * 20 + 8 * 56), prepare)


def compaction(batch: int) -> Case:
    """Renaming the slots of trees of 8."""

    def prepare() -> Call:
        rows = torch.arange(batch, device=DEVICE)
        table = torch.randint(4096, (batch, 64), dtype=torch.int32, device=DEVICE)
        path = _ints(0, 2, 5, 0, 0, 0, 0, 0).repeat(batch, 1)
        counts, zero = torch.full_like(rows, 3), torch.zeros_like(rows)
        return lambda: compact.rename_slots(table, rows, zero, path, counts, 8)

    return Case(f"rename slots x {batch}", batch * (8 * 8 + 64 + 24), prepare)


def _eights(batch: int) -> tuple[sample.Trees, sample.Walked]:
    """Chains of 8 random tokens at temperature 1."""
    logits = _rand(8 * batch, VOCAB, dtype=torch.float32)
    number = torch.arange(batch, device=DEVICE)
    chain = torch.arange(8, device=DEVICE).repeat(batch, 1)
    trees = sample.Trees(
        tokens=torch.randint(VOCAB, (batch, 8), device=DEVICE),
        parents=chain - 1,
        depths=chain,
        num_nodes=torch.full_like(number, 8),
        logits=logits,
        row_offsets=number * 8,
        committed_lens=number,
        seed=number,
        temperature=torch.ones(batch, device=DEVICE),
    )
    return trees, sample.walked(batch, 8, VOCAB, DEVICE)


def walk(batch: int, *, filtered: bool) -> Case:
    """Sample-and-follow where every node is drawn."""
    rows = 8 * batch

    def prepare() -> Call:
        trees, out = _eights(batch)
        if not filtered:
            return lambda: sample.draw_all(trees, out)
        warm = torch.ones(batch, device=DEVICE)
        settings = (warm, torch.full_like(trees.seed, 50), warm.double() * 0.9, warm * 0)
        cuts, heads = torch.zeros_like(trees.tokens), filters.cut_heads(rows, DEVICE)
        narrowed = replace(trees, cuts=cuts)

        def call() -> None:
            where = (trees.logits, trees.row_offsets, trees.num_nodes)
            filters.token_cuts(*where, *settings, cuts, heads)
            sample.draw_all(narrowed, out)

        return call

    def baseline() -> Call:
        logits = _rand(rows, VOCAB, dtype=torch.float32)
        noise = torch.empty_like(logits).exponential_()
        return lambda: (logits.softmax(-1) / noise).argmax(-1)

    name = f"{'top_k, top_p, ' if filtered else ''}draw all + follow x {rows}"
    return Case(name, 4 * rows * VOCAB, prepare, None if filtered else baseline)


def levels(batch: int) -> Case:
    """Sample-and-follow level by level, six of them; random drafts end at the first."""

    def prepare() -> Call:
        trees, out = _eights(batch)
        return lambda: sample.draw_walk(trees, out, 6)

    return Case(f"draw 6 levels x {batch}", 4 * batch * VOCAB, prepare)


def rejection(batch: int) -> Case:
    """The rejection rule; random drafts end at the first."""

    def prepare() -> Call:
        trees, out = _eights(batch)
        probs = torch.rand(8 * batch, DRAFT_VOCAB, device=DEVICE)
        row_of = torch.arange(8 * batch, device=DEVICE).view(batch, 8)
        ids = torch.randperm(VOCAB, device=DEVICE)[:DRAFT_VOCAB]
        space = reject.reject_space(batch, VOCAB, DEVICE)
        return lambda: reject.reject_and_follow(trees, probs, row_of, out, space, ids)

    return Case(f"rejection x {batch}", 4 * batch * (VOCAB + DRAFT_VOCAB), prepare)
