"""A model in parts gives what it gives whole, and the parts are what they should be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_runs import Piece, Run
from safetensors.torch import load_file
from thread_ranks import ThreadRanks, on_ranks

from sgl_spec.errors import ConfigError
from sgl_spec.layers.parallel import ALONE, ordered_sum
from sgl_spec.models.config import ModelConfig
from sgl_spec.models.decoder import Decoder
from sgl_spec.models.loader import load_model
from sgl_spec.models.shard import check_size
from tests.tiny import make_tiny

IDS = [5, 80, 200, 7, 31]
TREE = [-1, 0, 0, 1, 2]
# Query and KV heads: one KV head each, several, one on two ranks, and some that do not divide.
HEADS = [(4, 2, 2), (8, 4, 2), (4, 2, 4), (9, 3, 2), (15, 5, 4)]


@pytest.mark.parametrize(("heads", "kv_heads", "size"), HEADS)
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_parts_give_the_whole(
    tmp_path: Path, arch: str, heads: int, kv_heads: int, size: int
) -> None:
    """A prompt, then a tree behind it; sums of parts round otherwise, and no more than that."""
    directory = make_tiny(
        tmp_path / "model", arch, hidden=heads * 8, heads=heads, kv_heads=kv_heads
    )
    expected = logits(load_model(directory))
    for found in on_ranks(size, lambda ranks: logits(load_model(directory, ranks=ranks))):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_biases_count_once(tmp_path: Path, tied: bool) -> None:
    """Those of divided outputs are divided, those of sums are added after the sum."""
    directory = make_tiny(
        tmp_path / "model",
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=tied,
        peaked=not tied,
    )
    assert "model.layers.0.self_attn.o_proj.bias" in load_file(directory / "model.safetensors")
    expected = logits(load_model(directory))
    for found in on_ranks(2, lambda ranks: logits(load_model(directory, ranks=ranks))):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def logits(model: Decoder) -> torch.Tensor:
    run = Run(model, 2, 16)
    run.logits(Piece(0, 0, IDS), Piece(1, 0, IDS[:2]))
    return torch.cat(run.logits(Piece(0, 5, IDS, TREE), Piece(1, 2, IDS[:1], [-1])))


def test_collectives_of_a_forward(tiny_model_dir: Path) -> None:
    """Two sums a layer and one gather, nothing else."""

    def run(ranks: ThreadRanks) -> int:
        model = load_model(tiny_model_dir, ranks=ranks)
        before = ranks.meeting.calls
        ranks.meeting.barrier.wait()
        Run(model, 1, 8).logits(Piece(0, 0, IDS))
        return ranks.meeting.calls - before

    assert on_ranks(2, run)[0] == 2 * 2 + 1


def test_a_rank_has_its_part(tiny_model_dir: Path) -> None:
    """Of weights and KV; the embedding is whole, and so are norms."""
    whole = load_model(tiny_model_dir)
    embedding = whole.embedding.numel() * 4

    def sizes(ranks: ThreadRanks) -> tuple[int, int]:
        model = load_model(tiny_model_dir, ranks=ranks)
        return model.weight_bytes, model.kv_bytes_per_token

    for weights, kv in on_ranks(2, sizes):
        assert kv == whole.kv_bytes_per_token // 2
        assert weights - embedding == pytest.approx((whole.weight_bytes - embedding) / 2, rel=0.02)


def test_dummy_weights_are_parts_of_the_same(tiny_model_dir: Path) -> None:
    """Random weights depend on the name alone, whoever has which part."""
    expected = logits(load_model(tiny_model_dir, load_format="dummy"))
    found = on_ranks(
        2, lambda ranks: logits(load_model(tiny_model_dir, load_format="dummy", ranks=ranks))
    )
    torch.testing.assert_close(found[1], expected, atol=1e-4, rtol=0)


def test_rows_of_the_head_are_there_on_every_rank(tiny_model_dir: Path) -> None:
    """A draft with a token map takes rows of all ranks."""
    rows = torch.tensor([500, 3, 255, 256])
    expected = load_model(tiny_model_dir).head_rows(rows).plain_weight()
    found = on_ranks(
        2, lambda ranks: load_model(tiny_model_dir, ranks=ranks).head_rows(rows).plain_weight()
    )
    for each in found:
        assert torch.equal(each, expected)


@pytest.mark.parametrize(
    ("size", "changes", "named"),
    [
        (4, {"num_heads": 9, "num_kv_heads": 3}, "9 query and 3 key-value heads"),
        (8, {"num_heads": 4, "num_kv_heads": 2}, "4 query and 2 key-value heads"),
        (2, {"vocab_size": 511}, "a vocabulary of 511"),
        (4, {"intermediate_size": 130}, "an intermediate size of 130"),
    ],
)
def test_refuses_what_does_not_divide(
    tiny_model_dir: Path, size: int, changes: dict[str, int], named: str
) -> None:
    """In a sentence that says the size and what it would have to divide."""
    config = replace(ModelConfig.from_hf(tiny_model_dir), **changes)
    with pytest.raises(ConfigError, match=rf"--tp-size {size} .*{named}"):
        check_size(config, size)


def test_alone_calls_nobody() -> None:
    """One rank has what it had."""
    x = torch.randn(2, 3)
    assert ALONE.sum(x) is x
    assert ALONE.gather(x) is x
    assert ALONE.agree(7) == ALONE.least(7) == 7


def test_ordered_sums_do_not_depend_on_the_rows_beside() -> None:
    """From the first rank to the last, in float32, rounded once."""
    torch.manual_seed(0)
    parts = torch.randn(4, 5, 16).bfloat16()
    wide = parts.float()
    expected = (((wide[0] + wide[1]) + wide[2]) + wide[3]).bfloat16()
    assert torch.equal(ordered_sum(parts), expected)
    assert torch.equal(ordered_sum(parts[:, 2:3]), expected[2:3])
