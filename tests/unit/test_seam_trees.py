"""Whether drafts make batches that the host judges slower: the policy, by a clock of our own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

pytest.importorskip("triton")

from sgl_spec.engine.cuda.seam_trees import FIRST, SeamTrees
from sgl_spec.engine.cuda.tree_ledger import CHECK, CHECKED, LIMIT, SHARE

PLAIN_MS = 10.0


@dataclass(frozen=True)
class At:
    """A place in time."""

    ms: float

    def ms_until(self, later: At) -> float:
        return later.ms - self.ms


@dataclass
class Server:
    """Rounds of `requests`. drafted_ms: of a round with drafts, which gives each `tokens`. graphs:
    captured by now."""

    drafted_ms: float
    tokens: float
    requests: int = 48
    plain_ms: float = PLAIN_MS
    now: float = 0.0
    graphs: int = 0

    def __post_init__(self) -> None:
        self.trees = SeamTrees(lambda: self.graphs, lambda: At(self.now))

    def round(self, *, wanted: bool = True, more: float = 0.0, captured: int = 0) -> bool:
        """more: ms that it takes beyond what such rounds take. Returns whether there were
        drafts."""
        drafts = self.trees.begin(self.requests, wanted=wanted)
        self.now += more + (self.drafted_ms if drafts else self.plain_ms)
        self.graphs += captured
        self.trees.end(self.tokens if drafts else 1.0)
        return drafts

    def rounds(self, count: int) -> list[bool]:
        return [self.round() for _ in range(count)]

    def pace(self, count: int) -> float:
        """Tokens over those of plain decoding in the same time."""
        start, tokens = self.now, 0.0
        for drafts in self.rounds(count):
            tokens += self.tokens if drafts else 1.0
        return tokens / ((self.now - start) / self.plain_ms)


def opened(server: Server) -> Server:
    """With an account for its size, and drafts tried once."""
    assert server.rounds(FIRST + 2) == [False] * (FIRST + 1) + [True]
    return server


@pytest.mark.parametrize("requests", [1, 3, 48])
@pytest.mark.parametrize(("ms", "tokens"), [(36.0, 1.7), (11.0, 1.0), (80.0, 2.0), (30.0, 2.9)])
def test_drafts_that_do_not_pay_rest(ms: float, tokens: float, requests: int) -> None:
    server = opened(Server(ms, tokens, requests=requests))
    assert server.pace(1200) > 0.97, "3 rounds of 300, one that shows it and 1 of 96"
    assert server.pace(1200) > 0.98
    stats = server.trees.stats()
    assert stats["seam_left"] > 4 * stats["seam_asked"] > 0, "they are tried again"


@pytest.mark.parametrize(("ms", "tokens"), [(11.0, 1.2), (36.0, 4.0), (16.0, 1.7)])
def test_drafts_that_pay_never_rest(ms: float, tokens: float) -> None:
    server = opened(Server(ms, tokens))
    drafted = server.rounds(1000)
    left = drafted.count(False)
    assert left == 1000 // (CHECK + CHECKED) * CHECKED, "but to see what others take"
    assert server.trees.stats() == {
        "seam_asked": 1001.0 - left,
        "seam_left": FIRST + 1.0 + left,
        "seam_rest": 0.0,
        "seam_tree_ms": pytest.approx(ms, rel=0.01),
        "seam_plain_ms": pytest.approx(PLAIN_MS),
    }


def test_text_that_changes_is_noticed() -> None:
    server = opened(Server(20.0, 1.0))
    assert not all(server.rounds(20))
    server.tokens = 4.0
    rest = round(LIMIT / SHARE) + 200
    server.rounds(rest)
    assert server.rounds(100).count(False) <= CHECKED, "but to see what others take"
    server.tokens = 1.0
    assert server.pace(1500) > 0.97


def test_what_a_first_round_captures_or_compiles_does_not_count() -> None:
    server = Server(12.0, 2.0)
    server.round(more=900.0)
    for _ in range(2):
        server.round(more=300.0, captured=2)
    server.rounds(FIRST - 1)
    server.round(more=100.0)
    assert server.round(more=700.0), "the first with drafts, which says nothing"
    assert server.round(more=500.0, captured=1)
    server.round()
    stats = server.trees.stats()
    assert stats["seam_plain_ms"] == pytest.approx(PLAIN_MS), "the least of them"
    assert stats["seam_rest"] == 0
    assert all(server.rounds(100))


def behind(server: Server, count: int, ms: float = 500.0) -> list[bool]:
    """Rounds of which each comes behind a prompt, or a round on the device."""
    drafted = []
    for _ in range(count):
        server.now += ms
        server.trees.passed()
        drafted.append(server.round())
    return drafted


def test_other_work_between_rounds_is_not_charged() -> None:
    server = Server(12.0, 2.0)
    server.round()
    drafted = behind(server, 300)
    assert drafted[: FIRST + 1] == [False] * FIRST + [True], "the first has none before it"
    assert drafted.count(False) == FIRST + CHECKED
    stats = server.trees.stats()
    assert stats["seam_plain_ms"] == pytest.approx(PLAIN_MS)
    assert stats["seam_tree_ms"] == pytest.approx(12.0, rel=0.01)


def test_drafts_that_do_not_pay_rest_behind_other_work_too() -> None:
    server = opened(Server(40.0, 1.0))
    drafted = behind(server, 1000)
    assert any(drafted[500:]), "they are tried again"
    assert drafted.count(True) < 20


def test_a_round_is_counted_when_the_next_one_begins() -> None:
    """Reading a mark waits for the device, which may be at what the drafter left there."""
    waits: list[float] = []

    class Slow(At):
        def ms_until(self, later: At) -> float:
            waits.append(later.ms)
            return super().ms_until(later)

    server = Server(12.0, 2.0)
    server.trees = SeamTrees(lambda: 0, lambda: Slow(server.now))
    server.rounds(2)
    assert waits == []
    server.round()
    assert waits == [2 * PLAIN_MS]


def test_forgotten_accounts_are_opened_again() -> None:
    server = opened(Server(40.0, 1.0))
    server.rounds(20)
    server.trees.clear()
    assert server.trees.stats() == {"seam_asked": 0.0, "seam_left": 0.0}
    server.drafted_ms, server.tokens = 12.0, 2.0
    opened(server)
    assert all(server.rounds(20))


def test_the_hosts_time_between_rounds_counts() -> None:
    """Whether drafts make it longer or shorter."""
    server = opened(Server(12.0, 2.0))
    for _ in range(20):
        server.now += 25.0 if server.round() else 0.0
    assert server.trees.stats()["seam_rest"] == 1


def test_batches_without_budget_are_not_asked_for_and_tell_what_rounds_take() -> None:
    server = opened(Server(12.0, 2.0))
    server.plain_ms = 15.0
    assert not any(server.round(wanted=False) for _ in range(100))
    assert server.trees.stats()["seam_plain_ms"] > 14
    assert server.round()


def test_batch_sizes_are_judged_apart() -> None:
    server = opened(Server(40.0, 1.0))
    server.rounds(20)
    assert server.trees.stats()["seam_rest"] == 1
    server.requests, server.drafted_ms, server.tokens = 5, 12.0, 2.0
    assert server.rounds(FIRST + 1) == [False] * FIRST + [True]
    server.requests = 8  # of the same power of two
    assert all(server.rounds(20))
    server.requests = 33
    assert not server.round()
