"""The default rule by kernels, against the one that defines it: every setting at once."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from kernel_runs import INTERPRETED

from sgl_spec.engine.cuda.follow import DeviceFollow
from sgl_spec.engine.cuda.rounds import SharedHeads
from sgl_spec.request import SamplingParams
from sgl_spec.speculative.grammar import token_masks
from sgl_spec.speculative.penalties import TokenCounts
from sgl_spec.speculative.sampling import SamplingRows, build_rows
from sgl_spec.speculative.tree import NodeMasks, TokenTree
from sgl_spec.speculative.verify import sample_and_follow

# Where everything is masked no difference of logits is a number.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
END, PROMPT = 2, 3
KINDS: dict[str, list[SamplingParams]] = {
    "greedy": [SamplingParams(temperature=0.0, seed=1)] * 2,
    "sampled": [SamplingParams(temperature=t, seed=i) for i, t in enumerate((1.0, 0.0, 0.6))],
    "filtered": [
        SamplingParams(temperature=0.9, top_k=7, seed=3),
        SamplingParams(temperature=1.2, top_p=0.8, min_p=0.02, seed=4),
        SamplingParams(temperature=0.0, top_k=7, seed=5),
    ],
    "minimum": [
        SamplingParams(temperature=1.0, seed=1, min_new_tokens=4),
        SamplingParams(temperature=1.0, seed=2, min_new_tokens=900, stop_token_ids=(5, 6, 7)),
        SamplingParams(temperature=0.0, seed=3),
    ],
    "moved": [
        SamplingParams(temperature=0.7, seed=1, repetition_penalty=1.7),
        SamplingParams(temperature=0.0, seed=2, frequency_penalty=0.6, presence_penalty=-0.9),
        SamplingParams(temperature=1.0, seed=3, logit_bias={1: 3.0, 4: -2.5, 3: -100.0, 8: 1.0}),
        SamplingParams(temperature=1.0, seed=4, logit_bias={5: 100.0, END: 100.0, 9: 100.0}),
        SamplingParams(temperature=1.0, seed=5, top_k=3, presence_penalty=1.5),
        SamplingParams(temperature=1.0, seed=6),
    ],
}


def make_rows(kind: str, vocab: int) -> SamplingRows:
    params = KINDS[kind]
    counts = TokenCounts(len(params), vocab, DEVICE)
    for row in range(len(params)):
        counts.start(row, [1, 3, 3], [4, 4, 5])
    return build_rows(params, [PROMPT] * len(params), [END], DEVICE, counts=counts)


def make_tree(rng: random.Random, batch: int, width: int, masks: int, vocab: int) -> TokenTree:
    """Random trees of up to `width` nodes, some of them masked."""
    parents = torch.tensor(
        [[-1, *(rng.randrange(i) for i in range(1, width))] for _ in range(batch)]
    )
    tokens = torch.tensor([rng.sample(range(vocab), width) for _ in range(batch)])
    counts = torch.tensor([width, *(rng.randint(1, width) for _ in range(batch - 1))])
    tree = TokenTree(tokens, parents, counts)
    if masks:
        words = torch.randint(-(2**31), 2**31, (masks, (vocab + 31) // 32)).int()
        words[0] = 0  # nothing may follow
        allowed = NodeMasks(words, torch.randint(-1, masks, (batch, width)))
        tree = replace(tree, allowed=allowed)
    return tree.to(torch.device(DEVICE))


def check(
    kind: str,
    vocab: int,
    width: int,
    most: int,
    *,
    masks: int,
    heads: SharedHeads | None = None,
) -> None:
    """Trees whose drafts are drawn: every node's likeliest token stands below it, if any does."""
    follow = DeviceFollow(most, heads or SharedHeads())
    rng, rows = random.Random(width), make_rows(kind, vocab)
    tree = make_tree(rng, rows.count, width, masks, vocab)
    logits = 2 * torch.randn(int(tree.num_nodes.sum()), vocab, device=DEVICE)
    offsets = tree.num_nodes.cumsum(0) - tree.num_nodes
    for request in range(tree.batch):
        for node in range(1, int(tree.num_nodes[request])):
            at = offsets[request] + tree.parents[request, node]
            logits[at, tree.tokens[request, node]] += 5.0
    committed = torch.arange(rows.count, device=DEVICE) + 4
    masked, before = token_masks(tree), logits.clone()
    expected = sample_and_follow(tree, logits, offsets, rows, committed, masks=masked)
    found = follow(tree, logits, offsets, rows, committed, masks=masked)
    assert torch.equal(logits, before), "log-probabilities are read from them"
    assert found.tokens.shape == found.path.shape == tree.tokens.shape
    assert found.counts.tolist() == expected.counts.tolist()
    for request, count in enumerate(expected.counts.tolist()):
        for mine, theirs in ((found.tokens, expected.tokens), (found.path, expected.path)):
            assert mine[request, :count].tolist() == theirs[request, :count].tolist()


CASES = [(1, 6, 0), (1, 6, 3), (5, 6, 0), (5, 6, 4), (12, 12, 2)]


@INTERPRETED
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "most", "masks"), CASES)
def test_equals_the_rule(kind: str, width: int, most: int, masks: int) -> None:
    check(kind, 70, width, most, masks=masks)


@INTERPRETED
def test_filters_use_the_work_space_that_is_given_and_read_nothing_of_it() -> None:
    shared, device = SharedHeads(), torch.device(DEVICE)
    heads = shared.of(3 * 6 + 2, device)  # as a larger round left it
    for left in (heads.keys, heads.sizes, heads.masses, heads.marks):
        left.fill_(7_777)
    check("filtered", 70, 5, 6, masks=0, heads=shared)
    assert shared.of(1, device) is heads, "it is large enough"
    used = heads.sizes != 7_777
    assert used.any()
    assert not used[-2:].any()
    check("filtered", 70, 12, 12, masks=0, heads=shared)
    assert len(shared.of(1, device).sizes) == 3 * 12, "it has grown for all"


@INTERPRETED
def test_it_can_be_compiled_beforehand() -> None:
    DeviceFollow(3, SharedHeads()).compile(70, torch.device(DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "most", "masks"), CASES)
@pytest.mark.parametrize("vocab", [70, 32000, 128256])
def test_equals_the_rule_on_the_gpu(
    kind: str, width: int, most: int, masks: int, vocab: int
) -> None:
    check(kind, vocab, width, most, masks=masks)
