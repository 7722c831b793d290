"""Log-probabilities of emitted tokens on the device, against those that a CPU reads."""

from __future__ import annotations

import pytest
import torch
from kernel_runs import INTERPRETED

from sgl_spec.engine.cuda.row_logprobs import RowLogprobs
from sgl_spec.request import LogprobParams
from sgl_spec.speculative.logprobs import Span, read_logprobs
from sgl_spec_kernels import logprobs
from sgl_spec_kernels.logprobs import Asked, emitted_logprobs, found_space
from sgl_spec_kernels.sample import walked

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check(vocab: int, nodes: int, top: int, dtype: torch.dtype) -> None:
    """Requests that ask for nothing, for the tokens' own, for the largest and for ids; of one all
    logits are equal, and of one most are -inf. Twice, since work space is used again."""
    ids = list(range(vocab - 1, vocab - 4, -1))
    asked = [
        None,
        LogprobParams(),
        LogprobParams(top_logprobs_num=top, token_ids_logprob=tuple(ids)),
        LogprobParams(top_logprobs_num=top),
        LogprobParams(top_logprobs_num=top),
    ]
    batch, levels = len(asked), nodes
    rows = torch.tensor([4, 0, 3, 1, 2], device=DEVICE)
    table = Asked(
        torch.full((6,), -1, dtype=torch.int64, device=DEVICE),
        torch.zeros(6, dtype=torch.int64, device=DEVICE),
        torch.zeros(6, 8, dtype=torch.int32, device=DEVICE),
    )
    for row, params in zip(rows.tolist(), asked, strict=True):
        if params is not None:
            table.top[row] = params.top_logprobs_num
            wanted = torch.tensor(params.token_ids_logprob, dtype=torch.int32, device=DEVICE)
            table.count[row], table.ids[row, : len(wanted)] = len(wanted), wanted
    found = found_space(batch * levels + 3, vocab, top + 1, 8, DEVICE)
    for seed in range(2):
        torch.manual_seed(seed)
        logits = (4 * torch.randn(batch * nodes, vocab, device=DEVICE)).to(dtype)
        logits[3 * nodes : 4 * nodes] = 1.0
        logits[4 * nodes :, 2:] = float("-inf")
        offsets = torch.arange(batch, device=DEVICE) * nodes
        out = walked(batch, nodes, vocab, DEVICE)
        out.path.copy_(torch.rand(batch, nodes).argsort(1))
        out.tokens.copy_(torch.randint(2, (batch, nodes)))
        out.counts.copy_(torch.tensor([nodes, 1, nodes, nodes, nodes]))
        emitted_logprobs(logits, offsets, rows, table, out, found, levels)
        places = [i for i, one in enumerate(asked) if one is not None]
        params = [one for one in asked if one is not None]
        counts = out.counts.tolist()
        read = RowLogprobs.fetch(found, levels, places, params).read(counts)
        assert read[0] is None
        for place, each in zip(places, params, strict=True):
            count = counts[place]
            (expected,) = read_logprobs(
                lambda at, logits=logits: logits[at].float(),
                offsets[place] + out.path[place, :count],
                out.tokens[place, :count],
                [Span(each, count)],
                vocab,
            )
            mine = read[place]
            assert mine is not None
            assert mine.values == pytest.approx(expected.values, abs=2e-5)
            assert mine.top_ids == expected.top_ids
            for name in ("top_values", "id_values"):
                flat = [v for row in getattr(mine, name) for v in row]
                theirs = [v for row in getattr(expected, name) for v in row]
                assert flat == pytest.approx(theirs, abs=2e-5)


@INTERPRETED
@pytest.mark.parametrize(("vocab", "nodes", "top"), [(40, 1, 2), (50, 3, 20)])
def test_equals_what_a_cpu_reads(
    vocab: int, nodes: int, top: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "BLOCK", 16)
    check(vocab, nodes, top, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocab", "nodes", "top"), [(4095, 8, 5), (4097, 1, 128), (49152, 6, 20), (128256, 2, 1)]
)
def test_equals_what_a_cpu_reads_on_the_gpu(
    vocab: int, nodes: int, top: int, dtype: torch.dtype
) -> None:
    check(vocab, nodes, top, dtype)
