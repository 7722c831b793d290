"""What the target hands to a draft head: the rows that enter its layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from heads import capture
from model_runs import Piece, Run
from tiny import make_tiny

from sgl_spec.models.decoder import Decoder
from sgl_spec.models.loader import load_model

IDS = torch.randint(3, 512, (120,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("target"), layers=4)


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Decoder:
    return load_model(target_dir)


def test_features_are_what_enters_the_layers(target: Decoder, target_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    final, features = capture(Run(target, 1, 200), IDS, (0, 3, 1, 4, 1))
    reference = AutoModelForCausalLM.from_pretrained(target_dir).eval()
    with torch.no_grad():
        states = reference(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    entering = [states[layer][0] for layer in (0, 3, 1, 4, 1)]  # [4] is normed in transformers too
    torch.testing.assert_close(features, torch.cat(entering, dim=-1), atol=1e-4, rtol=0)
    torch.testing.assert_close(final, states[-1][0], atol=1e-4, rtol=0)
    assert torch.equal(final, features.split(64, dim=-1)[3])


def test_features_do_not_change_the_forward(target: Decoder) -> None:
    run = Run(target, 1, 200)
    with torch.inference_mode():
        plain = target.forward(run._batch([Piece(0, 0, IDS)]), run.kv)
    final, _ = capture(Run(target, 1, 200), IDS, (2,))
    assert torch.equal(final, plain)
