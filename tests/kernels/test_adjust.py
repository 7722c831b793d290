"""Penalties, biases, masks and minimum lengths on the device, against the sampler's own."""

from __future__ import annotations

import random

import pytest
import torch
from kernel_runs import INTERPRETED
from model_runs import tree_words
from torch import Tensor

from sgl_spec.request import SamplingParams
from sgl_spec.speculative.penalties import TokenCounts
from sgl_spec.speculative.sampling import SamplingRows, TokenMasks, adjust, build_rows
from sgl_spec_kernels import adjust as device
from sgl_spec_kernels.adjust import Biases, Masks, Penalties, adjust_logits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
END = 2


def params_of(vocab: int) -> list[SamplingParams]:
    """One request of each kind; the last ones forbid or force nearly everything."""
    most = {token: -100.0 for token in range(vocab) if token != END}
    return [
        SamplingParams(seed=1),
        SamplingParams(seed=1, repetition_penalty=1.7),
        SamplingParams(seed=1, frequency_penalty=0.6, presence_penalty=-0.9),
        SamplingParams(seed=1, logit_bias={1: 3.0, 4: -2.5, 3: -100.0}),
        SamplingParams(seed=1, logit_bias={5: 100.0, END: 100.0}, min_new_tokens=3),
        SamplingParams(seed=1, min_new_tokens=900),
        SamplingParams(seed=1, logit_bias=most, min_new_tokens=900),
        SamplingParams(seed=1, logit_bias={1: 100.0, 3: 1.0}, repetition_penalty=0.5),
    ]


def make_rows(vocab: int) -> tuple[list[SamplingParams], SamplingRows]:
    params = params_of(vocab)
    counts = TokenCounts(len(params), vocab, DEVICE)
    for row in range(len(params)):
        counts.start(row, [1, 3, 3], [4, 4, 5])
    return params, build_rows(params, [3] * len(params), [END], DEVICE, counts=counts)


def check(vocab: int, nodes: int, *, masked: bool) -> None:
    params, rows = make_rows(vocab)
    batch, rng = len(params), random.Random(nodes)
    tokens = torch.randint(vocab, (batch, nodes), device=DEVICE)
    parents = [[-1, *(rng.randrange(i) for i in range(1, nodes))] for _ in range(batch)]
    words = torch.tensor([tree_words(p)[0] for p in parents], device=DEVICE)
    depths = torch.zeros_like(tokens)
    for node in range(1, nodes):
        depths[:, node] = depths[torch.arange(batch), [p[node] for p in parents]] + 1
    offsets = torch.arange(batch, device=DEVICE).flip(0) * nodes
    committed = torch.full((batch,), 5, device=DEVICE)
    counts = torch.full_like(committed, nodes)
    counts[0] = 1
    logits = 3 * torch.randn(batch * nodes, vocab, device=DEVICE)
    allowed = torch.randint(-(2**31), 2**31, (4, (vocab + 31) // 32), device=DEVICE).int()
    allowed[3] = 0
    row_of = torch.randint(-1, 4, (batch, nodes), device=DEVICE) if masked else None
    expected = logits.clone()
    for request in range(batch):
        for node in range(int(counts[request])):
            at = int(offsets[request]) + node
            ancestors = [j for j in range(1, nodes) if int(words[request, node]) >> j & 1]
            masks = None
            if row_of is not None:
                masks = TokenMasks(allowed, row_of[request, node].expand(len(logits)))
            adjust(
                expected[at : at + 1],
                rows.select(torch.tensor([request], device=DEVICE)),
                committed[request, None] + depths[request, node] + 1,
                path=tokens[request, None, ancestors],
                index=torch.tensor([at], device=DEVICE),
                masks=masks,
            )
    run(logits, (offsets, committed, counts, tokens, depths, words), params, rows, allowed, row_of)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def run(
    logits: Tensor,
    trees: tuple[Tensor, ...],
    params: list[SamplingParams],
    rows: SamplingRows,
    allowed: Tensor,
    row_of: Tensor | None,
) -> None:
    pen, bias = rows.penalties, rows.bias
    assert pen is not None
    assert bias is not None
    active = [p.penalised or bool(p.logit_bias) or p.min_new_tokens > 0 for p in params]
    adjust_logits(
        logits,
        *trees,
        torch.tensor(active, device=DEVICE),
        rows.end_from,
        rows.end_ids,
        Penalties(
            pen.row,
            pen.counts.text,
            pen.counts.output,
            pen.repetition.contiguous(),
            pen.frequency.contiguous(),
            pen.presence.contiguous(),
        ),
        Biases(bias.ids, bias.values, bias.banned, bias.has_banned, bias.forced, bias.has_forced),
        None if row_of is None else Masks(allowed, row_of),
    )


@INTERPRETED
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("vocab", "nodes"), [(12, 1), (33, 5), (70, 3)])
def test_equals_the_sampler(
    vocab: int, nodes: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "BLOCK", 16)
    check(vocab, nodes, masked=masked)


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("vocab", "nodes"), [(12, 1), (4095, 8), (4096, 3), (4097, 64), (128256, 2)]
)
def test_equals_the_sampler_on_the_gpu(vocab: int, nodes: int, masked: bool) -> None:
    check(vocab, nodes, masked=masked)
