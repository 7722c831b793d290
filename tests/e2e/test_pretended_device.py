"""No tensor of the engine strays: on a device that is only pretended, where mixing it with the CPU
is an error, every drafter, rule and setting gives what it gives on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from device_cases import SERVERS, Models, asked, make_engine, make_models, run
from fixed_costs import STEEP, fix_costs
from pretend import DEVICE, Pretended, There
from scoring import TOLERANCE

from sgl_spec import Completion
from sgl_spec.args import ResolvedArgs
from sgl_spec.engine import engine
from sgl_spec.engine.memory import GpuMemory

GIB = 1 << 30
# Whose trees the clock has a say in: by the time that drafting takes, or, in a trie, by when the
# grammars of other requests are compiled.
TIMED = ("EAGLE3, weighed", "NGRAM", "NGRAM, weighed")


@pytest.fixture(scope="module")
def models(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tiny_model_dir, tmp_path_factory.mktemp("drafts"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextmanager
def pretended_gpu() -> Iterator[Pretended]:
    """Engines that are made in here run on `DEVICE`, with the defaults of a GPU."""
    resolve = ResolvedArgs.for_device
    memory = GpuMemory(total=80 * GIB, free=79 * GIB, used=GIB // 2)
    with pytest.MonkeyPatch.context() as patch, Pretended() as pretended:
        patch.setattr(engine, "resolve_device", lambda _: DEVICE)
        patch.setattr(ResolvedArgs, "for_device", lambda self, _: resolve(self, "cuda"))
        patch.setattr(GpuMemory, "read", lambda _: memory)
        yield pretended


@pytest.mark.parametrize("server", SERVERS)
def test_every_feature_keeps_to_the_device(
    models: Models, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_costs(monkeypatch, STEEP)
    wanted = run(make_engine(models, server), asked(server))
    with pretended_gpu() as pretended:
        llm = make_engine(models, server)
        found = run(llm, asked(server))
        assert isinstance(llm.engine.scheduler.worker.kv.k, There)  # type: ignore[attr-defined]
    assert pretended.crossings
    for name, one, other in zip(asked(server), found, wanted, strict=True):
        assert one.output_ids == other.output_ids, name
        assert one.finish == other.finish, name
        if server not in TIMED:
            assert one.spec == other.spec, name
        check_logprobs(one, other)


def check_logprobs(one: Completion, other: Completion) -> None:
    pairs = ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs))
    for mine, theirs in pairs:
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine.top_ids == theirs.top_ids
            assert mine.values == pytest.approx(theirs.values, abs=TOLERANCE)


def test_what_mixes_devices_fails() -> None:
    """Otherwise the test above would say nothing."""
    with Pretended() as pretended:
        there = torch.arange(6, device=DEVICE)
        with pytest.raises(AssertionError, match="mixes"):
            there + torch.arange(6)
        with pytest.raises(AssertionError, match="mixes"):
            there[torch.tensor([1])]
        with pytest.raises(RuntimeError, match="numpy"):
            there.numpy()
        there[torch.tensor([0, 2], device=DEVICE)] = 9
        assert there.tolist() == [9, 1, 9, 3, 4, 5]
        assert (there * 2).view(2, 3)[1].tolist() == [6, 8, 10]
        assert int(there.max()) == 9
        assert sum(pretended.crossings.values()) == 3
