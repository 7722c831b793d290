"""N-grams on the device against the twins: small vocabularies, so that much repeats."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from kernel_runs import INTERPRETED
from torch import Tensor

from sgl_spec_kernels import ngram_chains, ngram_index, ngram_rows
from sgl_spec_kernels.ngram_chains import MOST_MATCHED, Chains
from sgl_spec_kernels.ngram_index import TokenIndex, token_index
from sgl_spec_kernels.ngram_rows import CUTOFFS
from sgl_spec_kernels.sample import walked

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FILLER = 0


@dataclass
class World:
    """Texts of requests 1 .. B in a log, with room behind each for `nodes` tokens more."""

    index: TokenIndex
    rows: Tensor
    committed: Tensor
    roots: Tensor
    max_nodes: Tensor
    places: Tensor
    known: Tensor


def world(batch: int, nodes: int, vocab: int, longest: int) -> World:
    index = token_index(64 + batch * (longest + nodes + 2), batch + 1, DEVICE)
    lengths = torch.randint(1, longest + 1, (batch,)).tolist()
    at, places, known = 2, [], []
    for row, length in enumerate(lengths, start=1):
        index.starts[row] = at
        text = torch.randint(0, vocab, (length,), dtype=torch.int32, device=DEVICE)
        index.log[at : at + length] = text
        places.append(torch.arange(at, at + length))
        known.append(torch.arange(length))
        at += length + nodes + 1
    ends = torch.tensor(lengths, device=DEVICE)
    rows = torch.arange(1, batch + 1, device=DEVICE)
    roots = index.log[index.starts[rows] + ends - 1].long()
    most = torch.randint(1, nodes + 1, (batch,), device=DEVICE)
    rest = [torch.cat(part).to(DEVICE) for part in (places, known)]
    return World(index, rows, ends - 1, roots, most, *rest)


def random_facts(batch: int, nodes: int) -> Tensor:
    facts = torch.zeros(batch, 3, dtype=torch.int32, device=DEVICE)
    facts[:, 0] = torch.randint(0, MOST_MATCHED + 1, (batch,))
    facts[:, 1] = torch.randint(0, nodes, (batch,))
    return facts


def check_learn(batch: int, nodes: int, longest: int) -> None:
    mine = world(batch, nodes, 3, longest)
    expected = TokenIndex(mine.index.log, mine.index.table.clone(), mine.index.starts)
    ngram_index.learn(mine.index, mine.places, mine.known)
    ngram_index.learn_ref(expected, mine.places, mine.known)
    found, wanted = mine.index.table, expected.table
    assert torch.equal(found > 0, wanted > 0), "the same n-grams are known"
    assert (wanted > 0).any() or longest == 1
    known = dict(zip(mine.places.tolist(), mine.known.tolist(), strict=True))
    for entry in found.nonzero()[:, 0].tolist():  # of equal n-grams any may be named
        place = int(found[entry])
        assert entry in ngram_index.entries_of(mine.index, place, known[place])


def check_propose(batch: int, nodes: int, vocab: int, longest: int) -> None:
    mine = world(batch, nodes, vocab, longest)
    ngram_index.learn_ref(mine.index, mine.places, mine.known)
    outs = [ngram_chains.chains(batch, nodes, DEVICE) for _ in range(2)]
    inputs = (mine.rows, mine.committed, mine.roots, mine.max_nodes)
    ngram_chains.propose(mine.index, *inputs, outs[0])
    ngram_chains.propose_ref(mine.index, *inputs, outs[1])
    assert torch.equal(outs[0].facts, outs[1].facts)
    assert torch.equal(outs[0].tokens, outs[1].tokens)
    if nodes > 2 and batch > 2 and vocab < 9:
        assert (outs[0].facts[:, 1] > 0).any(), "nothing was drafted"


def check_keep(batch: int, nodes: int) -> None:
    mine = world(batch, nodes, 50, 9)
    out = walked(batch, nodes, 50, DEVICE)
    out.tokens.copy_(torch.randint(0, 50, (batch, nodes)))
    out.counts.copy_(torch.randint(1, nodes + 1, (batch,)))
    mine.rows[-1] = FILLER
    logs, spots = [], []
    for keep in (ngram_index.keep, ngram_index.keep_ref):
        index = TokenIndex(mine.index.log.clone(), mine.index.table, mine.index.starts)
        both = [torch.full((batch * nodes,), -5, device=DEVICE) for _ in range(2)]
        keep(index, mine.rows, mine.committed, out, FILLER, *both)
        logs.append(index.log)
        spots.append(both)
    assert torch.equal(logs[0], logs[1])
    assert batch == 1 or not torch.equal(logs[0], mine.index.log)
    assert torch.equal(spots[0][1], spots[1][1])
    used = spots[0][1] > 0
    assert torch.equal(spots[0][0][used], spots[1][0][used])
    assert not used[-nodes:].any(), "the filler has no text"


def check_rows(batch: int, nodes: int, total: int) -> None:
    width = 300
    table = torch.randperm((batch + 2) * width, device=DEVICE).to(torch.int32).view(-1, width)
    rows = torch.randperm(batch + 2, device=DEVICE)[:batch]
    committed = torch.randint(0, 200, (batch,), device=DEVICE)
    tokens = torch.randint(0, 99, (batch, nodes), device=DEVICE)
    facts = random_facts(batch, nodes)
    scores = torch.rand(MOST_MATCHED + 1, nodes - 1, device=DEVICE).sort(1, descending=True).values
    cutoffs = torch.linspace(1, 0, CUTOFFS, device=DEVICE)
    depths = (scores >= cutoffs[:, None, None]).sum(-1).int()
    made = []
    for share, fill in (
        (ngram_rows.share_rows, ngram_rows.chain_rows),
        (ngram_rows.share_rows_ref, ngram_rows.chain_rows_ref),
    ):
        out = Chains(tokens, facts.clone())
        into = ngram_rows.chain_rows_buffers(batch, total, DEVICE)
        share(out, depths, into)
        fill(out, committed, rows, table, into)
        made.append((out.facts, *(getattr(into, name) for name in into.__slots__)))
    for found, expected in zip(*made, strict=True):
        assert torch.equal(found, expected)
    drafts = int((made[0][0][:, 2] - 1).sum())
    assert drafts <= total - batch
    if total == batch * nodes:
        assert torch.equal(made[0][0][:, 2], facts[:, 1] + 1), "everything fits"


LEARN = [(1, 2, 1), (1, 3, 127), (2, 4, 200), (4, 2, 9)]
PROPOSE = [(1, 2, 2, 40), (3, 8, 2, 30), (5, 9, 3, 60), (4, 1, 2, 20), (3, 4, 400, 5)]
ROWS = [(1, 2, 1), (1, 8, 8), (3, 4, 5), (5, 8, 40), (7, 3, 21), (33, 8, 128), (20, 8, 129)]


@INTERPRETED
@pytest.mark.parametrize(("batch", "nodes", "longest"), LEARN)
def test_learn(batch: int, nodes: int, longest: int) -> None:
    check_learn(batch, nodes, longest)


@INTERPRETED
@pytest.mark.parametrize(("batch", "nodes", "vocab", "longest"), PROPOSE)
def test_propose(batch: int, nodes: int, vocab: int, longest: int) -> None:
    check_propose(batch, nodes, vocab, longest)


@INTERPRETED
@pytest.mark.parametrize(("batch", "nodes"), [(1, 1), (2, 4), (3, 7)])
def test_keep(batch: int, nodes: int) -> None:
    check_keep(batch, nodes)


@INTERPRETED
@pytest.mark.parametrize(("batch", "nodes", "total"), ROWS)
def test_rows(batch: int, nodes: int, total: int) -> None:
    check_rows(batch, nodes, total)


@INTERPRETED
def test_a_text_that_goes_round_is_drafted_beyond_its_end() -> None:
    check_round()


def check_round() -> None:
    index = token_index(40, 2, DEVICE)
    index.starts[1] = 5
    index.log[5:11] = torch.tensor([7, 8, 9, 7, 8, 9], dtype=torch.int32)
    places, known = torch.arange(5, 11, device=DEVICE), torch.arange(6, device=DEVICE)
    ngram_index.learn(index, places, known)
    out = ngram_chains.chains(1, 8, DEVICE)
    one = torch.ones(1, dtype=torch.int64, device=DEVICE)
    ngram_chains.propose(index, one, 5 * one, 9 * one, 64 * one, out)
    assert out.facts[0, :2].tolist() == [3, 7]
    assert out.tokens.tolist() == [[9, 7, 8, 9, 7, 8, 9, 7]]


@INTERPRETED
def test_a_text_is_not_found_at_its_own_end() -> None:
    check_own_end()


def check_own_end() -> None:
    index = token_index(40, 2, DEVICE)
    index.starts[1] = 5
    index.log[5:11] = torch.tensor([7, 8, 9, 7, 8, 9], dtype=torch.int32)
    places, known = torch.arange(5, 11, device=DEVICE), torch.arange(6, device=DEVICE)
    ngram_index.learn(index, places, known)
    for entry in ngram_index.entries_of(index, 11, 6)[
        3:
    ]:  # of a longer text that stood here before
        index.table[entry] = 11
    one = torch.ones(1, dtype=torch.int64, device=DEVICE)
    for propose in (ngram_chains.propose, ngram_chains.propose_ref):
        out = ngram_chains.chains(1, 4, DEVICE)
        propose(index, one, 5 * one, 9 * one, 64 * one, out)
        assert out.facts[0, :2].tolist() == [3, 3]
        assert out.tokens.tolist() == [[9, 7, 8, 9]]


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    for learn in (*LEARN, (48, 8, 1000)):
        check_learn(*learn)
    for propose in (*PROPOSE, (48, 8, 5, 300), (256, 64, 2, 100)):
        check_propose(*propose)
    for keep in ((1, 1), (3, 7), (256, 64)):
        check_keep(*keep)
    for rows in (*ROWS, (256, 8, 2048), (256, 64, 4096), (1000, 8, 1500)):
        check_rows(*rows)
    check_round()
    check_own_end()
