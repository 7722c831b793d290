"""Draft top-k, tree growth and path compaction on the device, against what defines them."""

from __future__ import annotations

import pytest
import torch
from kernel_runs import INTERPRETED
from torch import Tensor

from sgl_spec.request import SamplingParams
from sgl_spec.speculative.grow import GrownTrees
from sgl_spec.speculative.noise import Stream, exponential, noise_bits, row_keys, stream_keys
from sgl_spec.speculative.propose import draw_siblings
from sgl_spec.speculative.ranking import Ranking
from sgl_spec.speculative.sampling import SamplingRows, build_rows
from sgl_spec_kernels import compact, draft_topk, kv_move, tree_build
from sgl_spec_kernels.draft_topk import topk_work

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# batch, frontier rows, width, top k: below, at and beyond a block; a row of fewer tokens than k
TOPKS = [(1, 1, 5, 8), (2, 3, 64, 4), (3, 2, 65, 3), (1, 2, 300, 8)]
BIG_TOPKS = [(1, 8, 2048, 8), (3, 8, 32000, 8), (48, 1, 32001, 4), (2, 8, 151936, 10)]
# steps, topk, nodes of the tree, batch
SHAPES = [(1, 1, 2, 1), (3, 1, 4, 2), (2, 4, 64, 2), (3, 3, 8, 3), (5, 4, 8, 2)]
BIG_SHAPES = [(5, 4, 8, 48), (7, 8, 64, 17), (8, 8, 33, 5), (64, 1, 64, 3), (6, 10, 60, 9)]


def sampled(batch: int) -> SamplingRows:
    params = [
        SamplingParams(temperature=[0.0, 0.7, 1.0, 1.9][i % 4], seed=7 + i * 2**33)
        for i in range(batch)
    ]
    return build_rows(params, [0] * batch, [], DEVICE)


def check_topk(batch: int, frontier: int, width: int, topk: int, noisy: bool) -> None:
    rows = batch * frontier
    logits = (4 * torch.randn(rows, width, device=DEVICE)).round(decimals=1)  # many ties
    logits[:, ::7] = -torch.inf
    ids = torch.randperm(2 * width, device=DEVICE)[:width]
    sampling, lengths = sampled(batch), torch.arange(batch, device=DEVICE) * 1000 + 5
    request = torch.arange(batch, device=DEVICE).repeat_interleave(frontier)
    values = torch.full((rows, topk), torch.nan, device=DEVICE)
    tokens = torch.full((rows, topk), -9, device=DEVICE)
    work = topk_work(rows, width, topk, DEVICE)
    draft_topk.draft_topk(
        logits,
        values,
        tokens,
        work,
        error=0.7,
        depth=3,
        lengths=lengths,
        seed=sampling.seed,
        temperature=sampling.temperature,
        noise="shared" if noisy else None,
        ids=ids,
    )
    assert not work.arrived.any()
    # The whole ranking: among equal scores at its edge, a top k may choose any.
    ranking = Ranking(sampling, max(width, topk), shared_noise=noisy, error=0.7)
    scores, order = ranking.best(logits, request, lengths[request] + 3, ids)
    torch.testing.assert_close(values, scores[:, :topk], atol=5e-5, rtol=1e-5)
    finite = values > -torch.inf
    same = tokens == order[:, :topk]
    greedy = (sampling.temperature == 0)[request]
    assert (same | ~finite)[greedy].all()
    # Elsewhere rounding may swap scores that are nearly equal.
    by_token = scores.new_full((rows, 2 * width), -torch.inf)
    by_token.scatter_(1, order[:, :width], scores[:, :width])
    assert ((by_token.gather(1, tokens) - values).abs() < 1e-4)[finite].all()
    assert same[finite].float().mean() > 0.95
    ordered = tokens.masked_fill(~finite, -1).sort(1).values
    assert not ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()


def check_siblings(batch: int, frontier: int, width: int, topk: int) -> None:
    """Drafts drawn for the rejection rule: the tokens, in the order in which they are drawn."""
    rows, topk = batch * frontier, min(topk, width)
    logits = 2 * torch.randn(rows, width, device=DEVICE)
    ids = torch.randperm(2 * width, device=DEVICE)[:width]
    sampling, lengths = sampled(batch), torch.arange(batch, device=DEVICE) * 1000 + 5
    values = torch.empty(rows, topk, device=DEVICE)
    tokens = torch.full((rows, topk), -9, device=DEVICE)
    draft_topk.draft_topk(
        logits,
        values,
        tokens,
        topk_work(rows, width, topk, DEVICE),
        error=0.7,
        depth=3,
        lengths=lengths,
        seed=sampling.seed,
        temperature=sampling.temperature,
        noise="proposal",
        ids=ids,
    )
    request = torch.arange(batch, device=DEVICE).repeat_interleave(frontier)
    keys = stream_keys(sampling.seed[request], lengths[request] + 3, Stream.PROPOSAL, 4)
    temperature = sampling.temperature[request]
    expected, _ = draw_siblings(logits, temperature, keys, topk, ids)
    assert (tokens == expected).float().mean() > 0.99  # rounding may swap neighbours
    assert torch.equal(tokens[temperature == 0], expected[temperature == 0])


def check_meaningless_rows() -> None:
    """A row with NaN or +inf, or of nothing but -inf, proposes nothing."""
    logits = torch.zeros(4, 9, device=DEVICE)
    logits[0, 3], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    values = torch.zeros(4, 2, device=DEVICE)
    ints = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    tokens = ints[:, None].repeat(1, 2)
    draft_topk.draft_topk(
        logits,
        values,
        tokens,
        topk_work(4, 9, 2, DEVICE),
        error=1.0,
        depth=0,
        lengths=ints,
        seed=ints,
        temperature=None,
    )
    assert (values[:3] == -torch.inf).all()
    assert tokens[3].tolist() == [0, 1]


def check_tree(steps: int, topk: int, nodes: int, batch: int) -> None:
    """Both grow from the same scores, which fall into a few values so that ties decide."""
    sampling = None
    lengths = torch.arange(batch, device=DEVICE) * 3 + 4
    roots = torch.randint(1000, (batch,), device=DEVICE)
    table = torch.randint(1 << 20, (batch + 2, 400), dtype=torch.int32, device=DEVICE)
    rows = torch.randperm(batch + 2, device=DEVICE)[:batch]
    trees = GrownTrees(roots, lengths, sampling, steps=steps, topk=topk, draft_tokens=nodes)
    state = tree_build.grow_state(batch, steps, topk, DEVICE)
    width, committed = topk + 3, lengths - 1
    for depth in range(1, steps + 1):
        frontier = 1 if depth == 1 else topk
        logits = torch.randint(3, (batch * frontier, width), device=DEVICE).float()
        logits[::3, 2:] = -torch.inf  # fewer candidates than k
        request = torch.arange(batch, device=DEVICE).repeat_interleave(frontier)
        found = trees.ranking.best(logits, request, lengths[request])
        trees.expand(logits)
        tree_build.grow_tree(
            state,
            *found,
            depth,
            prefix_lens=lengths,
            rows=rows,
            req_to_token=table,
            last=depth == steps,
        )
        if depth < steps:
            edge = trees.frontier()
            live, at = (
                trees._scores > -torch.inf,
                (depth - 1) * topk + torch.arange(topk, device=DEVICE),
            )
            for mine, twin in (
                (state.tokens, edge.tokens),
                (state.parents, edge.parents),
                (state.words, edge.words),
                (state.slots, table[rows[:, None], lengths[:, None] + at].long()),
                (state.positions, (lengths[:, None] + depth - 1).expand(-1, topk)),
            ):
                assert torch.equal(mine[live], twin[live])
    bounds = torch.randint(1, nodes + 1, (batch,), device=DEVICE)
    for max_nodes in (None, bounds):
        tree = tree_build.device_tree(batch, nodes, DEVICE)
        for part in (tree.tokens, tree.parents, tree.words, tree.slots):
            part.fill_(-99)
        tree_build.build_tree(
            tree,
            state,
            roots,
            steps,
            committed_lens=committed,
            rows=rows,
            req_to_token=table,
            max_nodes=max_nodes,
        )
        check_built(tree, trees, max_nodes, committed, table[rows])


def check_built(
    tree: tree_build.DeviceTree,
    trees: GrownTrees,
    max_nodes: Tensor | None,
    committed: Tensor,
    table: Tensor,
) -> None:
    twin = trees.finish(max_nodes)
    used = twin.used()
    width = twin.width  # a tree has no more columns than candidates
    assert torch.equal(tree.num_nodes, twin.num_nodes)
    assert torch.equal(tree.tokens[:, :width][used], twin.tokens[used])
    assert torch.equal(tree.parents[:, :width][used], twin.parents[used])
    assert torch.equal(tree.words[:, :width][used], twin.ancestor_words()[used])
    assert torch.equal(tree.depths[:, :width][used], twin.depths()[used])
    positions = committed[:, None] + twin.depths()
    assert torch.equal(tree.positions[:, :width][used], positions[used])
    torch.testing.assert_close(tree.scores[:, :width][used], twin.scores[used])
    node = torch.arange(tree.tokens.shape[1], device=DEVICE)
    slots = table.gather(1, committed[:, None] + node[None])
    assert torch.equal(tree.slots, slots.long())
    fillers = node >= tree.num_nodes[:, None]
    assert torch.equal(tree.words[fillers], (1 << node).expand_as(tree.words)[fillers])
    assert (tree.tokens[fillers] == 0).all()


def check_compact(batch: int, nodes: int, width: int) -> None:
    table = torch.randperm(batch * (nodes + 9), device=DEVICE).view(batch, -1).int()
    rows = torch.randperm(batch, device=DEVICE)
    committed = torch.arange(batch, device=DEVICE) % 7
    counts = torch.randint(1, width + 1, (batch,), device=DEVICE)
    path = torch.stack([torch.randperm(nodes - 1).sort().values + 1 for _ in range(batch)])
    keep = torch.rand(path.shape).argsort(1)[:, : width - 1].sort(1).values
    path = torch.cat([torch.zeros(batch, 1, dtype=torch.int64), path.gather(1, keep)], 1)
    path = path.to(DEVICE).contiguous()
    k, v = torch.randn(2, 2, table.numel(), 2, 80, device=DEVICE)
    mine, twin = (k.clone(), v.clone()), (k, v)
    compact.move_path(*mine, table, rows, committed, path, counts)
    kv_move.move_path(*twin, table, rows, committed, path, counts)
    assert torch.equal(mine[0], twin[0])
    assert torch.equal(mine[1], twin[1])


def check_noise() -> None:
    """The integers of the host, to the bit; the variates to rounding."""
    from device_noise import probe

    seed = torch.randint(-(2**62), 2**62, (5,), device=DEVICE)
    positions = torch.randint(1 << 20, (5,), device=DEVICE)
    keys, stream, bits, variates = probe(seed, positions, int(Stream.ACCEPTANCE), 3, 1024)
    expected = row_keys(seed, positions)
    assert torch.equal(keys, expected)
    assert torch.equal(stream, stream_keys(seed, positions, Stream.ACCEPTANCE, 3))
    tokens = torch.arange(1024, dtype=torch.int32, device=DEVICE)
    assert torch.equal(bits, noise_bits(expected, tokens))
    torch.testing.assert_close(variates, exponential(bits), atol=0, rtol=5e-6)


@INTERPRETED
def test_noise_is_the_hosts() -> None:
    check_noise()


@INTERPRETED
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("noisy", [True, False])
@pytest.mark.parametrize(("batch", "frontier", "width", "topk"), TOPKS)
def test_topk(
    batch: int,
    frontier: int,
    width: int,
    topk: int,
    noisy: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draft_topk, "BLOCK", 64)
    check_topk(batch, frontier, width, topk, noisy)
    monkeypatch.setattr(draft_topk, "MANY", 1)
    check_topk(batch, frontier, width, topk, noisy)
    if noisy:
        check_siblings(batch, frontier, width, topk)


@INTERPRETED
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_meaningless_rows() -> None:
    check_meaningless_rows()


@INTERPRETED
@pytest.mark.parametrize(("steps", "topk", "nodes", "batch"), SHAPES)
def test_trees(steps: int, topk: int, nodes: int, batch: int) -> None:
    check_tree(steps, topk, nodes, batch)


@INTERPRETED
@pytest.mark.parametrize(("batch", "nodes", "width"), [(1, 2, 2), (3, 8, 6), (2, 13, 5), (1, 5, 1)])
def test_compaction(batch: int, nodes: int, width: int) -> None:
    check_compact(batch, nodes, width)


@pytest.mark.gpu
def test_noise_and_meaningless_rows_on_the_gpu() -> None:
    check_noise()
    check_meaningless_rows()


@pytest.mark.gpu
@pytest.mark.parametrize("size", TOPKS + BIG_TOPKS)
def test_topk_on_the_gpu(size: tuple[int, int, int, int]) -> None:
    check_topk(*size, noisy=True)
    check_topk(*size, noisy=False)
    check_siblings(*size)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES + BIG_SHAPES)
def test_trees_on_the_gpu(shape: tuple[int, int, int, int]) -> None:
    check_tree(*shape)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1, 2, 2), (48, 8, 6), (200, 64, 9), (5, 33, 33)])
def test_compaction_on_the_gpu(size: tuple[int, int, int]) -> None:
    check_compact(*size)
