"""Whether trees of the host are worth their price, by what rounds really brought and took.

What trees promise decides about a single round, but promises may be kept for years or never: scores
are estimates, those that look best are too good more often than not, and the host's time on the way
to a launch is not all in a model of costs. So accounts are kept. Every round for which a drafter
was asked is charged the time from the round before to its own end, and credited what its tokens
would have taken without trees. In the red, rounds run ahead without asking, and a small share of
their time pays the debt off; then trees are tried again. So a server loses no more than that share
and a first few rounds, whatever is promised, and the worse trees were the longer they rest. What a
round takes without trees changes with the texts, so now and then trees that pay are left out for a
few rounds to see. No device, no clock: times come from the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

LIMIT = 3.0  # plain rounds' worth of time that trees may lose before they rest
CREDIT = 8.0  # likewise, that they may have earned for worse times
SHARE = 1 / 96  # of the time of rounds at rest, to be lost by the next trial
CHECK = 192  # rounds with trees, after which some without are due
CHECKED = 3  # as many
_BLEND = 1 / 16  # weight of the newest round
_FASTER = 1 / 4  # likewise, where it shows that rounds without trees are faster than was believed
_MOST_LEARNED = 4 * LIMIT  # plain rounds' worth of debt that a better price of tokens may make
_MOST_ASKED = 3.0  # times what the last took: no more of a round's time counts, which may have
_MOST_PLAIN = 2.0  # compiled something; likewise, times what they take lately


@dataclass(slots=True)
class Account:
    """Of one batch size. plain_ms: of a round without asking; asked_ms: of one with. counted: what
    counted of the last such. debt: ms that asking lost, negative if it gained. tokens: per request,
    brought since there is a debt. resting: whether it is being paid off. unseen: rounds with trees
    since it was last seen what one without takes; checking: whether it is being seen."""

    plain_ms: float
    asked_ms: float
    counted: float
    debt: float = 0.0
    tokens: float = 0.0
    resting: bool = False
    unseen: int = 0
    checking: bool = False

    @property
    def rests(self) -> bool:
        """Whether the next round is to be one without asking."""
        return self.resting or self.checking

    def note_asked(self, tokens: float, ms: float) -> None:
        """A round gave each request so many tokens, on average."""
        self.counted = counted = min(ms, _MOST_ASKED * max(self.counted, self.plain_ms))
        self.asked_ms += _BLEND * (counted - self.asked_ms)
        self.debt = max(self.debt + counted - tokens * self.plain_ms, -CREDIT * self.plain_ms)
        self.tokens = self.tokens + tokens if self.debt > 0 else 0.0
        self.resting = self.resting or self.debt > LIMIT * self.plain_ms
        self.unseen += 1
        self.checking = self.checking or self.unseen >= CHECK

    def note_plain(self, ms: float) -> None:
        """A round for which nobody was asked. The debt is also what tokens would have taken, so it
        follows what is learned of that: where texts grew, plain rounds take longer than the last
        ones did before a long time with trees."""
        counted = min(ms, _MOST_PLAIN * self.plain_ms)
        learned = (_FASTER if counted < self.plain_ms else _BLEND) * (counted - self.plain_ms)
        self.plain_ms += learned
        if self.resting:
            most = max(self.debt, _MOST_LEARNED * self.plain_ms)
            self.debt = min(self.debt - self.tokens * learned, most)
        self.unseen = max(0, self.unseen - CHECK // CHECKED)
        self.checking = self.checking and self.unseen > 0
        if self.debt > 0:
            self.debt = max(0.0, self.debt - SHARE * counted)
        if self.debt <= 0:
            self.tokens, self.resting = 0.0, False


class TreeLedger:
    """Accounts by batch size."""

    def __init__(self) -> None:
        self._accounts: dict[int, Account] = {}
        self._last: Account | None = None
        self.asked = self.plain = 0

    def open(self, size: int, plain_ms: float) -> None:
        """Rounds of a size are about to run. plain_ms: what one takes without trees, if no account
        knows better."""
        if size not in self._accounts:
            self._accounts[size] = Account(plain_ms, plain_ms, 2 * plain_ms)
        self._last = self._accounts[size]

    @property
    def resting(self) -> bool:
        """Whether nobody is to be asked, at the size that was opened last."""
        return self._last is not None and self._last.rests

    def plain_ms(self, size: int) -> float:
        """Of a round without trees, of an open account."""
        return self._accounts[size].plain_ms

    def note(self, size: int, tokens: float, ms: float, *, asked: bool) -> None:
        """A round of an open account took `ms` from the end of the round before. tokens: it gave a
        request, on average. asked: whether it waited for trees, even if there were none."""
        account = self._accounts[size]
        if asked:
            self.asked += 1
            account.note_asked(tokens, ms)
        else:
            self.plain += 1
            account.note_plain(ms)

    def stats(self) -> dict[str, float]:
        """trees_asked, trees_left: rounds for which trees were made, and for which they were not.
        trees_rest: 1 while accounts forbid them. tree_round_ms, plain_round_ms: what both take
        lately, at the present batch size."""
        last = self._last
        figures = {"trees_asked": float(self.asked), "trees_left": float(self.plain)}
        if last is None:
            return figures
        times = {"tree_round_ms": last.asked_ms, "plain_round_ms": last.plain_ms}
        return figures | {"trees_rest": float(last.rests)} | times
