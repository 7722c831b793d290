"""What an exception or Ctrl-C leaves behind in `LLM`: everything in order, or a clear refusal."""

from __future__ import annotations

import gc
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest

from sgl_spec import LLM, interrupts
from sgl_spec.errors import EngineDeadError

PROMPTS = [[7], [40, 41, 42, 9], [5] * 30]
PARAMS = {"temperature": 0.8, "seed": 3, "frequency_penalty": 0.3, "max_new_tokens": 12}
GRAMMAR = {"temperature": 0, "regex": "[ab]{30}", "max_new_tokens": 40}


@pytest.fixture(autouse=True)
def _pythons_own_handler() -> Iterator[None]:
    """Which a process that was started in the background does not have: SIGINT is ignored there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(params=["none", "NGRAM"])
def llm(tiny_model_dir: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Room for two requests, so that one of three waits; prompts come in pieces."""
    options = {"max_total_tokens": 400, "max_running_requests": 2, "chunked_prefill_size": 16}
    with LLM(str(tiny_model_dir), speculative_algorithm=request.param, **options) as made:
        yield made


def texts(llm: LLM) -> list[list[int]]:
    return [done.output_ids for done in llm.generate(PROMPTS, PARAMS)]


def all_is_back(llm: LLM) -> None:
    """Nothing runs, and every row and slot is free."""
    scheduler, slots = llm.engine.scheduler, llm.engine.slots
    assert not llm.engine.has_work
    slots.check([])
    assert scheduler.flush()
    assert slots.pages.free_slots == slots.pages.total


def before_call(owner: object, name: str, at: int, act: Callable[[], object]) -> None:
    """Do something before the `at`-th call of a method."""
    method, calls = getattr(owner, name), 0

    def call(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            act()
        return method(*args)

    setattr(owner, name, call)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def fail(*_: object) -> NoReturn:
    raise RuntimeError("device lost")


@pytest.mark.parametrize(("method", "at"), [("_prefill", 1), ("_prefill", 2), ("_decode", 3)])
def test_ctrl_c_within_a_step_ends_the_call_behind_it(llm: LLM, method: str, at: int) -> None:
    wanted = texts(llm)
    llm.engine.scheduler.flush()
    before_call(llm.engine.worker, method, at, interrupt)
    with pytest.raises(KeyboardInterrupt):
        texts(llm)
    all_is_back(llm)
    assert texts(llm) == wanted


def test_ctrl_c_while_a_grammar_is_compiled(llm: LLM) -> None:
    before_call(llm.engine.scheduler.compiling, "take", 1, interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[7], [8]], GRAMMAR)
    all_is_back(llm)
    assert len(llm.generate([7], GRAMMAR)[0].text) == 30


def test_an_interrupt_in_the_last_step_is_not_lost(llm: LLM) -> None:
    before_call(llm.engine.worker, "_prefill", 1, interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([7], {"max_new_tokens": 1})
    all_is_back(llm)


def test_ctrl_c_twice_in_a_hurry_is_once(llm: LLM) -> None:
    before_call(llm.engine.worker, "_decode", 1, lambda: (interrupt(), interrupt()))
    with pytest.raises(KeyboardInterrupt):
        texts(llm)
    all_is_back(llm)


def test_a_step_that_hangs_can_be_left(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "IMPATIENT_S", 0.0)
    before_call(llm.engine.worker, "_decode", 1, lambda: (interrupt(), interrupt(), fail()))
    with pytest.raises(KeyboardInterrupt):
        texts(llm)
    with pytest.raises(EngineDeadError, match=r"\(KeyboardInterrupt\)"):
        texts(llm)


def test_a_handler_of_the_program_s_own_decides(llm: LLM) -> None:
    wanted, told = texts(llm), []
    before = signal.signal(signal.SIGINT, lambda number, _: told.append(number))
    try:
        before_call(llm.engine.worker, "_decode", 2, interrupt)
        assert texts(llm) == wanted
        assert told == [signal.SIGINT]
        interrupt()
        assert told == [signal.SIGINT] * 2
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        before_call(llm.engine.worker, "_decode", 2, interrupt)
        assert texts(llm) == wanted
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_alarm_of_the_program_s_own_may_be_any_error(llm: LLM) -> None:
    wanted, before = texts(llm), signal.signal(signal.SIGINT, fail)
    try:
        before_call(llm.engine.worker, "_decode", 2, interrupt)
        with pytest.raises(RuntimeError, match="device lost"):
            texts(llm)
    finally:
        signal.signal(signal.SIGINT, before)
    all_is_back(llm)
    assert texts(llm) == wanted


def test_a_handler_may_set_another_for_the_next_time(llm: LLM) -> None:
    """As programs do that ask once more before they quit."""
    wanted = texts(llm)
    llm.engine.scheduler.flush()
    told: list[int] = []

    def ask(number: int, _: object) -> None:
        told.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, ask)
    before_call(llm.engine.worker, "_decode", 1, interrupt)
    assert texts(llm) == wanted
    assert told == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    llm.engine.scheduler.flush()
    signal.signal(signal.SIGINT, ask)
    before_call(llm.engine.worker, "_decode", 1, interrupt)
    before_call(llm.engine.worker, "_decode", 3, interrupt)
    with pytest.raises(KeyboardInterrupt):
        texts(llm)
    all_is_back(llm)
    signal.signal(signal.SIGINT, lambda *_: signal.signal(signal.SIGINT, signal.SIG_IGN))
    before_call(llm.engine.worker, "_decode", 1, interrupt)
    assert texts(llm) == wanted
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_handler_may_shut_the_model_down(llm: LLM) -> None:
    signal.signal(signal.SIGINT, lambda *_: (llm.shutdown(), sys.exit(3)))
    before_call(llm.engine.worker, "_decode", 2, interrupt)
    with pytest.raises(SystemExit):
        texts(llm)
    with pytest.raises(RuntimeError, match="shut down"):
        texts(llm)


def test_a_shut_down_within_a_step_ends_the_call_behind_it(llm: LLM) -> None:
    before_call(llm.engine.worker, "_decode", 2, llm.shutdown)
    with pytest.raises(RuntimeError, match="shut down"):
        texts(llm)


def test_a_handler_cannot_call_in_the_middle_of_a_call(llm: LLM) -> None:
    wanted = texts(llm)
    llm.engine.scheduler.flush()
    signal.signal(signal.SIGINT, lambda *_: texts(llm))
    before_call(llm.engine.worker, "_decode", 2, interrupt)
    with pytest.raises(RuntimeError, match="in the middle of another call"):
        texts(llm)
    all_is_back(llm)
    assert texts(llm) == wanted


def test_other_threads_leave_signals_alone(llm: LLM) -> None:
    wanted, handler = texts(llm), signal.getsignal(signal.SIGINT)
    seen: list[Any] = []
    before_call(llm.engine.worker, "_decode", 1, lambda: seen.append(signal.getsignal(2)))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(texts, llm).result() == wanted
    assert seen == [handler]


@pytest.mark.parametrize("method", ["_prefill", "_decode", "observe", "collect", "begin", "close"])
def test_an_engine_whose_step_failed_says_so_at_once(tiny_model_dir: Path, method: str) -> None:
    llm = LLM(str(tiny_model_dir), speculative_algorithm="NGRAM", chunked_prefill_size=16)
    model = weakref.ref(llm.engine.model)
    before_call(llm.engine.worker, method, 2, fail)
    with pytest.raises(RuntimeError, match="device lost"):
        texts(llm)
    with pytest.raises(EngineDeadError, match=r"\(RuntimeError: device lost\).*make another LLM"):
        texts(llm)
    gc.collect()
    assert model() is None
    llm.shutdown()


def test_a_prompt_that_cannot_be_queued_takes_the_others_back(llm: LLM) -> None:
    wanted = texts(llm)
    before_call(llm.engine, "submit", 2, fail)
    with pytest.raises(RuntimeError, match="device lost"):
        texts(llm)
    all_is_back(llm)
    assert texts(llm) == wanted
