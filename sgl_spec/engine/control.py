"""Does drafting pay, and which way of drafting pays most?

A server can run a round in a few ways: without drafts (option 0), or with one of a few tree shapes,
or by asking a drafter on the host. The controller picks the option with the most tokens per
millisecond at the present load, by what rounds really took and really brought:

    rate(load, option) = (1 + gain(texts, option)) / ms(load, option)

The gain is the drafted tokens that a request keeps per round. Acceptance changes with the texts all
the time, and for all options at once, so a gain has two factors: the present *level*, known from
the option that runs, and the option's *share* of it. A round also tells what smaller trees, which
lie within its own, would have gained; larger ones are known from trials. A source that scores its
drafts gives the first factor itself (`expected`). Other options are tried from a fixed share of the
time: a trial is charged what it lost, and the next one waits until that is paid for. So a server
loses no more than this share, and a trial that loses little is repeated often.

What was learned of texts holds at every load, and so does by how much rounds of an option take
longer than was thought: a load that never ran begins with both.

No device and no clock: times come from the caller, in any unit that is the same within a load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

SHARE = 1 / 128  # of the time, to be lost by trials
MARGIN = 0.02  # by which another option must be better to lead
LEVEL = 96.0  # request rounds that the present level is an average of
MOST_REQUESTS = 24.0  # that count in one round, so that a level outlives a few rounds
FRESH = 8.0  # request rounds that a level counts for once nothing was drafted for a while
TRIALS = 256.0  # request rounds that a share is an average of
PRIOR = 16.0  # request rounds that a first guess counts for
SEEN = 4.0  # times its loss, that the trial of an option is charged whose gain is seen anyway
ROUNDS = 16.0  # that a time is an average of
STALE = 12.0  # rounds that a time counts for once its option did not run for a while
KNOWN = 3.0  # rounds that a time is the average of before it is believed
RECENT = 3  # rounds of an option whose median counts
RISE = 1.5  # times what is known, that counts at most
COMPILED = 3.0  # times what later ones show: a first time that long is forgotten
FADE = 1 / 64  # of a weight, per round in which nothing is learned
LEAST_LOSS = 0.02  # of a trial's time, which it is charged at least
MOST_LOSS = 2.0  # rounds of the leading option's, that a trial may be expected to lose


@dataclass(frozen=True, slots=True)
class Load:
    """What rounds are compared under. size: of the batch. texts: loads with the same value share
    what is learned of acceptance."""

    size: int
    texts: Hashable = None


@dataclass(frozen=True, slots=True)
class Decision:
    """How a round is run. base: the gain that was expected of it before its share. trial: whether
    another option leads, at a rate of `best`. level: the option whose gain tells the present level:
    the best of those that draft; 0 where a source has scores. charged: what a trial is expected to
    lose, ms."""

    load: Load
    option: int
    base: float
    trial: bool = False
    level: int = 0
    best: float = 0.0
    charged: float = 0.0


@dataclass(slots=True)
class Average:
    """A running average. weight: of what it holds; most: where that stops to grow, so that older
    values are forgotten."""

    most: float
    value: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        """Take a value in."""
        self.weight = min(self.weight + weight, self.most)
        self.value += (value - self.value) * min(1.0, weight / self.weight)

    def fade(self, least: float) -> None:
        """Nothing new was learned: the next value counts for more."""
        if self.weight > least:
            self.weight = max(least, self.weight * (1 - FADE))


@dataclass(slots=True)
class _Share:
    """What an option gained over what was expected of it."""

    gained: Average
    expected: Average

    @classmethod
    def guessed(cls, share: float) -> _Share:
        return cls(Average(TRIALS, share, PRIOR), Average(TRIALS, 1.0, PRIOR))

    @property
    def value(self) -> float:
        return self.gained.value / max(self.expected.value, 1e-6)

    def add(self, gain: float, base: float, requests: float) -> None:
        self.gained.add(gain, requests)
        self.expected.add(base, requests)


class _Texts:
    """Acceptance of one kind of texts."""

    def __init__(self, guesses: Sequence[float]) -> None:
        self.level = Average(LEVEL, 1.0, FRESH)
        self.shares = [_Share.guessed(guess) for guess in guesses]
        self.seen = False

    def gain(self, option: int, base: float) -> float:
        """Drafted tokens that a request keeps."""
        return base * self.shares[option].value if option else 0.0

    def learn(self, decision: Decision, gains: Mapping[int, float], requests: float) -> None:
        """What a round gained, and would have with smaller options, by option that drafts."""
        base = decision.base
        if not decision.option:
            self.level.fade(FRESH)
        if decision.level in gains:
            base = gains[decision.level] / max(self.shares[decision.level].value, 1e-3)
            self.level.add(base, requests)
        self.seen = self.seen or len(gains) > 1
        for option, gain in gains.items():
            if option != decision.level:
                self.shares[option].add(gain, base, requests)


@dataclass(slots=True)
class _Account:
    """Of one load. ms, thought, recent, rounds: by option. A time counts as the median of recent
    ones, so that one busy moment of the machine moves nothing. thought: before a round ran, 0.0
    where nothing was. lead: the option that is run unless
    another one is tried; None before the first round. trials: by option, lately. debt: what trials
    lost and nothing has paid for, ms."""

    ms: list[Average]
    thought: list[float]
    recent: list[deque[float]]
    rounds: list[int]
    trials: list[float]
    lead: int | None = None
    debt: float = 0.0

    def time(self, option: int, longer: float) -> float:
        """Milliseconds of a round. longer: than was thought, if none has run here."""
        return self.ms[option].value * (1.0 if self.rounds[option] else longer)

    def take(self, option: int, ms: float, longer: float) -> float:
        """A round took so long. Returns what counts of it. longer: see `time`."""
        time, recent = self.ms[option], self.recent[option]
        time.value = self.time(option, longer)
        recent.append(ms)
        counted = sorted(recent)[(len(recent) - 1) // 2]
        if time.weight:
            counted = min(counted, RISE * time.value)
        if counted * COMPILED < time.value:
            time.weight = 0.0
        time.add(counted)
        self.rounds[option] += 1
        for other in self.ms[:option] + self.ms[option + 1 :]:
            other.fade(STALE)
        return counted

    def next_trial(self, rates: dict[int, float], times: dict[int, float]) -> int:
        """Which option to try: one that loses half as much is tried twice as often, and one that
        loses rounds only if all do. rates: of the options that do not lead, over that of the one
        that does. times: of all."""
        losses = {each: _loss(rate) * times[each] for each, rate in rates.items()}
        tried = min(losses, key=lambda each: losses[each] * (self.trials[each] + 0.5))
        most = MOST_LOSS * times[self.lead or 0]
        if losses[tried] > most:
            tried = min(losses, key=losses.__getitem__)
        self.trials = [count * (1 - 1 / 16) for count in self.trials]
        self.trials[tried] += 1
        return tried


class Controller:
    """See the module. guesses: of each option's gain before anything is known, 0.0 first."""

    def __init__(self, guesses: Sequence[float]) -> None:
        self._guesses = tuple(guesses)
        self._accounts: dict[Load, _Account] = {}
        self._texts: dict[Hashable, _Texts] = {}
        self._longer = [Average(ROUNDS) for _ in self._guesses]  # real times over thought ones
        self._present: _Account | None = None

    def know(self, load: Load, option: int, ms: float) -> None:
        """A round is thought to take so long, until one has run."""
        account = self._account(load)
        if not account.ms[option].weight:
            account.ms[option].add(ms, KNOWN)
            account.thought[option] = ms

    def choose(
        self, load: Load, options: Sequence[int], expected: Sequence[float] | None = None
    ) -> Decision:
        """How to run the next round. options: those that can be run, rising. expected: of every
        option there is, the drafted tokens that the source's scores promise a request; None where
        it has no scores."""
        account, texts = self._account(load), self._texts_of(load)
        self._present = account
        bases = expected or [texts.level.value] * len(self._guesses)
        for option in options:
            if account.ms[option].weight < KNOWN:  # it must run to be known
                return Decision(load, option, bases[option])
        times = {each: account.time(each, self._factor(each)) for each in options}
        rates = {each: (1 + texts.gain(each, bases[each])) / times[each] for each in options}
        option = lead = _lead(account, rates)
        others = {each: rate / rates[lead] for each, rate in rates.items() if each != lead}
        drafting = lead or max(others, key=others.__getitem__, default=0)
        if account.debt <= 0 and others:
            # While nothing drafts the level is the question, and one option answers it.
            option = account.next_trial(others, times) if lead else drafting
        level, charged = drafting if expected is None else 0, 0.0
        if option != lead:  # the next round is chosen before this one is known
            charged = _loss(others[option]) * times[option]
            account.debt += charged
        return Decision(load, option, bases[option], option != lead, level, rates[lead], charged)

    def note(
        self,
        decision: Decision,
        requests: int,
        tokens: float,
        ms: float,
        smaller: Mapping[int, float] | None = None,
    ) -> None:
        """A round of so many requests brought them `tokens` in all, in `ms`. smaller: what other
        options that draft would have brought, as far as the round shows that."""
        account, texts = self._account(decision.load), self._texts_of(decision.load)
        option, thought = decision.option, account.thought[decision.option]
        counted = account.take(option, ms, self._factor(option))
        if thought:
            self._longer[option].add(counted / thought)
        brought = {**(smaller or {}), option: tokens}
        gains = {each: brought[each] / requests - 1 for each in brought if each}
        texts.learn(decision, gains, min(float(requests), MOST_REQUESTS))
        if decision.trial:
            time = account.ms[decision.option].value
            rate = (1 + texts.gain(decision.option, decision.base)) / time
            seen = texts.seen and 0 < option < (account.lead or 0)
            lost = counted * _loss(rate / decision.best) * (SEEN if seen else 1.0)
            account.debt += lost - decision.charged
        else:
            account.debt = max(0.0, account.debt - SHARE * counted)

    def rate(self, load: Load) -> float:
        """Tokens per millisecond that a request gets of the option that leads; 0.0 if none does."""
        account, texts = self._account(load), self._texts_of(load)
        if account.lead is None:
            return 0.0
        gain = texts.gain(account.lead, texts.level.value)
        return (1 + gain) / account.ms[account.lead].value

    def clear(self) -> None:
        """Forget what was learned of acceptance; times stay."""
        self._texts.clear()
        for account in self._accounts.values():
            account.lead, account.debt = None, 0.0

    def stats(self, unit_ms: float = 1.0) -> dict[str, float]:
        """draft_option: what leads at the present load, 0 for no drafts. option_{i}_rounds,
        option_{i}_ms: how often each ran at any load, and what it takes at the present one.
        unit_ms: of the times that rounds were noted with."""
        if self._present is None:
            return {}
        rounds = [
            sum(each) for each in zip(*(a.rounds for a in self._accounts.values()), strict=True)
        ]
        figures = {"draft_option": float(self._present.lead or 0)}
        for option, (count, time) in enumerate(zip(rounds, self._present.ms, strict=True)):
            figures[f"option_{option}_rounds"] = float(count)
            figures[f"option_{option}_ms"] = time.value * unit_ms
        return figures

    def _factor(self, option: int) -> float:
        """By how much rounds of an option take longer than was thought; those of any, if none of
        its own has run."""
        known = [each.value for each in self._longer if each.weight]
        own = self._longer[option]
        return own.value if own.weight else sum(known) / len(known) if known else 1.0

    def _account(self, load: Load) -> _Account:
        if load not in self._accounts:
            count = len(self._guesses)
            times = [Average(ROUNDS) for _ in range(count)]
            recent = [deque[float](maxlen=RECENT) for _ in range(count)]
            zeros = [0.0] * count
            self._accounts[load] = _Account(times, zeros, recent, [0] * count, zeros[:])
        return self._accounts[load]

    def _texts_of(self, load: Load) -> _Texts:
        if load.texts not in self._texts:
            self._texts[load.texts] = _Texts(self._guesses)
        return self._texts[load.texts]


def _loss(rate: float) -> float:
    """Share of a trial's time that it lost, from its option's rate over the leading one's."""
    return max(LEAST_LOSS, 1 - rate)


def _lead(account: _Account, rates: dict[int, float]) -> int:
    """The option of the best rate; the one that led before stays while it is as good."""
    best, lead = max(rates, key=rates.__getitem__), account.lead
    if lead is None or lead not in rates or rates[best] > rates[lead] * (1 + MARGIN):
        account.lead = lead = best
    return lead


def guessed_gain(steps: int, topk: int, nodes: int) -> float:
    """A guess of the drafted tokens that a tree of this shape gains: the chance of a level is
    that of a chain's, about 0.6, and the more nodes a level has the more of the rest it catches."""
    levels = min(steps, nodes - 1)
    width = (nodes - 1) / levels if topk > 1 else 1.0
    chance = 1 - 0.4 / max(width, 1.0) ** 0.5
    return float(sum(chance**depth for depth in range(1, levels + 1)))
