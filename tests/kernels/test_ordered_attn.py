"""Attention in one order against its twin, and against itself: the same bits for a row whether it
decodes, stands in a tree, a chunk of a prompt or a batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from kernel_runs import GPU_DTYPES, INTERPRETED, relative_error
from model_runs import tree_words
from torch import Tensor

from sgl_spec_kernels import ordered_attn, ordered_attn_ref, tree_attn


@dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    device: str

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Asked:
    """Rows of one request. slots: of its columns; words: None for a causal chunk."""

    slots: Sequence[int]
    prefix: int
    q: Tensor
    words: Sequence[int] | None = None


def arguments(asked: Sequence[Asked], device: str) -> list[Tensor | None]:
    width = max(len(one.slots) for one in asked) + 3
    table = torch.full((len(asked), width), 2**30, dtype=torch.int32)  # whatever: never read
    for row, one in zip(table, asked, strict=True):
        row[: len(one.slots)] = torch.tensor(one.slots)
    lens = [len(one.q) for one in asked]
    words = None
    if asked[0].words is not None:
        words = torch.tensor([word for one in asked for word in one.words or ()], device=device)
    return [
        table.to(device),
        torch.arange(len(asked), device=device),
        torch.tensor([one.prefix for one in asked], device=device),
        torch.tensor([0, *lens], device=device).cumsum(0),
        words,
    ]


def attend(heads: Heads, kv: Tensor, asked: Sequence[Asked]) -> list[Tensor]:
    """What each request's rows see, in one launch; the work space held NaN before."""
    args, longest = arguments(asked, heads.device), max(len(one.q) for one in asked)
    tiles = -(-args[0].shape[1] // ordered_attn.tile_columns(heads.dim, heads.dtype.itemsize))
    shape = (len(asked), heads.kv_heads, longest, heads.group)
    rows = ordered_attn.ordered_work_rows(*shape, tiles)
    work = tree_attn.AttnWork.of(max(rows, 16), heads.dim, heads.device)
    work.part.fill_(torch.nan)
    work.stats.fill_(torch.nan)
    plan = ordered_attn.plan_ordered_attn(
        *args,
        heads_per_kv=heads.group,
        kv_heads=heads.kv_heads,
        head_dim=heads.dim,
        dtype=heads.dtype,
        max_q_len=longest,
        work=work,
    )
    q = torch.cat([one.q for one in asked])
    found = ordered_attn.ordered_attn(q, kv[0], kv[1], plan, heads.dim**-0.5)
    assert not work.arrived.any()
    return list(found.split([len(one.q) for one in asked]))


def twin(heads: Heads, kv: Tensor, asked: Sequence[Asked]) -> Tensor:
    plan = ordered_attn_ref.plan_ordered_attn(
        *arguments(asked, heads.device),
        heads_per_kv=heads.group,
        head_dim=heads.dim,
        dtype=heads.dtype,
    )
    q = torch.cat([one.q for one in asked])
    return ordered_attn_ref.ordered_attn(q, kv[0], kv[1], plan, heads.dim**-0.5)


class Texts:
    """Texts in scattered slots of one pool; a slot that nobody wrote holds NaN."""

    def __init__(self, heads: Heads, seed: int, slots: int = 4096) -> None:
        torch.manual_seed(seed)
        self.rng, self.heads = random.Random(seed), heads
        self.free = torch.randperm(slots).tolist()
        kv = torch.full((2, slots, heads.kv_heads, heads.dim), torch.nan)
        self.kv = kv.to(heads.device, heads.dtype)

    def columns(self, count: int) -> list[int]:
        taken = [self.free.pop() for _ in range(count)]
        new = torch.randn(2, count, self.heads.kv_heads, self.heads.dim)
        self.kv[:, taken] = new.to(self.kv)
        return taken

    def queries(self, count: int) -> Tensor:
        return torch.randn(count, self.heads.heads, self.heads.dim).to(self.kv)

    def tree(self, prefix: int, nodes: int) -> tuple[Asked, list[Asked]]:
        """A random tree, and each of its rows as plain decoding would have it."""
        parents = [-1, *(self.rng.randrange(max(0, i - 6), i) for i in range(1, nodes))]
        slots, q = self.columns(prefix + nodes), self.queries(nodes)
        words, depths = tree_words(parents)
        plain = []
        for node, depth in enumerate(depths):
            path = [at for at in range(nodes) if words[node] >> at & 1]
            seen = [*slots[:prefix], *(slots[prefix + at] for at in path)]
            plain.append(Asked(seen, prefix + depth, q[node : node + 1], [1]))
        return Asked(slots, prefix, q, words), plain

    def chunk(self, prefix: int, rows: int) -> tuple[Asked, list[Asked]]:
        slots, q = self.columns(prefix + rows), self.queries(rows)
        plain = [Asked(slots[: prefix + at + 1], prefix + at, q[at : at + 1]) for at in range(rows)]
        return Asked(slots, prefix, q), plain


def small(monkeypatch: pytest.MonkeyPatch, kv_heads: int = 2) -> Heads:
    """Tiles of 16 and few programs: the interpreter is slow."""
    monkeypatch.setattr(ordered_attn, "tile_columns", lambda *_: 16)
    monkeypatch.setattr(ordered_attn_ref, "tile_columns", lambda *_: 16)
    monkeypatch.setattr(ordered_attn, "_PROGRAMS", 16)
    monkeypatch.setattr(ordered_attn, "FOLDED_AT_ONCE", 2)
    monkeypatch.setattr(tree_attn, "_MOST_ROWS", 16)
    return Heads(2 * kv_heads, kv_heads, 16, torch.float32, "cpu")


def shared_out(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """alone: every tile has a program. first: the first takes most, and rows are the tall operand.
    many: the last one merges. one: a program has all tiles."""
    if how == "first":
        monkeypatch.setattr(ordered_attn, "part_slots", lambda *_: 2)
        monkeypatch.setattr(ordered_attn, "TALL_ROWS", 16)
    if how == "many":
        monkeypatch.setattr(ordered_attn, "_FEW_BLOCKS", 0)
        monkeypatch.setattr(ordered_attn, "LONG_SPLIT", 16)
        monkeypatch.setattr(tree_attn, "FAIR_PROGRAMS", 10**9)  # 0 columns each
    if how == "one":
        monkeypatch.setattr(ordered_attn, "_PROGRAMS", 1)


WAYS = ("alone", "first", "many", "one")


@INTERPRETED
@pytest.mark.parametrize("how", WAYS)
def test_equals_its_twin(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = small(monkeypatch)
    shared_out(monkeypatch, how)
    texts = Texts(heads, seed=1)
    trees = [texts.tree(prefix, nodes)[0] for prefix, nodes in ((0, 1), (31, 9), (16, 3))]
    if how == "alone":
        trees.append(texts.tree(20, 64)[0])
    for asked in (trees, [texts.chunk(13, 12)[0], texts.chunk(0, 5)[0], texts.chunk(47, 1)[0]]):
        found = torch.cat(attend(heads, texts.kv, asked))
        assert relative_error(found, twin(heads, texts.kv, asked)) < 1e-6


@INTERPRETED
@pytest.mark.parametrize("how", WAYS)
def test_a_row_has_the_bits_of_plain_decoding(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = small(monkeypatch, kv_heads=1)
    texts = Texts(heads, seed=2)
    made = [texts.tree(prefix, nodes) for prefix, nodes in ((27, 7), (16, 9), (0, 3))]
    chunks = [texts.chunk(13, 12)]
    plain = [attend(heads, texts.kv, [row])[0] for _, rows in made + chunks for row in rows]
    shared_out(monkeypatch, how)
    found = attend(heads, texts.kv, [tree for tree, _ in made])
    found += attend(heads, texts.kv, [chunk for chunk, _ in chunks])
    assert torch.equal(torch.cat(found), torch.cat(plain))


@INTERPRETED
def test_fillers_have_no_path_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows behind a short tree see its root alone, or nothing; both cost no tile."""
    heads = small(monkeypatch)
    texts = Texts(heads, seed=3)
    tree, _ = texts.tree(20, 5)
    padded = Asked(tree.slots, 20, torch.cat((tree.q, texts.queries(2))), [*tree.words, 1, 0])
    found = attend(heads, texts.kv, [padded])[0]
    assert torch.equal(found[:5], attend(heads, texts.kv, [tree])[0])
    assert found.isfinite().all()
    args = arguments([padded], "cpu")
    grid = ordered_attn.ordered_grid(1, 2, 7, 2)
    tails = ordered_attn._tails(*args, 2, grid, 16)
    words = tree.words
    leaves = {word for word in words if not any(word & ~o == 0 and word != o for o in words)}
    assert int(tails.shapes[0, 0]) == len(leaves)


@INTERPRETED
def test_slots_in_the_order_of_a_tree_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the gathered tails are for: the same columns in the order of the nodes give others."""
    heads = small(monkeypatch, kv_heads=1)
    texts = Texts(heads, seed=4)
    tree, plain = texts.tree(26, 14)
    expected = torch.cat([attend(heads, texts.kv, [row])[0] for row in plain])
    work = tree_attn.attn_work(1, 1, 14, 2, 16, "cpu")
    plan = tree_attn.plan_tree_attn(
        *arguments([tree], "cpu"), heads_per_kv=2, kv_heads=1, max_q_len=14, work=work
    )
    found = tree_attn.tree_attn(tree.q, texts.kv[0], texts.kv[1], plan, heads.dim**-0.5)
    assert relative_error(found, expected) < 1e-5
    assert not torch.equal(found, expected)


SIZES = {"llama": (32, 8, 128), "smollm2": (9, 3, 64), "wide": (16, 2, 256), "odd": (8, 4, 80)}


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "error"), GPU_DTYPES)
@pytest.mark.parametrize("name", SIZES)
def test_on_the_gpu(name: str, dtype: torch.dtype, error: float) -> None:
    """Bits of plain decoding in trees of every size, chunks and batches; and the twin's values."""
    heads = Heads(*SIZES[name], dtype, "cuda")
    texts = Texts(heads, seed=int(torch.randint(1 << 30, ())), slots=1 << 17)
    shapes = [(n, nodes) for n in (0, 1, 63, 64, 65, 127, 500, 1000) for nodes in (1, 8, 32)]
    shapes += [(300, 64), (2040, 16), (4097, 8)]
    made = [texts.tree(*shape) for shape in shapes]
    made_chunks = [texts.chunk(*shape) for shape in ((0, 300), (333, 257), (64, 1), (1000, 70))]
    trees, chunks = [tree for tree, _ in made], [chunk for chunk, _ in made_chunks]
    rows = [row for _, plain in made for row in plain]
    chunk_rows = [row for _, plain in made_chunks for row in plain[-40:]]
    alone = torch.cat([attend(heads, texts.kv, [row])[0] for row in rows])
    found = torch.cat(attend(heads, texts.kv, trees))
    wrong = relative_error(found[-9:], twin(heads, texts.kv, trees)[-9:])
    assert wrong < error
    assert torch.equal(found, alone), "trees in a batch"
    one_by_one = torch.cat([attend(heads, texts.kv, [tree])[0] for tree in trees])
    assert torch.equal(one_by_one, alone), "trees alone"
    for size in (40, 300):
        parts = [rows[at : at + size] for at in range(0, len(rows), size)]
        batched = torch.cat([out for part in parts for out in attend(heads, texts.kv, part)])
        assert torch.equal(batched, alone), f"{size} rows at once"
    for asked in (chunks, *([chunk] for chunk in chunks)):
        given = attend(heads, texts.kv, asked)
        one_of = chunks.index(asked[0]) if len(asked) == 1 else None
        plain = [made_chunks[one_of]] if one_of is not None else made_chunks
        for out, (_, each) in zip(given, plain, strict=True):
            expected = torch.cat([attend(heads, texts.kv, [row])[0] for row in each[-40:]])
            assert torch.equal(out[-40:], expected), f"chunks: {len(asked)}"
    batched = torch.cat(attend(heads, texts.kv, chunk_rows))
    expected = torch.cat([attend(heads, texts.kv, [row])[0] for row in chunk_rows])
    assert torch.equal(batched, expected), "decoded rows of chunks"
