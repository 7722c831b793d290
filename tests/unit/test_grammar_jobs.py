"""Grammars are compiled beside the steps: what waits for them, what does not, what is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from fake_grammar import compile_counting
from fakes import VOCAB
from rig import Rig

from sgl_spec.engine import grammar_jobs
from sgl_spec.engine.compiling import Compiling
from sgl_spec.engine.grammar import GrammarError
from sgl_spec.engine.grammar_jobs import AT_ONCE, MAX_THREADS, TIMEOUT_S, CompileJob, GrammarJobs
from sgl_spec.request import Grammar
from sgl_spec.speculative.grammar import Automaton


class Gated:
    """Compiles a grammar when it is let through, and remembers which it was asked for."""

    def __init__(self) -> None:
        self.gates: dict[str, threading.Event] = {}
        self.begun: list[str] = []

    def __call__(self, grammar: Grammar) -> Automaton:
        self.begun.append(grammar.text)
        if not self.gates.setdefault(grammar.text, threading.Event()).wait(3600):
            raise TimeoutError
        if grammar.text == "bad":
            raise GrammarError("cannot be compiled: it is bad")
        if grammar.text == "panic":
            raise SystemExit  # no Exception, like a panic of the grammar engine
        return compile_counting(grammar)

    def open(self, text: str) -> None:
        self.gates.setdefault(text, threading.Event()).set()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def gated() -> Gated:
    return Gated()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rig(gated: Gated, clock: Clock) -> Rig:
    rig = Rig(drafter="random", rows=4)
    rig.scheduler.compiling = Compiling(GrammarJobs(gated, VOCAB, clock))
    return rig


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def run_until(rig: Rig, rid: str) -> None:
    until(lambda: rig.step() or rid in rig.ends)


def test_a_grammar_that_takes_long_delays_nobody_else(rig: Rig, gated: Gated) -> None:
    """While it is compiled, requests that came later start, decode and end."""
    rig.submit("hard", [1, 2], regex="2,4", max_new_tokens=9)
    gated.open("1,3")
    for i in range(6):
        rig.submit(f"free {i}", [3, i], max_new_tokens=20, ignore_eos=True)
        rig.submit(f"easy {i}", [4, i], regex="1,3", max_new_tokens=20)
    for i in range(6):
        run_until(rig, f"free {i}")
        run_until(rig, f"easy {i}")
    assert "hard" not in rig.ends
    assert len(rig.scheduler.compiling) == 1
    assert rig.slots.table.free_rows == 4, "a request whose grammar is compiled holds nothing"
    assert not rig.scheduler.flush(), "a request is on its way"
    gated.open("2,4")
    rig.run()
    assert rig.ends["hard"].finish.kind == "stop"


def test_with_nothing_else_to_do_a_step_waits_a_moment(rig: Rig, gated: Gated) -> None:
    rig.submit("hard", [1, 2], regex="2,4", max_new_tokens=9)
    start = time.monotonic()
    for _ in range(5):
        rig.step()
    assert time.monotonic() - start > 0.02, "an idle engine spins"
    assert rig.scheduler.has_work
    gated.open("2,4")
    rig.run()


def test_a_grammar_is_compiled_once(rig: Rig, gated: Gated) -> None:
    gated.open("2,4")
    for i in range(8):
        rig.submit(str(i), [1, 2], regex="2,4", max_new_tokens=9)
    rig.run()
    rig.submit("later", [1, 2], regex="2,4", max_new_tokens=9)
    rig.run()
    assert gated.begun == ["2,4"]
    assert len({tuple(ids) for ids in rig.outputs.values()}) == 1


@pytest.mark.parametrize("text", ["bad", "panic"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_cannot_be_compiled_is_a_400_that_names_the_field(
    rig: Rig, gated: Gated, text: str
) -> None:
    gated.open(text)
    rig.submit("a", [1, 2], regex=text, max_new_tokens=9)
    rig.submit("b", [1, 2], regex=text, grammar_field="response_format", max_new_tokens=9)
    rig.submit("free", [1, 2], max_new_tokens=9)
    rig.run()
    assert rig.ends["a"].finish.status == rig.ends["b"].finish.status == 400
    assert rig.ends["a"].finish.message.startswith("regex cannot be compiled: ")
    assert rig.ends["b"].finish.message.startswith("response_format cannot be compiled: ")
    assert rig.ends["a"].finish.param == "regex"
    assert rig.ends["b"].finish.param == "response_format"
    assert rig.ends["free"].finish.kind != "abort"
    assert not rig.scheduler.compiling


def test_what_takes_too_long_is_a_400_and_keeps_no_other_waiting(
    rig: Rig, gated: Gated, clock: Clock
) -> None:
    slow = [f"{i + 1},9" for i in range(MAX_THREADS + 1)]
    for text in slow:
        rig.submit(text, [1, 2], regex=text, max_new_tokens=9)
    rig.step()
    until(lambda: len(gated.begun) == AT_ONCE)
    clock.now += TIMEOUT_S + 1
    rig.step()
    assert set(rig.ends) == set(slow[:AT_ONCE])
    message = rig.ends[slow[0]].finish.message
    assert message == f"regex takes longer than {TIMEOUT_S:g} s to compile."
    rig.step()  # those that are overdue have made room for others
    until(lambda: len(gated.begun) == 2 * AT_ONCE)
    clock.now += TIMEOUT_S + 1
    for _ in range(3):
        rig.step()
    assert len(gated.begun) == MAX_THREADS, "there is a bound to what hangs"
    assert len(rig.ends) == MAX_THREADS
    for text in slow:
        gated.open(text)
    rig.run()
    assert rig.ends[slow[-1]].finish.kind != "abort", "it waited for its turn, which is no fault"
    rig.submit("again", [1, 2], regex=slow[0], max_new_tokens=20)
    rig.run()
    assert rig.ends["again"].finish.kind == "stop", "what came too late is of use to the next"
    assert len(gated.begun) == len(slow)


def test_an_abort_while_the_grammar_is_compiled(rig: Rig, gated: Gated) -> None:
    rig.submit("one", [1, 2], regex="2,4", max_new_tokens=9)
    rig.submit("two", [1, 2], regex="2,4", max_new_tokens=9)
    rig.step()
    rig.scheduler.abort("one")
    rig.step()
    assert rig.ends["one"].finish.message == "Aborted"
    gated.open("2,4")
    rig.run()
    assert rig.ends["two"].finish.kind == "stop"
    rig.submit("three", [1, 2], regex="3,4", max_new_tokens=9)
    rig.scheduler.abort(None)
    rig.run()
    assert rig.ends["three"].finish.message == "Aborted"
    assert "3,4" not in gated.begun, "nobody waits for it, so it is not begun"


def test_requests_that_wait_for_a_grammar_are_in_the_queue(gated: Gated) -> None:
    rig = Rig(rows=1, max_queued=2)
    rig.scheduler.compiling = Compiling(GrammarJobs(gated, VOCAB))
    for i in range(5):
        rig.submit(str(i), [1, 2, 3], regex="2,4", max_new_tokens=9)
    rig.step()
    assert sorted(rig.ends) == ["3", "4"]
    assert rig.ends["3"].finish.status == 503
    gated.open("2,4")
    rig.run()


def finished(jobs: GrammarJobs, text: str) -> CompileJob:
    job = jobs.submit(Grammar("regex", text, "regex"))
    until(lambda: jobs.poll() or job.done)
    jobs.release(job)
    return job


def test_the_cache_is_bounded_and_forgets_the_least_used(
    gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_jobs, "CACHED_GRAMMARS", 3)
    jobs = GrammarJobs(gated, VOCAB)
    for text in ("1,2", "1,3", "1,4", "1,5"):
        gated.open(text)
    first = [finished(jobs, text) for text in ("1,2", "1,3", "1,4")]
    assert finished(jobs, "1,2") is first[0]
    finished(jobs, "1,5")
    assert finished(jobs, "1,2") is first[0]
    assert finished(jobs, "1,3") is not first[1]
    monkeypatch.setattr(grammar_jobs, "CACHED_CHARS", 7)
    finished(jobs, "1,4")
    assert len(jobs._finished) == 2, "long grammars count by their length"


def test_a_hanging_compilation_does_not_keep_the_process(rig: Rig) -> None:
    rig.submit("hard", [1, 2], regex="2,4", max_new_tokens=9)
    rig.step()
    names = [thread for thread in threading.enumerate() if "_run" in thread.name]
    assert names
    assert all(thread.daemon for thread in names)
    rig.scheduler.abort(None)
    rig.run()
