"""Penalties, biases, masks and minimum lengths on the device, against the sampler's own."""

from __future__ import annotations

import random

import pytest
import torch
from fakes import holding_req
from kernel_runs import INTERPRETED
from model_runs import tree_words

from sgl_spec.engine.cuda.state import DeviceRows
from sgl_spec.request import SamplingParams
from sgl_spec.speculative.penalties import TokenCounts
from sgl_spec.speculative.sampling import TokenMasks, adjust, build_rows
from sgl_spec_kernels import settings
from sgl_spec_kernels.sample import walked
from sgl_spec_kernels.settings import Masks, adjust_logits, adjusted_space, count_tokens

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
END = 2
PROMPT, OUTPUT = [1, 3, 3], [4, 4, 5]


def params_of(vocab: int) -> list[SamplingParams]:
    """One request of each kind; the last ones forbid or force nearly everything."""
    most = {token: -100.0 for token in range(vocab) if token != END}
    return [
        SamplingParams(seed=1),
        SamplingParams(seed=1, repetition_penalty=1.7),
        SamplingParams(seed=1, frequency_penalty=0.6, presence_penalty=-0.9),
        SamplingParams(seed=1, logit_bias={1: 3.0, 4: -2.5, 3: -100.0}),
        SamplingParams(seed=1, logit_bias={5: 100.0, END: 100.0}, min_new_tokens=3),
        SamplingParams(seed=1, min_new_tokens=900, max_new_tokens=900),
        SamplingParams(seed=1, logit_bias=most, min_new_tokens=900, max_new_tokens=900),
        SamplingParams(seed=1, logit_bias={END: 100.0}, min_new_tokens=900, max_new_tokens=900),
        SamplingParams(seed=1, logit_bias={1: 100.0, 3: 1.0}, repetition_penalty=0.5),
    ]


def device_rows(params: list[SamplingParams], vocab: int) -> DeviceRows:
    rows = DeviceRows(len(params), vocab, [END], DEVICE)
    for row, each in enumerate(params):
        rows.open(holding_req(row, PROMPT, OUTPUT, each), 8)
    rows.sync()
    return rows


def check(vocab: int, nodes: int, *, masked: bool, dtype: torch.dtype = torch.float32) -> None:
    params = params_of(vocab)
    batch, rng = len(params), random.Random(nodes)
    counted = TokenCounts(batch, vocab, DEVICE)
    for row in range(batch):
        counted.start(row, PROMPT, OUTPUT)
    rows = build_rows(params, [len(PROMPT)] * batch, [END], DEVICE, counts=counted)
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
    logits = (3 * torch.randn(batch * nodes, vocab, device=DEVICE)).to(dtype)
    allowed = torch.randint(-(2**31), 2**31, (4, (vocab + 31) // 32), device=DEVICE).int()
    allowed[3] = 0
    row_of = torch.randint(-1, 4, (batch, nodes), device=DEVICE)
    if not masked:
        row_of.fill_(-1)
    expected = logits.float().clone()
    for request in range(batch):
        for node in range(int(counts[request])):
            at = int(offsets[request]) + node
            ancestors = [j for j in range(1, nodes) if int(words[request, node]) >> j & 1]
            adjust(
                expected[at : at + 1],
                rows.select(torch.tensor([request], device=DEVICE)),
                committed[request, None] + depths[request, node] + 1,
                path=tokens[request, None, ancestors],
                index=torch.tensor([at], device=DEVICE),
                masks=TokenMasks(allowed, row_of[request, node].expand(len(logits))),
            )
    order = torch.arange(batch, device=DEVICE)
    out, before = adjusted_space(batch * nodes, vocab, DEVICE), logits.clone()
    adjust_logits(
        logits, out, device_rows(params, vocab).settings, order, offsets, committed, counts,
        tokens, depths, words, Masks(allowed, row_of) if masked else None,
    )  # fmt: skip
    assert torch.equal(logits, before), "log-probabilities are of the model's own"
    used = [int(offsets[i]) + node for i in range(batch) for node in range(int(counts[i]))]
    torch.testing.assert_close(out.logits[used], expected[used], atol=1e-5, rtol=1e-5)


@INTERPRETED
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("vocab", "nodes"), [(12, 1), (33, 5), (70, 3)])
def test_equals_the_sampler(
    vocab: int, nodes: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "BLOCK", 16)
    check(vocab, nodes, masked=masked)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("vocab", "nodes"), [(12, 1), (4095, 8), (4096, 3), (4097, 64), (128256, 2)]
)
def test_equals_the_sampler_on_the_gpu(
    vocab: int, nodes: int, masked: bool, dtype: torch.dtype
) -> None:
    check(vocab, nodes, masked=masked, dtype=dtype)


def check_counts() -> None:
    """Repeated tokens, a row without penalties, and the filler, which two requests have."""
    vocab, params = 9, [SamplingParams(seed=1, frequency_penalty=0.5), SamplingParams(seed=1)]
    rows, filler = torch.tensor([1, 2, 0, 2], device=DEVICE), 2
    out = walked(4, 4, vocab, DEVICE)
    out.tokens.copy_(torch.tensor([[6, 6, 7, 8], [6, 6, 6, 6], [6, 4, 6, 8], [6, 6, 6, 6]]))
    out.counts.copy_(torch.tensor([4, 4, 3, 1]))
    found, expected = device_rows(params, vocab).settings, device_rows(params, vocab).settings
    count_tokens(found, rows, out, filler)
    settings.count_tokens_ref(expected, rows, out, filler)
    assert torch.equal(found.output, expected.output)
    assert torch.equal(found.marks, expected.marks)
    assert found.output[0].tolist() == [0, 0, 0, 0, 3, 1, 2, 0, 0]


@INTERPRETED
def test_counts_what_a_round_emitted() -> None:
    check_counts()


@pytest.mark.gpu
def test_counts_what_a_round_emitted_on_the_gpu() -> None:
    check_counts()
