"""Schedules, checkpoints, batches, vocabulary and the arithmetic of accept lengths."""

from __future__ import annotations

import json
import math
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_data import VOCAB, load_target, make_data, make_target

from sgl_spec.errors import ConfigError
from sgl_spec.training import chain_attention, eagle3, losses, standalone
from sgl_spec.training.acceptance import (
    BEYOND,
    OUTSIDE,
    TreeShape,
    accept_length,
    accepted,
    hit_rates,
)
from sgl_spec.training.feed import Feed, Position, learned_rows
from sgl_spec.training.held_out import MAX_STEPS, HeldOut
from sgl_spec.training.loop import learning_rate
from sgl_spec.training.shards import TokenBatch, TokenShards
from sgl_spec.training.vocabulary import DraftVocabulary

CHAIN, TREE = TreeShape(5, 1, 6), TreeShape(5, 4, 8)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    root = tmp_path_factory.mktemp("loop")
    target = load_target(make_target(root / "target"))
    data = make_data(root / "data", target, sequences=40)
    options = ["--model-path", str(root / "target"), "--data", str(data), "--batch-tokens", "256"]
    options += ["--max-len", "64", "--held-out", "0.3", "--lr", "0.01", "--draft-vocab", "100"]
    return SimpleNamespace(root=root, data=data, options=options, target=target)


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def test_learning_rate_rises_then_falls_to_nothing() -> None:
    rates = [learning_rate(share, 2.0, 0.1) for share in np.linspace(0, 1, 101)]
    assert rates[0] == 0
    assert max(rates) == rates[10] == 2.0
    assert all(a < b for a, b in pairwise(rates[:11]))
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert math.isclose(rates[100], 0, abs_tol=1e-12)


def test_a_run_repeats_and_a_resumed_run_goes_on(world: SimpleNamespace) -> None:
    """The same seed gives the same weights; a second run starts where the data was left."""
    for name in ("a", "b"):
        eagle3.main([*world.options, "--out", str(world.root / name), "--steps", "3"])
    first, second = weights_of(world.root / "a"), weights_of(world.root / "b")
    assert all(torch.equal(first[name], second[name]) for name in first)
    resumed = [*world.options, "--out", str(world.root / "b"), "--steps", "2", "--resume"]
    eagle3.main(resumed)
    state = torch.load(world.root / "b" / "checkpoint.pt", weights_only=True)
    assert state["progress"]["step"] == 5
    assert state["progress"]["share"] == 1.0
    once = torch.load(world.root / "a" / "checkpoint.pt", weights_only=True)["progress"]
    assert (once["epoch"], once["batch"]) < (
        state["progress"]["epoch"],
        state["progress"]["batch"],
    )
    assert not torch.equal(weights_of(world.root / "b")["fc.weight"], first["fc.weight"])


def test_an_interrupted_schedule_is_finished(world: SimpleNamespace) -> None:
    """A checkpoint from the middle of a run is gone on with at that share of the schedule."""
    out = world.root / "middle"
    eagle3.main([*world.options, "--out", str(out), "--steps", "4"])
    path = out / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    state["progress"]["share"] = 0.5
    torch.save(state, path)
    eagle3.main([*world.options, "--out", str(out), "--steps", "4", "--resume"])
    provenance = json.loads((out / "provenance.json").read_text())
    assert provenance["steps"] == 8
    assert provenance["schedule_share"] == 1.0


def test_a_time_limit_ends_a_run_with_its_schedule(world: SimpleNamespace) -> None:
    out = world.root / "timed"
    sizes = "--hidden 32 --intermediate 48 --num-layers 1 --heads 2 --kv-heads 2 --head-dim 16"
    options = [item for item in world.options if item not in ("--draft-vocab", "100")]
    standalone.main([*options, "--out", str(out), "--time-limit", "2", *sizes.split()])
    provenance = json.loads((out / "provenance.json").read_text())
    assert provenance["schedule_share"] == 1.0
    assert provenance["steps"] > 2
    assert str(world.root) not in json.dumps(provenance)


def test_training_learns(world: SimpleNamespace) -> None:
    """A head that has seen the data predicts held-out answers better than a fresh one."""
    figures = []
    for steps in ("1", "150"):
        out = world.root / f"learns{steps}"
        eagle3.main([*world.options, "--out", str(out), "--steps", steps, "--optimizer", "muon"])
        found = json.loads((out / "provenance.json").read_text())
        figures.append(found["held_out_figures"]["(7,8,32)"])
    assert figures[1] > figures[0] + 0.1


def test_weights_of_an_earlier_run(world: SimpleNamespace) -> None:
    start = world.root / "start"
    eagle3.main([*world.options, "--out", str(start), "--steps", "2"])
    again = [*world.options, "--init-from", str(start), "--steps", "1", "--lr", "1e-9"]
    eagle3.main([*again, "--out", str(world.root / "again")])
    first, second = weights_of(start), weights_of(world.root / "again")
    assert torch.equal(first["d2t"], second["d2t"])
    assert torch.allclose(first["fc.weight"].float(), second["fc.weight"].float(), atol=1e-2)
    with pytest.raises(ConfigError, match=r"midlayer\.mlp\.gate_proj\.weight is of shape"):
        eagle3.main([*again, "--out", str(world.root / "other"), "--intermediate", "40"])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--steps", "2", "--time-limit", "9"], "--steps and --time-limit"),
        ([], "--steps and --time-limit"),
        (["--steps", "2", "--lr", "-1"], "--lr -1.0"),
        (["--steps", "2", "--layers", "1", "2", "8"], "--layers 1 2 8"),
        (["--steps", "2", "--draft-vocab", "999"], "--draft-vocab 999"),
        (["--steps", "2", "--resume", "--init-from", "x"], "--resume and --init-from"),
        (["--steps", "2", "--ttt-steps", "0"], "--ttt-steps 0"),
        (["--steps", "2", "--held-out", "0"], "--held-out 0.0 keeps no prompt"),
    ],
)
def test_refusals_name_the_flag(world: SimpleNamespace, flags: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        eagle3.main([*world.options, "--out", str(world.root / "refused"), *flags])


@pytest.mark.parametrize("name", ["model.safetensors", "checkpoint.pt"])
def test_a_trained_draft_is_not_replaced(world: SimpleNamespace, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"weights")
    with pytest.raises(ConfigError, match=f"holds {name} of an earlier run; give --resume"):
        eagle3.main([*world.options, "--out", str(tmp_path), "--steps", "1"])
    assert (tmp_path / name).read_bytes() == b"weights"


def test_learned_rows() -> None:
    """Answers and what would follow them; a share of prompts; no padding, nothing too early."""
    batch = TokenBatch(
        tokens=torch.zeros(2, 12, dtype=torch.int64),
        lens=torch.tensor([10, 6]),
        prompt_lens=torch.tensor([7, 2]),
        kinds=torch.zeros(2, dtype=torch.int64),
    )
    rng = np.random.default_rng(0)
    assert learned_rows(batch, 0.0, 3, rng).tolist() == [6, 7, 8, 9, 12 + 3, 12 + 4, 12 + 5]
    everything = learned_rows(batch, 1.0, 1, rng)
    assert everything.tolist() == [*range(1, 10), *range(13, 18)]


def test_feed_goes_on_from_a_position(world: SimpleNamespace) -> None:
    shards = TokenShards(world.data, 0.3)

    def feed() -> Feed:
        return Feed(
            shards,
            tokens=256,
            max_len=64,
            seed=3,
            prompt_share=0.5,
            reach=2,
            device=torch.device("cpu"),
        )

    whole = feed().batches(Position())
    first = [next(whole) for _ in range(12)]
    whole.close()
    assert first[-1][1].epoch > 0, "the data must be passed more than once here"
    rest = feed().batches(first[4][1])
    for batch, position in first[5:]:
        again, where = next(rest)
        assert where == position
        assert torch.equal(again.tokens, batch.tokens)
        assert torch.equal(again.rows, batch.rows)
    rest.close()


def test_vocabulary_keeps_what_answers_use(world: SimpleNamespace) -> None:
    shards = TokenShards(world.data, 0.3)
    counted = np.zeros(VOCAB)
    for index in shards.training():
        tokens, prompt = shards.sequence(int(index)), int(shards.prompt_lens[index])
        np.add.at(counted, tokens[:prompt], 0.1)
        np.add.at(counted, tokens[prompt:], 1.0)
    found = DraftVocabulary.most_frequent(shards, 60)
    assert found.ids.tolist() == sorted(np.argsort(-counted, kind="stable")[:60].tolist())
    columns = found.columns()
    assert (columns >= 0).sum() == 60
    assert torch.equal(columns[found.ids], torch.arange(60))
    answers = [
        shards.sequence(int(index))[shards.prompt_lens[index] :] for index in shards.held_out()
    ]
    inside = np.isin(np.concatenate(answers), found.ids.numpy())
    assert found.coverage(shards, shards.held_out()) == pytest.approx(inside.mean())


def test_accept_length_of_a_chain_by_hand() -> None:
    """Roots 0..5 of an answer of seven tokens; hits 1, 0, ... decide where the next root is."""
    ranks = np.full((6, 5), OUTSIDE)
    ranks[0, :2] = 0  # accepts two: the round ends at token 3
    ranks[3, 0] = 0  # accepts one: ends at token 5
    ranks[1, :5] = 0  # never a root
    counts = accepted(ranks, CHAIN)
    assert counts.tolist() == [2, 5, 0, 1, 0, 0]
    # rounds: 0 -> 3 tokens, 3 -> 2, 5 -> 1
    assert accept_length([counts]) == pytest.approx((3 + 2 + 1) / 3)


def test_accept_length_of_a_tree_is_bounded_by_its_nodes() -> None:
    ranks = np.array([[0, 0, 0, 0, 0], [1, 1, 0, 0, 0], [3, 0, 0, 0, 0], [4, 0, 0, 0, 0]])
    # second row: 2, then 2 + 4 = 6 of 7 nodes; third: 4 nodes, then 8; fourth: beyond topk.
    assert accepted(ranks, TREE).tolist() == [5, 2, 1, 0]
    rates = hit_rates(np.array([[0, 0], [0, 1], [1, 0], [0, 0]]), 1)
    assert rates == [0.75, pytest.approx(2 / 3)]
    ended = hit_rates(np.array([[0, 0], [0, BEYOND], [0, 5]]), 1)
    assert ended == [1.0, 0.5]


def test_a_draft_that_is_the_target_accepts_everything(world: SimpleNamespace) -> None:
    """Ranks from the target's own logits: full rounds, whatever the shape."""
    shards = TokenShards(world.data, 0.3)
    held_out = HeldOut(shards, tokens=2000, batch_tokens=256, max_len=64)

    def ranks_of(batch: TokenBatch) -> torch.Tensor:
        logits = world.target.forward(batch.tokens).final @ world.target.head.t()
        wanted = torch.nn.functional.pad(batch.tokens, (0, 1))[:, 1:]
        score = logits.gather(2, wanted[..., None])
        ranks = (logits > score).sum(dim=-1)
        padded = torch.nn.functional.pad(ranks, (0, MAX_STEPS))
        return padded.unfold(1, MAX_STEPS, 1)[:, : batch.tokens.shape[1]]

    figures = held_out.judge(ranks_of)
    assert figures["(5,1,6)"] == 6.0
    assert figures["(7,8,32)"] == 8.0
    assert all(figures[f"agree{depth}"] == 1.0 for depth in range(1, 8))


@pytest.fixture
def eager_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a compiled run puts in the place of plain pieces goes with it."""
    monkeypatch.setattr(chain_attention, "kernels", type(chain_attention.kernels)())
    monkeypatch.setattr(losses, "kernels", type(losses.kernels)())


@pytest.mark.slow
@pytest.mark.usefixtures("eager_afterwards")
@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler reads .grad of inner tensors
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")
def test_fused_kernels_learn_the_same(world: SimpleNamespace) -> None:
    """A compiled run ends where a plain one does, up to rounding."""
    for name, flag in (("plain", "--no-compile"), ("fused", "--compile")):
        out = world.root / name
        eagle3.main([*world.options, "--out", str(out), "--steps", "3", flag])
    plain, fused = weights_of(world.root / "plain"), weights_of(world.root / "fused")
    for name, weight in plain.items():
        torch.testing.assert_close(fused[name].float(), weight.float(), rtol=0, atol=0.02)
