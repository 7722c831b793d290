"""A tiny target with greedy answers of its own, as the training commands read them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tiny import make_tiny

from sgl_spec.training.shards import ShardWriter, TokenSequence
from sgl_spec.training.target import Target

VOCAB = 320
KINDS = ("chat", "copy")


def make_target(directory: Path, arch: str = "llama") -> Path:
    """Eight layers, so that the three captured ones differ."""
    return make_tiny(directory, arch, vocab=VOCAB, layers=8, hidden=48, heads=3, kv_heads=1)


def load_target(directory: Path) -> Target:
    """In float32 on the CPU."""
    return Target(directory, dtype=torch.float32, device=torch.device("cpu"))


def make_data(
    directory: Path, target: Target, *, sequences: int = 48, answer: int = 24, seed: int = 0
) -> Path:
    """Random prompts of 8 to 20 tokens, each with `answer` greedy tokens."""
    rng = np.random.default_rng(seed)
    identity = {
        "target": "tiny",
        "vocab_size": VOCAB,
        "kinds": list(KINDS),
        "seed": seed,
        "part": 0,
        "parts": 1,
    }
    writer = ShardWriter(directory, identity, {})
    for job in range(sequences):
        prompt = rng.integers(3, VOCAB, rng.integers(8, 21))
        tokens = greedy(target, prompt, answer)
        writer.add(TokenSequence(tokens, len(prompt), job % 2, 0.0, job))
    writer.flush()
    return directory


def greedy(target: Target, prompt: np.ndarray, count: int) -> np.ndarray:
    """The prompt and `count` tokens that the target prefers."""
    tokens = torch.from_numpy(prompt.astype(np.int64))[None]
    for _ in range(count):
        logits = target.forward(tokens).final[:, -1] @ target.head.t()
        tokens = torch.cat((tokens, logits.argmax(dim=-1, keepdim=True)), dim=1)
    return tokens[0].numpy()
