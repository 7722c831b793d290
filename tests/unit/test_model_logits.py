"""Logits equal transformers', for every supported architecture and flag; forwards agree with
each other however the rows are cut."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runs import Piece, Run, reference_logits

from sgl_spec.models.decoder import Decoder
from sgl_spec.models.loader import load_model
from tests.tiny import make_tiny

TOLERANCE = 1e-4

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama wide heads": ("llama", {"head_dim": 32}),
    "llama no gqa": ("llama", {"num_key_value_heads": 4}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn rope": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn rope, mscale and exact ramp": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 40.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn rope, attention factor given": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 2.0,
                "attention_factor": 1.3,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 tied, attention bias": (
        "qwen3",
        {"tie_word_embeddings": True, "attention_bias": True},
    ),
}


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Tiny products gain nothing from a second thread, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 512), k=count)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(tmp_path: Path, case: str) -> None:
    arch, overrides = CASES[case]
    directory = make_tiny(tmp_path, arch, layers=3, peaked=False, **overrides)
    ids = random_ids(300)
    run = Run(load_model(directory), 1, 300)
    (logits,) = run.logits(Piece(0, 0, ids))
    torch.testing.assert_close(logits, reference_logits(directory, ids), atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), "llama", heads=6, kv_heads=2, hidden=96)


@pytest.fixture(scope="module")
def model(tiny: Path) -> Decoder:
    return load_model(tiny)


def full_logits(model: Decoder, ids: list[int]) -> torch.Tensor:
    return Run(model, 1, len(ids)).logits(Piece(0, 0, ids))[0]


def test_chunks_and_decode_steps_equal_one_forward(model: Decoder) -> None:
    """Chunks of uneven size and single steps, three requests interleaved in scattered slots."""
    texts = [random_ids(n, seed=n) for n in (70, 333, 140)]
    run = Run(model, 3, 340)
    seen: list[list[torch.Tensor]] = [[], [], []]

    def step(*sizes: int, decode: bool = False) -> None:
        pieces = []
        for request, size in enumerate(sizes):
            start = sum(len(part) for part in seen[request])
            tokens = texts[request][start : start + size]
            if tokens:
                pieces.append(Piece(request, start, tokens, [-1] if decode else None))
        for piece, logits in zip(pieces, run.logits(*pieces), strict=True):
            seen[piece.request].append(logits)

    step(1, 300, 0)
    step(60, 1, 137)
    for _ in range(3):
        step(1, 1, 1, decode=True)
    step(6, 29, 0)
    for text, parts in zip(texts, seen, strict=True):
        torch.testing.assert_close(torch.cat(parts), full_logits(model, text), atol=1e-4, rtol=0)


@pytest.mark.parametrize("seed", range(3))
def test_tree_rows_equal_their_root_paths(model: Decoder, seed: int) -> None:
    """Ragged random trees (up to all 64 bits of a word) over prefixes of mixed length, and none."""
    rng = random.Random(seed)
    run = Run(model, 5, 400, seed)
    sizes = [1, rng.randint(2, 12), 64, rng.randint(2, 12), 13]
    prefixes = [rng.randint(1, 30), 0, rng.randint(1, 300), rng.randint(200, 300), 250]
    texts = [random_ids(n, seed + n) for n in prefixes]
    run.logits(*(Piece(i, 0, text) for i, text in enumerate(texts) if text))
    trees = []
    for i, size in enumerate(sizes):
        parents = [-1, *(rng.randrange(node) for node in range(1, size))]
        trees.append(Piece(i, prefixes[i], random_ids(size, seed + i), parents))
    for text, tree, logits in zip(texts, trees, run.logits(*trees), strict=True):
        assert tree.parents is not None
        for node in rng.sample(range(len(tree.tokens)), min(6, len(tree.tokens))):
            path = [node]
            while tree.parents[path[0]] >= 0:
                path.insert(0, tree.parents[path[0]])
            alone = full_logits(model, text + [tree.tokens[i] for i in path])
            torch.testing.assert_close(logits[node], alone[-1], atol=1e-4, rtol=0)


def test_prompt_of_several_blocks_over_a_cached_prefix(model: Decoder) -> None:
    """The causal mask is one corner shared by blocks of rows; a wrong view shows past 128 rows."""
    ids = random_ids(900)
    run = Run(model, 2, 900)
    run.logits(Piece(1, 0, ids[:333]))
    logits, _ = run.logits(Piece(1, 333, ids[333:]), Piece(0, 0, ids[:5]))
    torch.testing.assert_close(logits, full_logits(model, ids)[333:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(tiny: Path, model: Decoder, dtype: str) -> None:
    """8 or 11 bits of mantissa over a few layers: the error is small beside the logits."""
    ids = random_ids(40)
    run = Run(load_model(tiny, dtype=dtype), 1, 41)
    (logits,) = run.logits(Piece(0, 0, ids))
    (last,) = run.logits(Piece(0, 40, [7], [-1]))
    exact = full_logits(model, [*ids, 7])
    error = (torch.cat((logits, last)) - exact).square().mean().sqrt() / exact.std()
    assert logits.dtype is torch.float32
    assert error < {"bfloat16": 0.03, "float16": 0.004}[dtype]
    assert error > 1e-5, "the model did not run in the dtype asked for"
