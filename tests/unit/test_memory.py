"""How a GPU's memory is shared out, and what is said where it does not suffice."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sgl_spec.args import ResolvedArgs, ServerArgs
from sgl_spec.engine.memory import (
    GpuMemory,
    Shapes,
    gpu_hint,
    least_slots,
    pool_slots,
    work_bytes,
)
from sgl_spec.errors import ConfigError
from sgl_spec.models.config import ModelConfig

GB = 10**9
CARD = GpuMemory(total=150 * GB, free=134 * GB, used=15 * GB)
SHAPES = Shapes(prompt_rows=8192, requests=48, nodes=8, captured=3, draft_columns=32000)


def resolved(**given: Any) -> ResolvedArgs:
    return ServerArgs(model_path="m", device="cuda", **given).resolve()


@pytest.fixture
def config(tiny_model_dir: Path) -> ModelConfig:
    """Of an 8B Llama."""
    return dataclasses.replace(
        ModelConfig.from_hf(tiny_model_dir),
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128_256,
    )


def test_work_covers_what_the_largest_forwards_hold(config: ModelConfig) -> None:
    """Rows of a prompt chunk through a layer with what is captured, and logits of all trees."""
    work = work_bytes(config, 2, SHAPES)
    row = 2 * (4096 * 5 + 6144 + 4096 + 3 * 14336 + 2 * 3 * 4096)  # bytes, bfloat16
    logits = 48 * 8 * 128_256 * (2 + 4)
    assert work > 8192 * row + logits
    assert work < 8 * GB  # and still leaves a card to the KV pool


@pytest.mark.parametrize("more", ["prompt_rows", "requests", "nodes", "captured", "graphs"])
def test_work_grows_with_every_size(config: ModelConfig, more: str) -> None:
    larger = dataclasses.replace(SHAPES, **{more: 4 * getattr(SHAPES, more) + 4})
    assert work_bytes(config, 2, larger) > work_bytes(config, 2, SHAPES)


def test_the_pool_gets_the_share_without_weights_and_work() -> None:
    assert CARD.room(None, 5 * GB) == int(150 * GB * 0.88) - 15 * GB - 5 * GB
    assert CARD.room(0.5, 5 * GB) == 75 * GB - 20 * GB


def test_a_default_share_takes_what_is_there_and_an_asked_one_is_refused() -> None:
    """Another process holds half of the card."""
    busy = dataclasses.replace(CARD, free=60 * GB)
    left = busy.room(None, 5 * GB)
    assert 54 * GB < left < 55 * GB
    with pytest.raises(ConfigError, match=r"0\.9 of 150\.00 GB.*60\.00 GB are free") as caught:
        busy.room(0.9, 5 * GB)
    most = float(caught.value.message.split("at most ")[1].split(" ")[0])
    assert most == 0.49
    assert busy.room(most, 5 * GB) > 53 * GB


def test_a_share_that_is_too_small_is_told_what_would_work() -> None:
    """And that works, to the slot."""
    args, per_token, width, work = resolved(mem_fraction_static=0.05), 1 << 17, 9000, 5 * GB
    least = least_slots(args, width) * per_token
    hint = gpu_hint(CARD, work, least)
    with pytest.raises(ConfigError, match=r"Give --mem-fraction-static 0\.14 or more") as caught:
        pool_slots(args, CARD.room(0.05, work), per_token, width, hint)
    assert "holds only 0 KV slots" in caught.value.message
    assert "15.00 GB are weights, 5.00 GB work space" in caught.value.message
    assert pool_slots(args, CARD.room(0.14, work), per_token, width, hint) > 0
    with pytest.raises(ConfigError):
        pool_slots(args, CARD.room(0.13, work), per_token, width, hint)


def test_a_model_that_no_share_can_serve_is_told_what_to_lower() -> None:
    hint = gpu_hint(CARD, 140 * GB, GB)
    assert "Give" not in hint
    assert "--max-running-requests, --chunked-prefill-size or --context-length" in hint


def test_a_pool_that_does_not_fit_is_told_which_would() -> None:
    with pytest.raises(ConfigError, match=r"--max-total-tokens 1000000 takes 131\.07 GB") as caught:
        CARD.check_slots(1_000_000, 1 << 17, 5 * GB)
    most = int(caught.value.message.split("at most ")[1].split(" ")[0])
    CARD.check_slots(most, 1 << 17, 5 * GB)
    with pytest.raises(ConfigError):
        CARD.check_slots(most + 1, 1 << 17, 5 * GB)


def test_a_pool_is_no_larger_than_its_requests_can_use() -> None:
    args = resolved(max_running_requests=4, page_size=16)
    assert pool_slots(args, 100 * GB, 1000, 512) == 4 * 512
    assert pool_slots(resolved(max_total_tokens=100, page_size=16), 0, 1000, 512) == 112
