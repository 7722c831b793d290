"""Filters, draws and walks on the device, against the sampler that defines them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from kernel_runs import INTERPRETED
from torch import Tensor

from sgl_spec.request import SamplingParams
from sgl_spec.speculative.filters import survivors
from sgl_spec.speculative.rejection import RejectionRule
from sgl_spec.speculative.sampling import SamplingRows, build_rows
from sgl_spec.speculative.tree import AcceptResult, DraftProbs, TokenTree
from sgl_spec.speculative.verify import sample_and_follow
from sgl_spec_kernels import filters, reject, sample
from sgl_spec_kernels.filters import cut_heads, token_cuts
from sgl_spec_kernels.simulate import force_path

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEVER = torch.iinfo(torch.int64).max
# temperature, top_k (-1: all), top_p, min_p
SETTINGS = [
    (0.0, 3, 0.9, 0.0),
    (1.0, -1, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.0, -1, 0.9, 0.0),
    (1.7, -1, 0.3, 0.0),
    (1.0, -1, 0.99999, 0.0),
    (0.5, -1, 1.0, 0.1),
    (1.0, 20, 0.8, 0.0),
    (1.3, 12, 0.95, 0.05),
    (0.8, 40, 0.95, 0.01),
    (1.0, 40, 0.5, 0.3),
    (0.01, 7, 0.5, 0.5),
    (50.0, -1, 0.7, 0.0),
    (1.0, -1, 0.95, 0.02),
]


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, blocks and rankings of a few tokens, so that small vocabularies cross their edges."""
    for name, value in {"CHUNK": 16, "GROUPS": 4, "BLOCK": 16, "FEW": 16}.items():
        monkeypatch.setattr(filters, name, value)


def make_rows(settings: list[tuple[float, int, float, float]]) -> SamplingRows:
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, seed=i * 2**35 + 11)
        for i, (t, k, p, m) in enumerate(settings)
    ]
    return build_rows(params, [0] * len(params), [], DEVICE)


def make_logits(kind: str, rows: int, vocab: int) -> Tensor:
    x = 3 * torch.randn(rows, vocab, device=DEVICE)
    if kind == "ties":
        x = x.round()
    if kind == "flat":
        x = torch.zeros_like(x)
    if kind == "peaked":
        x[:, vocab // 3] = 40.0
    if kind == "masked":
        x[:, torch.rand(vocab) < 0.7] = -torch.inf
        x[-1] = -torch.inf
    return x


def keys_of(x: Tensor) -> Tensor:
    bits = (x + 0.0).view(torch.int32)
    place = ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return (place.to(torch.int64) << 32) | torch.arange(x.shape[1], device=x.device)


def find_cuts(x: Tensor, rows: SamplingRows, batch: int) -> Tensor:
    """Cuts [B, N] of the rows of x, N to a request."""
    nodes = len(x) // batch
    cuts = torch.full((batch, nodes), -9, device=DEVICE)
    offsets = torch.arange(batch, device=DEVICE) * nodes
    counts = torch.full((batch,), nodes, device=DEVICE)
    token_cuts(
        x,
        offsets,
        counts,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        cuts,
        cut_heads(len(x), DEVICE),
    )
    return cuts


def check_cuts(kind: str, vocab: int, nodes: int) -> None:
    rows = make_rows(SETTINGS)
    x = make_logits(kind, nodes * len(SETTINGS), vocab)
    cuts = find_cuts(x, rows, len(SETTINGS)).flatten()
    each = rows.select(torch.arange(len(SETTINGS), device=DEVICE).repeat_interleave(nodes))
    free = (each.top_k >= vocab) & (each.top_p >= 1) & (each.min_p <= 0)
    free |= each.temperature == 0
    assert (cuts[free] == NEVER).all()
    some = ~free & (x.amax(1) > -torch.inf)
    if not some.any():
        return
    part = each.select(some)
    ids, weights = survivors(x[some], part)
    expected = torch.zeros_like(x[some], dtype=torch.bool)
    expected.scatter_(1, ids, weights > 0)
    # Where a weight underflows nothing is drawn, kept or not.
    drawable = torch.exp((x[some] - x[some].amax(1, keepdim=True)) / part.temperature[:, None]) > 0
    kept = (keys_of(x[some]) <= cuts[some][:, None]) & drawable
    differ = (kept != expected).sum(1)
    assert (differ[part.top_p >= 1] == 0).all()
    # Exponentials that differ in their last bit move the edge of a sum by a token or two, and
    # where the tail is all but weightless by some of its tokens.
    mass = torch.exp((x[some] - x[some].amax(1, keepdim=True)) / part.temperature[:, None]).double()
    moved = (mass * (kept != expected)).sum(1) / mass.sum(1)
    assert (moved < 1e-6).logical_or(differ <= 1).all()


def check_places(kind: str, vocab: int, constants: dict[str, int]) -> None:
    """Heads and rows, blocks and rankings of other lengths: to the token the same is kept."""
    rows, x = make_rows(SETTINGS), make_logits(kind, len(SETTINGS), vocab)
    first = find_cuts(x, rows, len(SETTINGS))
    for name, value in constants.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(filters, name, value)
            other = find_cuts(x, rows, len(SETTINGS))
        differ = (keys_of(x) <= first) != (keys_of(x) <= other)
        assert not (differ & (x > -torch.inf)).any(), f"{name} = {value}"


def make_trees(batch: int, nodes: int, vocab: int) -> TokenTree:
    rng = random.Random(int(torch.randint(1 << 30, (1,))))
    tokens, parents, counts = [], [], []
    for _ in range(batch):
        count = rng.randint(1, nodes)
        above, held = [-1], [rng.randrange(vocab)]
        free = {node: rng.sample(range(vocab), min(vocab, nodes)) for node in range(nodes)}
        for node in range(1, nodes):
            above.append(rng.randrange(max(0, node - 3), node))
            held.append(free[above[-1]].pop())
        tokens.append(held)
        parents.append(above)
        counts.append(count)
    ints = (torch.tensor(part, device=DEVICE) for part in (tokens, parents, counts))
    return TokenTree(*ints)


def device_trees(tree: TokenTree, logits: Tensor, rows: SamplingRows) -> sample.Trees:
    """The kernels' arguments, with heads; rows of the logits lie in reversed order of the
    requests."""
    batch, nodes = tree.tokens.shape
    number = torch.arange(batch, device=DEVICE)
    offsets = number.flip(0) * nodes
    cuts = torch.full((batch, nodes), -9, device=DEVICE)
    settings = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    heads = cut_heads(batch * nodes, DEVICE)
    token_cuts(logits, offsets, tree.num_nodes, *settings, cuts, heads)
    depths = tree.depths().contiguous()
    given = (tree.tokens, tree.parents, depths, tree.num_nodes, logits, offsets, number * 1000 + 3)
    return sample.Trees(*given, rows.seed, rows.temperature, cuts, heads)


def check_equal(out: sample.Walked, expected: AcceptResult) -> None:
    assert not out.arrived.any()
    assert torch.equal(out.counts, expected.counts)
    used = torch.arange(out.tokens.shape[1], device=DEVICE) < out.counts[:, None]
    assert torch.equal(out.tokens[used], expected.tokens[used])
    assert torch.equal(out.path[used], expected.path[used])
    assert (out.tokens[~used] == -9).all()


def check_walk(kind: str, batch: int, nodes: int, vocab: int) -> None:
    rows = make_rows([SETTINGS[i % len(SETTINGS)] for i in range(batch)])
    tree, logits = make_trees(batch, nodes, vocab), make_logits(kind, batch * nodes, vocab)
    trees = device_trees(tree, logits, rows)
    expected = sample_and_follow(tree, logits, trees.row_offsets, rows, trees.committed_lens)
    out = sample.walked(batch, nodes, vocab, DEVICE)
    for walk, listed in product((False, True), repeat=2):
        given = trees if listed else replace(trees, heads=None)
        out.tokens.fill_(-9)
        out.path.fill_(-9)
        if walk:
            sample.draw_walk(given, out, levels=nodes)
        else:
            sample.draw_all(given, out)
        check_equal(out, expected)
    sample.draw_all(trees, out)
    check_forced(trees, tree, out)


def check_forced(trees: sample.Trees, tree: TokenTree, out: sample.Walked) -> None:
    """Lengths from 1 to beyond the deepest tree."""
    drawn, depths = out.drawn.tolist(), tree.depths().tolist()
    parents, held, counts = (t.tolist() for t in (tree.parents, tree.tokens, tree.num_nodes))
    for length in (1, 2, 4, 99):
        out.tokens.fill_(-9)
        out.path.fill_(-9)
        lengths = torch.full_like(tree.num_nodes, length)
        force_path(trees, tree.ancestor_words().contiguous(), lengths, out)
        for i, count in enumerate(counts):
            depth = min(length - 1, max(depths[i][:count]))
            node = depths[i][:count].index(depth)
            tokens, path = [drawn[i][node]], [node]
            while node > 0:
                tokens.insert(0, held[i][node])
                node = parents[i][node]
                path.insert(0, node)
            fill = [-9] * (len(held[i]) - depth - 1)
            assert out.counts[i] == depth + 1
            assert out.tokens[i].tolist() == tokens + fill
            assert out.path[i].tolist() == path + fill


def check_rejection(kind: str, batch: int, nodes: int, vocab: int, *, hot: bool) -> None:
    """hot: the drafter knows two thirds of the vocabulary, in an order of its own; the other drafts
    have q = 0."""
    rows = make_rows([SETTINGS[i % len(SETTINGS)] for i in range(batch)])
    tree, logits = make_trees(batch, nodes, vocab), make_logits(kind, batch * nodes, vocab)
    trees = device_trees(tree, logits, rows)
    columns = vocab * 2 // 3 if hot else vocab
    ids = torch.randperm(vocab, device=DEVICE)[:columns] if hot else None
    probs = torch.randn(batch * nodes, columns, device=DEVICE).softmax(1)
    row_of = torch.randperm(batch * nodes, device=DEVICE).view(batch, nodes)
    tree = replace(tree, draft=DraftProbs(probs, row_of, ids))
    expected = RejectionRule()(tree, logits, trees.row_offsets, rows, trees.committed_lens)
    out = sample.walked(batch, nodes, vocab, DEVICE)
    out.tokens.fill_(-9)
    space = torch.full_like(reject.reject_space(batch, vocab, DEVICE), torch.nan)
    reject.reject_and_follow(trees, probs, row_of, out, space, ids)
    check_equal(out, expected)


@INTERPRETED
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("vocab", [16, 17, 65])
@pytest.mark.parametrize(
    ("kind", "head"),
    [("random", 16), ("random", 64), ("ties", 64), ("flat", 16), ("masked", 16), ("masked", 64)],
)
def test_cuts(kind: str, head: int, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabularies around one and four chunks. A head of 16 is too short for most rows, which then
    serve as their own; 64 keys are more than are ranked."""
    shrink(monkeypatch)
    monkeypatch.setattr(filters, "HEAD", head)
    check_cuts(kind, vocab, nodes=1)


@INTERPRETED
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_cuts_of_a_vocabulary_beyond_the_most_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    monkeypatch.setattr(filters, "MOST_CHUNKS", 2)
    check_cuts("random", 70, nodes=1)


@INTERPRETED
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_cuts_do_not_depend_on_where_they_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    check_places("random", 40, {"HEAD": 16, "FEW": 64, "BLOCK": 32, "CHUNK": 32})


@INTERPRETED
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("kind", "batch", "nodes", "vocab"),
    [("random", 3, 1, 9), ("ties", 11, 3, 5), ("masked", 4, 5, 21)],
)
def test_walks(
    kind: str, batch: int, nodes: int, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "BLOCK", 8)
    shrink(monkeypatch)
    check_walk(kind, batch, nodes, vocab)


@INTERPRETED
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("kind", "batch", "nodes", "vocab", "hot"),
    [("random", 11, 4, 9, False), ("ties", 11, 4, 12, True), ("masked", 4, 4, 21, False)],
)
def test_rejection(
    kind: str, batch: int, nodes: int, vocab: int, hot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(monkeypatch)
    monkeypatch.setattr(reject, "BLOCK", 8)
    check_rejection(kind, batch, nodes, vocab, hot=hot)


KINDS = ["random", "ties", "flat", "peaked", "masked"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_cuts_on_the_gpu(kind: str) -> None:
    for vocab in (5, 2047, 2048, 2049, 32000, 131072):
        check_cuts(kind, vocab, nodes=2)
    for vocab in (32000, 131072):
        check_places(kind, vocab, {"HEAD": 512, "FEW": 32, "BLOCK": 512, "CHUNK": 8192})


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "size", [(1, 1, 4096), (11, 8, 16), (48, 8, 6), (7, 64, 90), (3, 5, 128256)]
)
def test_walks_on_the_gpu(size: tuple[int, int, int], kind: str) -> None:
    check_walk(kind, *size)
    check_rejection(kind, *size, hot=False)
    check_rejection(kind, *size, hot=True)


@pytest.mark.gpu
def test_tail_mass_at_a_large_vocabulary() -> None:
    """Half of the probability on one token, the rest spread evenly: 131,071 rare tokens together
    must be drawn half of the time, and every region of the ids alike."""
    vocab, batch, rounds = 131_072, 512, 40
    logits = torch.zeros(1, vocab, device=DEVICE)
    logits[0, 0] = torch.log(torch.tensor(float(vocab - 1)))
    zeros = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    out, found = sample.walked(batch, 1, vocab, DEVICE), []
    for step in range(rounds):
        trees = sample.Trees(
            zeros[:, None],
            zeros[:, None] - 1,
            zeros[:, None],
            zeros + 1,
            logits,
            zeros,
            zeros + step,
            torch.randint(1 << 60, (batch,), device=DEVICE),
            torch.ones(batch, device=DEVICE),
        )
        sample.draw_all(trees, out)
        found.append(out.tokens[:, 0].clone())
    drawn = torch.cat(found)
    n = len(drawn)
    tail = drawn[drawn > 0]
    assert abs(len(tail) / n - 0.5) < 5 * 0.5 / n**0.5
    regions = torch.bincount(tail * 16 // vocab, minlength=16).double()
    spread = (len(tail) / 16) ** 0.5
    assert (regions - len(tail) / 16).abs().max() < 5 * spread
