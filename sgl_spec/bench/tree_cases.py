"""What `bench.kernels` times of a round around its forwards: drafting, sampling, moving on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import torch
from torch import Tensor

from sgl_spec.bench import kernel_cases as shapes
from sgl_spec.bench.kernel_cases import Call, Case, rand
from sgl_spec_kernels import (
    compact,
    draft_topk,
    filters,
    reject,
    round_state,
    sample,
    tree_build,
)


def tree_cases() -> Iterator[Case]:
    """All of them."""
    for batch in (1, 48):
        for width in (shapes.DRAFT_VOCAB, shapes.VOCAB):
            yield topk(batch, width)
        yield trees(batch)
        yield moving(batch)
        for warm in (False, True):
            yield walk(batch, warm=warm)
            yield levels(batch, warm=warm)
        for kind in FILTERED:
            yield walk(batch, warm=True, kind=kind)
            yield cuts(batch, kind)
        yield rejection(batch)
        yield ends(batch)


def _numbers(count: int) -> Tensor:
    return torch.arange(count, device=shapes.DEVICE)


def topk(batch: int, width: int) -> Case:
    """Draft top 4 of 4 rows a request, with the target's noise."""
    rows = 4 * batch

    def prepare() -> Call:
        logits = rand(rows, width)
        values = torch.empty(rows, 4, device=shapes.DEVICE)
        tokens = torch.empty(rows, 4, dtype=torch.int64, device=shapes.DEVICE)
        work = draft_topk.topk_work(rows, width, 4, shapes.DEVICE)
        numbers, warm = _numbers(batch), torch.ones(batch, device=shapes.DEVICE)
        ids = None
        if width < shapes.VOCAB:
            ids = torch.randperm(shapes.VOCAB, device=shapes.DEVICE)[:width]
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
        logits = rand(rows, width)
        return lambda: logits.float().log_softmax(-1).topk(4)

    moved = 2 * rows * width + (8 * width if width < shapes.VOCAB else 0)
    return Case(f"draft top 4 of {width} x {rows}", moved, prepare, baseline)


def trees(batch: int) -> Case:
    """A step of growth and the building of (5, 4, 8) trees: two kernels."""

    def prepare() -> Call:
        state = tree_build.grow_state(batch, 5, 4, shapes.DEVICE)
        tree = tree_build.device_tree(batch, 8, shapes.DEVICE)
        state.cand_scores.uniform_(-9, -1)
        log_probs = -torch.rand(4 * batch, 4, device=shapes.DEVICE)
        tokens = torch.randint(shapes.VOCAB, (4 * batch, 4), device=shapes.DEVICE)
        rows, zero = _numbers(batch), _numbers(batch) * 0
        table = torch.randint(4096, (batch, 64), dtype=torch.int32, device=shapes.DEVICE)
        where = {"rows": rows, "req_to_token": table}

        def call() -> None:
            tree_build.grow_tree(state, log_probs, tokens, 2, prefix_lens=zero, last=False, **where)
            tree_build.build_tree(tree, state, rows, 5, committed_lens=zero, **where)

        return call

    return Case(f"grow + build tree x {batch}", batch * (68 * 20 + 8 * 56), prepare)


def _paths(batch: int) -> tuple[Tensor, Tensor]:
    """Three accepted tokens of trees of 8."""
    path = torch.tensor([0, 2, 5, 0, 0, 0, 0, 0], device=shapes.DEVICE).repeat(batch, 1)
    return path, torch.full_like(path[:, 0], 3)


def moving(batch: int, layers: int = 32) -> Case:
    """Moving the KV of two nodes of trees of 8."""
    slots, heads = 16 * batch, (shapes.KV_HEADS, shapes.DIM)

    def prepare() -> Call:
        rows, (path, counts) = _numbers(batch), _paths(batch)
        k, v = rand(2, layers, slots, *heads)
        table = torch.randperm(slots, device=shapes.DEVICE).view(batch, 16).int()
        zero = rows * 0
        return lambda: compact.move_path(k, v, table, rows, zero, path, counts)

    moved = 2 * 2 * 2 * 2 * batch * layers * heads[0] * heads[1]
    return Case(f"move 2 of 8 nodes x {batch}", moved, prepare)


def ends(batch: int) -> Case:
    """Beginning and ending a round, the draft's rows behind it, and their features: four
    kernels."""
    width, levels, nodes = 3 * shapes.HIDDEN, 5, 8

    def prepare() -> Call:
        numbers, warm = _numbers(batch), torch.ones(batch, device=shapes.DEVICE)
        ints = numbers.clone
        state = round_state.RowState(
            ints(), ints(), ints(), warm, ints(), warm.double(), warm.clone(), ints()
        )
        here = round_state.RowState(*(getattr(state, f.name).clone() for f in fields(state)))
        out = sample.walked(batch, nodes, shapes.VOCAB, shapes.DEVICE)
        path, counts = _paths(batch)
        out.path.copy_(path)
        out.counts.copy_(counts)
        rows = round_state.extend_buffers(batch, levels, shapes.DEVICE)
        packed = torch.zeros(batch, nodes + 1, dtype=torch.int32, device=shapes.DEVICE)
        table = torch.zeros(batch, 4096, dtype=torch.int32, device=shapes.DEVICE)
        features = rand(batch * nodes, width)
        taken = torch.empty_like(features[:1]).repeat(batch * (levels + 1), 1)
        zero = torch.zeros_like(numbers)

        def call() -> None:
            round_state.begin_round(state, numbers, here)
            round_state.extend_rows(
                rows, out, "head", committed=zero, roots=here.last, rows=numbers, req_to_token=table
            )
            round_state.gather_features(features, rows.features, taken)
            round_state.end_round(here.committed, here.last, numbers, out, packed, -1)

        return call

    moved = batch * (2 * 56 + 12 * nodes + 48 * (levels + 1) + 4 * width * (levels + 1))
    return Case(f"ends of a round x {batch}", moved, prepare)


def _eights(batch: int, *, warm: bool) -> tuple[sample.Trees, sample.Walked]:
    """Chains of 8 random tokens."""
    logits, number = rand(8 * batch, shapes.VOCAB), _numbers(batch)
    chain = torch.arange(8, device=shapes.DEVICE).repeat(batch, 1)
    trees = sample.Trees(
        tokens=torch.randint(shapes.VOCAB, (batch, 8), device=shapes.DEVICE),
        parents=chain - 1,
        depths=chain,
        num_nodes=torch.full_like(number, 8),
        logits=logits,
        row_offsets=number * 8,
        committed_lens=number,
        seed=number,
        temperature=torch.ones(batch, device=shapes.DEVICE) if warm else None,
    )
    return trees, sample.walked(batch, 8, shapes.VOCAB, shapes.DEVICE)


FILTERED = ("top_k, top_p", "top_p", "top_p of flat rows")


def _filtering(kind: str, trees: sample.Trees) -> tuple[Callable[[], None], sample.Trees]:
    """What finds the cuts, and the trees with them. Random logits are flat, top_p keeps most of
    them; in the other kinds a few dozen tokens stand out as they do in text."""
    batch, nodes = trees.tokens.shape
    if kind != "top_p of flat rows":
        rows = torch.arange(len(trees.logits), device=shapes.DEVICE)[:, None]
        some = torch.randint(shapes.VOCAB, (len(rows), 32), device=shapes.DEVICE)
        trees.logits.mul_(1.5)
        trees.logits[rows, some] += torch.linspace(9, 13, 32, device=shapes.DEVICE).to(
            rand(1).dtype
        )
    ones = torch.ones(batch, device=shapes.DEVICE)
    top_k = torch.full_like(trees.seed, 50 if "top_k" in kind else shapes.VOCAB)
    settings = (ones, top_k, ones.double() * 0.9, ones * 0)
    cuts, heads = torch.zeros_like(trees.tokens), filters.cut_heads(batch * nodes, shapes.DEVICE)
    where = (trees.logits, trees.row_offsets, trees.num_nodes)
    narrowed = replace(trees, cuts=cuts, heads=heads)
    return lambda: filters.token_cuts(*where, *settings, cuts, heads), narrowed


def cuts(batch: int, kind: str) -> Case:
    """What the filters keep of every node's row: four kernels."""
    rows = 8 * batch

    def prepare() -> Call:
        return _filtering(kind, _eights(batch, warm=True)[0])[0]

    return Case(f"{kind}, cuts x {rows}", 2 * rows * shapes.VOCAB, prepare)


def walk(batch: int, *, warm: bool, kind: str | None = None) -> Case:
    """Sample-and-follow where every node is drawn. kind: one of FILTERED."""
    rows = 8 * batch

    def prepare() -> Call:
        trees, out = _eights(batch, warm=warm)
        if kind is None:
            return lambda: sample.draw_all(trees, out)
        find, narrowed = _filtering(kind, trees)

        def call() -> None:
            find()
            sample.draw_all(narrowed, out)

        return call

    def baseline() -> Call:
        logits = rand(rows, shapes.VOCAB)
        noise = torch.empty_like(logits, dtype=torch.float32).exponential_()
        if not warm:
            return lambda: logits.argmax(-1)
        return lambda: (logits.float().softmax(-1) / noise).argmax(-1)

    name = f"{kind or ('sampled' if warm else 'greedy')}, draw all + follow x {rows}"
    return Case(name, 2 * rows * shapes.VOCAB, prepare, baseline if kind is None else None)


def levels(batch: int, *, warm: bool) -> Case:
    """Sample-and-follow level by level, six of them; random drafts end at the first."""

    def prepare() -> Call:
        trees, out = _eights(batch, warm=warm)
        return lambda: sample.draw_walk(trees, out, 6)

    name = f"{'sampled' if warm else 'greedy'}, 6 levels x {batch}"
    return Case(name, 2 * batch * shapes.VOCAB, prepare)


def rejection(batch: int) -> Case:
    """The rejection rule; random drafts end at the first."""
    columns = shapes.DRAFT_VOCAB

    def prepare() -> Call:
        trees, out = _eights(batch, warm=True)
        probs = torch.rand(8 * batch, columns, device=shapes.DEVICE)
        row_of = _numbers(8 * batch).view(batch, 8)
        ids = torch.randperm(shapes.VOCAB, device=shapes.DEVICE)[:columns]
        space = reject.reject_space(batch, shapes.VOCAB, shapes.DEVICE)
        return lambda: reject.reject_and_follow(trees, probs, row_of, out, space, ids)

    return Case(f"rejection x {batch}", batch * (2 * shapes.VOCAB + 4 * columns), prepare)
