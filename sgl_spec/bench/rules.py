"""Acceptance rules on one small pair of distributions: measured, beside closed forms.

The target gives six tokens the probabilities p whatever came before, the drafter gives them q. Each
row is one rule with its drafts over many rounds, seeds 0, 1, 2, ...; the expected values are worked
out from the rule's definition in Python floats, without the code under test.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sgl_spec.bench.closed_forms import (
    Expected,
    Probs,
    as_block,
    following,
    one_by_one,
    relaxed,
    siblings,
)
from sgl_spec.bench.report import provenance, say, table, write_row
from sgl_spec.request import SamplingParams
from sgl_spec.speculative.base import DraftBatch
from sgl_spec.speculative.propose import SampledTrees
from sgl_spec.speculative.rules import AcceptanceRule, make_rule
from sgl_spec.speculative.sampling import SamplingRows, build_rows, draw
from sgl_spec.speculative.topology import Topology, topology
from sgl_spec.speculative.tree import TokenTree

P: Probs = (0.40, 0.25, 0.15, 0.10, 0.07, 0.03)
Q: Probs = (0.20, 0.35, 0.05, 0.25, 0.10, 0.05)
BEST = tuple(sorted(range(len(Q)), key=lambda token: -Q[token]))
ROOT_POSITION = 6
CHAIN = 3


@dataclass(frozen=True, slots=True)
class Row:
    """One rule, measured and expected.

    chi_square: of the first token against the target's distribution, 5 degrees of freedom; its
    expectation is 5 for a lossless rule. p_value: of that. p_value_pair: of the first two tokens
    together. total_variation: of the first token; what is measured for a lossless rule is chance.
    """

    rule: str
    drafts: str
    acceptance: float
    acceptance_expected: float
    kept: float
    kept_expected: float
    total_variation: float
    total_variation_expected: float
    chi_square: float
    chi_square_expected: float
    p_value: float
    p_value_pair: float


@dataclass(frozen=True, slots=True)
class Case:
    """A rule and the trees it judges: `fixed` tokens as children of the root, or sampled ones."""

    name: str
    drafts: str
    rule: AcceptanceRule
    expected: Expected
    fixed: tuple[int, ...] = ()
    sampled: Topology | None = None


def main(argv: Sequence[str]) -> None:
    """`python -m sgl_spec.bench rules`."""
    options = _parser().parse_args(argv)
    torch.set_num_threads(1)
    rows = [measure(case, options.draws, options.seed) for case in cases()]
    print(f"p = {list(P)}, q = {list(Q)}, {options.draws} rounds a row; (expected)")
    print(table(_HEADER, [_cells(row) for row in rows]))
    if options.json:
        command = ["python", "-m", "sgl_spec.bench", "rules", *argv]
        facts = {"p": P, "q": Q, "draws": options.draws, "rows": [asdict(row) for row in rows]}
        write_row(Path(options.json), {**provenance(command, options.seed), **facts})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sgl_spec.bench rules", description=__doc__)
    parser.add_argument("--draws", type=int, default=200_000, help="rounds per row")
    parser.add_argument("--seed", type=int, default=0, help="the first round's seed")
    parser.add_argument("--json", help="append one JSON row to this file")
    return parser


_HEADER = ("rule", "drafts", "accepted", "", "kept", "", "TV", "", "chi2", "", "p", "p (pair)")


def _cells(row: Row) -> list[str]:
    pairs = (
        (row.acceptance, row.acceptance_expected),
        (row.kept, row.kept_expected),
        (row.total_variation, row.total_variation_expected),
        (row.chi_square, row.chi_square_expected),
    )
    cells = [text for seen, due in pairs for text in (f"{seen:.4g}", f"({due:.4g})")]
    return [row.rule, row.drafts, *cells, f"{row.p_value:.2g}", f"{row.p_value_pair:.2g}"]


def cases() -> list[Case]:
    """All rows of the table."""
    best, three = BEST[:1], BEST[:3]
    follow, rejection, block = make_rule(), make_rule(rejection=True), make_rule(block=True)
    acc, half, fifth = (
        make_rule(threshold_acc=0.5),
        make_rule(threshold_single=0.5),
        make_rule(threshold_single=0.2),
    )
    chain = topology(CHAIN, 1, CHAIN + 1)
    one, tree = topology(1, 1, 2), topology(1, 3, 4)
    return [
        Case("one-hot", "best by q", follow, following(P, best), fixed=best),
        Case("p/q", "1 sampled", rejection, siblings(P, Q, 1), sampled=one),
        Case("target only", "3 best by q", follow, following(P, three), fixed=three),
        Case("p/q, tree", "3 sampled", rejection, siblings(P, Q, 3), sampled=tree),
        Case("p/q, chain", "chain of 3", rejection, one_by_one(P, Q, CHAIN), sampled=chain),
        Case("block", "chain of 3", block, as_block(P, Q, CHAIN), sampled=chain),
        Case("threshold_acc 0.5", "3 best by q", acc, relaxed(P, three, acc=0.5), fixed=three),
        Case("threshold_single 0.5", "3 best by q", half, relaxed(P, three, 0.5), fixed=three),
        Case("threshold_single 0.2", "3 best by q", fifth, relaxed(P, three, 0.2), fixed=three),
    ]


# --- measurement ----------------------------------------------------------------------------------


def measure(case: Case, draws: int, seed: int) -> Row:
    """Run `draws` rounds of a case at once, as requests of one batch."""
    say(f"Drawing: {case.name}, {case.drafts}.")
    params = SamplingParams(seed=0, temperature=1.0)
    rows = build_rows([params], [1], []).select(torch.zeros(draws, dtype=torch.int64))
    rows.seed.copy_(torch.arange(seed, seed + draws))
    tree = _sampled_tree(case.sampled, rows) if case.sampled else _fixed_tree(case.fixed, draws)
    logits = torch.tensor(P).log().expand(tree.width, -1).contiguous()
    committed = torch.full((draws,), ROOT_POSITION)
    done = case.rule(tree, logits, torch.zeros_like(committed), rows, committed)
    first = done.tokens[:, 0]
    after = draw(logits, rows, committed + 2, torch.zeros_like(committed))
    pair = first * len(P) + torch.where(done.counts > 1, done.tokens[:, 1], after)
    return _row(case, draws, done.counts - 1, first, pair)


def _fixed_tree(candidates: Sequence[int], draws: int) -> TokenTree:
    tokens = torch.tensor([0, *candidates]).expand(draws, -1)
    parents = torch.tensor([-1, *[0] * len(candidates)]).expand(draws, -1)
    return TokenTree(tokens, parents, torch.full((draws,), tokens.shape[1]))


def _sampled_tree(shape: Topology, rows: SamplingRows) -> TokenTree:
    count = rows.count
    batch = DraftBatch(
        rows=np.zeros(count, dtype=np.int64),
        lengths=np.full(count, ROOT_POSITION + 1),
        max_nodes=np.full(count, shape.width),
        tokens=np.zeros((1, ROOT_POSITION + 1), dtype=np.int32),
        sampling=rows,
    )
    trees, logits = SampledTrees(batch, shape), torch.tensor(Q).log()
    for level in trees.levels():
        trees.grow(level, logits.expand(len(level.request), -1))
    return trees.finish()


def _row(case: Case, draws: int, kept: Tensor, first: Tensor, pair: Tensor) -> Row:
    counts = torch.bincount(first, minlength=len(P)).tolist()
    pairs = torch.bincount(pair, minlength=len(P) ** 2).tolist()
    due = case.expected
    both = [a * b for a in P for b in P]
    return Row(
        rule=case.name,
        drafts=case.drafts,
        acceptance=float((kept > 0).double().mean()),
        acceptance_expected=due.acceptance,
        kept=float(kept.double().mean()),
        kept_expected=due.kept,
        total_variation=total_variation([count / draws for count in counts], P),
        total_variation_expected=round(total_variation(due.first, P), 12),
        chi_square=chi_square(counts, P),
        chi_square_expected=_mean_chi_square(due.first, draws),
        p_value=_p_value(counts, P),
        p_value_pair=_p_value(pairs, both),
    )


def total_variation(a: Sequence[float], b: Sequence[float]) -> float:
    """Half the summed distance."""
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / 2


def chi_square(counts: Sequence[int], probs: Sequence[float]) -> float:
    """Pearson's statistic of counts against a distribution."""
    total = sum(counts)
    pairs = zip(counts, probs, strict=True)
    return sum((count - total * p) ** 2 / (total * p) for count, p in pairs)


def _mean_chi_square(drawn: Sequence[float], draws: int) -> float:
    """Expectation of the statistic when tokens come from `drawn` and not from p."""
    pairs = zip(drawn, P, strict=True)
    return sum((draws * (d - p) ** 2 + d * (1 - d)) / p for d, p in pairs)


def _p_value(counts: Sequence[int], probs: Sequence[float]) -> float:
    freedom, statistic = torch.tensor([len(probs) - 1, chi_square(counts, probs)]).double() / 2
    return float(torch.special.gammaincc(freedom, statistic))
