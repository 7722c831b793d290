"""The engine's counters and the decode log line."""

from __future__ import annotations

import pytest

from sgl_spec.engine.metrics import EngineCounters, RoundLog, Throughput, useless_drafts


def test_a_line_every_interval_about_the_rounds_since() -> None:
    log, counters = RoundLog(2), EngineCounters()
    assert log.line(counters, running=1, queued=0, used=0.0) is None
    for emitted in (3, 1):
        counters.rounds += 1
        counters.generated += emitted
        counters.add_round(proposed=4, accepted=emitted - 1, emitted=emitted)
    line = log.line(counters, running=1, queued=5, used=0.25)
    assert line is not None
    assert "accept len: 2.00, accept rate: 0.25" in line
    assert "#running-req: 1, token usage: 0.25" in line
    assert line.endswith("#queue-req: 5")
    assert log.line(counters, running=1, queued=0, used=0.0) is None
    counters.rounds += 2
    plain = log.line(counters, running=1, queued=0, used=0.0)
    assert plain is not None
    assert "accept" not in plain, "rounds without speculation have no accept length"


def test_histogram_counts_rounds_by_accepted_drafts() -> None:
    counters = EngineCounters()
    for accepted in (0, 2, 2):
        counters.add_round(proposed=3, accepted=accepted, emitted=accepted + 1)
    assert counters.histogram == [1, 0, 2]
    assert counters.as_dict()["spec_histogram"] == [1, 0, 2]


def test_throughput_is_zero_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("sgl_spec.engine.metrics.time.monotonic", lambda: now)
    meter = Throughput(window_s=5.0)
    assert meter.rate() == 0.0
    meter.add(10)
    now = 102.0
    meter.add(30)
    assert meter.rate() == pytest.approx(10.0)
    now = 110.0
    assert meter.rate() == 0.0


@pytest.mark.parametrize(
    ("proposed", "accepted", "said"),
    [(1999, 0, False), (2000, 19, True), (2000, 20, False), (90_000, 3, True)],
)
def test_a_draft_model_of_no_use_is_told(proposed: int, accepted: int, said: bool) -> None:
    problem = useless_drafts(EngineCounters(proposed=proposed, accepted=accepted))
    assert (problem is not None) == said
    if problem is not None:
        assert f"{accepted} of {proposed} tokens" in problem
