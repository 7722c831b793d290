"""The engine on a GPU: in float32 it writes what it writes on the CPU, whatever drafts, judges or
constrains it, by plain torch, by the fused kernels, and by rounds in CUDA graphs."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from device_cases import (
    DRAFTS_DECIDE,
    SERVERS,
    Models,
    asked,
    gap,
    make_engine,
    make_models,
    prompts,
    run,
    settings,
)
from draft_rig import make_draft
from tiny import make_tiny

from sgl_spec import LLM, Completion
from sgl_spec.engine.memory import GpuMemory
from sgl_spec.errors import ConfigError

pytestmark = pytest.mark.gpu

EXCUSED = 1e-3  # the distance of two scores whose order rounding may change
LOGPROBS = 1e-3
LONG = {"max_new_tokens": 60, "ignore_eos": True}
NEW = 24


@pytest.fixture(scope="module")
def models(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tiny_model_dir, tmp_path_factory.mktemp("drafts"))


@pytest.fixture(scope="module")
def plain(models: Models) -> LLM:
    return make_engine(models, "none", device="cpu")


def same_or_near(
    plain: LLM, server: str, found: list[Completion], wanted: list[Completion]
) -> None:
    """Every text is the CPU's, or parts from it where two tokens have nearly the same score."""
    names = asked(server)
    rows = zip(names, prompts(), settings(names, NEW), found, wanted, strict=False)
    for name, prompt, params, one, other in rows:
        pairs = list(zip(one.output_ids, other.output_ids, strict=False))
        parted = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if parted is None:
            assert one.output_ids == other.output_ids, name
            continue
        assert server not in DRAFTS_DECIDE, f"{name}: {one.output_ids} != {other.output_ids}"
        ids = [*prompt, *other.output_ids[:parted]]
        apart = gap(plain, ids, params, len(prompt), list(pairs[parted]))
        assert apart <= EXCUSED, f"{name}, token {parted}: {pairs[parted]} are {apart:g} apart"


@pytest.mark.parametrize(
    ("server", "backend"),
    [
        *((server, "triton") for server in SERVERS if server != "simulated"),
        *((server, "torch") for server in ("none", "NGRAM", "EAGLE3", "rejection, tree")),
    ],
)
def test_texts_are_those_of_the_cpu(models: Models, plain: LLM, server: str, backend: str) -> None:
    """Every setting of a request in one batch, twice: first with a cold prefix cache and rounds
    that are not captured yet."""
    wanted = run(make_engine(models, server, device="cpu"), asked(server), NEW)
    llm = make_engine(models, server, device="cuda", attention_backend=backend)
    assert llm.engine.info["attention_backend"] == backend
    for _ in range(2):
        found = run(llm, asked(server), NEW)
        same_or_near(plain, server, found, wanted)
        for one, other in zip(found, wanted, strict=True):
            if one.logprobs is not None and one.output_ids == other.output_ids:
                assert other.logprobs is not None
                assert one.logprobs.values == pytest.approx(other.logprobs.values, abs=LOGPROBS)


def test_simulated_lengths_are_reached(models: Models) -> None:
    """Lengths are drawn for batches as they come, so the texts are nobody's; their mean is kept."""
    llm = make_engine(models, "simulated", device="cuda")
    done = llm.generate([[5, 6, 7, i + 8] for i in range(24)], {"temperature": 0.0, **LONG})
    assert all(one.spec is not None and len(one.output_ids) == 60 for one in done)
    counters = llm.engine.counters
    assert counters.emitted / counters.verify_ct == pytest.approx(2.5, rel=0.1)


@pytest.mark.parametrize("server", ["none", "NGRAM", "EAGLE3"])
@pytest.mark.parametrize(
    "flags",
    [
        {"disable_cuda_graph": True},
        {"disable_overlap_schedule": True},
        {"cuda_graph_bs": [3, 8]},
        {"cuda_graph_max_bs": 2},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_how_rounds_are_launched_changes_no_text(
    models: Models, plain: LLM, server: str, flags: dict[str, object]
) -> None:
    wanted = run(make_engine(models, server, device="cpu"), asked(server), NEW)
    llm = make_engine(models, server, device="cuda", **flags)
    same_or_near(plain, server, run(llm, asked(server), NEW), wanted)


@pytest.mark.parametrize("server", ["none", "NGRAM", "EAGLE3", "STANDALONE"])
def test_settings_and_grammars_run_as_graphs(models: Models, plain: LLM, server: str) -> None:
    """Grammars, penalties, biases and log-probabilities: the texts without graphs, twice, so that
    the second time every round is replayed; and the device's waiting for masks is told."""
    names = asked(server)
    eager = make_engine(models, server, device="cuda", disable_cuda_graph=True)
    wanted = run(eager, names, NEW)
    llm = make_engine(models, server, device="cuda")
    for _ in range(2):
        same_or_near(plain, server, run(llm, names, NEW), wanted)
    made = llm.engine.scheduler.worker.rounds._made.values()  # type: ignore[attr-defined]
    assert any(each.program.split and each.graphs for each in made), "no masked round was captured"
    for one in (eager, llm):
        assert 0 <= one.engine.state().drafter["mask_wait_ms"] < 1000


@pytest.mark.parametrize("server", ["none", "NGRAM", "EAGLE3", "STANDALONE"])
def test_many_requests_come_and_go_in_half_precision(models: Models, server: str) -> None:
    """More than may run, prompts that share beginnings, ends at different times, a pool so small
    that requests are retracted: every one of them ends, and every slot comes back."""
    llm = make_engine(
        models, server, device="cuda", dtype="bfloat16", max_total_tokens=700,
        max_running_requests=24,
    )  # fmt: skip
    rng = random.Random(7)
    stem = [rng.randrange(3, 512) for _ in range(40)]
    texts = [[*stem[: rng.randrange(2, 40)], i % 500 + 3] for i in range(80)]
    params = [
        {
            "seed": i,
            "temperature": float(i % 2),
            "max_new_tokens": 90 + 2 * (i % 60),
            "ignore_eos": True,
        }
        for i in range(80)
    ]
    done = llm.generate(texts, params)
    assert [len(one.output_ids) for one in done] == [90 + 2 * (i % 60) for i in range(80)]
    assert llm.engine.counters.retracted > 0
    assert llm.engine.scheduler.flush()
    assert llm.engine.slots.pages.free_slots == llm.engine.slots.pages.total


@pytest.fixture
def small_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A GPU of 8 GB beside what earlier tests have left: torch refuses to go beyond. Its size."""
    size, whole = 8 * 10**9, torch.cuda.mem_get_info()[1]
    gc.collect()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_reserved()

    def read(device: torch.device) -> GpuMemory:
        torch.cuda.empty_cache()
        used = torch.cuda.memory_reserved(device) - left
        return GpuMemory(size, size - used, used)

    monkeypatch.setattr(GpuMemory, "read", read)
    torch.cuda.set_per_process_memory_fraction((size + left) / whole)
    yield size
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("server", ["none", "EAGLE3"])
def test_most_of_the_memory_may_be_given_away(small_card: int, server: str, tmp_path: Path) -> None:
    """At 0.9 of the card the largest prefill, rounds of all requests and their sampling still fit,
    with the KV pool full."""
    target = make_tiny(tmp_path / "target", hidden=1024, layers=8, heads=16, kv_heads=8)
    models = Models(target, {"EAGLE3": make_draft("EAGLE3", tmp_path / "draft", target)})
    llm = make_engine(
        models, server, device="cuda", dtype="bfloat16", max_total_tokens=None,
        mem_fraction_static=0.9, max_running_requests=256, chunked_prefill_size=8192,
    )  # fmt: skip
    memory = llm.engine.info["memory"]
    planned = 1e9 * (memory["kvcache"] + memory["weight"] + memory["work"])
    assert 0.85 * small_card < planned < 0.92 * small_card
    rng = random.Random(1)
    length = min(1800, llm.engine.num_slots // 200)
    texts = [[rng.randrange(3, 512) for _ in range(length)] for _ in range(260)]
    params = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 20, "ignore_eos": True}
    done = llm.generate(texts, params)
    assert all(len(one.output_ids) == 20 for one in done)


def test_a_share_that_cannot_work_says_which_would(models: Models) -> None:
    flags = {"device": "cuda", "max_total_tokens": None, "max_running_requests": 200}
    with pytest.raises(ConfigError, match=r"Give --mem-fraction-static (0\.\d+) or more") as caught:
        make_engine(models, "none", mem_fraction_static=0.001, **flags)
    least = caught.value.message.split("--mem-fraction-static ")[1].split(" ")[0]
    llm = make_engine(models, "none", mem_fraction_static=float(least), **flags)
    assert llm.engine.num_slots > 0


def test_the_engine_says_where_it_runs(models: Models) -> None:
    info = make_engine(models, "none", device="auto", dtype="auto").engine.info
    assert (info["device"], info["device_name"]) == ("cuda", torch.cuda.get_device_name())
    assert (info["dtype"], info["attention_backend"]) == ("float32", "triton")  # as it is stored
