"""What the training commands cannot do: one line that names the flag or the file, exit code 2."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_file_torch
from safetensors.torch import save_file as save_file_torch
from training_data import load_target, make_data, make_target

from sgl_spec.errors import ConfigError
from sgl_spec.models.checkpoint import resolve_draft
from sgl_spec.models.shipped import SHIPPED
from sgl_spec.training import feed as feeds
from sgl_spec.training import stopping
from sgl_spec.training.__main__ import main as command
from sgl_spec.training.checks import check_directory
from sgl_spec.training.eagle3 import Eagle3Draft
from sgl_spec.training.eval import draft_kind
from sgl_spec.training.feed import Batch, Feed, Position
from sgl_spec.training.loop import StepStats
from sgl_spec.training.shards import ShardWriter, TokenSequence, TokenShards

PATIENCE_S = 20


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A target, data of 32 to 44 tokens each, and a head trained for two steps."""
    root = tmp_path_factory.mktemp("refusals")
    model = make_target(root / "target")
    data = make_data(root / "data", load_target(model), sequences=40)
    common = ["--model-path", str(model), "--data", str(data), "--held-out", "0.3"]
    train = ["eagle3", *common, "--batch-tokens", "256", "--max-len", "64"]
    head = root / "head"
    assert command([*train, "--draft-vocab", "100", "--out", str(head), "--steps", "2"]) == 0
    return SimpleNamespace(root=root, model=model, data=data, common=common, train=train, head=head)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that is refused: its one line."""

    def run(*argv: str) -> str:
        capsys.readouterr()
        assert command(list(argv)) == 2
        lines = re.split("[\\n\\r]", capsys.readouterr().err)  # a bar ends with a return
        (line,) = [line for line in lines if line.startswith(f"{argv[0]}: ")]
        return line

    return run


def in_time(action: Callable[[], None]) -> None:
    """Runs what once hung for ever."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--max-len", "8", "--ttt-steps", "16"], r"--ttt-steps.*44 only 8 are read \(--max-len"),
        (["--held-out", "0.999999"], "--held-out 0.999999 keeps every prompt"),
        (["--device", "banana"], "--device banana is unknown; allowed: cpu, cuda or cuda:N"),
        (["--draft-vocab", "0"], "--draft-vocab 0 is out of range"),
    ],
)
def test_training(
    world: SimpleNamespace, refused: Callable[..., str], flags: list[str], named: str
) -> None:
    out = str(world.root / "none")
    line = refused(*world.train, "--out", out, "--time-limit", "5", *flags)
    assert re.search(named, line), line
    assert not Path(out).exists()


def test_out_must_be_a_directory(
    tmp_path: Path, world: SimpleNamespace, refused: Callable[..., str]
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    out = file / "below"
    expected = f"--out {out} cannot be a directory: {file} is a file."
    assert refused(*world.train, "--steps", "1", "--out", str(out)).endswith(expected)
    check_directory(tmp_path / "new" / "deeper")
    assert not (tmp_path / "new").exists()


def shard(**changes: Any) -> Callable[[Path], None]:
    """Replaces arrays of the data's shard."""

    def apply(data: Path) -> None:
        (path,) = data.glob("*.safetensors")
        arrays = load_file(path)
        for name, change in changes.items():
            arrays[name] = change(arrays[name])
        save_file(arrays, path)

    return apply


def manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Changes the data's manifest."""

    def apply(data: Path) -> None:
        path = data / "part-00.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return apply


def first(value: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        changed = array.copy()
        changed[0] = value
        return changed

    return change


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (shard(tokens=first(999)), "holds token id 999, the vocabulary has 320"),
        (shard(kinds=first(9)), "holds kind 9, the manifest names 2"),
        (shard(prompt_lens=first(0)), "a prompt is empty"),
        (shard(offsets=first(3)), "offsets do not divide"),
        (shard(jobs=lambda array: array[:-1]), "arrays are of different lengths"),
        (shard(tokens=lambda array: array.astype(np.float32)), "tokens is missing or of another"),
        (manifest(lambda m: m["shards"][0].pop("tokens")), "shard 0: tokens must be int"),
        (manifest(lambda m: m["shards"].append(3)), "shard 1 is no JSON object"),
        (manifest(lambda m: m.pop("vocab_size")), "vocab_size must be int, found 'nothing'"),
    ],
)
def test_damaged_data_is_named(
    world: SimpleNamespace, tmp_path: Path, damage: Callable[[Path], None], named: str
) -> None:
    data = tmp_path / "data"
    shutil.copytree(world.data, data)
    TokenShards(data)
    damage(data)
    with pytest.raises(ConfigError, match=named) as caught:
        TokenShards(data)
    assert str(data) in str(caught.value)


@pytest.fixture
def copied(world: SimpleNamespace, tmp_path: Path) -> Path:
    """A head of one's own to go on from."""
    shutil.copytree(world.head, tmp_path / "head")
    return tmp_path / "head"


def test_resuming_from_half_a_checkpoint(
    world: SimpleNamespace, copied: Path, refused: Callable[..., str]
) -> None:
    argv = [*world.train, "--out", str(copied), "--steps", "1", "--resume"]
    path = copied / "checkpoint.pt"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert f"--resume: cannot read {path}" in refused(*argv)
    state = torch.load(world.head / "checkpoint.pt", weights_only=True)
    torch.save({"weights": state["weights"]}, path)
    assert f"--resume: {path} is no checkpoint of a training" in refused(*argv)
    torch.save(state | {"constants": {}}, path)
    assert f"{path}: fc_scale has shape None" in refused(*argv)
    path.unlink()
    assert f"--resume: {path} does not exist" in refused(*argv)


@pytest.mark.parametrize("going_on", ["--resume", "--init-from"])
def test_another_draft_vocabulary(
    world: SimpleNamespace, copied: Path, refused: Callable[..., str], going_on: str
) -> None:
    """A head keeps its own: another one is refused, none at all is that of the head."""
    out = copied if going_on == "--resume" else copied.parent / "new"
    argv = [*world.train, "--out", str(out), "--steps", "1", going_on]
    argv += [] if going_on == "--resume" else [str(copied)]
    line = refused(*argv, "--draft-vocab", "64")
    assert line.endswith("was made with --draft-vocab 100, this run has 64.")
    assert command(argv) == 0
    assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == 100


def test_a_head_of_a_larger_vocabulary(
    world: SimpleNamespace, copied: Path, refused: Callable[..., str]
) -> None:
    arrays = load_file_torch(copied / "model.safetensors")
    arrays["d2t"][-1] += 500
    save_file_torch(arrays, copied / "model.safetensors")
    argv = [*world.train, "--out", str(copied), "--steps", "1", "--resume"]
    assert "has token ids beyond the 320" in refused(*argv)


def feed_of(world: SimpleNamespace) -> Feed:
    return Feed(
        TokenShards(world.data, 0.3),
        tokens=64,
        max_len=64,
        seed=0,
        prompt_share=0.0,
        reach=1,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("then", ["nothing", "errors"])
def test_a_feed_can_be_left_whatever_it_does(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """While no batch has a row, and while an error waits behind batches that nobody took."""
    rows, calls = feeds.learned_rows, []
    reached = threading.Event()

    def scripted(*args: Any) -> Any:
        calls.append(args)
        if then == "nothing" and len(calls) > 1:
            reached.set()
            return np.zeros(0, dtype=np.int64)
        if then == "errors" and len(calls) > 1 + feeds._READY:
            reached.set()
            raise ValueError("broken")
        return rows(*args)

    monkeypatch.setattr(feeds, "learned_rows", scripted)
    batches = feed_of(world).batches(Position())
    next(batches)
    assert reached.wait(PATIENCE_S)
    in_time(batches.close)


def test_a_batch_of_short_sequences_sets_no_scale(world: SimpleNamespace, tmp_path: Path) -> None:
    """Channels are scaled by a batch that has rows to look at, whichever comes first."""
    argv = ["--data", str(world.data), str(short_data(world, tmp_path / "short"))]
    argv += ["--model-path", str(world.model), "--held-out", "0.3", "--draft-vocab", "100"]
    argv += ["--batch-tokens", "64", "--max-len", "64", "--ttt-steps", "16", "--steps", "1"]
    for seed in ("0", "1", "2"):
        out = tmp_path / seed
        assert command(["eagle3", *argv, "--out", str(out), "--seed", seed]) == 0
        state = torch.load(out / "checkpoint.pt", weights_only=True)
        assert state["constants"]["fc_scale"].isfinite().all()


def short_data(world: SimpleNamespace, directory: Path) -> Path:
    """Many sequences of three tokens beside the world's."""
    manifest = json.loads((world.data / "part-00.json").read_text())
    names = ("target", "vocab_size", "kinds", "seed", "part", "parts")
    writer = ShardWriter(directory, {name: manifest[name] for name in names}, {})
    for job in range(400):
        writer.add(TokenSequence(np.array([5 + job % 300, 7, 9]), 1, 0, 0.0, job))
    writer.flush()
    return directory


@pytest.fixture
def signals() -> Iterator[None]:
    """Ctrl-C as in a terminal: a process that was started behind others ignores it."""
    before = {number: signal.getsignal(number) for number in stopping._SIGNALS}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in before.items():
        assert signal.getsignal(number) is signal.default_int_handler
        signal.signal(number, handler)


def stop_in_step(monkeypatch: pytest.MonkeyPatch, step: int, *numbers: signal.Signals) -> None:
    """Sends signals to this process in the middle of a step, counted from 1."""
    loss, seen = Eagle3Draft.loss, []

    def stopped(draft: Eagle3Draft, batch: Batch) -> StepStats:
        seen.append(batch)
        if len(seen) == step:
            for number in numbers:
                os.kill(os.getpid(), number)
        return loss(draft, batch)

    monkeypatch.setattr(Eagle3Draft, "loss", stopped)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("number", stopping._SIGNALS)
def test_a_stopped_training_goes_on(
    world: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    """Ctrl-C in the third of six steps: they are saved, weights and schedule, and gone on with."""
    argv = [*world.train, "--draft-vocab", "100", "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        stop_in_step(patch, 3, number)
        assert command([*argv, "--steps", "6"]) == 130
    shown = capfd.readouterr().err
    assert "Stopping: this step is finished and saved" in shown
    assert "eagle3: stopped; with --resume it goes on" in shown
    assert "Traceback" not in shown
    progress = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["progress"]
    assert (progress["step"], progress["share"]) == (3, 0.5)
    assert json.loads((tmp_path / "provenance.json").read_text())["steps"] == 3
    assert command([*argv, "--steps", "3", "--resume"]) == 0
    provenance = json.loads((tmp_path / "provenance.json").read_text())
    assert (provenance["steps"], provenance["schedule_share"]) == (6, 1.0)


@pytest.mark.usefixtures("signals")
def test_a_second_ctrl_c_stops_at_once(
    world: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_in_step(monkeypatch, 2, signal.SIGINT, signal.SIGINT)
    argv = [*world.train, "--draft-vocab", "100", "--out", str(tmp_path), "--steps", "4"]
    assert command(argv) == 130
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("signals")
def test_handlers_of_others_are_left_alone() -> None:
    taken: list[int] = []

    def theirs(number: int, _frame: object) -> None:
        taken.append(number)

    signal.signal(signal.SIGTERM, theirs)
    with stopping.StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (taken, stop.asked) == ([signal.SIGTERM], False)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked
    assert signal.getsignal(signal.SIGTERM) is theirs
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens must be 1 or more, got 0"),
        (["--shapes", "5,1,6", "5,1,9"], "--shapes 5,1,9 would be measured as 5,1,6"),
        (["--shapes", "5,x,6"], "--shapes must be STEPS,TOPK,NODES each, got '5,x,6'"),
        (["--max-new-tokens", "100000"], "no prompt leaves room for --max-new-tokens 100000"),
        (["--max-new-tokens", "1"], "No group has a whole round; raise --max-new-tokens"),
    ],
)
def test_evaluation(
    world: SimpleNamespace, refused: Callable[..., str], flags: list[str], named: str
) -> None:
    shape = ["--shapes", "2,1,3", "--limit", "1"]
    line = refused("eval", *world.common, "--draft", str(world.head), *shape, *flags)
    assert named in line


def test_shipped_drafts_are_judged_by_name() -> None:
    found = {name: draft_kind(resolve_draft(name)) for name in SHIPPED}
    assert {name: kind for name, (kind, _) in found.items()} == SHIPPED


def test_refused_prompts_are_no_prompts(
    world: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    """With room for prompts of 16 tokens, the longer ones are reported and not counted."""
    shards = TokenShards(world.data, 0.3)
    lens = [int(shards.prompt_lens[index]) for index in shards.held_out()]
    short = sum(length <= 16 for length in lens)
    assert 0 < short < len(lens), "some must fit and some not"
    argv = ["eval", *world.common, "--draft", str(world.head), "--shapes", "2,1,3", "2,2,4"]
    assert (
        command([*argv, "--limit", "99", "--max-new-tokens", "24", "--context-length", "40"]) == 0
    )
    shown = capsys.readouterr()
    means = re.findall(r"^2,\d,\d +mean +(\d+) +\d+ +\d+ +([\d.]+)", shown.out, re.M)
    assert [int(count) for count, _ in means] == [short, short]
    assert all(1 <= float(figure) <= 3 for _, figure in means)
    assert f"{len(lens) - short} of {len(lens)} prompts are longer than 16 tokens" in shown.err
