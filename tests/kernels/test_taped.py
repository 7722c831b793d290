"""Records of rounds do what graphs would: the test double itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from kernel_runs import INTERPRETED
from taped import Tape
from torch import Tensor

from sgl_spec_kernels.rms_norm import rms_norm

pytestmark = INTERPRETED


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Program:
    """Buffers in and out, and `step` between them."""

    def __init__(self, step: Callable[[Program], Tensor]) -> None:
        self.given = torch.arange(1.0, 5.0)
        self.out = torch.zeros(4)
        self.factor = 2
        self.step = step

    def __call__(self) -> None:
        self.out.copy_(self.step(self))


def replayed(program: Program, given: list[float]) -> list[float]:
    """What comes out for other inputs, after a capture."""
    tape = Tape(program)
    program.given.copy_(torch.tensor(given))
    tape.replay()
    return program.out.tolist()


def test_inputs_are_read_anew_and_numbers_are_those_of_the_capture() -> None:
    program = Program(lambda p: p.given * p.factor)
    tape = Tape(program)
    program.given += 1
    program.factor = 100
    tape.replay()
    assert program.out.tolist() == [4, 6, 8, 10]


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(lambda p: (p.given * 2).view(2, 2).t().reshape(-1), id="views and copies"),
        pytest.param(lambda p: torch.zeros(4).add_(p.given), id="in place"),
        pytest.param(lambda p: torch.empty(4).fill_(3).where(p.given < 3, p.given), id="filled"),
        pytest.param(lambda p: torch.topk(p.given, 4, sorted=True)[0].flip(0), id="two results"),
        pytest.param(lambda p: rms_norm(p.given[None], torch.ones(4), 1e-6)[0], id="a kernel"),
    ],
)
def test_what_is_replayed_is_what_would_run(step: Callable[[Program], Tensor]) -> None:
    direct = Program(step)
    direct.given.copy_(torch.tensor([4.0, 1.0, 3.0, 2.0]))
    direct()
    expected = direct.out.tolist()
    assert replayed(Program(step), [4.0, 1.0, 3.0, 2.0]) == expected


def test_what_is_kept_outside_is_written_by_replays_alone() -> None:
    kept: list[Tensor] = []

    def step(program: Program) -> Tensor:
        kept[:] = [program.given + 1]
        return kept[0]

    program = Program(step)
    tape = Tape(program)
    assert kept[0].isnan().all(), "a capture computes nothing"
    tape.replay()
    assert kept[0].tolist() == [2, 3, 4, 5]


def test_memory_that_was_not_written_holds_garbage() -> None:
    assert replayed(Program(lambda p: torch.empty(4)), [0.0] * 4) != [0.0] * 4


@pytest.mark.parametrize(
    ("step", "why"),
    [
        pytest.param(lambda p: p.given * float(p.given[0]), "item", id="float"),
        pytest.param(lambda p: p.given if p.given[0] else -p.given, "is_nonzero", id="if"),
        pytest.param(lambda p: p.given * p.given.tolist()[0], "resolve_conj", id="tolist"),
        pytest.param(lambda p: p.given * p.given.numpy()[0], "resolve_conj", id="numpy"),
        pytest.param(lambda p: p.given[p.given > 0], "by a mask", id="mask"),
        pytest.param(lambda p: p.given.nonzero()[:, 0] + p.given, "nonzero", id="nonzero"),
        pytest.param(lambda p: p.given + torch.tensor([1.0] * 4), "lift_fresh", id="a list"),
        pytest.param(
            lambda p: p.given.repeat_interleave(torch.ones(4, dtype=torch.int64)),
            "without a size",
            id="as often",
        ),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(step: Callable[[Program], Tensor], why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        Tape(Program(step))


def test_memory_that_nobody_keeps_is_refused() -> None:
    from_outside = [torch.ones(4)]
    with pytest.raises(AssertionError, match="nobody keeps"):
        Tape(Program(lambda p: p.given + from_outside.pop()))
