"""The table of a round: its stages, their bytes, and an engine that is left as it was."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
from heads import make_eagle3

from sgl_spec.bench import round as bench_round
from sgl_spec.bench.__main__ import main
from sgl_spec.bench.stages import HOST, Recorder, watched
from sgl_spec.layers.linear import Linear
from sgl_spec.llm import LLM
from sgl_spec.models import layer
from sgl_spec.models.layer import total_bytes
from sgl_spec.speculative.grow import GrownTrees


class ScriptedClock:
    """Each mark is one second after the last."""

    def __init__(self) -> None:
        self.now = 0
        self.capturing = False

    def mark(self) -> int:
        self.now += 1
        return self.now

    def seconds(self, start: int, end: int) -> float:
        return end - start

    def captures(self) -> bool:
        return self.capturing


def test_times_of_nested_stages_add_up() -> None:
    recorder = Recorder(ScriptedClock())
    with recorder.stage("whole"):
        with recorder.part(": linear", 100), recorder.stage("inner"):
            pass
        with recorder.stage("inner"):
            pass
    with recorder.part(": linear", 1000):  # outside of stages, as in a prefill
        pass
    times = recorder.round()
    assert dict(times.seconds) == {"whole": 3, "whole: linear": 2, "inner": 2}
    assert times.total == 7  # eight marks
    assert times.calls == {"whole": 1, "whole: linear": 1, "inner": 2}
    assert times.bytes == {"whole: linear": 100}
    assert recorder.round().total == 0


def test_a_captured_round_counts_with_each_replay() -> None:
    """It was called twice, once to warm up; its spans are those of the capture, and what they took
    is not the host's."""
    clock = ScriptedClock()
    recorder = Recorder(clock)

    def program() -> None:
        with recorder.stage("verify"):
            recorder.reads(100, kv=3)
            with recorder.stage("output layer"):
                recorder.reads(20)
        with recorder.stage("compaction"):
            pass

    graph = object()
    with recorder.stage(HOST):
        with recorder.capture(graph):
            program()
            clock.capturing = True
            program()
            clock.capturing = False
        recorder.replay(graph)
    first = recorder.round(held=7)
    with recorder.stage(HOST), recorder.stage("drafting"):
        recorder.replay(graph)
    second = recorder.round(held=10)
    inside = {"verify": 2, "output layer": 1, "compaction": 1}
    assert {name: first.seconds[name] for name in inside} == inside
    assert dict(second.calls) == {HOST: 1, "drafting": 1, **dict.fromkeys(inside, 1)}
    assert second.seconds == {HOST: 2 - 4, "drafting": 1, **inside}  # of a clock without overlap
    assert first.bytes == {"verify": 100 + 3 * 7, "output layer": 20}
    assert second.bytes == {"verify": 100 + 3 * 10, "output layer": 20}


FLAGS = {
    "none": (),
    "NGRAM": ("--speculative-algorithm", "NGRAM"),
    "EAGLE3": ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "HEAD"),
}


@pytest.fixture(scope="module")
def head(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers = {"eagle_config": {}, "eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    return make_eagle3(tmp_path_factory.mktemp("head"), tiny_model_dir, **layers)


@pytest.mark.parametrize("kind", FLAGS)
def test_the_table(
    kind: str, tiny_model_dir: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "row.json"
    flags = [str(head) if flag == "HEAD" else flag for flag in FLAGS[kind]]
    if kind != "none":
        flags.append("--speculative-verify-whole-trees")
    argv = ["round", "--model-path", str(tiny_model_dir), "--batch", "3", "--rounds", "6"]
    assert main([*argv, "--prompt-tokens", "40", "--json", str(out), *flags]) == 0
    row = json.loads(out.read_text())
    stages = {one["stage"]: one for one in row["rows"]}
    assert {"verify: linear", "verify: attention", "output layer: linear", HOST} <= stages.keys()
    drafting = {"EAGLE3": {"draft extend", "draft steps", "tree build"}, "NGRAM": {"drafting"}}
    both = drafting["EAGLE3"] | drafting["NGRAM"]
    assert both & stages.keys() == drafting.get(kind, set())
    *parts, whole = row["rows"]
    assert whole["stage"] == "round"
    assert sum(one["ms"] for one in parts) == pytest.approx(whole["ms"])
    assert sum(one["mb"] for one in parts) == pytest.approx(whole["mb"])
    model = LLM(str(tiny_model_dir)).engine.model
    weights = [t for t in model.stack.tensors() if t.dim() == 2]
    assert stages["verify: linear"]["mb"] == pytest.approx(total_bytes(weights) / 1e6)
    head_bytes = total_bytes(model.lm_head.tensors())
    assert stages["output layer: linear"]["mb"] == pytest.approx(head_bytes / 1e6)
    # 3 requests of 40 tokens and what they have got since, and the rows of their trees.
    least = 3 * 40 * model.kv_bytes_per_token / 1e6
    assert least < stages["verify: attention"]["mb"] < 3 * least
    if kind == "EAGLE3":
        assert stages["draft steps: linear"]["calls"] > stages["draft extend: linear"]["calls"]
        assert row["args"]["speculative_num_steps"] == 5
    assert whole["over_floor"] > 1
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == len(row["rows"]) + 2


DEVICE = {"verify", "output layer", "sample and follow", "row state", HOST}
DRAFTING = {
    "NGRAM": {"drafting", "tell the drafter"},
    "EAGLE3": {"draft steps", "tree build", "draft extend"},
}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled")
# Rows that fill a forward up compute with whatever lies in memory.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("kind", DRAFTING)
def test_the_table_of_rounds_on_the_device(
    kind: str, tiny_model_dir: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of the fused kernels, in the interpreter: stages by forward, with their bytes."""
    monkeypatch.setattr(bench_round, "WARM_ROUNDS", 1)
    out = tmp_path / "row.json"
    flags = [str(head) if flag == "HEAD" else flag for flag in FLAGS[kind]]
    argv = ["round", "--model-path", str(tiny_model_dir), "--rounds", "2"]
    argv += ["--prompt-tokens", "12", "--attention-backend", "triton", "--json", str(out), *flags]
    if kind == "EAGLE3":
        for name, value in (("num-steps", "2"), ("eagle-topk", "2"), ("num-draft-tokens", "4")):
            argv += [f"--speculative-{name}", value]
    assert main(argv) == 0
    row = json.loads(out.read_text())
    stages = {one["stage"]: one for one in row["rows"]}
    # Trees of the n-gram drafter may be roots alone: no path to bring to the front.
    assert stages.keys() - {"round", "compaction"} == DEVICE | DRAFTING[kind]
    model = LLM(str(tiny_model_dir)).engine.model
    weights = total_bytes([*model.stack.tensors(), model.norm])
    kv = stages["verify"]["mb"] * 1e6 - weights
    assert 12 < kv / model.kv_bytes_per_token < 12 + 20 * 8
    head_bytes = total_bytes(model.lm_head.tensors())
    assert stages["output layer"]["mb"] == pytest.approx(head_bytes / 1e6)
    if kind == "EAGLE3":  # two levels, the second behind a forward
        assert stages["draft steps"]["calls"] == 1
        assert stages["tree build"]["calls"] == 2 + 1
        assert stages["draft steps"]["mb"] > 0 < stages["draft extend"]["mb"]
    assert row["plain_over_floor"] > 1


def test_the_engine_is_left_as_it_was(tiny_model_dir: Path, head: Path) -> None:
    llm = LLM(
        str(tiny_model_dir),
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(head),
        disable_radix_cache=True,
    )
    engine = llm.engine
    owners = (engine.model, engine.scheduler.worker, engine.drafter)
    before = [dict(vars(owner)) for owner in owners]
    functions = [Linear.__call__, Linear.add_to, GrownTrees.expand, layer.store_and_attend]
    prompt, params = list(range(5, 40)), {"temperature": 0.0, "max_new_tokens": 20}
    (plain,) = llm.generate([prompt], params)
    recorder = Recorder(ScriptedClock())
    with contextlib.suppress(KeyError), watched(engine, recorder):
        (measured,) = llm.generate([prompt], params)
        raise KeyError
    assert measured.output_ids == plain.output_ids
    assert recorder.round().calls["verify"] > 1
    assert [vars(owner).keys() for owner in owners] == [each.keys() for each in before]
    assert engine.scheduler.worker.rule is before[1]["rule"]  # type: ignore[attr-defined]
    after = [Linear.__call__, Linear.add_to, GrownTrees.expand, layer.store_and_attend]
    assert all(a is b for a, b in zip(after, functions, strict=True))


def test_refusals(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["round", "--model-path", str(tiny_model_dir)]
    assert main([*argv, "--rounds", "2000"]) == 2
    assert "lower --rounds or --prompt-tokens" in capsys.readouterr().err
    assert main([*argv, "--batch", "2", "--max-total-tokens", "32"]) == 2
    assert "a request may have" in capsys.readouterr().err
