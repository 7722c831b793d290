"""Whether trees of the host ever make a server slower: the policy in a simulated server, whose host
and device have clocks. No device."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from sgl_spec.engine.cuda.costs import DeviceCosts, TreeShapes
from sgl_spec.engine.cuda.drafting import HostDrafting
from sgl_spec.engine.cuda.graphs import Replayed
from sgl_spec.engine.cuda.running import Planned, RunningRound
from sgl_spec.engine.cuda.timing import Stopwatch
from sgl_spec.engine.cuda.tree_ledger import (
    CHECK,
    CHECKED,
    CREDIT,
    LIMIT,
    SHARE,
    Account,
    TreeLedger,
)
from sgl_spec.speculative.array_tree import ArrayTree
from sgl_spec.speculative.base import DraftBatch
from sgl_spec.speculative.tree import AcceptResult, TokenTree

REQUESTS, NODES = 48, 8
TREE_MS = {64: 5.9, 128: 6.0, 192: 6.1, 256: 7.2, 384: 9.3}
PLAIN_MS = 5.9
REQUEST_MS = 0.3  # that rounds take longer than they do without requests
GRAPH_MS = 0.3  # from the start of a launch to its kernels, where nothing runs meanwhile
STEP_MS = 0.5  # of the scheduler


@dataclass
class Text:
    """Chains of `depth` tokens: how likely a token is said to be right, and is."""

    said: float
    true: float
    depth: int = 3


@dataclass
class Server:
    """Host and device, each at its own time. ms: of the drafter's propose, look and observe."""

    text: Text
    propose_ms: float = 0.9
    observe_ms: float = 0.9
    requests: int = REQUESTS
    host: float = 0.0
    device: float = 0.0
    tokens: int = 0
    asked: int = 0
    rounds: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))


class Watch:
    def __init__(self, start: float, end: float) -> None:
        self.start, self.end = start, end

    def ms(self) -> float:
        return self.end - self.start

    def ms_until(self, later: Watch) -> float:
        return later.start - self.end


class Plugin:
    """A drafter that cannot look."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def propose(self, batch: DraftBatch) -> TokenTree:
        server, size, text = self.server, len(batch.rows), self.server.text
        server.host += server.propose_ms
        nodes = text.depth + 1
        wild = server.rng.uniform(0.7, 1.3, (size, 1))  # some texts are said to be better
        said = np.minimum(text.said * wild, 1.0) ** np.arange(nodes)
        tokens = torch.full((size, nodes), 6)
        tokens[:, 0] = 5
        parents = torch.arange(-1, nodes - 1).repeat(size, 1)
        return TokenTree(tokens, parents, torch.full((size,), nodes), torch.from_numpy(said))

    def observe(self, batch: DraftBatch, tree: TokenTree, accepted: AcceptResult) -> None:
        self.server.host += self.server.observe_ms


class Looking(Plugin):
    def look(self, batch: DraftBatch) -> TokenTree:
        return self.propose(batch)


class Promises(TreeLedger):
    """What came of trees is not held against what they promise."""

    @property
    def resting(self) -> bool:
        return False


def costs() -> DeviceCosts:
    known = DeviceCosts(TreeShapes((REQUESTS,), NODES))
    known.know(REQUESTS, REQUESTS, PLAIN_MS - REQUEST_MS)
    for rows, ms in TREE_MS.items():
        known.know(REQUESTS, rows, ms)
    return known


class Simulation:
    """What the scheduler and the worker do with a source of trees; see `engine.scheduler`."""

    def __init__(self, server: Server, drafting: HostDrafting) -> None:
        self.server, self.drafting = server, drafting
        self.under_way: RunningRound | None = None
        self.last: Watch | None = None
        size = server.requests
        tokens = np.full((size, 64), 5, np.int32)
        self.batch = DraftBatch(np.arange(size), np.full(size, 10), np.full(size, NODES), tokens)
        self.remaining = np.full(size, 50)

    def run(self, ms: float) -> float:
        """Serve for so long. Returns how many tokens came over those of plain decoding."""
        server = self.server
        start, tokens = server.device, server.tokens
        while server.device < start + ms:
            self.step()
        plain = (server.device - start) / PLAIN_MS * server.requests
        return (server.tokens - tokens) / plain

    def step(self) -> None:
        server, drafting = self.server, self.drafting
        server.host += STEP_MS
        if drafting.waits():
            self.collect(self.under_way, behind=False)
            self.under_way = None
        before, self.under_way = self.under_way, self.launch()
        if before is None:
            drafting.learn()
        else:
            self.collect(before, behind=True)

    def launch(self) -> RunningRound:
        server, behind = self.server, self.under_way is not None
        size = server.requests
        if behind:
            self.drafting.expect(size)
        tree = None if behind else self.drafting.plan(self.batch, self.remaining)
        asked = tree is not None
        tree = tree if tree is not None and tree.drafts else None
        ms = PLAIN_MS
        if tree is not None:
            ms = next(ms for rows, ms in TREE_MS.items() if rows >= size + tree.drafts) + REQUEST_MS
        start, ready = max(server.host, server.device), server.host + GRAPH_MS
        server.host, server.device = ready, max(start, ready) + ms
        server.rounds += 1
        server.asked += asked
        watch = Watch(start, server.device)
        planned = Planned(cast(Replayed, None), self.batch, tree, drafted=asked, timed=True)
        launched = RunningRound(
            rows=self.batch.rows, tenancy=self.batch.rows, final=self.batch.rows, size=size,
            results=None, proposed=[0] * size, planned=planned, watch=cast(Stopwatch, watch),
            before=cast("Stopwatch | None", self.last),
        )  # fmt: skip
        self.last = watch
        return launched

    def collect(self, launched: RunningRound | None, *, behind: bool) -> None:
        if launched is None:
            return
        server = self.server
        assert launched.watch is not None
        server.host = max(server.host, cast(Watch, launched.watch).end)
        given = self.given(launched.planned.tree)
        server.tokens += int(given[:, 0].sum())
        self.drafting.tell(launched, self.batch.lengths, given)
        self.drafting.observe(given[:, 0].tolist())
        if behind:
            self.drafting.learn(look=True)

    def given(self, tree: ArrayTree | None) -> np.ndarray:
        """[B, 1 + N]: the chain as far as it is right, and one more token."""
        size, text = self.server.requests, self.server.text
        right = self.server.rng.random((size, NODES)) < text.true
        most = 0 if tree is None else (tree.num_nodes - 1)[:, None]
        kept = (right.cumprod(1) * (np.arange(NODES) < most)).sum(1)
        given = np.full((size, 1 + NODES + 1), 7, np.int32)
        for row, count in zip(given, kept, strict=True):
            row[0] = count + 1
            row[1 : 1 + count] = 6
        return given


def simulated(server: Server, *, looks: bool, ledger: TreeLedger | None = None) -> Simulation:
    drafter = (Looking if looks else Plugin)(server)
    drafting = HostDrafting(drafter, costs())  # type: ignore[arg-type]  # what it is asked here
    if ledger is not None:
        drafting.ledger = ledger
    return Simulation(server, drafting)


BENCH_MS = 3300.0  # 96 requests of 256 tokens, 48 at a time
BAD = [Text(0.40, 0.15), Text(0.5, 0.0), Text(0.45, 0.16), Text(0.9, 0.1, 7)]
GOOD = [Text(0.6, 0.6), Text(0.8, 0.8), Text(0.45, 0.5), Text(0.9, 0.85, 5)]


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("text", BAD)
def test_trees_that_do_not_pay_cost_next_to_nothing(text: Text, looks: bool) -> None:
    promised = simulated(Server(text), looks=looks, ledger=Promises()).run(BENCH_MS)
    assert promised < 0.95, "this is a text that promises too much"
    assert simulated(Server(text), looks=looks).run(BENCH_MS) > 0.98
    assert simulated(Server(text), looks=looks).run(4 * BENCH_MS) > 0.98


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("text", GOOD)
def test_trees_that_pay_are_kept(text: Text, looks: bool) -> None:
    promised = simulated(Server(text), looks=looks, ledger=Promises()).run(BENCH_MS)
    assert promised > 1.05, "this is a text to gain from"
    gained = simulated(Server(text), looks=looks).run(BENCH_MS)
    assert gained - 1 > 0.95 * (promised - 1)


@pytest.mark.parametrize("looks", [True, False])
def test_text_that_becomes_repetitive_is_found_and_one_that_ceases_to_be_is_left(
    looks: bool,
) -> None:
    bad, good = Text(0.5, 0.0), Text(0.8, 0.8)
    server = Server(bad)
    simulation = simulated(server, looks=looks)
    assert simulation.run(BENCH_MS) > 0.98
    server.text = good
    simulation.run(400 * PLAIN_MS)  # a rest, which may just have begun
    gained = simulation.run(BENCH_MS)
    assert gained > 0.98 * simulated(Server(good), looks=looks).run(BENCH_MS) > 1.8
    server.text = bad
    assert simulation.run(BENCH_MS) > 0.96, "what was earned before may be lost"
    assert simulation.run(BENCH_MS) > 0.98


@pytest.mark.parametrize("looks", [True, False])
def test_chance_does_not_stop_a_single_request_from_gaining(looks: bool) -> None:
    promised, gained = (
        simulated(Server(Text(0.6, 0.6), requests=1), looks=looks, ledger=ledger).run(4 * BENCH_MS)
        for ledger in (Promises(), None)
    )
    assert promised > 1.4
    assert gained - 1 > 0.9 * (promised - 1)


def test_a_plugin_that_takes_longer_than_rounds_rests_nearly_always() -> None:
    server = Server(Text(0.6, 0.6), propose_ms=50.0)
    assert simulated(server, looks=False, ledger=Promises()).run(BENCH_MS) < 0.3
    server = Server(Text(0.6, 0.6), propose_ms=50.0)
    simulation = simulated(server, looks=False)
    assert simulation.run(BENCH_MS) > 0.95, "one round to see it, one more to believe it"
    assert simulation.run(4 * BENCH_MS) > 0.98
    assert simulation.drafting.stats()["trees_rest"] == 1


def test_what_requests_add_to_all_rounds_is_no_debt_for_long() -> None:
    """Texts that grow: no round without trees has run since they were short."""
    account = Account(5.0, 10.0, 5.0)
    rested = 0
    for step in range(2000):
        grown = 5.0 + 5.0 * step / 2000
        if account.resting:
            rested += 1
            account.note_plain(grown)
        else:
            account.note_asked(1.7, grown + 3.0)
    assert account.plain_ms > 7, "it was learned again"
    assert rested < 200


@pytest.mark.parametrize("looks", [True, False])
def test_rounds_that_got_faster_are_noticed_while_trees_are_asked_for(
    looks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long texts under which trees do not pay, so that a plain round is known as a long one; trees
    that pay; then short texts, under which trees bring nothing that a long round would be worth."""
    server = Server(Text(0.5, 0.0))
    simulation = simulated(server, looks=looks)
    with monkeypatch.context() as long:
        long.setattr(sys.modules[__name__], "PLAIN_MS", PLAIN_MS + 3.0)
        long.setattr(sys.modules[__name__], "REQUEST_MS", REQUEST_MS + 3.0)
        simulation.run(2 * BENCH_MS)
        server.text = Text(0.6, 0.6)
        simulation.run(4 * BENCH_MS)
    server.text = Text(0.5, 0.1)
    simulation.run(2 * BENCH_MS)
    assert simulation.run(BENCH_MS) > 0.97
    assert simulation.run(4 * BENCH_MS) > 0.98


def test_no_better_price_makes_a_rest_endless() -> None:
    """Trees that nearly paid for a long time, until plain rounds turn out to be faster."""
    account = Account(10.0, 10.0, 10.0)
    for _ in range(30_000):
        account.note_asked(1.0, 10.0001)
    while not account.resting:
        account.note_asked(1.0, 13.0)
    rest = 0
    while account.resting and rest < 5000:
        account.note_plain(5.0)
        rest += 1
    assert rest < 2 * 4 * LIMIT / SHARE


def test_what_plain_rounds_take_is_seen_now_and_then() -> None:
    account = Account(8.0, 8.0, 8.0)
    asked = plain = 0
    for _ in range(20 * (CHECK + CHECKED)):
        if account.rests:
            plain += 1
            account.note_plain(6.0)
        else:
            asked += 1
            account.note_asked(2.5, 9.0)
    assert not account.resting
    assert plain / asked == pytest.approx(CHECKED / CHECK, rel=0.02)
    assert account.plain_ms == pytest.approx(6.0, rel=0.01)


def test_one_round_that_compiles_is_no_reason_to_rest() -> None:
    account = Account(5.0, 10.0, 5.0)
    account.note_asked(2.0, 800.0)
    assert not account.resting
    account.note_plain(800.0)
    assert account.plain_ms < 6
    for _ in range(3):
        account.note_asked(1.0, 12.0)
    assert account.resting, "three of them are one"


def test_debts_are_paid_and_credit_is_bounded() -> None:
    account = Account(5.0, 10.0, 5.0)
    for _ in range(100):
        account.note_asked(3.0, 7.0)
    lost = 0
    while not account.resting:
        account.note_asked(1.0, 6.0)
        lost += 1
    assert lost == 5 * (CREDIT + LIMIT) + 1
    rest = 0
    while account.resting and rest < 1000:
        account.note_plain(5.0)
        rest += 1
    assert rest == pytest.approx((LIMIT * 5 + 1) / 5 / SHARE, rel=0.02)


def test_batch_sizes_have_their_own_accounts() -> None:
    ledger = TreeLedger()
    for size in (8, 48):
        ledger.open(size, 5.0)
    for _ in range(20):
        ledger.note(48, 1.0, 9.0, asked=True)
    assert ledger.resting
    ledger.open(8, 5.0)
    assert not ledger.resting
    ledger.open(48, 7.0)
    assert ledger.resting
    assert ledger.plain_ms(48) == 5.0
    assert ledger.stats()["trees_asked"] == 20
