"""Shards: what is written is read back, resumed, split and batched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sgl_spec.errors import ConfigError
from sgl_spec.training import shards
from sgl_spec.training.shards import ShardWriter, TokenSequence, TokenShards

KINDS = ["chat", "rag"]


def identity(**changes: Any) -> dict[str, Any]:
    base = {"target": "t", "vocab_size": 500, "kinds": KINDS, "seed": 7, "part": 0, "parts": 1}
    return base | changes


def made(job: int, length: int | None = None) -> TokenSequence:
    rng = np.random.default_rng(job)
    tokens = rng.integers(1, 500, length or int(rng.integers(8, 60)))
    return TokenSequence(tokens, int(rng.integers(2, 7)), job % 2, 0.5 * (job % 3), job)


def write(directory: Path, jobs: range, **changes: Any) -> ShardWriter:
    writer = ShardWriter(directory, identity(**changes), {"note": 1})
    for job in jobs:
        writer.add(made(job))
    writer.flush()
    return writer


def test_round_trip_over_parts_and_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_SHARD_TOKENS", 200)
    first = write(tmp_path, range(20), parts=2)
    write(tmp_path, range(100, 110), parts=2, part=1)
    assert len(first.manifest["shards"]) > 2
    data = TokenShards(tmp_path)
    expected = [made(job) for job in [*range(20), *range(100, 110)]]
    assert data.tokens.dtype == np.uint16
    assert len(data) == 30
    assert data.kind_names == ("chat", "rag")
    assert data.num_tokens == sum(len(item.tokens) for item in expected)
    for index, item in enumerate(expected):
        np.testing.assert_array_equal(data.sequence(index), item.tokens)
        assert data.prompt_lens[index] == item.prompt_len
        assert data.kinds[index] == item.kind
        assert data.temperatures[index] == item.temperature


def test_wide_vocabularies_keep_their_ids(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, identity(vocab_size=151_936), {})
    writer.add(TokenSequence(np.array([5, 151_935, 70_000]), 1, 0, 0.0, 0))
    writer.flush()
    assert TokenShards(tmp_path).sequence(0).tolist() == [5, 151_935, 70_000]


def test_resume_knows_the_finished_jobs_only(tmp_path: Path) -> None:
    writer = write(tmp_path, range(5))
    writer.add(made(5))  # never flushed: the process died
    again = ShardWriter(tmp_path, identity(), {})
    assert again.done == set(range(5))
    again.add(made(6))
    again.flush()
    assert len(TokenShards(tmp_path)) == 6


def test_what_is_finished_is_written_before_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed run loses what finished since the last shard, however few tokens that is."""
    now = [0.0]
    monkeypatch.setattr(shards.time, "monotonic", lambda: now[0])
    writer = ShardWriter(tmp_path, identity(), {})
    for job in range(10):
        now[0] += 0.4 * shards._SHARD_SECONDS
        writer.add(made(job))
    assert ShardWriter(tmp_path, identity(), {}).done == set(range(9))
    assert len(TokenShards(tmp_path)) == 9


@pytest.mark.parametrize("broken", ["save_file", "_write_manifest"])
def test_a_flush_that_a_signal_broke_off_is_done_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    writer = write(tmp_path, range(5))
    writer.add(made(5))
    owner = shards if broken == "save_file" else ShardWriter
    done = getattr(owner, broken)

    def interrupted(*args: Any) -> None:
        done(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, broken, interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.flush()
    writer.flush()
    assert ShardWriter(tmp_path, identity(), {}).done == set(range(6))
    assert len(TokenShards(tmp_path)) == 6


@pytest.mark.parametrize("change", [{"seed": 8}, {"target": "u"}, {"kinds": ["chat"]}])
def test_a_part_of_another_run_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    write(tmp_path, range(2))
    with pytest.raises(ConfigError, match=next(iter(change))):
        ShardWriter(tmp_path, identity(**change), {})


def test_answers_to_one_prompt_fall_on_one_side(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, identity(), {})
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 500, 6) for _ in range(200)]
    for job in range(600):
        tokens = np.concatenate((prompts[job % 200], rng.integers(1, 500, 4)))
        writer.add(TokenSequence(tokens, 6, 0, 0.0, job))
    writer.flush()
    data = TokenShards(tmp_path, held_out=0.25)
    held = set(data.held_out().tolist())
    assert 90 < len(held) < 210
    assert held.isdisjoint(data.training().tolist())
    assert len(held) + len(data.training()) == 600
    assert all((i in held) == (i % 200 in held) for i in range(600))
    assert len(TokenShards(tmp_path, held_out=0).held_out()) == 0
    data.require_held_out()
    with pytest.raises(ConfigError, match=r"--held-out 1e-18 keeps no prompt of the data apart"):
        TokenShards(tmp_path, held_out=1e-18).require_held_out()


def test_batches_cover_every_sequence_once(tmp_path: Path) -> None:
    write(tmp_path, range(300))
    data = TokenShards(tmp_path, held_out=0)
    seen: list[tuple[int, ...]] = []
    padding = cells = 0
    for batch in data.batches(data.training(), tokens=512, max_len=128, seed=3, multiple=8):
        assert batch.tokens.numel() <= 512
        assert batch.tokens.shape[1] % 8 == 0
        for row, length in zip(batch.tokens, batch.lens.tolist(), strict=True):
            seen.append(tuple(row[:length].tolist()))
            assert not row[length:].any()
        padding += int((batch.tokens.shape[1] - batch.lens).sum())
        cells += batch.tokens.numel()
    assert sorted(seen) == sorted(tuple(made(job).tokens.tolist()) for job in range(300))
    assert padding / cells < 0.15
    first = [b.tokens for b in data.batches(data.training(), tokens=512, max_len=128, seed=3)]
    again = [b.tokens for b in data.batches(data.training(), tokens=512, max_len=128, seed=3)]
    other = [b.tokens for b in data.batches(data.training(), tokens=512, max_len=128, seed=4)]
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))
    assert not all(a.shape == b.shape and a.equal(b) for a, b in zip(first, other, strict=False))


def test_long_sequences_are_cut_and_masks_follow(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, identity(), {})
    writer.add(TokenSequence(np.arange(1, 41), 30, 0, 0.0, 0))
    writer.add(TokenSequence(np.arange(1, 11), 4, 1, 0.0, 1))
    writer.flush()
    batch = TokenShards(tmp_path).gather(np.array([0, 1]), 20)
    assert batch.lens.tolist() == [20, 10]
    assert batch.prompt_lens.tolist() == [20, 4]
    assert batch.answer_mask().sum(1).tolist() == [0, 6]
    assert batch.answer_mask()[1, 4:10].all()


def test_a_directory_without_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"part-NN\.json"):
        TokenShards(tmp_path)
    ShardWriter(tmp_path, identity(), {})
    with pytest.raises(ConfigError, match="no finished shard"):
        TokenShards(tmp_path)
