"""The data generator continues prompts as transformers' `generate` does, and samples fairly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from reference import Reference
from tiny import end_on, make_tiny

from sgl_spec.errors import ConfigError
from sgl_spec.models.loader import load_model
from sgl_spec.training.generate import Generator, Job
from sgl_spec.training.static_decoder import draw

NEW = 24


def jobs(count: int, temperature: float = 0.0) -> list[Job]:
    rng = np.random.default_rng(5)
    lens = [1, 2, *rng.integers(3, 90, count - 2)]
    return [
        Job(index, rng.integers(3, 512, int(length)), NEW - index % 3, temperature)
        for index, length in enumerate(lens)
    ]


def generator(directory: Path, *, batch_size: int = 5, seed: int = 0) -> Generator:
    model = load_model(directory)
    return Generator(model, batch_size=batch_size, max_prompt=90, max_new=NEW, seed=seed)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_greedy_equals_transformers(arch: str, tmp_path: Path) -> None:
    """More jobs than rows, prompts of one token and of many, ends by stop id and by length."""
    directory = make_tiny(tmp_path, arch)
    asked = jobs(17)
    reference = Reference(end_on(directory, [2]))
    free = reference.generate([job.prompt.tolist() for job in asked], NEW)
    common = max({token for row in free for token in row}, key=lambda t: sum(t in r for r in free))
    expected = Reference(end_on(directory, [2, common]))
    plain = expected.generate([job.prompt.tolist() for job in asked], NEW)
    got = {item.job.index: item for item in generator(directory).run(asked)}
    assert sorted(got) == list(range(17))
    ended = 0
    for job in asked:
        tokens = plain[job.index][: job.max_new]
        item = got[job.index]
        assert item.tokens.tolist() == tokens
        assert item.ended == (tokens[-1] in (2, common))
        ended += item.ended
    assert 0 < ended < 17


def test_rows_hold_long_and_short_neighbours_apart(tiny_model_dir: Path) -> None:
    """The text of a job does not depend on the rows beside it, nor on who had the row before."""
    asked = jobs(12)
    alone = {item.job.index: item for item in generator(tiny_model_dir, batch_size=1).run(asked)}
    for item in generator(tiny_model_dir, batch_size=12).run(asked[::-1]):
        assert item.tokens.tolist() == alone[item.job.index].tokens.tolist()


def test_a_run_left_early_leaves_nothing_behind(tiny_model_dir: Path) -> None:
    made = generator(tiny_model_dir)
    next(iter(made.run(jobs(12))))
    after = {item.job.index: item.tokens.tolist() for item in made.run(jobs(12)[:4])}
    fresh = {
        item.job.index: item.tokens.tolist() for item in generator(tiny_model_dir).run(jobs(12)[:4])
    }
    assert after == fresh


def test_samples_repeat_by_seed_and_differ_between_seeds(tiny_model_dir: Path) -> None:
    def texts(seed: int) -> list[list[int]]:
        run = generator(tiny_model_dir, seed=seed).run(jobs(6, temperature=1.0))
        return [item.tokens.tolist() for item in sorted(run, key=lambda item: item.job.index)]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


def test_draws_follow_the_softmax_at_each_temperature() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([2.0, 1.0, 0.0, -3.0])
    for temperature in (0.5, 1.0):
        rows = 40_000
        drawn = draw(logits.expand(rows, -1), torch.full((rows,), temperature))
        found = torch.bincount(drawn, minlength=4) / rows
        torch.testing.assert_close(found, (logits / temperature).softmax(0), atol=0.01, rtol=0)
    assert draw(logits.expand(100, -1), torch.zeros(100)).eq(0).all()


def test_more_than_the_context_is_refused(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="2048"):
        Generator(load_model(tiny_model_dir), batch_size=1, max_prompt=2000, max_new=100, seed=0)
